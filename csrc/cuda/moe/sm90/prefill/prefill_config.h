/* Tiles of the configs of experts for prefill on Hopper, by their number. */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_PREFILL_CONFIG_H
#define MOQ_CUDA_MOE_SM90_PREFILL_PREFILL_CONFIG_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a tile at most. */
int moq_moe_fp8_tile_rows(const moq_moe_spec *spec, int config);
int moq_moe_nvfp4_tile_rows(int config);

/* Whether tiles of NVFP4 have fewer rows of W, and steps more columns. */
bool moq_moe_nvfp4_is_deep(int config);

/* NVFP4 with FP8 products: configs, and the rows of their tiles. */
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
