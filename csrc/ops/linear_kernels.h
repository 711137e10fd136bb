/* The kernels that run linears: one table of rows. */
#ifndef MOQ_OPS_LINEAR_KERNELS_H
#define MOQ_OPS_LINEAR_KERNELS_H

#include "core/kernel.h"
#include "cpu/isa.h"
#include "ops/plan.h"

/* A linear as the rules of the plan know it; its problems are moq_linear_spec. */
extern const moq_operation MOQ_LINEAR;

/* Variants of a kernel that are worth measuring: bit i is set where i is one. */
uint64_t moq_linear_variants(const moq_linear_kernel *kernel, const moq_linear_call *call);

/* True if the CPU kernel of an instruction set can run the layer, else false with the reason.
 * bfloat16 products are exact where bfloat16 holds the activations: its own, and all that are
 * quantized to at most six significant bits. */
bool moq_linear_runs_on_isa(const moq_linear_spec *spec, moq_isa isa, char *reason, size_t size);

/* A row of the table: 0 to MOQ_LINEAR.kernel_count - 1. */
const moq_linear_kernel *moq_linear_kernel_at(int index);

#endif
