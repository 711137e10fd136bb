/* Tiles of the FP8 linear for many tokens on Hopper (sm90_fp8_prefill.cu), and copies of their
 * operands.
 *
 * A tile is some rows of W by some tokens; a step is 128 columns of both, in the 128-byte swizzle.
 * One of the two operands gives the 64 rows of wgmma, the other its columns: W the rows where there
 * are few tokens, so that a tile may have few of them; tokens the rows where there are many, so
 * that a row has one scale a step. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_TILE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_PREFILL_TILE_H

#include "cuda/choice/fp8_prefill.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/sm90_gemm_feed.h"
#include "cuda/linear/sm90/sm90_gemm_outputs.h"
#include "cuda/linear/sm90/sm90_schedule.h"

namespace moq::fp8_prefill {

using namespace gemm;

#define CONSUMERS  256 /* threads of the two warpgroups that multiply */
#define QUANTIZERS 256 /* threads that quantize x, where that is done here */
#define STEP       128

typedef struct {
    int m, n, k;
    int steps;     /* of 128 columns */
    int row_tiles; /* along W, of a block or pair of blocks */
    int columns;   /* tiles along the tokens, of a block or pair of blocks */
    int band;      /* columns that are done together, for the sake of L2 */
    int stages;
    int token_bytes; /* of a step, which may be fewer than of a tile */
    int flight;      /* of them whose weights are on their way at once, to begin with */
    int split_steps; /* of a block, where K is divided, */
    int more_splits; /* and how many blocks have one more */
    int room,
        side;   /* where sums of other blocks come to, in shared memory, and float4 of each half */
    int scales; /* where those of tokens are, in shared memory */
    int turn, turn_step; /* where outputs turn around, and from a warpgroup's to the next one's */
    bool few;            /* weights are read once */
    bool boxed;          /* the copy engine can write y */
    bool per_token;      /* scale of x */
    moq_rows x;          /* where it is quantized here */
    moq_output out;
    const float *x_scale;      /* one, [M], or by groups [steps][x_scale_stride] */
    int64_t x_scale_stride;    /* a multiple of 4 */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, steps] */
    moq_partitions partitions;
} gemm_args;

struct operand_copies;

/* A block's tile: 128 * WAVES rows of the first operand (half of that for MOQ_SPLIT_K_WARPGROUPS)
 * by T of the other. FUSED: x is quantized here. */
template <moq_orientation FIRST, int T_, int WAVES_, moq_sharing SHARE, bool GROUPS, bool FUSED>
struct tile {
    typedef gemm_args args;
    typedef partition_tiles tiles;
    typedef operand_copies copies;
    static constexpr bool stream_k = false, staggered = false;
    static constexpr int T = T_, WAVES = WAVES_, consumers = CONSUMERS;
    static constexpr bool groups = GROUPS, tokens_first = FIRST == MOQ_TOKENS_FIRST, fused = FUSED;
    static constexpr bool share_weights = SHARE == MOQ_SHARE_WEIGHTS;
    static constexpr bool share_tokens = SHARE == MOQ_SHARE_TOKENS;
    static constexpr bool pair = share_weights || share_tokens;
    static constexpr bool by_steps =
        SHARE == MOQ_SPLIT_K_WARPGROUPS; /* warpgroups; otherwise by rows */
    static constexpr bool split_k = SHARE == MOQ_SPLIT_K || by_steps;
    static constexpr int row_groups = by_steps ? 1 : 2, k_groups = 2 / row_groups;
    static constexpr int rows = row_groups * 64 * WAVES;
    /* Outputs leave by the copy engine, under the products of the next tile. */
    static constexpr bool boxes = tokens_first && !splits;
    /* Copies of weights before the rest of a block is ready, 16 KB: x waits behind more of them
     * (docs/lab/fp8-prefill.md). Pairs have to wait for each other. */
    static constexpr int first_copies = pair ? 0 : row_groups * WAVES > 1 ? 1 : 2;
    /* Which factors outputs have. */
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
    /* A step's weights are counted at the barrier of its tokens, and one thread copies both: a
     * second wait lies between two products, and takes 12 cycles. */
    static constexpr bool together = boxes && WAVES > 1;
    static constexpr int token_arrivals = fused ? QUANTIZERS / 32 : together ? 2 : 1;
    static constexpr int threads = copier + (uneven ? 128 : 64);
    /* Sums of other blocks have room beside the ring, rather than where it was. */
    static constexpr bool own_room = splits && T < 128;
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

} // namespace moq::fp8_prefill

#endif
