/* Tiles of the NVFP4 linears for some tokens on Hopper, exact (sm90_nvfp4_medium.cu) and with FP8
 * products (sm90_nvfp4_fp8_medium.cu): copies of their operands, and exact products.
 *
 * A tile is some rows of W by some tokens; a step is 128 columns of both. W is in the packed layout
 * (core/nvfp4_packed.h): a matrix of bytes with a row for each 16 rows of W and 576 bytes for each
 * 64 columns, of which the copy engine brings a box. x comes in the 128-byte swizzle. Beyond the
 * last columns both are zeros.
 *
 * A warp reads the codes of its 16 rows and 64 columns with one load a lane and decodes them into
 * the fragments of four products, while the products of the 64 columns before are under way: two
 * sets of fragments take turns. Four lanes need the same scales; each makes a quarter of a step's,
 * which come to the others through shared memory. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_TILE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_TILE_H

#include "core/nvfp4_packed.h"
#include "cuda/choice/nvfp4_medium.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/sm90_gemm_feed.h"
#include "cuda/linear/sm90/sm90_gemm_outputs.h"
#include "cuda/linear/sm90/sm90_schedule.h"

namespace moq::nvfp4_medium {

using namespace gemm;

#define STEP MOQ_NVFP4_MEDIUM_STEP
#define UNIT MOQ_PACK_BYTES
static_assert(MAX_STAGES == MOQ_NVFP4_MEDIUM_STAGES, "as the choice counts them");

typedef struct {
    int m, n;
    int steps;     /* of 128 columns */
    int row_tiles; /* along W */
    int columns;   /* along the tokens */
    int tokens;    /* of a tile, at most T */
    int stages;
    int flight;      /* of them whose weights are on their way at once, to begin with */
    int split_steps; /* of a block, where K is divided, */
    int more_splits; /* and how many blocks have one more */
    int room,
        side; /* where sums of other blocks come to, in shared memory, and float4 of each share */
    int turn; /* where outputs turn around */
    moq_output out;
    const float *output_scale; /* [N] */
    const float *fold_scale;   /* of e4m3: [N], powers of two, */
    const float *x_scale;      /* and [m] */
    bool per_token;
    int turn_step;  /* from where a warpgroup's outputs turn around to the next one's */
    int tail_tiles; /* tiles at the end whose steps all blocks share evenly */
    stream_k_tail tail;
    float4 *handed;  /* sums of other blocks, and */
    uint64_t *ready; /* whether they are there, of each warp */
} gemm_args;

struct operand_copies;

/* A block's tile: 64 rows of W for each of ROW_GROUPS, by T tokens. Of K_GROUPS warpgroups with the
 * same rows each takes every so many steps. PARTS: the blocks of a cluster share K too. */
template <moq_nvfp4_type TYPE, int T_, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K> struct tile {
    typedef gemm_args args;
    typedef layer_tiles<false> tiles;
    typedef operand_copies copies;
    static constexpr bool stream_k = true, staggered = true;
    static constexpr bool share_tokens = false, share_weights = false;
    static __device__ __forceinline__ int tile_tokens(const gemm_args *a) {
        return a->tokens;
    }
    static constexpr moq_nvfp4_type type = TYPE;
    static constexpr int T = T_, WAVES = 1, row_groups = ROW_GROUPS, k_groups = K_GROUPS;
    static constexpr bool split_k = SPLIT_K, pair = false;
    static constexpr int consumers = 128 * ROW_GROUPS * K_GROUPS;
    /* Registers of those who multiply and of those who copy, where not all have the same. */
    static constexpr bool uneven = T * ROW_GROUPS * K_GROUPS >= 384;
    static constexpr int registers = consumers == 512 ? 112 : 152;
    static constexpr int copier_registers = consumers == 512 ? 32 : 56;
    /* A warp copies weights, another tokens. */
    static constexpr int copier = consumers, token_arrivals = 1;
    static constexpr int threads = consumers + (uneven ? 128 : 64);
    static constexpr int weight_rows = 64 * ROW_GROUPS, tokens = T;
    static constexpr int weight_bytes = weight_rows / 16 * 2 * UNIT;
    static constexpr int token_size = 2; /* bytes of a value */
    static constexpr int token_bytes = T * STEP * token_size;
    /* Products that a set of fragments is for: two of T = 128 where registers are few. */
    static constexpr int depth = T == 128 && consumers == 512 ? 2 : 4;
    static constexpr int pieces = STEP / 16 / depth; /* of a step */
    /* Copies of weights before the rest of a block is ready, 14 to 18 KB: x waits behind more of
     * them (docs/lab/nvfp4-medium.md). */
    static constexpr int first_copies = ROW_GROUPS == 1 ? 3 : 4 / ROW_GROUPS;
    /* Both sets are decoded before the first tokens are there: 1 % where products take long. */
    static constexpr bool early = T == 128;
    static_assert(K_GROUPS <= 2, "warpgroups of other steps have code of their own");
    static constexpr int stage = (token_bytes + weight_bytes + 1023) / 1024 * 1024;
    /* Sums of other blocks have room beside the ring, rather than where it was. */
    static constexpr bool own_room = T < 128;
    /* Which factors outputs have. */
    static constexpr bool tokens_first = false, row_factors = true, token_factors = false;
    static constexpr float unit = MOQ_NVFP4_FACTOR;
};

