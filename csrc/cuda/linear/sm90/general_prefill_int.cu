/* Kernels of int8 and int4 weights of the linear of general weights of many tokens on Hopper. The
 * formula, the layouts and the bounds are those of general_prefill.cu, which has the launch. */
#include "cuda/linear/sm90/general_prefill.h"

namespace moq::general_prefill {

#define INT8_BF16(tokens, share) general_variant<INT8, AS_BF16, tokens, share>(),
#define INT8_F16(tokens, share)  general_variant<INT8, AS_F16, tokens, share>(),
#define INT4_BF16(tokens, share) general_variant<INT4, AS_BF16, tokens, share>(),
#define INT4_F16(tokens, share)  general_variant<INT4, AS_F16, tokens, share>(),

static const variant INT8_VARIANTS[2][MOQ_NVFP4_PREFILL_SHAPE_COUNT] = {
    {MOQ_NVFP4_PREFILL_SHAPES(INT8_BF16)}, {MOQ_NVFP4_PREFILL_SHAPES(INT8_F16)}};
static const variant INT4_VARIANTS[2][MOQ_NVFP4_PREFILL_SHAPE_COUNT] = {
    {MOQ_NVFP4_PREFILL_SHAPES(INT4_BF16)}, {MOQ_NVFP4_PREFILL_SHAPES(INT4_F16)}};

const variant *int_variants(bool int4, bool float16) {
    return int4 ? INT4_VARIANTS[float16] : INT8_VARIANTS[float16];
}

} // namespace moq::general_prefill
