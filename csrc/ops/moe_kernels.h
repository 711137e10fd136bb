/* The kernels that run experts: one table of typed rows. */
#ifndef MOQ_OPS_MOE_KERNELS_H
#define MOQ_OPS_MOE_KERNELS_H

#include "core/moe.h"
#include "ops/plan.h"

typedef struct {
    moq_kernel_name name;
    /* Members with the meaning that they have for linears (ops/linear_kernels.h). */
    bool (*can_run)(const moq_moe_spec *spec, int64_t tokens, char *reason, size_t size);
    double (*cost)(const moq_moe_spec *spec, int64_t tokens);
    int64_t (*workspace)(const moq_moe_call *call);
    moq_status (*run)(const moq_moe_call *call, moq_err *err);
    uint64_t (*variants)(const moq_moe_call *call);
    moq_kernel_config (*choose)(const moq_moe_spec *spec, int64_t tokens, int32_t variant);
    bool folds;
    bool takes_codes; /* x may be codes already: moq_linear_spec.quantized_input of w13 */
} moq_moe_kernel;

/* Experts as the rules of the plan know them; their problems are moq_moe_spec. */
extern const moq_operation MOQ_MOE;

/* A row of the table: 0 to MOQ_MOE.kernel_count - 1. */
const moq_moe_kernel *moq_moe_kernel_at(int index);

#endif
