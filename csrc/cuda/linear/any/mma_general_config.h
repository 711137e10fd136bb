/* Tiles of mma_general_linear.cu, and which a call has. */
#ifndef MOQ_CUDA_LINEAR_ANY_MMA_GENERAL_CONFIG_H
#define MOQ_CUDA_LINEAR_ANY_MMA_GENERAL_CONFIG_H

#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(tokens, warps with rows of their own, warps that split K, tiles of 16 rows of a warp), the
 * tile for prefill last. */
#define MOQ_MMA_GENERAL_SHAPES(X)                                                                  \
    X(8, 1, 8, 1)                                                                                  \
    X(16, 1, 8, 1)                                                                                 \
    X(32, 1, 4, 1)                                                                                 \
    X(64, 1, 4, 1)                                                                                 \
    X(64, 4, 1, 2)

typedef struct {
    int tokens, rows;
} moq_mma_general_tile;

#define MOQ_MMA_GENERAL_TILE(tokens, wm, wk, wr) {tokens, 16 * (wr) * (wm)},
static const moq_mma_general_tile MOQ_MMA_GENERAL_TILES[] = {
    MOQ_MMA_GENERAL_SHAPES(MOQ_MMA_GENERAL_TILE)};
#undef MOQ_MMA_GENERAL_TILE

enum { MOQ_MMA_GENERAL_COUNT = sizeof MOQ_MMA_GENERAL_TILES / sizeof *MOQ_MMA_GENERAL_TILES };

static inline int64_t moq_mma_general_tiles(const moq_linear_spec *spec, int64_t m, int shape) {
    const moq_mma_general_tile *t = &MOQ_MMA_GENERAL_TILES[shape];
    return divide_up(m, t->tokens) * moq_tile_count(spec, t->rows);
}

/* Picks the fewest tokens that hold all, or the tile for prefill if there are enough of it. Where
 * the order of sums is not to depend on m, four warps split K. */
static inline int moq_mma_general_shape(const moq_linear_spec *spec, int64_t m) {
    int prefill = MOQ_MMA_GENERAL_COUNT - 1, shape = 0;
    if (spec->batch_invariant)
        return m <= MOQ_MMA_GENERAL_TILES[2].tokens ? 2 : 3;
    while (shape < prefill - 1 && m > MOQ_MMA_GENERAL_TILES[shape].tokens)
        shape++;
    bool large = m > MOQ_MMA_GENERAL_TILES[shape].tokens / 2 &&
                 moq_mma_general_tiles(spec, m, prefill) >= spec->target.sm_count;
    return shape == prefill - 1 && large ? prefill : shape;
}

#ifdef __cplusplus
}
#endif
#endif
