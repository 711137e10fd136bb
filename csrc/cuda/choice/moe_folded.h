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

/* The way of a call in a variant: 0 is the best one, others are a row and one more. */
moq_kernel_config moq_moe_folded_choose(const moq_moe_spec *spec, int64_t tokens, int32_t variant);

/* Bit i is set where variant i is worth measuring. */
uint64_t moq_moe_folded_variants(const moq_moe_call *call);

/* Seconds of a whole call in its best way. */
double moq_moe_folded_seconds(const moq_moe_spec *spec, int64_t tokens);

#ifdef __cplusplus
}
#endif
#endif
