/* Copies between a tensor of any strides and a matrix of its rows. */
#ifndef MOQ_CUDA_TENSOR_CUDA_ROWS_H
#define MOQ_CUDA_TENSOR_CUDA_ROWS_H

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copy a tensor [..., columns] to `rows` [m, columns], and back. Elements have 2 or 4 bytes; `rows`
 * has contiguous rows. Queued on `stream` of the current device. */
moq_status moq_cuda_gather_rows(const moq_tensor *tensor, const moq_tensor *rows, void *stream,
                                moq_err *err);
moq_status moq_cuda_scatter_rows(const moq_tensor *rows, const moq_tensor *tensor, void *stream,
                                 moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
