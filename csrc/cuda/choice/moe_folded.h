/* How a call of NVFP4 experts with FP8 products and many tokens on Hopper goes
 * (moe/sm90/prefill/nvfp4_folded.cu): rows of its tiles. Plain C, which asks nothing but the
 * description.
 */
#ifndef MOQ_CUDA_CHOICE_MOE_FOLDED_H
#define MOQ_CUDA_CHOICE_MOE_FOLDED_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ways, the rows of forms: tiles of up to so many rows of tokens. */
#define MOQ_MOE_FOLDED_CONFIGS 2
#define MOQ_MOE_FOLDED_ROWS    96
#define MOQ_MOE_FOLDED_WIDE    288

static inline int moq_moe_folded_tile_rows(moq_kernel_config config) {
    return moq_tiling_row(config.tiling) ? MOQ_MOE_FOLDED_WIDE : MOQ_MOE_FOLDED_ROWS;
}

#ifdef __cplusplus
}
#endif
#endif
