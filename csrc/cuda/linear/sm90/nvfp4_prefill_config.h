/* Ways to do the GEMM of many tokens of Hopper, of NVFP4 weights (nvfp4_prefill.cu) and of those
 * that general kernels read (general_prefill.cu): shapes of tiles, and how a call is shared out in
 * tiles of a shape. */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_PREFILL_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_PREFILL_CONFIG_H

#include "core/linear.h"
#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_NVFP4_PREFILL_ROWS  128 /* of W, of a block */
#define MOQ_NVFP4_PREFILL_CHUNK 32  /* tokens whose outputs leave at a time */

/* The shapes of tiles: X(tokens, what two blocks share). */
#define MOQ_NVFP4_PREFILL_SHAPES(X) X(256, MOQ_SHARE_TOKENS) X(256, MOQ_ALONE)

#define MOQ_NVFP4_PREFILL_SHAPE_COUNT 2

#define MOQ_GENERAL_PREFILL_STEP 128 /* columns of K */

typedef struct {
    int tokens, blocks; /* of a tile; that share its tokens */
} moq_nvfp4_prefill_shape;

/* How a call is done. Workers are blocks or pairs of them. */
typedef struct {
    const moq_nvfp4_prefill_shape *shape;
    int index; /* of the shape */
    int64_t row_tiles, columns, workers;
    int64_t tail_tiles; /* tiles that are shared evenly */
} moq_nvfp4_prefill_config;

/* Expand the call's config. */
moq_nvfp4_prefill_config moq_nvfp4_prefill_expand_config(const moq_linear_call *call);
moq_nvfp4_prefill_config moq_general_prefill_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
