/* Ways to do the NVFP4 GEMM with FP8 products of many tokens of Hopper (nvfp4_fp8_prefill.cu):
 * its shapes of tiles, and how a call is shared out in tiles of a shape. */
#ifndef MOQ_CUDA_CHOICE_NVFP4_FP8_H
#define MOQ_CUDA_CHOICE_NVFP4_FP8_H

#include "core/linear.h"
#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_NVFP4_FP8_ROWS 128 /* of W, of a tile */
#define MOQ_NVFP4_FP8_STEP 128 /* columns of K */

/* The shapes of tiles: X(tokens, what two blocks share, microseconds of a step with sums promoted
 * and fast, of even shares, and of the outputs of a token). */
#define MOQ_NVFP4_FP8_SHAPES(X)                                                                    \
    X(256, MOQ_SHARE_WEIGHTS, 0.712, 0.633, 6.83, 0.00911)                                         \
    X(256, MOQ_ALONE, 0.815, 0.752, 5.13, 0.0109)                                                  \
    X(128, MOQ_SHARE_WEIGHTS, 0.514, 0.470, 3.49, 0.00822)                                         \
    X(128, MOQ_ALONE, 0.640, 0.584, 4.23, 0.00705)                                                 \
    X(64, MOQ_SHARE_WEIGHTS, 0.421, 0.379, 3.68, 0.0118)

typedef struct {
    int tokens, blocks;  /* of a tile; that share its weights */
    double step[2];      /* microseconds of a step, sums promoted, or fast, */
    double tail, output; /* of even shares, and of the outputs of a token of a tile */
} moq_nvfp4_fp8_shape;

/* How a call is done. Workers are blocks or pairs of them. */
typedef struct {
    const moq_nvfp4_fp8_shape *shape;
    int index; /* of the shape */
    int64_t row_tiles, columns, workers;
    int64_t tail_tiles; /* tiles that are shared evenly */
} moq_nvfp4_fp8_config;

/* The call's way, laid out. */
moq_nvfp4_fp8_config moq_nvfp4_fp8_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
