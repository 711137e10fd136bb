/* RMSNorm, RoPE and cache writes of attention heads on the device (core/heads.h). */
#ifndef MOQ_CUDA_TENSOR_CUDA_HEADS_H
#define MOQ_CUDA_TENSOR_CUDA_HEADS_H

#include "core/heads.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Normalizes, turns and stores heads: D is 32, 64, 128 or 256, with at least one token and head;
 * rows and tensors begin at multiples of 16 bytes. Queued on `stream` of the current device; may
 * overlap with its neighbours there (PDL). */
moq_status moq_cuda_qk_norm_rope(const moq_heads *heads, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
