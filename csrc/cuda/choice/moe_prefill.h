/* How a call of experts with many tokens on Hopper goes (pipeline.cu): rows of its tiles.
 * Plain C, which asks nothing but the description. */
#ifndef MOQ_CUDA_CHOICE_MOE_PREFILL_H
#define MOQ_CUDA_CHOICE_MOE_PREFILL_H

#include "core/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ways at most, the rows of forms: shapes of tiles. */
#define MOQ_MOE_PREFILL_CONFIGS 5

/* Rows of a tile at most. */
int moq_moe_prefill_tile_rows(const moq_moe_spec *spec, moq_kernel_config config);

/* Whether tiles have fewer rows of W, and steps more columns. */
bool moq_moe_prefill_deep(const moq_moe_spec *spec, moq_kernel_config config);

#ifdef __cplusplus
}
#endif
#endif
