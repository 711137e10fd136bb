/* Ways to do the FP8 GEMM of Hopper (fp8_prefill.cu): its shapes of tiles, and how a call is
 * shared out in tiles of a shape. */
#ifndef MOQ_CUDA_LINEAR_SM90_FP8_PREFILL_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_FP8_PREFILL_CONFIG_H

#include "core/linear.h"
#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_FP8_PREFILL_STEP 128 /* columns of K */

/* Which operand gives the rows of products. */
typedef enum { MOQ_WEIGHTS_FIRST, MOQ_TOKENS_FIRST } moq_orientation;

/* The shapes of tiles: X(the operand that gives rows, columns of the product, waves of 64 rows of a
 * warpgroup, what blocks share, whether x is quantized as it is multiplied). */
#define MOQ_FP8_PREFILL_SHAPES(X)                                                                  \
    X(MOQ_WEIGHTS_FIRST, 32, 1, MOQ_ALONE, false)                                                  \
    X(MOQ_WEIGHTS_FIRST, 32, 1, MOQ_SPLIT_K, false)                                                \
    X(MOQ_WEIGHTS_FIRST, 32, 1, MOQ_SPLIT_K_WARPGROUPS, false)                                     \
    X(MOQ_WEIGHTS_FIRST, 32, 2, MOQ_ALONE, false)                                                  \
    X(MOQ_WEIGHTS_FIRST, 64, 1, MOQ_ALONE, false)                                                  \
    X(MOQ_WEIGHTS_FIRST, 64, 1, MOQ_SPLIT_K, false)                                                \
    X(MOQ_WEIGHTS_FIRST, 64, 1, MOQ_SPLIT_K_WARPGROUPS, false)                                     \
    X(MOQ_WEIGHTS_FIRST, 64, 2, MOQ_SHARE_TOKENS, false)                                           \
    X(MOQ_WEIGHTS_FIRST, 128, 1, MOQ_SPLIT_K, false)                                               \
    X(MOQ_WEIGHTS_FIRST, 128, 1, MOQ_SHARE_TOKENS, false)                                          \
    X(MOQ_TOKENS_FIRST, 128, 1, MOQ_SPLIT_K, false)                                                \
    X(MOQ_TOKENS_FIRST, 128, 1, MOQ_SHARE_WEIGHTS, false)                                          \
    X(MOQ_TOKENS_FIRST, 128, 2, MOQ_SHARE_WEIGHTS, false)                                          \
    X(MOQ_TOKENS_FIRST, 128, 2, MOQ_SHARE_TOKENS, false)                                           \
    X(MOQ_WEIGHTS_FIRST, 32, 1, MOQ_SPLIT_K, true)                                                 \
    X(MOQ_WEIGHTS_FIRST, 32, 1, MOQ_SPLIT_K_WARPGROUPS, true)                                      \
    X(MOQ_WEIGHTS_FIRST, 64, 1, MOQ_SPLIT_K, true)

/* Rows of the operand that gives them, of a block. */
#define MOQ_FP8_PREFILL_ROWS(waves, share)                                                         \
    (((share) == MOQ_SPLIT_K_WARPGROUPS ? 1 : 2) * 64 * (waves))

typedef struct {
    int tokens, weight_rows; /* of a block */
    moq_orientation first;
    moq_sharing share;
    bool fused; /* x is quantized here */
} moq_fp8_prefill_shape;

/* How a call is done: a shape of tiles and how many there are, by blocks or pairs of them. */
typedef struct {
    const moq_fp8_prefill_shape *shape;
    int index;   /* of the shape */
    int cluster; /* blocks that share */
    int64_t row_tiles, columns, workers;
} moq_fp8_prefill_config;

static inline bool moq_fp8_prefill_has_split_k(const moq_fp8_prefill_shape *v) {
    return v->share == MOQ_SPLIT_K || v->share == MOQ_SPLIT_K_WARPGROUPS;
}

/* Whether outputs leave by the copy engine. */
static inline bool moq_fp8_prefill_has_boxes(const moq_fp8_prefill_shape *v) {
    return v->first == MOQ_TOKENS_FIRST && !moq_fp8_prefill_has_split_k(v);
}

/* Tokens of the tile of a block or pair. */
static inline int moq_fp8_prefill_tokens(const moq_fp8_prefill_shape *v) {
    return v->tokens * (v->share == MOQ_SHARE_WEIGHTS ? 2 : 1);
}

/* Expands the call's config. */
moq_fp8_prefill_config moq_fp8_prefill_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
