/* The kernels that run linears: one table of typed rows. */
#ifndef MOQ_OPS_LINEAR_KERNELS_H
#define MOQ_OPS_LINEAR_KERNELS_H

#include "core/linear.h"
#include "cpu/isa.h"
#include "ops/plan.h"

typedef struct {
    moq_kernel_name name;
    /* Writes the reason and returns false where the kernel cannot run m tokens of the layer; m may
     * be MOQ_ANY_TOKENS. A function of the description alone. */
    bool (*can_run)(const moq_linear_spec *spec, int64_t m, char *reason, size_t size);
    /* Estimated seconds for m > 0 rows that it can run; only the order between kernels matters. */
    double (*cost)(const moq_linear_spec *spec, int64_t m);
    /* Bytes of device memory the call works in; NULL for none. */
    int64_t (*workspace)(const moq_linear_call *call);
    moq_status (*run)(const moq_linear_call *call, moq_err *err);
    /* The variants of the kernel that do the call: bit i is set for variant i. NULL for one. */
    uint64_t (*variants)(const moq_linear_call *call);
    /* The way of a variant with m rows, found by comparing; NULL where a variant is all of it. */
    moq_kernel_config (*choose)(const moq_linear_spec *spec, int64_t m, int32_t variant);
    /* Estimated seconds of a call in its way; NULL where they are those of the kernel. */
    double (*config_seconds)(const moq_linear_call *call);
    /* The kernel multiplies x by the call's pre_quant_scale itself; for others that is done before.
     */
    bool smooths;
    /* The kernel runs layers whose x is codes already: moq_linear_spec.quantized_input. */
    bool takes_codes;
    bool folds; /* of packed NVFP4 weights it multiplies e4m3 codes (moq_linear_folds) */
} moq_linear_kernel;

/* A linear as the rules of the plan know it; its problems are moq_linear_spec. */
extern const moq_operation MOQ_LINEAR;

/* Seconds that m rows are expected to take as they were chosen to run, from the way alone;
 * `scaled`: the layer has an input_scale. */
double moq_linear_config_seconds(const moq_linear_spec *spec, int64_t m, moq_choice choice,
                                 bool scaled);

/* True if the CPU kernel of an instruction set can run the layer, else false with the reason.
 * bfloat16 products are exact where bfloat16 holds the activations: its own, and all that are
 * quantized to at most six significant bits. */
bool moq_linear_runs_on_isa(const moq_linear_spec *spec, moq_isa isa, char *reason, size_t size);

/* True if the CUDA kernel of a name, "simt", can run the layer with some number of tokens, else
 * false with the reason. */
bool moq_linear_runs_on_cuda(const char *name, const moq_linear_spec *spec, char *reason,
                             size_t size);

/* A row of the table: 0 to MOQ_LINEAR.kernel_count - 1. */
const moq_linear_kernel *moq_linear_kernel_at(int index);

#endif
