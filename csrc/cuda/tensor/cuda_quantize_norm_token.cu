/* Kernels of RMSNorm, quantized with a scale for each token or for 128 columns
 * (cuda_quantize_norm.h). */
#include "cuda/tensor/cuda_quantize_norm.h"

namespace moq::quantization {

const void *moq_norm_token_kernel(moq_dtype dtype, moq_input_mode mode, moq_row_plan plan,
                                  bool wide_weight) {
    return mode == MOQ_INPUT_E4M3_TOKEN
               ? norm_kernel<MOQ_INPUT_E4M3_TOKEN>(dtype, plan, wide_weight)
               : norm_kernel<MOQ_INPUT_E4M3_GROUP>(dtype, plan, wide_weight);
}

} // namespace moq::quantization
