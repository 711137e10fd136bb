/* Kernels of a table: what the plan knows of each, and what runs a call.
 *
 * A row is a constant that its kernel defines. ops/linear_kernels.c and ops/moe_kernels.c list the
 * rows, those of CUDA by cuda/choice/families.h. */
#ifndef MOQ_CORE_KERNEL_H
#define MOQ_CORE_KERNEL_H

#include "core/linear.h"
#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Asks a predicate for a number of tokens that suits the kernel, whichever that is. */
#define MOQ_ANY_TOKENS 0

/* Declares a function of a .cu file: NULL in a build without nvcc. */
#ifdef __cplusplus
#define MOQ_ENTRY
#else
#define MOQ_ENTRY extern __attribute__((weak, visibility("hidden")))
#endif

/* The configs of a CUDA kernel: cuda/choice/search.h. */
typedef struct moq_configs moq_configs;

/* The part of a row that the plan of every operation reads. */
typedef struct {
    const char *family;         /* "cpu" or "cuda" */
    const char *name;           /* "simt"; users write "cuda:simt" */
    const char *note;           /* what explain() says beside the name, or NULL */
    const moq_configs *configs; /* NULL for a kernel of the CPU, which has one config */
    /* The kernel multiplies x by the call's pre_quant_scale itself; for others that is done before.
     */
    bool smooths;
    bool adds;        /* it runs layers whose outputs get an addend: moq_linear_call.addend */
    bool takes_codes; /* it runs layers whose x is codes: moq_linear_spec.quantized_input */
    bool folds;       /* of packed NVFP4 weights it multiplies e4m3 codes (moq_linear_folds), */
    bool quantizes;   /* or their own codes by e2m1 codes of x */
    /* The kernel runs batch_invariant layers, with any number of tokens: in configs that `configs`
     * lets those have, a row is summed in one order, whatever other rows there are. */
    bool row_order_fixed;
    bool only_forced; /* it runs where MOQEXT_KERNEL names it, and nowhere else */
} moq_kernel;

typedef struct {
    moq_kernel kernel;
    /* Writes the reason and returns false where the kernel cannot run m tokens of the layer; m may
     * be MOQ_ANY_TOKENS. A function of the description alone. */
    bool (*can_run)(const moq_linear_spec *spec, int64_t m, char *reason, size_t size);
    /* Estimated seconds of m > 0 tokens, where the kernel has no configs; only their order matters.
     */
    double (*cost)(const moq_linear_spec *spec, int64_t m);
    /* Bytes of device memory that the call works in; NULL for none. */
    int64_t (*workspace)(const moq_linear_call *call);
    moq_status (*run)(const moq_linear_call *call, moq_err *err);
    /* A library's algorithms: bit i is set where variant i is one. NULL where variants are configs.
     */
    uint64_t (*variants)(const moq_linear_call *call);
    /* Whether the library has algorithms for a call, of which it looks at sizes and the alignment
     * of addresses, else false with the reason. NULL where the kernel needs no library. */
    bool (*ask)(const moq_linear_call *call, char *reason, size_t size);
} moq_linear_kernel;

/* Members with the meaning that they have for linears. */
typedef struct {
    moq_kernel kernel;
    bool (*can_run)(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size);
    double (*cost)(const moq_moe_spec *spec, int64_t tokens);
    int64_t (*workspace)(const moq_moe_call *call);
    moq_status (*run)(const moq_moe_call *call, moq_err *err);
} moq_moe_kernel;

#ifdef __cplusplus
}
#endif
#endif
