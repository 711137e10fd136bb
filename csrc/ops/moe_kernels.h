/* The kernels that run experts: one table of rows. */
#ifndef MOQ_OPS_MOE_KERNELS_H
#define MOQ_OPS_MOE_KERNELS_H

#include "core/kernel.h"
#include "ops/plan.h"

/* Experts as the rules of the plan know them; their problems are moq_moe_spec. */
extern const moq_operation MOQ_MOE;

/* Variants of a kernel that are worth measuring: bit i is set where i is one. */
uint64_t moq_moe_variants(const moq_moe_kernel *kernel, const moq_moe_call *call);

/* A row of the table: 0 to MOQ_MOE.kernel_count - 1. */
const moq_moe_kernel *moq_moe_kernel_at(int index);

#endif
