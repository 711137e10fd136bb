/* Experts on the CPU: two linears for each (core/moe.h), made of the passes of the linear kernels
 * (cpu/cpu_pass.h).
 *
 * Slots are sorted by expert, and what one expert has is a panel of up to MOQ_CPU_PANEL_ROWS rows,
 * gathered once. Five regions of threads do all experts together, so that one token with eight
 * experts keeps as many threads busy as a layer would:
 *
 *   1. rows of x into the panels of W13             shared by rows
 *   2. W13 with its panels, to u in float32         by tiles of rows of the weights
 *   3. act(u), rounded, into the panels of W2       by rows
 *   4. W2 with its panels, to d in float32          by tiles
 *   5. y = sum of w d in the order of the slots     by tokens
 *
 * Few tokens are bound by reading the weights of the experts that are asked for, each once. Long
 * inputs go in chunks of tokens whose panels fit MOQ_MOE_MEMORY bytes. */
#ifndef MOQ_CPU_CPU_MOE_H
#define MOQ_CPU_CPU_MOE_H

#include "core/moe.h"
#include "cpu/cpu_linear.h"

#define MOQ_MOE_MEMORY ((size_t)256 << 20)

/* g [I] = act(u), u [P * I]: the activation of one row, in float32. */
void moq_cpu_moe_activation(const moq_moe_spec *spec, const float *u, float *g);

/* Estimated seconds of one core for that many tokens, spread over the experts evenly. */
double moq_cpu_moe_seconds(const moq_linear_tiles *tiles, const moq_moe_spec *spec, int64_t tokens);

/* Runs a call on an instruction set, which the CPU must have. */
moq_status moq_cpu_moe(const moq_linear_tiles *tiles, const moq_moe_call *call, moq_err *err);

#endif
