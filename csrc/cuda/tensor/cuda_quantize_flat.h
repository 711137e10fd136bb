/* Quantization of contiguous 16-bit tensors by one given scale, by row, or in groups of 128, by
 * short kernels: the step before most products. */
#ifndef MOQ_CUDA_TENSOR_CUDA_QUANTIZE_FLAT_H
#define MOQ_CUDA_TENSOR_CUDA_QUANTIZE_FLAT_H

#include "cuda/tensor/cuda_quantize_rows.h"

namespace moq::quantization {

/* Whether these kernels do it; the chunks of x are whole and aligned. */
bool moq_quantize_suits_flat(const moq_cuda_quantize *q, const quantize_args *a);
moq_status moq_quantize_flat(const moq_cuda_quantize *q, const quantize_args *a, moq_err *err);

} // namespace moq::quantization

#endif