/* ---- copies of a step: in a stage tokens are first ---- */

struct operand_copies {
    template <class S>
    static __device__ __forceinline__ void weights(const gemm_args *, const producer_pipeline *p,
                                                   const next_copy *f) {
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage + S::token_bytes);
        uint32_t bar = p->barriers.weights + 8u * f->slot.index;
        mbarrier_expect(bar, S::weight_bytes);
        copy_box_2d(to, p->weights, f->step * (2 * UNIT / 8), f->where.row / 16, bar,
                    p->weight_policy);
    }

    template <class S>
    static __device__ __forceinline__ void tokens(const gemm_args *a, const producer_pipeline *p,
                                                  const next_copy *f) {
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage);
        uint32_t bar = p->barriers.tokens + 8u * f->slot.index;
        mbarrier_expect(bar, a->tokens * (STEP * S::token_size));
#pragma unroll
        for (int box = 0; box < S::token_size; box++, to += S::T * STEP) {
            int column = (S::token_size * f->step + box) * STEP;
            copy_box_2d(to, p->tokens, column, f->where.token, bar, p->token_policy);
        }
    }
};

/* ---- products ---- */

/* What a warp takes steps from, in the first stage. */
typedef struct {
    stage_barriers barriers;
    uint32_t codes, scales; /* of this lane */
    uint32_t room;          /* of this warp: scales as operands, of two steps */
    uint64_t tokens;        /* the operand */
    uint32_t stages;
} consumer_pipeline;

/* Bytes of a warp's scales of a step as products need them: of 16 rows and 8 groups, [units][g]
 * [groups of the unit, rows g and g + 8]. Four lanes need the same: each makes a quarter. */
#define SCALES MOQ_NVFP4_MEDIUM_SCALES

/* A step of a warpgroup: the place in the ring, of it, of its barriers and of its scales, and the
 * parity of the phase in which it is used next. The compiler has to see that all threads have the
 * same, or every product takes its operand through two registers. */
typedef struct {
    uint32_t at, barriers, parity, scales;
} stage_place;

/* To the next step of this warpgroup. */
template <class S>
static __device__ __forceinline__ void advance_own(stage_place *s, uint32_t stages) {
    s->at += S::k_groups * S::stage;
    s->barriers += S::k_groups * 8;
    s->scales ^= SCALES;
    if (s->barriers >= stages * 8) {
        s->at -= stages * S::stage;
        s->barriers -= stages * 8;
        s->parity ^= 1;
    }
}

/* Fragments of some products of 16 columns. */
template <class S> struct fragments {
    uint32_t a[S::depth][4];
};

/* Where a lane puts the scales that it makes of a step, four of two groups of rows g and g + 8, and
 * where it finds those that it needs. */
typedef struct {
    uint32_t made, needed;
} scale_places;

