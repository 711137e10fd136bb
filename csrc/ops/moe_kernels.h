/* The kernels that run experts: one table of typed rows. */
#ifndef MOQ_OPS_MOE_KERNELS_H
#define MOQ_OPS_MOE_KERNELS_H

#include "core/moe.h"
#include "cuda/choice/search.h"
#include "ops/plan.h"

typedef struct {
    moq_kernel_name name;
    /* Members with the meaning that they have for linears (ops/linear_kernels.h). */
    bool (*can_run)(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size);
    const moq_configs *family;
    double (*cost)(const moq_moe_spec *spec, int64_t tokens);
    int64_t (*workspace)(const moq_moe_call *call);
    moq_status (*run)(const moq_moe_call *call, moq_err *err);
    bool folds;
    bool takes_codes; /* x may be codes already: moq_linear_spec.quantized_input of w13 */
} moq_moe_kernel;

/* Experts as the rules of the plan know them; their problems are moq_moe_spec. */
extern const moq_operation MOQ_MOE;

/* Variants of a kernel that are worth measuring: bit i is set where i is one. */
uint64_t moq_moe_variants(const moq_moe_kernel *kernel, const moq_moe_call *call);

/* A row of the table: 0 to MOQ_MOE.kernel_count - 1. */
const moq_moe_kernel *moq_moe_kernel_at(int index);

#endif
