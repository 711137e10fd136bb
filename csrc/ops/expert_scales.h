/* Stacks of experts and their scales as engines keep them: gate and up exchanged, input scales
 * shared by all experts or by the two halves of each, and the factors of NVFP4 products. Each has a
 * function that checks the inputs and describes the result, and one that writes it. */
#ifndef MOQ_OPS_EXPERT_SCALES_H
#define MOQ_OPS_EXPERT_SCALES_H

#include "core/tensor.h"

/* stack [E, 2n, ...] or [E, 2] of any dtype -> the same with the halves of axis 1 exchanged, where
 * the stack is: CUDA work is queued on `stream`. */
moq_status moq_describe_swap_gate_up(const moq_tensor *stack, moq_tensor *expected, moq_err *err);
moq_status moq_run_swap_gate_up(const moq_tensor *stack, void *stream, const moq_tensor *out,
                                moq_err *err);

/* input_scale [E] or [E, P], on the host -> float32 [E], the largest one of each expert. */
moq_status moq_describe_expert_input_scale(const moq_tensor *scale, moq_tensor *expected,
                                           moq_err *err);
moq_status moq_run_expert_input_scale(const moq_tensor *scale, void *stream, const moq_tensor *out,
                                      moq_err *err);

/* input_scale [E] or [E, P], on the host -> float32 of any shape: each element the largest of all.
 */
moq_status moq_check_input_scales(const moq_tensor *scale, moq_err *err);
moq_status moq_run_shared_input_scale(const moq_tensor *scale, const moq_tensor *expected,
                                      const moq_tensor *out, moq_err *err);

/* input_scale [E] and weight_scale_2 [E] or [E, P], on the host -> alpha [E] = input_scale * the
 * first of weight_scale_2, reciprocal [E] = 1 / input_scale. */
moq_status moq_describe_expert_alphas(const moq_tensor *input_scale,
                                      const moq_tensor *weight_scale_2, moq_tensor *expected,
                                      moq_err *err);
moq_status moq_run_expert_alphas(const moq_tensor *input_scale, const moq_tensor *weight_scale_2,
                                 const moq_tensor *alpha, const moq_tensor *reciprocal,
                                 moq_err *err);

#endif
