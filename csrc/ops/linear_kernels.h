/* The kernels that run linears: one table of typed rows. */
#ifndef MOQ_OPS_LINEAR_KERNELS_H
#define MOQ_OPS_LINEAR_KERNELS_H

#include "core/linear.h"
#include "cpu/isa.h"
#include "cuda/choice/search.h"
#include "ops/plan.h"

typedef struct {
    moq_kernel_name name;
    /* Writes the reason and returns false where the kernel cannot run m tokens of the layer; m may
     * be MOQ_ANY_TOKENS. A function of the description alone. */
    bool (*can_run)(const moq_linear_spec *spec, int64_t m, char *reason, size_t size);
    /* Configs of a CUDA kernel, and estimated seconds of a CPU kernel for m > 0 rows that it can
     * run, of which only the order between kernels matters. The other is NULL. */
    const moq_configs *family;
    double (*cost)(const moq_linear_spec *spec, int64_t m);
    /* Bytes of device memory the call works in; NULL for none. */
    int64_t (*workspace)(const moq_linear_call *call);
    moq_status (*run)(const moq_linear_call *call, moq_err *err);
    /* A library's algorithms: bit i is set where variant i is one. NULL where variants are configs
     * of the family. */
    uint64_t (*variants)(const moq_linear_call *call);
    /* The kernel multiplies x by the call's pre_quant_scale itself; for others that is done before.
     */
    bool smooths;
    /* The kernel runs layers whose x is codes already: moq_linear_spec.quantized_input. */
    bool takes_codes;
    bool folds; /* of packed NVFP4 weights it multiplies e4m3 codes (moq_linear_folds) */
} moq_linear_kernel;

/* A linear as the rules of the plan know it; its problems are moq_linear_spec. */
extern const moq_operation MOQ_LINEAR;

/* Variants of a kernel that are worth measuring: bit i is set where i is one. */
uint64_t moq_linear_variants(const moq_linear_kernel *kernel, const moq_linear_call *call);

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
