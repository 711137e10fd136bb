/* Smoothing on the device: applies pre_quant_scale to activations for kernels that do not. */
#ifndef MOQ_CUDA_TENSOR_CUDA_SMOOTH_H
#define MOQ_CUDA_TENSOR_CUDA_SMOOTH_H

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes rows[m, k] = round(x[..., k] * scale[k]), with the bits of moq_cpu_smooth_rows. Rows of
 * `rows` begin at multiples of 16. Queued on `stream` of the current device. */
moq_status moq_cuda_smooth_rows(const moq_tensor *x, const float *scale, const moq_tensor *rows,
                                void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
