/* Block scales of MX as those of NVFP4 on the device (core/mx_scales.h), like cpu/cpu_mx_scales.h.
 * Callers have validated shapes. */
#ifndef MOQ_CUDA_TENSOR_CUDA_MX_SCALES_H
#define MOQ_CUDA_TENSOR_CUDA_MX_SCALES_H

#include "core/mx_scales.h"
#include "cuda/tensor/cuda_prepare.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes scales and factors of all rows. A row with a NaN scale, or whose exponents lie too far
 * apart, has a NaN for its factor, and `found` is told of a bad code; NULL: it has none. */
moq_status moq_cuda_convert_mx_scales(const moq_mx_rows *rows, moq_findings *found, void *stream,
                                      moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
