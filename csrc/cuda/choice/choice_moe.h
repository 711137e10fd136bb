/* What the choice among CUDA kernels of experts goes by, as choice.h has it for linears. */
#ifndef MOQ_CUDA_CHOICE_CHOICE_MOE_H
#define MOQ_CUDA_CHOICE_CHOICE_MOE_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a tile of the products of warps, where an expert has so many in the mean. */
int moq_moe_mma_fp8_as_f16_tile_rows(double rows);
int moq_moe_mma_fp8_as_e4m3_tile_rows(double rows);
int moq_moe_mma_nvfp4_tile_rows(double rows);
int moq_moe_mma_nvfp4_folded_tile_rows(double rows);

/* Seconds of a whole call whose tokens are spread over the experts evenly. */
double moq_cuda_moe_simt_seconds(const moq_moe_spec *spec, int64_t tokens);
double moq_cuda_moe_mma_fp8_as_f16_seconds(const moq_moe_spec *spec, int64_t tokens);
double moq_cuda_moe_mma_fp8_as_e4m3_seconds(const moq_moe_spec *spec, int64_t tokens);
double moq_cuda_moe_mma_nvfp4_seconds(const moq_moe_spec *spec, int64_t tokens);
double moq_cuda_moe_mma_nvfp4_folded_seconds(const moq_moe_spec *spec, int64_t tokens);

#ifdef __cplusplus
}
#endif
#endif
