/* Rows of a tile of the products of warps, where an expert has so many in the mean. */
#ifndef MOQ_CUDA_MOE_ANY_ANY_CHIP_H
#define MOQ_CUDA_MOE_ANY_ANY_CHIP_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

int moq_moe_mma_fp8_tile_rows(const moq_moe_spec *spec, double rows);
int moq_moe_mma_nvfp4_tile_rows(const moq_moe_spec *spec, double rows);
int moq_moe_mma_general_tile_rows(const moq_moe_spec *spec, double rows);

#ifdef __cplusplus
}
#endif
#endif
