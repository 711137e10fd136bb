/* The linear kernels of the CUDA floor. Each takes a call that was checked, on the device of its
 * spec; what a kernel cannot do is said by its predicate in ops/plan.c, from the facts given here.
 *
 * All take x and y as rows: the values of a row next to each other, rows a stride apart. */
#ifndef MOQ_CUDA_LINEAR_H
#define MOQ_CUDA_LINEAR_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FP8 weights, up to MOQ_FP8_DECODE_TOKENS rows, K a multiple of 128; sm_90a. */
#define MOQ_FP8_DECODE_TOKENS 16
moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
