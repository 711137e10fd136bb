/* Mainloop of the FP8 prefill kernel of linears on Hopper (fp8_prefill.cu), which multiplies int8
 * too: the shape of a tile, copies of its operands, and its block scales. fp8_products.h and
 * int8_products.h have the products.
 *
 * A tile is some rows of W by some tokens, a step 128 columns of both in the 128-byte swizzle. One
 * operand gives the 64 rows of wgmma, the other its columns. W gives the rows when there are few
 * tokens, so that a tile may be narrow; tokens give the rows when there are many, so that a row has
 * one scale a step.
 *
 * Tensor cores bound it with many tokens, copies with few. */
#ifndef MOQ_CUDA_LINEAR_SM90_FP8_PREFILL_MAINLOOP_H
#define MOQ_CUDA_LINEAR_SM90_FP8_PREFILL_MAINLOOP_H

#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/fp8_products.h"
#include "cuda/linear/sm90/gemm_epilogue.h"
#include "cuda/linear/sm90/gemm_pipeline.h"
#include "cuda/linear/sm90/gemm_scheduler.h"
#include "cuda/linear/sm90/int8_products.h"

namespace moq::fp8_prefill {

using namespace gemm;

#define CONSUMERS  256 /* threads of the two warpgroups that multiply */
#define QUANTIZERS 256 /* threads that quantize x in fused tiles */

typedef struct {
    int m, n, k;
    int steps;     /* steps of 128 columns */
    int row_tiles; /* tiles along W, of a block or pair of blocks */
    int columns;   /* tiles along the tokens, of a block or pair of blocks */
    int band;      /* columns done together, so that tokens stay in the L2 */
    int stages;
    int token_bytes; /* bytes of a step's tokens; fewer than the tile's where copying all costs time
                      */
    int flight;      /* stages whose weights are under way at once at the start */
    int split_steps; /* split-K: steps of a block */
    int more_splits; /* split-K: blocks with one step more */
    int room, side;  /* offset of sums of other blocks in shared memory, and float4 of each half */
    int scales;      /* offset of the token scales in shared memory */
    int turn, turn_step; /* offset of staged outputs, and from a warpgroup's to the next one's */
    bool weights_once;   /* weights are read once */
    bool boxed;          /* y can be written by bulk tensor stores */
    bool per_token;      /* x has a scale for each token */
    moq_rows x;          /* activations, for fused tiles */
    moq_output out;
    const float *x_scale;      /* one scale, [M], or by groups [steps][x_scale_stride] */
    int64_t x_scale_stride;    /* a multiple of 4 */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, steps] */
    moq_partitions partitions;
} gemm_args;

struct operand_copies;

/* Codes of both operands: e4m3 with a scale a row or less, e4m3 with scales of groups, or int8 with
 * a scale a row. */
typedef enum { E4M3, E4M3_GROUPS, INT8, OPERANDS } operand_format;

/* Tile of a block: 128 * WAVES rows of the first operand (half of that for MOQ_SPLIT_K_WARPGROUPS)
 * by T of the other. FUSED: x is quantized in the kernel. */
template <moq_orientation FIRST, int T_, int WAVES_, moq_sharing SHARE, operand_format FORMAT,
          bool FUSED>
