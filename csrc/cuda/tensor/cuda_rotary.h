/* Rotary embedding on the device, with the bits of the CPU (core/rotary.h). */
#ifndef MOQ_CUDA_TENSOR_CUDA_ROTARY_H
#define MOQ_CUDA_TENSOR_CUDA_ROTARY_H

#include "core/rotary.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes y [B, T, H, D] of the dtype of x without gaps, at least one value. Queued on `stream` of
 * the current device; may overlap with its neighbours there (PDL). */
moq_status moq_cuda_rotate(const moq_rotary *rotary, void *out, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
