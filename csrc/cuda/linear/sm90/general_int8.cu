/* Kernels of int8 weights of the linear of general weights on Hopper. The formula, the layouts and
 * the bounds are those of general.cu, which has the launch. */
#include "cuda/linear/sm90/general.h"

namespace moq::general {

#define BFLOAT16(...) GENERAL_VARIANT(INT8, MOQ_NVFP4_BF16, __VA_ARGS__)
#define FLOAT16(...)  GENERAL_VARIANT(INT8, MOQ_NVFP4_F16, __VA_ARGS__)

static const variant BFLOAT16_VARIANTS[] = {MOQ_GENERAL_SHAPES(BFLOAT16)
                                                MOQ_GENERAL_WIDE_SHAPES(BFLOAT16)};
static const variant FLOAT16_VARIANTS[] = {MOQ_GENERAL_SHAPES(FLOAT16)
                                               MOQ_GENERAL_WIDE_SHAPES(FLOAT16)};

const variant *int8_variants(moq_dtype dtype) {
    return dtype == MOQ_DT_F16 ? FLOAT16_VARIANTS : BFLOAT16_VARIANTS;
}

} // namespace moq::general
