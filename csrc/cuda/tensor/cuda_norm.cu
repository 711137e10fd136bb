/* Kernels of RMSNorm that write values (cuda_quantize_norm.h). */
#include "cuda/tensor/cuda_quantize_norm.h"

namespace moq::quantization {

const void *moq_norm_values_kernel(moq_dtype dtype, moq_row_plan plan, bool wide_weight) {
    return norm_kernel<MOQ_WRITE_VALUES>(dtype, plan, wide_weight);
}

} // namespace moq::quantization
