/* Parts of the NVFP4 linear for a few tokens on Hopper (sm90_nvfp4_decode.cu, whose head says what
 * is computed and what bounds it): how work is shared out, the rings of the warps, and products. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_DECODE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_DECODE_H

#include "core/nvfp4_packed.h"
#include "cuda/choice/nvfp4_decode.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_products.h"
#include "cuda/device/ptx.h"

#include <stddef.h>

namespace moq::nvfp4_decode {

#define STAGES      MOQ_NVFP4_DECODE_STAGES
#define STAGE_UNITS MOQ_NVFP4_DECODE_STAGE_UNITS
#define WEIGHTS     (STAGE_UNITS * MOQ_PACK_BYTES)
#define MAX_RANKS   2
#define MAX_PARTS   16 /* warps of a block that share K */
#define MAX_GROUPS  4  /* of warps of a block that have other rows */
#define X_BLOCK     MOQ_NVFP4_DECODE_X_BLOCK

/* What is known when the kernel is compiled: the warps of a block that multiply, slabs of W that a
 * warp multiplies with what it has read of x, tiles of 8 tokens, and the type of x. Eight warps, or
 * sixteen without one that adds up, leave room for another block. */
template <int WARPS, int SLABS, int TILES, moq_nvfp4_type TYPE> struct shape {
    static constexpr int warps = WARPS, max_stages = STAGES / WARPS;
    static constexpr bool adder = MOQ_NVFP4_DECODE_ADDS(WARPS, SLABS);
    static constexpr int threads = 32 * WARPS + 32 * adder, at_once = WARPS == 8 || !adder ? 2 : 1;
    static constexpr int slabs = SLABS, tiles = TILES, blocks = STAGE_UNITS / SLABS;
    static constexpr int rows = SLABS * MOQ_PACK_ROWS, rank_rows = rows / MAX_RANKS;
    static constexpr int row_pitch = rows + 4; /* parked, no conflicts */
    static constexpr moq_nvfp4_type type = TYPE;
};

typedef struct {
    MOQ_NVFP4_DECODE_SHARE
    const uint8_t *weight;
    const float *output_scale;
    moq_rows x;
    moq_output out;
} decode_args;
static_assert(offsetof(decode_args, weight) == sizeof(moq_nvfp4_decode_share),
              "the share is copied to the beginning");

/* Barriers of a block. */
typedef struct {
    uint64_t stage[STAGES];
    uint64_t kept[MAX_PARTS];                            /* x is here */
    uint64_t staged[MAX_GROUPS][2], free[MAX_GROUPS][2]; /* sums are, or may come */
    uint64_t posted[2];                                  /* boxes are full */
} barriers;

/* ---- who does what ---- */

/* The place of a block among the blocks that share K. */
static __device__ __forceinline__ int rank_of(const decode_args *a) {
    return (int)blockIdx.x & ((1 << a->log_ranks) - 1);
}

static __host__ __device__ __forceinline__ bool in_cluster(const decode_args *a) {
    return a->log_ranks || a->share;
}

/* The part of K and the slabs that a warp has. Slabs are done in rounds, as many in each as in any
 * other, or one more in the first. */
typedef struct {
    int begin, count;       /* blocks of K */
    int slab;               /* the first */
    int rounds, take, more; /* slabs of a round, and how many rounds have one more */
} share;

template <class S>
static __device__ __forceinline__ share share_of(const decode_args *a, int split, int group) {
    share s;
    int cluster = (int)blockIdx.x >> a->log_ranks;
    split += rank_of(a) << a->log_splits;
    s.begin = split * a->blocks + min(split, a->more_blocks);
    s.count = a->blocks + (split < a->more_blocks);
    int slabs = cluster < a->clusters ? a->slabs + (cluster < a->more_slabs) : 0;
    int groups = S::warps >> a->log_splits, each = slabs / groups, rest = slabs % groups;
    int own = each + (group < rest);
    s.slab = cluster * a->slabs + min(cluster, a->more_slabs) + group * each + min(group, rest);
    s.rounds = (own + S::slabs - 1) / S::slabs;
    s.take = s.rounds ? own / s.rounds : 0;
    s.more = own - s.take * s.rounds;
    return s;
}

