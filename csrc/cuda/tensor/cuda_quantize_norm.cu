/* Kernels of RMSNorm, quantized with one scale of all of x or as NVFP4, and the choice among all of
 * cuda_quantize_norm.h. */
#include "cuda/tensor/cuda_quantize_norm.h"

namespace moq::quantization {

const void *moq_norm_kernel(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan,
                            bool wide_weight) {
    switch ((int)mode) {
    case MOQ_FIND_AMAX:
        return norm_kernel<MOQ_FIND_AMAX>(dtype, plan, wide_weight);
    case MOQ_INPUT_E4M3_TENSOR:
        return norm_kernel<MOQ_INPUT_E4M3_TENSOR>(dtype, plan, wide_weight);
    case MOQ_WRITE_VALUES:
        return moq_norm_values_kernel(dtype, plan, wide_weight);
    case MOQ_INPUT_E4M3_TOKEN:
    case MOQ_INPUT_E4M3_GROUP:
        return moq_norm_token_kernel(dtype, mode, plan, wide_weight);
    default:
        return MOQ_GENERAL(dtype, norm_any_rows, MOQ_INPUT_NVFP4);
    }
}

} // namespace moq::quantization
