/* Tiles of the FP8 GEMM of Hopper: which a block makes, and how their operands come to it.
 *
 * A tile is some rows of W by some tokens; a step is 128 columns of both, in the 128-byte swizzle.
 * One of the two operands gives the 64 rows of wgmma, the other its columns: W the rows where there
 * are few tokens, so that a tile may have few of them; tokens the rows where there are many, so
 * that a row has one scale a step. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_MANY_TILE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_MANY_TILE_H

#include "cuda/choice/fp8_many.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/sm90_gemm_outputs.h"

namespace moq::fp8_many {

using namespace gemm;

#define CONSUMERS  256 /* threads of the two warpgroups that multiply */
#define QUANTIZERS 256 /* threads that quantize x, where that is done here */
#define STEP       128
#define MAX_STAGES 24

typedef struct {
    int m, n, k;
    int steps;     /* of 128 columns */
    int row_tiles; /* along W, of a block or pair of blocks */
    int columns;   /* along the tokens, likewise */
    int band;      /* columns that are done together, for the sake of L2 */
    int stages;
    int flight;     /* of them whose weights are on their way at once, to begin with */
    int part_steps; /* of a block, where K is divided, */
    int more_parts; /* and how many blocks have one more */
    int room,
        side; /* where sums of other blocks come to, in shared memory, and float4 of each half */
    int turn, turn_step; /* where outputs turn around, and from a warpgroup's to the next one's */
    bool few;            /* weights are read once */
    bool per_token;      /* scale of x */
    moq_rows x;          /* where it is quantized here */
    moq_output out;
    const float *x_scale;      /* one, [M], or by groups [steps][x_scale_stride] */
    int64_t x_scale_stride;    /* a multiple of 4 */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, steps] */
    moq_partitions partitions;
} gemm_args;

/* A block's tile: 128 * WAVES rows of the first operand (half of that for MOQ_FINE_PARTS) by T of
 * the other. FUSED: x is quantized here. */
template <moq_orientation FIRST, int T_, int WAVES_, moq_sharing SHARE, bool GROUPS, bool FUSED>
struct tile {
    typedef gemm_args args;
    static constexpr int T = T_, WAVES = WAVES_, consumers = CONSUMERS;
    static constexpr bool groups = GROUPS, tokens_first = FIRST == MOQ_TOKENS_FIRST, fused = FUSED;
    static constexpr bool share_weights = SHARE == MOQ_SHARE_WEIGHTS;
    static constexpr bool share_tokens = SHARE == MOQ_SHARE_TOKENS;
    static constexpr bool pair = share_weights || share_tokens;
    static constexpr bool by_steps = SHARE == MOQ_FINE_PARTS; /* warpgroups; otherwise by rows */
    static constexpr bool parts = SHARE == MOQ_PARTS || by_steps;
    static constexpr int row_groups = by_steps ? 1 : 2, k_groups = 2 / row_groups;
    static constexpr int rows = row_groups * 64 * WAVES;
    /* Copies of weights before the rest of a block is ready, 16 KB: x waits behind more of them
     * (docs/lab/fp8-many.md). Pairs have to wait for each other. */
    static constexpr int first_copies = pair ? 0 : row_groups * WAVES > 1 ? 1 : 2;
    /* Of outputs. */
    static constexpr bool row_factors = !GROUPS, token_factors = !GROUPS;
    static constexpr float unit = 1.0f;
    static constexpr int weight_rows = tokens_first ? T : rows, tokens = tokens_first ? rows : T;
    static constexpr int weight_at = tokens_first ? rows * STEP : 0;
    static constexpr int token_at = tokens_first ? 0 : rows * STEP;
    static constexpr int stage = (rows + T) * STEP;
    static constexpr int stride = by_steps ? 2 : 1; /* steps from one of a warpgroup to its next */
    /* Two products may be under way where registers allow. */
    static constexpr bool two_sets = !tokens_first && WAVES * T <= 128;
    static constexpr bool wide = WAVES * T >= 128; /* more than 168 registers */
    /* Registers of those who multiply, quantize and copy; 0 where all have the same. */
    static constexpr bool uneven = wide || (FUSED && T == 64);
    static constexpr int registers = wide ? 232 : 136, copier_registers = wide ? 40 : 24;
    static constexpr int quantizer_registers = 88;
    /* Threads from `copier` on copy. */
    static constexpr int copier = CONSUMERS + (fused ? QUANTIZERS : 0);
    static constexpr int token_arrivals = fused ? QUANTIZERS / 32 : 1;
    static constexpr int threads = copier + (uneven ? 128 : 64);
    /* Sums of other blocks have room beside the ring, rather than where it was. */
    static constexpr bool own_room = parts && T < 128;
};

/* ---- the order of work ---- */

/* What a block does: of each of its tiles the steps from `first` on, `left` steps in all. Where K
 * is divided the grid is [tokens][rows of W][parts], which takes no division to find out. */
typedef struct {
    int tile, stride, first, end, step, left;
} cursor;