struct tile {
    typedef gemm_args args;
    typedef partition_tiles tiles;
    typedef operand_copies copies;
    static constexpr bool stream_k = false, staggered = false;
    static constexpr int T = T_, WAVES = WAVES_, consumers = CONSUMERS;
    static constexpr bool groups = FORMAT == E4M3_GROUPS, int8 = FORMAT == INT8;
    static constexpr bool tokens_first = FIRST == MOQ_TOKENS_FIRST, fused = FUSED;
    static constexpr bool share_weights = SHARE == MOQ_SHARE_WEIGHTS;
    static constexpr bool share_tokens = SHARE == MOQ_SHARE_TOKENS;
    static constexpr bool pair = share_weights || share_tokens;
    static constexpr bool by_steps =
        SHARE == MOQ_SPLIT_K_WARPGROUPS; /* warpgroups split K, not rows */
    static constexpr bool split_k = SHARE == MOQ_SPLIT_K || by_steps;
    static constexpr int row_groups = by_steps ? 1 : 2, k_groups = 2 / row_groups;
    static constexpr int rows = row_groups * 64 * WAVES;
    /* Outputs leave by bulk tensor stores, under the products of the next tile. */
    static constexpr bool boxes = tokens_first && !split_k;
    /* Copies of weights before the block's other barriers are ready, 16 KB: more would delay x
     * (docs/lab/fp8-prefill.md). Pairs have to wait for each other. */
    static constexpr int first_copies = pair ? 0 : row_groups * WAVES > 1 ? 1 : 2;
    /* Scales that outputs have. */
    static constexpr bool row_factors = !groups, token_factors = !groups;
    static constexpr float unit = 1.0f;
    static constexpr int weight_rows = tokens_first ? T : rows, tokens = tokens_first ? rows : T;
    static constexpr int weight_at = tokens_first ? rows * STEP : 0;
    static constexpr int token_at = tokens_first ? 0 : rows * STEP;
    static constexpr int stage = (rows + T) * STEP;
    static constexpr int stride = by_steps ? 2 : 1; /* from a step of a warpgroup to its next */
    /* Two products are under way at once where registers allow. */
    static constexpr bool two_sets = !tokens_first && WAVES * T <= 128;
    static constexpr bool wide = WAVES * T >= 128; /* more than 168 registers */
    /* Registers of consumers, quantizers and producers, where they differ. */
    static constexpr bool uneven = wide || (FUSED && T == 64);
    static constexpr int registers = wide ? 232 : 136, copier_registers = wide ? 40 : 24;
    static constexpr int quantizer_registers = 88;
    /* First producer thread. */
    static constexpr int copier = CONSUMERS + (fused ? QUANTIZERS : 0);
    /* One thread copies weights and tokens and counts both at the tokens' barrier: a second wait
     * between two products takes 12 cycles. */
    static constexpr bool together = boxes && WAVES > 1;
    static constexpr int token_arrivals = fused ? QUANTIZERS / 32 : together ? 2 : 1;
    static constexpr int threads = copier + (uneven ? 128 : 64);
    /* Sums of other blocks have room beside the pipeline, rather than in its place. */
    static constexpr bool own_room = split_k && T < 128;
};

/* ---- copies of a step ---- */

struct operand_copies {
    template <class S>
    static __device__ __forceinline__ void weights(const gemm_args *, const producer_pipeline *p,
                                                   const next_copy *f) {
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage + S::weight_at);
        uint32_t bars = S::together ? p->barriers.tokens : p->barriers.weights;
        uint32_t bar = bars + 8u * f->slot.index;
        mbarrier_expect(bar, S::weight_rows * STEP);
        if (S::share_weights) {
            int half = p->rank * (S::weight_rows / 2);
            copy_box_2d_to(to + half * STEP, p->weights, f->step * STEP, f->where.row + half, bar,
                           p->weight_policy, 3);
        } else {
            copy_box_2d(to, p->weights, f->step * STEP, f->where.row, bar, p->weight_policy);
        }
    }

    template <class S>
    static __device__ __forceinline__ void tokens(const gemm_args *a, const producer_pipeline *p,
                                                  const next_copy *f) {
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage + S::token_at);
        uint32_t bar = p->barriers.tokens + 8u * f->slot.index;
        mbarrier_expect(bar, a->token_bytes + (S::groups ? S::tokens * 4 : 0));
        if (S::share_tokens) {
            int half = p->rank * (S::tokens / 2);
            copy_box_2d_to(to + half * STEP, p->tokens, f->step * STEP, f->where.token + half, bar,
                           p->token_policy, 3);
        } else {
            copy_box_2d(to, p->tokens, f->step * STEP, f->where.token, bar, p->token_policy);
        }
        if (S::groups)
            copy_bytes(p->scales + (uint32_t)f->slot.index * (S::tokens * 4),
                       a->x_scale + f->step * a->x_scale_stride + f->where.token, S::tokens * 4,
                       bar);
    }
};

/* Returns the block scales of a warpgroup's rows, held from step `first` on. */
template <class S>
static __device__ __forceinline__ block_scales<S>
find_blocks(const gemm_args *a, const tile_place *at, int group, int first) {
    block_scales<S> block = {};
    block.steps = a->steps;
#pragma unroll
    for (int i = 0; S::groups && i < block.ROWS; i++) {
        int row = at->row + (S::tokens_first || S::by_steps ? 0 : (group * S::WAVES + i) * 64);
        int line = moq_block_row(&a->partitions, at->partition, min(row, at->end - 1));
        block.row[i] = a->block_scale + (int64_t)line * a->steps;
    }
    if (S::groups)
        hold_scales(&block, first);
    return block;
}

/* Tile of a warpgroup: its schedule, its place, and its block scales. */
template <class S> struct own_tile {
    work w;
    tile_place at;
    block_scales<S> block;
};

template <class S>
static __device__ __forceinline__ void find_tile(const gemm_args *a, int group, int rank,
                                                 own_tile<S> *tile) {
    if (!has_steps(&tile->w))
        return;
    tile->at = place_of<S>(a, tile->w.number, rank);
    tile->block = find_blocks<S>(a, &tile->at, group, tile->w.first);
}

} // namespace moq::fp8_prefill

#endif