static __device__ __forceinline__ scale_places find_scale_places(const consumer_pipeline *t) {
    uint32_t lane = threadIdx.x % 32;
    return {kept(t->room + lane * 8), kept(t->room + lane / 4 * 16)};
}

/* Makes the scales of a step. */
template <class S>
static __device__ __forceinline__ void make_scales(const consumer_pipeline *t, const stage_place *s,
                                                   const scale_places *p) {
    uint32_t four = load_shared_word(t->scales + s->at);
    store_shared_pair(p->made + s->scales, {moq_nvfp4_scales<S::type>(four, false),
                                            moq_nvfp4_scales<S::type>(four, true)});
    __syncwarp();
}

/* Decodes a piece of a step. */
template <class S>
static __device__ __forceinline__ void decode(const consumer_pipeline *t, const stage_place *s,
                                              const scale_places *p, int piece, fragments<S> *f) {
    int first = piece * S::depth; /* of the products of the step, four to a unit */
    uint32_t from = t->codes + s->at + first / 4 * UNIT + first % 4 * 4;
    uint32_t scales_from = p->needed + s->scales + first / 4 * (SCALES / 2) + first % 4 * 4;
    uint32_t codes[S::depth], scales[S::depth];
    if constexpr (S::depth == 4) {
        *(uint4 *)codes = load_shared(from);
        *(uint4 *)scales = load_shared(scales_from);
    } else {
        *(uint2 *)codes = load_shared_pair(from);
        *(uint2 *)scales = load_shared_pair(scales_from);
    }
#pragma unroll
    for (int i = 0; i < S::depth; i++)
        moq_nvfp4_fragment<S::type>(codes[i], scales[i], f->a[i]);
}

template <class S>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const stage_place *s,
                                             int piece, const fragments<S> *f,
                                             float (&sum)[S::T / 2]) {
    int first = piece * S::depth;
    uint64_t right =
        t->tokens + s->at / 16 + (uint32_t)(first / 4 * (S::T * STEP / 16) + first % 4 * 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::depth; i++) {
        if constexpr (S::type == MOQ_NVFP4_F16)
            wgmma_f16(sum, f->a[i], right + 2 * i);
        else
            wgmma_bf16(sum, f->a[i], right + 2 * i);
    }
    wgmma_commit();
}

/* The products of these fragments have ended: until here they stay in their registers. */
template <class S> static __device__ __forceinline__ void give_up(fragments<S> *f) {
#pragma unroll
    for (int i = 0; i < S::depth * 4; i++)
        asm volatile("" : "+r"(f->a[i / 4][i % 4])::"memory");
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t, const stage_place *s) {
    warp_releases<false>(t->barriers.empty + s->barriers, 0);
}

/* Adds `steps` steps of this warpgroup from `s` on to the sums: while a piece is multiplied the
 * next is decoded. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, int steps,
                                                stage_place *s, float (&sum)[S::T / 2]) {
    fragments<S> set[2] = {};
    stage_place before = *s;
    scale_places p = find_scale_places(t);
    if (steps <= 0)
        return;
    mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
    make_scales<S>(t, s, &p);
    decode<S>(t, s, &p, 0, &set[0]);
    if (S::early)
        decode<S>(t, s, &p, 1, &set[1]);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        mbarrier_wait(t->barriers.tokens + s->barriers, s->parity);
#pragma unroll
        for (int piece = 0; piece < S::pieces; piece++) {
            fragments<S> *own = &set[piece % 2], *other = &set[1 - piece % 2];
            issue<S>(t, s, piece, own, sum);
            wgmma_wait<1>();
            give_up<S>(other);
            if (piece == 0 && left < steps)
                release<S>(t, &before);
            bool have = S::early && piece == 0 && left == steps;
            if (piece + 1 < S::pieces && !have)
                decode<S>(t, s, &p, piece + 1, other);
        }
        before = *s;
        advance_own<S>(s, t->stages);
        if (left > 1) {
            mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
            make_scales<S>(t, s, &p);
            decode<S>(t, s, &p, 0, &set[0]);
        }
    }
    wgmma_wait<0>();
    give_up<S>(&set[1]);
    stay_here(sum);
    release<S>(t, &before);
}

} // namespace moq::nvfp4_medium

#endif