static __device__ __forceinline__ int slabs_of(const share *s, int round) {
    return s->take + (round < s->more);
}

static __device__ __forceinline__ int first_of(const share *s, int round) {
    return s->slab + round * s->take + min(round, s->more);
}

/* ---- the ring of a warp ---- */

typedef struct {
    uint32_t stages, full; /* weights and barriers */
    uint32_t x;            /* of stages, or of all columns */
    uint64_t policy;
    int lane;
} pipeline;

/* What a stage is filled with next: `from` is of the lane's slab. */
typedef struct {
    int round, done; /* blocks of K before it */
    const uint8_t *from;
} next_stage;

static __device__ __forceinline__ next_stage start_of(const decode_args *a, const share *s,
                                                      int lane) {
    return {0, 0, a->weight + (s->slab + lane) * a->slab_bytes + s->begin * MOQ_PACK_BYTES};
}

static __device__ __forceinline__ void advance_stage(const decode_args *a, const share *s,
                                                     next_stage *c) {
    c->done += a->turn;
    c->from += a->turn * MOQ_PACK_BYTES;
    if (c->done >= s->count) {
        c->from += slabs_of(s, c->round) * a->slab_bytes - c->done * MOQ_PACK_BYTES;
        c->done = 0;
        c->round++;
    }
}

static __device__ __forceinline__ bool is_meant(const share *s, const next_stage *c) {
    return c->round < s->rounds && s->count > 0;
}

/* A lane for each slab: one lane for all takes longer than their products. */
template <class S>
static __device__ __forceinline__ void fetch_weights(const decode_args *a, const share *s,
                                                     const pipeline *r, const next_stage *c,
                                                     int stage) {
    uint32_t bytes = (uint32_t)(min(a->turn, s->count - c->done) * MOQ_PACK_BYTES);
    uint32_t to = r->stages + (uint32_t)(stage * WEIGHTS), bar = r->full + 8u * stage;
    int slabs = slabs_of(s, c->round);
    if (r->lane == 0)
        mbarrier_expect(bar, slabs * bytes);
    if (r->lane < slabs)
        copy_bytes_once(to + r->lane * (S::blocks * MOQ_PACK_BYTES), c->from, bytes, bar,
                        r->policy);
}

/* Pieces of 16 bytes of a row of x in a stage are xored with this, so that lanes that read the same
 * piece of 8 rows meet no bank twice. It is what the 128-byte swizzle makes of boxes. */
static __device__ __forceinline__ uint32_t turn_of(const pipeline *r, int row) {
    return (r->x / X_BLOCK + (uint32_t)row) & 7;
}

/* What a lane copies of x in a stage, as far as it can be told before x may be read: a piece of
 * 16 bytes of some blocks of K, of every fourth token from one on. */
typedef struct {
    const uint8_t *from; /* in the warp's first block of K */
    uint32_t to;         /* in a stage */
    int tokens;          /* every fourth */
    int block, step;     /* the first, and from block to block */
    int blocks;          /* of the warp that have such columns */
} piece_of_x;

static __device__ __forceinline__ piece_of_x piece_of(const decode_args *a, const share *s,
                                                      const pipeline *r) {
    piece_of_x p;
    int piece = r->lane % 8, row = r->lane / 8, log_tokens = min(a->m - 1, 2);
    int token = row & ((1 << log_tokens) - 1);
    p.from = (const uint8_t *)((const uint16_t *)a->x.data + token * a->x.stride +
                               s->begin * MOQ_PACK_K + piece * 8);
    p.to = r->x + token * X_BLOCK + ((piece ^ turn_of(r, token)) << 4);
    p.tokens = (a->m - token + 3) / 4;
    p.block = row >> log_tokens;
    p.step = 4 >> log_tokens;
    p.blocks = (a->k - piece * 8 + MOQ_PACK_K - 1) / MOQ_PACK_K - s->begin;
    find_now(p.from);
    find_now(p.to);
    find_now(p.tokens);
    find_now(p.block);
    find_now(p.step);
    find_now(p.blocks);
    return p;
}

