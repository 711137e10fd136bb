/* FP8 experts for decode on Hopper whose x is codes already: instances of the kernels for gate and
 * up of fp8.cu, which has all others, that quantize nothing. */
#include "cuda/moe/sm90/decode/fp8_split_k.h"

namespace moq::moe_decode {

const void *coded_up_kernel_of(const moq_moe_decode_half *h, moq_dtype dtype, moq_input_mode mode) {
    return dtype == MOQ_DT_F16 ? up_kernel_of<MOQ_DT_F16, true>(h, mode)
                               : up_kernel_of<MOQ_DT_BF16, true>(h, mode);
}

} // namespace moq::moe_decode
