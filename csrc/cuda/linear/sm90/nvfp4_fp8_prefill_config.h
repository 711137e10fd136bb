/* Ways to do the NVFP4 GEMM with FP8 products of many tokens of Hopper (nvfp4_fp8_prefill.cu):
 * its shapes of tiles, and how a call is shared out in tiles of a shape. */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_FP8_PREFILL_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_FP8_PREFILL_CONFIG_H

#include "core/linear.h"
#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_NVFP4_FP8_ROWS 128 /* of W, of a tile */
#define MOQ_NVFP4_FP8_STEP 128 /* columns of K */

/* The shapes of tiles: X(tokens, what two blocks share). */
#define MOQ_NVFP4_FP8_SHAPES(X)                                                                    \
    X(256, MOQ_SHARE_WEIGHTS) X(256, MOQ_ALONE) X(128, MOQ_SHARE_WEIGHTS)

typedef struct {
    int tokens, blocks; /* of a tile; that share its weights */
} moq_nvfp4_fp8_shape;

/* How a call is done. Workers are blocks or pairs of them. */
typedef struct {
    const moq_nvfp4_fp8_shape *shape;
    int index; /* of the shape */
    int64_t row_tiles, columns, workers;
    int64_t tail_tiles; /* tiles that are shared evenly */
} moq_nvfp4_fp8_config;

/* Expands the call's config. */
moq_nvfp4_fp8_config moq_nvfp4_fp8_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
