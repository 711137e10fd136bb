/* Float16 kernels of the NVFP4 linear for dozens of tokens on Hopper. The formula, the layouts and
 * the bounds are those of nvfp4_medium.cu, which has the bfloat16 kernels and the launch. */
#include "cuda/linear/sm90/nvfp4_medium.h"

namespace moq::nvfp4_medium {

#define VARIANT(tokens, row_groups, k_groups, split_k, shared)                                     \
    variant_of<MOQ_NVFP4_F16, tokens, row_groups, k_groups, split_k, shared>(),

static const variant FLOAT16_VARIANTS[] = {MOQ_NVFP4_MEDIUM_SHAPES(VARIANT)};

const variant *float16_variants(void) {
    return FLOAT16_VARIANTS;
}

} // namespace moq::nvfp4_medium