/* Columns of x from block `done` of the warp on, 16 bytes a lane; zeros beyond K. */
static __device__ __forceinline__ void fetch_tokens(const decode_args *a, const piece_of_x *p,
                                                    int done, int blocks, uint32_t stage,
                                                    uint32_t bar) {
    int64_t four = 4 * 2 * a->x.stride;
#pragma unroll 1
    for (int block = p->block; block < blocks; block += p->step) {
        const uint8_t *from = p->from + (done + block) * X_BLOCK;
        uint32_t to = p->to + stage + block * a->x_rows * X_BLOCK;
        int bytes = done + block < p->blocks ? 16 : 0;
#pragma unroll 1
        for (int i = 0; i < p->tokens; i++) {
            copy_async_16(to, from, bytes);
            from += four;
            to = (to ^ 64) + 4 * X_BLOCK; /* as turn_of has it */
        }
    }
    copy_async_arrive(bar);
}

/* Columns of x in boxes of all tokens by 64 columns, which come later than fetch_tokens has them
 * but take a warp less time. */
template <class S>
static __device__ __forceinline__ void fetch_boxes(const pipeline *r, const CUtensorMap *tokens,
                                                   int first, int blocks, uint32_t to,
                                                   uint32_t bar) {
    constexpr int bytes = 8 * S::tiles * X_BLOCK;
    if (!is_elected()) {
        mbarrier_arrive(bar);
        return;
    }
    mbarrier_expect(bar, blocks * bytes);
#pragma unroll
    for (int i = 0; i < S::blocks; i++)
        if (i < blocks)
            copy_box_2d(to + i * bytes, tokens, (first + i) * X_BLOCK, 0, bar,
                        policy_evict_normal());
}

/* Bytes of a token that a warp has of columns that there are. */
static __device__ __forceinline__ int bytes_of(const decode_args *a, const share *s) {
    return max(0, min(s->count * X_BLOCK, 2 * (a->k - s->begin * MOQ_PACK_K)));
}

/* Zeros for columns of the last block that are beyond K. */
static __device__ __forceinline__ void clear_rest(const decode_args *a, const share *s,
                                                  const pipeline *r) {
    int bytes = bytes_of(a, s);
    for (int i = r->lane; i < a->m * 8; i += 32)
        if (bytes + i % 8 * 16 < s->count * X_BLOCK)
            store_shared(r->x + i / 8 * a->x_pitch + bytes + i % 8 * 16, make_uint4(0, 0, 0, 0));
}

/* All columns of x that a warp has, a lane for each token; of blocks that read x together, each
 * reads every other token for both. */
typedef struct {
    const uint8_t *from;
    uint32_t to;
    int bytes;
    bool mine;
} tokens_of_x;

static __device__ __forceinline__ tokens_of_x all_of(const decode_args *a, const share *s,
                                                     const pipeline *r) {
    tokens_of_x t;
    t.from = (const uint8_t *)((const uint16_t *)a->x.data + r->lane * a->x.stride +
                               s->begin * MOQ_PACK_K);
    t.to = r->x + r->lane * a->x_pitch;
    t.bytes = bytes_of(a, s);
    find_now(t.from);
    find_now(t.to);
    find_now(t.bytes);
    t.mine = r->lane < a->m && t.bytes > 0 && (!a->share || (r->lane & 1) == ((int)blockIdx.x & 1));
    return t;
}

static __device__ __forceinline__ void fetch_all(const decode_args *a, const tokens_of_x *t,
                                                 int lane, uint32_t bar) {
    if (lane == 0)
        mbarrier_expect(bar, a->m * t->bytes);
    if (!t->mine)
        return;
    if (a->share)
        copy_bytes_to(t->to, t->from, t->bytes, bar, 3);
    else
        copy_bytes(t->to, t->from, t->bytes, bar);
}

/* The tokens' part of fresh stages. */
static __device__ __forceinline__ void fetch_fresh(const decode_args *a, const piece_of_x *p,
                                                   const share *s, const pipeline *r, int stages) {
    uint32_t stage = 0, bar = r->full;
    int done = 0;
#pragma unroll 1
    for (; stages > 0; stages--) {
        fetch_tokens(a, p, done, min(a->turn, s->count - done), stage, bar);
        done += a->turn;
        if (done >= s->count)
            done = 0;
        stage += a->x_stage;
        bar += 8;
    }
}