template <class S> static __device__ __forceinline__ cursor start(const gemm_args *a) {
    if (S::parts) {
        int rank = (int)blockIdx.x;
        int first = rank * a->part_steps + min(rank, a->more_parts);
        int steps = a->part_steps + (rank < a->more_parts);
        return {(int)blockIdx.y, 0, first, first + steps, first, steps};
    }
    int blocks = S::pair ? 2 : 1;
    int worker = blockIdx.x / blocks, workers = gridDim.x / blocks;
    int tiles = (a->row_tiles * a->columns - worker + workers - 1) / workers;
    return {worker, workers, 0, a->steps, 0, tiles * a->steps};
}

template <class S> static __device__ place place_of(const gemm_args *a, int tile, int rank) {
    constexpr int ROWS = S::weight_rows * (S::share_tokens ? 2 : 1);
    constexpr int TOKENS = S::tokens * (S::share_weights ? 2 : 1);
    place p = {0, 0, 0, (int)blockIdx.z * TOKENS, a->m};
    int row_tile = tile, begin = 0;
    if (!S::parts) {
        int band = tile / (a->row_tiles * a->band), within = tile % (a->row_tiles * a->band);
        int width = min(a->band, a->columns - band * a->band);
        row_tile = within / width;
        p.token = (band * a->band + within % width) * TOKENS;
    }
    for (;; p.partition++) {
        p.end = a->partitions.end[p.partition];
        int tiles = (p.end - begin + ROWS - 1) / ROWS;
        if (row_tile < tiles)
            break;
        row_tile -= tiles;
        begin = p.end;
    }
    p.row = begin + row_tile * ROWS;
    if (S::share_weights)
        p.token += rank * S::tokens;
    if (S::share_tokens)
        p.row += rank * S::weight_rows;
    return p;
}

/* ---- the producers: one thread copies weights, one the codes of x ---- */

/* Barriers of the stages: weights are there, codes of x are there, both may be replaced. */
typedef struct {
    uint32_t weights, tokens, empty;
} gates;

/* Where operands come from and go to. */
typedef struct {
    const CUtensorMap *weights, *tokens;
    uint32_t ring, scales;
    gates gate;
    uint64_t weight_policy, token_policy;
    int rank;
} pipes;

/* The next step to copy. What a step costs here limits the whole kernel. */
typedef struct {
    cursor at;
    place where;
    ring_place slot;
    int copied;
} feed;

template <class S>
static __device__ __forceinline__ feed begin_feed(const gemm_args *a, const pipes *p) {
    feed f = {start<S>(a)};
    f.where = place_of<S>(a, f.at.tile, p->rank);
    return f;
}

template <class S>
static __device__ __forceinline__ void next_feed(const gemm_args *a, const pipes *p, feed *f) {
    advance(&f->slot, a->stages);
    f->copied++;
    f->at.left--;
    if (++f->at.step == f->at.end) {
        f->at.step = f->at.first;
        f->at.tile += f->at.stride;
        if (f->at.left > 0)
            f->where = place_of<S>(a, f->at.tile, p->rank);
    }
}

template <class S>
static __device__ __forceinline__ void copy_weights(const pipes *p, const feed *f) {
    uint32_t to = p->ring + (uint32_t)(f->slot.index * S::stage + S::weight_at);
    uint32_t bar = p->gate.weights + 8u * f->slot.index;
    mbarrier_expect(bar, S::weight_rows * STEP);
    if (S::share_weights) {
        int half = p->rank * (S::weight_rows / 2);
        copy_box_2d_to(to + half * STEP, p->weights, f->at.step * STEP, f->where.row + half, bar,
                       p->weight_policy, 3);
    } else {
        copy_box_2d(to, p->weights, f->at.step * STEP, f->where.row, bar, p->weight_policy);
    }
}

template <class S>
static __device__ __forceinline__ void copy_tokens(const gemm_args *a, const pipes *p,
                                                   const feed *f) {
    uint32_t to = p->ring + (uint32_t)(f->slot.index * S::stage + S::token_at);
    uint32_t bar = p->gate.tokens + 8u * f->slot.index;
    mbarrier_expect(bar, S::tokens * (STEP + (S::groups ? 4 : 0)));
    if (S::share_tokens) {
        int half = p->rank * (S::tokens / 2);
        copy_box_2d_to(to + half * STEP, p->tokens, f->at.step * STEP, f->where.token + half, bar,
                       p->token_policy, 3);
    } else {
        copy_box_2d(to, p->tokens, f->at.step * STEP, f->where.token, bar, p->token_policy);
    }
    if (S::groups)
        copy_bytes(p->scales + (uint32_t)f->slot.index * (S::tokens * 4),
                   a->x_scale + f->at.step * a->x_scale_stride + f->where.token, S::tokens * 4,
                   bar);
}

/* Whether there is one. */
static __device__ __forceinline__ bool more(const feed *f) {
    return f->at.left > 0;
}

#include "cuda/linear/sm90/sm90_gemm_feed.h"

} // namespace moq::fp8_many

#endif
