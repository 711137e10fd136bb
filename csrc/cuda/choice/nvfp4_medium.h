/* Ways to do the NVFP4 GEMMs of Hopper for some dozens to some hundreds of tokens, of exact
 * products (nvfp4_medium.cu) and of FP8 ones (nvfp4_fp8_medium.cu): their shapes of
 * tiles, how a call is shared out in tiles of a shape, and what lies where in shared memory. */
#ifndef MOQ_CUDA_CHOICE_NVFP4_MEDIUM_H
#define MOQ_CUDA_CHOICE_NVFP4_MEDIUM_H

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

/* Bytes of a step of a block: tokens, and packed rows of W. */
#define MOQ_NVFP4_MEDIUM_STAGE(tokens, row_groups, token_size)                                     \
    (((tokens) * MOQ_NVFP4_MEDIUM_STEP * (token_size) +                                            \
      (row_groups) * 64 / 16 * 2 * MOQ_PACK_BYTES + 1023) /                                        \
     1024 * 1024)

/* The shapes of tiles of exact products: X(tokens, warpgroups with rows of their own, warpgroups
 * with the same rows, whether the blocks of a cluster share K, whether blocks may share the steps
 * of the last tiles evenly, microseconds of a step). Shapes that neither the recorded choices nor
 * tune() preferred anywhere are not here (docs/lab/choice.md). */
#define MOQ_NVFP4_MEDIUM_SHAPES(X)                                                                 \
    X(16, 3, 1, false, false, 0.466)                                                               \
    X(16, 4, 1, false, true, 0.604)                                                                \
    X(16, 2, 1, true, false, 0.370)                                                                \
    X(16, 3, 1, true, false, 0.442)                                                                \
    X(16, 2, 2, true, false, 0.548)                                                                \
    X(16, 1, 2, true, false, 0.354)                                                                \
    X(32, 2, 1, false, false, 0.390)                                                               \
    X(32, 4, 1, false, true, 0.616)                                                                \
    X(32, 3, 1, false, false, 0.499)                                                               \
    X(32, 3, 1, true, false, 0.480)                                                                \
    X(32, 4, 1, true, false, 0.598)                                                                \
    X(32, 2, 2, true, false, 0.611)                                                                \
    X(32, 1, 2, true, false, 0.393)                                                                \
    X(64, 2, 1, false, false, 0.475)                                                               \
    X(64, 4, 1, false, true, 0.846)                                                                \
    X(64, 3, 1, false, true, 0.623)                                                                \
    X(64, 2, 1, true, false, 0.455)                                                                \
    X(64, 3, 1, true, false, 0.602)                                                                \
    X(64, 4, 1, true, false, 0.791)                                                                \
    X(64, 2, 2, true, false, 0.791)                                                                \
    X(64, 1, 2, true, false, 0.555)                                                                \
    X(128, 2, 1, false, true, 0.631)                                                               \
    X(128, 4, 1, false, true, 1.224)                                                               \
    X(128, 3, 1, false, true, 0.923)                                                               \
    X(128, 2, 1, true, false, 0.575)                                                               \
    X(128, 3, 1, true, false, 0.867)                                                               \
    X(128, 4, 1, true, false, 1.231)                                                               \
    X(128, 2, 2, true, false, 1.219)

/* The shapes of tiles of FP8 products, told by the same numbers. */
#define MOQ_NVFP4_FP8_MEDIUM_SHAPES(X)                                                             \
    X(32, 2, 1, false, true, 0.429)                                                                \
    X(32, 3, 1, false, true, 0.557)                                                                \
    X(32, 4, 1, false, true, 0.685)                                                                \
    X(32, 2, 1, true, false, 0.455)                                                                \
    X(32, 3, 1, true, false, 0.535)                                                                \
    X(32, 1, 2, true, false, 0.454)                                                                \
    X(32, 2, 2, true, false, 0.704)                                                                \
    X(64, 2, 1, false, true, 0.469)                                                                \
    X(64, 3, 1, false, true, 0.682)                                                                \
    X(64, 4, 1, false, true, 0.888)                                                                \
    X(64, 2, 1, true, false, 0.493)                                                                \
    X(64, 3, 1, true, false, 0.658)                                                                \
    X(64, 1, 2, true, false, 0.497)                                                                \
    X(64, 2, 2, true, false, 0.845)                                                                \
    X(128, 2, 1, false, true, 0.613)                                                               \
    X(128, 3, 1, false, true, 0.945)                                                               \
    X(128, 2, 1, true, false, 0.612)                                                               \
    X(128, 3, 1, true, false, 0.970)                                                               \
    X(128, 1, 2, true, false, 0.612)                                                               \
    X(256, 2, 1, false, true, 0.962)                                                               \
    X(256, 2, 1, true, false, 0.934)

/* A shape of tiles. */
typedef struct {
    int tokens, row_groups, k_groups;
    bool split_k, shared; /* blocks of a cluster share K; of the last tiles, steps */
    int stage;            /* bytes of a step */
    int token_step;       /* bytes of a token in a step */
    double step;          /* microseconds, fitted */
} moq_nvfp4_medium_shape;

/* How a call is done: a shape of tiles and how many there are. */
typedef struct {
    const moq_nvfp4_medium_shape *shape; /* NULL where there is no way */
    int index;                           /* of the shape */
    int cluster;                         /* blocks that share K */
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

/* The call's way, laid out. */
moq_nvfp4_medium_config moq_nvfp4_medium_expand_config(const moq_linear_call *call);
moq_nvfp4_medium_config moq_nvfp4_fp8_medium_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