/* The tokens' part of a stage that is filled again. */
template <class S>
static __device__ __forceinline__ void
fetch_columns(const decode_args *a, const CUtensorMap *tokens, const share *s, const pipeline *r,
              const piece_of_x *p, int done, int stage) {
    uint32_t at = (uint32_t)(stage * a->x_stage), bar = r->full + 8u * stage;
    int blocks = min(a->turn, s->count - done);
    if (a->boxes)
        fetch_boxes<S>(r, tokens, s->begin + done, blocks, r->x + at, bar);
    else
        fetch_tokens(a, p, done, blocks, at, bar);
}

/* ---- products ---- */

/* Where a lane reads a stage: its words of 4 vectors, its scales, and pieces of x. */
template <class S> struct lane_places {
    uint32_t word[4], scale, x[S::tiles][2];
};

template <class S>
static __device__ __forceinline__ lane_places<S> places_of(const decode_args *a,
                                                           const pipeline *r) {
    lane_places<S> p;
    int g = r->lane / 4, t = r->lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        p.word[i] = r->stages + (uint32_t)moq_pack_word_at(g, i, t);
    p.scale = r->stages + (uint32_t)moq_pack_scale_at(g, t);
#pragma unroll
    for (int i = 0; i < S::tiles; i++) {
        int row = min(8 * i + g, a->m - 1); /* tokens that are not there: any that is */
        uint32_t piece = a->x_stays ? row * a->x_pitch + 32 * t
                                    : row * X_BLOCK + ((2 * t ^ turn_of(r, row)) << 4);
        p.x[i][0] = r->x + piece;
        p.x[i][1] = a->x_stays ? p.x[i][0] + 16 : r->x + (piece ^ 16);
    }
    return p;
}

template <class S> using sums = float[S::slabs][S::tiles][4];

/* COUNT slabs by the blocks of a stage. */
template <class S, int COUNT>
static __device__ __forceinline__ void multiply_stage(const decode_args *a, lane_places<S> p,
                                                      int stage, int done, int blocks,
                                                      sums<S> &sum) {
    uint32_t at = (uint32_t)(stage * WEIGHTS),
             step = (uint32_t)((a->x_stays ? 1 : a->x_rows) * X_BLOCK);
    uint32_t x_at = a->x_stays ? done * step : (uint32_t)(stage * a->x_stage);
#pragma unroll
    for (int i = 0; i < 4; i++)
        p.word[i] += at;
    p.scale += at;
#pragma unroll
    for (int i = 0; i < 2 * S::tiles; i++)
        p.x[i / 2][i % 2] += x_at;
#pragma unroll(COUNT <= 2 ? 2 : 1)
    for (int block = 0; block < blocks; block++) {
        uint4 x[S::tiles][2];
#pragma unroll
        for (int i = 0; i < 2 * S::tiles; i++) {
            x[i / 2][i % 2] = load_shared(p.x[i / 2][i % 2]);
            p.x[i / 2][i % 2] += step;
        }
#pragma unroll
        for (int slab = 0; slab < COUNT; slab += 2) {
            uint32_t unit = slab * S::blocks * MOQ_PACK_BYTES;
            if (slab + 1 < COUNT)
                moq_multiply_units<S, 2>(p, unit, x, (float (&)[2][S::tiles][4])sum[slab]);
            else
                moq_multiply_units<S, 1>(p, unit, x, (float (&)[1][S::tiles][4])sum[slab]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            p.word[i] += MOQ_PACK_BYTES;
        p.scale += MOQ_PACK_BYTES;
    }
}

/* multiply_stage with code of its own for every number of slabs. */
template <class S, int COUNT>
static __device__ __forceinline__ void multiply_slabs(const decode_args *a, const lane_places<S> &p,
                                                      int stage, int done, int blocks, int slabs,
                                                      sums<S> &sum) {
    if constexpr (COUNT > 1) {
        if (slabs < COUNT) {
            multiply_slabs<S, COUNT - 1>(a, p, stage, done, blocks, slabs, sum);
            return;
        }
    }
    multiply_stage<S, COUNT>(a, p, stage, done, blocks, sum);
}

} // namespace moq::nvfp4_decode

#endif
