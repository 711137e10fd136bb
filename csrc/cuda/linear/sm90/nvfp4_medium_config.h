/* Ways to do the NVFP4 GEMMs of Hopper for some dozens to some hundreds of tokens, of exact
 * products (nvfp4_medium.cu) and of FP8 ones (nvfp4_fp8_medium.cu): their shapes of
 * tiles, how a call is shared out in tiles of a shape, and what lies where in shared memory. */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_MEDIUM_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_MEDIUM_CONFIG_H

#include "core/linear.h"
#include "core/nvfp4_packed.h"
#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_NVFP4_MEDIUM_STEP     128 /* columns of K */
#define MOQ_NVFP4_MEDIUM_STAGES   24  /* at most */
#define MOQ_NVFP4_MEDIUM_BARRIERS (3 * MOQ_NVFP4_MEDIUM_STAGES + 2)
#define MOQ_NVFP4_MEDIUM_SCALES   256 /* bytes that a warp makes of the scales of a step */

#define MOQ_PACKED_STEP 72 /* bytes of a packed row of W in a step */

/* Bytes of a step of a block: tokens, and rows of W of `weight_step` bytes. */
#define MOQ_NVFP4_MEDIUM_STAGE(tokens, row_groups, token_size, weight_step)                        \
    (((tokens) * MOQ_NVFP4_MEDIUM_STEP * (token_size) + (row_groups) * 64 * (weight_step) +        \
      1023) /                                                                                      \
     1024 * 1024)

/* The shapes of tiles of exact products: X(tokens, warpgroups with rows of their own, warpgroups
 * with the same rows, whether the blocks of a cluster share K, whether blocks may share the steps
 * of the last tiles evenly). */
#define MOQ_NVFP4_MEDIUM_SHAPES(X)                                                                 \
    X(16, 3, 1, false, false)                                                                      \
    X(16, 4, 1, false, true)                                                                       \
    X(16, 3, 1, true, false)                                                                       \
    X(16, 2, 2, true, false)                                                                       \
    X(16, 1, 2, true, false)                                                                       \
    X(32, 4, 1, false, true)                                                                       \
    X(32, 3, 1, false, false)                                                                      \
    X(32, 3, 1, true, false)                                                                       \
    X(32, 2, 2, true, false)                                                                       \
    X(32, 1, 2, true, false)                                                                       \
    X(64, 4, 1, false, true)                                                                       \
    X(64, 3, 1, false, true)                                                                       \
    X(64, 3, 1, true, false)                                                                       \
    X(64, 2, 2, true, false)                                                                       \
    X(64, 1, 2, true, false)                                                                       \
    X(128, 2, 1, false, true)                                                                      \
    X(128, 4, 1, false, true)                                                                      \
    X(128, 3, 1, false, true)                                                                      \
    X(128, 2, 1, true, false)                                                                      \
    X(128, 3, 1, true, false)                                                                      \
    X(128, 4, 1, true, false)

/* The shapes of tiles of FP8 products, told by the same numbers. */
#define MOQ_NVFP4_FP8_MEDIUM_SHAPES(X)                                                             \
    X(32, 3, 1, false, true)                                                                       \
    X(32, 4, 1, false, true)                                                                       \
    X(32, 3, 1, true, false)                                                                       \
    X(32, 1, 2, true, false)                                                                       \
    X(32, 2, 2, true, false)                                                                       \
    X(64, 3, 1, false, true)                                                                       \
    X(64, 4, 1, false, true)                                                                       \
    X(64, 3, 1, true, false)                                                                       \
    X(64, 1, 2, true, false)                                                                       \
    X(64, 2, 2, true, false)                                                                       \
    X(128, 2, 1, false, true)                                                                      \
    X(128, 3, 1, false, true)                                                                      \
    X(128, 1, 2, true, false)

/* A shape of tiles. */
typedef struct {
    int tokens, row_groups, k_groups;
    bool split_k, shared; /* blocks of a cluster share K; of the last tiles, steps */
    int stage;            /* bytes of a step */
    int token_step;       /* bytes of a token in a step */
    int weight_step;      /* bytes of a row of W in a step */
} moq_nvfp4_medium_shape;

/* How a call is done: a shape of tiles and how many there are. */
typedef struct {
    const moq_nvfp4_medium_shape *shape; /* NULL where there is none */
    int index;                           /* of the shape */
    int cluster;                         /* blocks that share K */
    int rows;                            /* of W in a tile */
    int64_t row_tiles, columns, workers;
    int64_t tail_tiles; /* tiles that are shared evenly */
} moq_nvfp4_medium_config;

/* Shared memory of a block: as many stages as fit, and where sums come to or outputs turn around;
 * sums of many tokens come to where the ring was. A warpgroup needs its next step before it gives
 * up one; no stages where that cannot be. */
typedef struct {
    int stages, side, behind; /* float4 of a share of sums; bytes behind the ring */
    int turn, turn_step;      /* where outputs turn around, and of the next warpgroup */
} moq_nvfp4_medium_layout;

moq_nvfp4_medium_layout moq_nvfp4_medium_smem_layout(const moq_nvfp4_medium_shape *v, int cluster);

/* Tokens of a tile: as few as give as many tiles, whole eights where there are several. */
int64_t moq_nvfp4_medium_tokens(int64_t m, const moq_nvfp4_medium_config *config);

/* Expands the call's config. */
moq_nvfp4_medium_config moq_nvfp4_medium_expand_config(const moq_linear_call *call);
moq_nvfp4_medium_config moq_nvfp4_fp8_medium_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
