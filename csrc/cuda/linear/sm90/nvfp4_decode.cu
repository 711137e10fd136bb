/* NVFP4 linear for up to 16 tokens on Hopper: y[m, n] = round(wx[n] * sum_k X[m, k] W[n, k] +
 * bias[n]).
 *
 * W is in the packed layout (core/nvfp4_packed.h), X bfloat16 or float16; products are exact, sums
 * float32. Reading W once, 0.5625 bytes a weight, bounds it, and decoding takes nearly as long: 73
 * instructions of a warp for the 1024 weights of a unit are 14 to 15 ns of a multiprocessor, where
 * the memory brings a unit in 17. Every other instruction of a warp counts.
 *
 * - Split-K: warps of a block split K, and so do the two blocks of a cluster where that is faster.
 *   Slabs of rows are dealt out to clusters as evenly as can be. With short K, groups of warps have
 *   rows of their own.
 * - A warp makes its slabs in rounds of up to 8, with code of its own for every number of slabs, so
 *   that none is multiplied in vain.
 * - A warp has a pipeline of its own, which it fills itself and waits for alone. A stage is up to 8
 *   units of W, some slabs by some blocks of K; each slab's bulk copy is issued by a lane of its
 *   own.
 * - x lies beside the pipelines, one bulk copy a token and warp, if there are several rounds or
 *   many stages and there is room; otherwise it comes with the stages. Stages that are refilled get
 *   x of more than four tokens in boxes. Two blocks with different rows may share the copies of x
 *   (multicast).
 * - W is constant, so pipelines fill before the preceding kernel has ended (PDL), and x follows.
 *   Addresses of sums and outputs are computed before that wait, since later work is on the
 *   critical path. Eight warps take half a multiprocessor where that is enough for their pipelines,
 *   so that the next call's blocks are resident when this one's end, or two blocks of this call.
 *   Sixteen warps are better at long calls and take all of it.
 * - Lane (g, t) reads the words of group t of rows g and g + 8, 4 weights of each row for a step of
 *   16 columns, so that a block scale is decoded once for its 16 weights. Columns of x are read in
 *   that order: two loads of 16 bytes for 64 columns of a token.
 * - A warp of its own adds the sums of a round while the others multiply the next; all warps add
 *   those of the last round. Sums of warps, then of blocks, are added in a fixed order. How K is
 *   split depends on the number of tokens, so the bits of a row may, too.
 *
 * The FP8 decode kernel (fp8_decode.cu) is built alike, but its weights need no decoder: warps
 * share stages, a producer fills them, and x is quantized before the mainloop.
 *
 * Measurements (H200, in a graph): docs/lab/nvfp4-decode.md. */
#include "core/nvfp4_packed.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_products.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/nvfp4_decode_config.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

#include <stddef.h>
#include <string.h>

namespace moq::nvfp4_decode {

#define STAGES      MOQ_NVFP4_DECODE_STAGES
#define STAGE_UNITS MOQ_NVFP4_DECODE_STAGE_UNITS
#define WEIGHTS     (STAGE_UNITS * MOQ_PACK_BYTES)
#define MAX_RANKS   2
#define MAX_SPLITS  16 /* warps of a block that split K */
#define MAX_GROUPS  4  /* groups of a block's warps that have rows of their own */
#define X_BLOCK     MOQ_NVFP4_DECODE_X_BLOCK

/* Compile-time shape: warps that multiply, slabs of W that a warp multiplies by one load of x,
 * tiles of 8 tokens, and the type of x. Eight warps leave room for a second block. */
template <int WARPS, int SLABS, int TILES, moq_nvfp4_type TYPE> struct shape {
    static constexpr int warps = WARPS, max_stages = STAGES / WARPS;
    static constexpr int threads = 32 * WARPS + 32, at_once = WARPS == 8 ? 2 : 1;
    static_assert(MOQ_NVFP4_DECODE_ADDS(WARPS, SLABS), "one warp more adds up sums");
    static constexpr int slabs = SLABS, tiles = TILES, blocks = STAGE_UNITS / SLABS;
    static constexpr int rows = SLABS * MOQ_PACK_ROWS, rank_rows = rows / MAX_RANKS;
    static constexpr int row_pitch = rows + 4; /* staged without bank conflicts */
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
    uint64_t kept[MAX_SPLITS];                           /* x has arrived */
    uint64_t staged[MAX_GROUPS][2], free[MAX_GROUPS][2]; /* sums are staged; their room is free */
    uint64_t posted[2]; /* boxes of sums from other blocks are full */
} barriers;

/* ---- partition of the work ---- */

/* Returns the rank of a block among those that split K. */
static __device__ __forceinline__ int rank_of(const decode_args *a) {
    return (int)blockIdx.x & ((1 << a->log_ranks) - 1);
}

static __host__ __device__ __forceinline__ bool in_cluster(const decode_args *a) {
    return a->log_ranks || a->share;
}

/* Share of a warp: a split of K, and slabs made in rounds of equal size, or one slab more in the
 * first rounds. */
typedef struct {
    int begin, count;       /* blocks of K */
    int slab;               /* first slab */
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

/* ---- the pipeline of a warp ---- */

typedef struct {
    uint32_t stages, full; /* addresses of weights and barriers */
    uint32_t x;            /* x of the stages, or of all columns */
    uint64_t policy;
    int lane;
} pipeline;

/* Cursor of a warp's copies; `from` points into the lane's slab. */
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

/* Copies the weights of a stage with a lane for each slab: one lane for all takes longer than their
 * products. */
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

/* Returns what the 16-byte pieces of a row of x in a stage are xored with, so that lanes reading
 * the same piece of 8 rows hit different banks. The 128-byte swizzle of boxes does the same. */
static __device__ __forceinline__ uint32_t turn_of(const pipeline *r, int row) {
    return (r->x / X_BLOCK + (uint32_t)row) & 7;
}

/* Copy of x by a lane, as far as it is known before x may be read: a 16-byte piece of some blocks
 * of K, of every fourth token. */
typedef struct {
    const uint8_t *from; /* address in the warp's first block of K */
    uint32_t to;         /* address in the first stage */
    int tokens;          /* number of tokens */
    int block, step;     /* the first block, and from block to block */
    int blocks;          /* blocks of the warp that have these columns */
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

/* Copies columns of x from the warp's block `done` on, 16 bytes a lane; zeros beyond K. */
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
            to = (to ^ 64) + 4 * X_BLOCK; /* follows turn_of */
        }
    }
    copy_async_arrive(bar);
}

/* Copies columns of x in boxes of all tokens by 64 columns. They arrive later than those of
 * fetch_tokens, but take a warp less time. */
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

/* Returns the bytes of a token in the warp's columns, up to the end of K. */
static __device__ __forceinline__ int bytes_of(const decode_args *a, const share *s) {
    return max(0, min(s->count * X_BLOCK, 2 * (a->k - s->begin * MOQ_PACK_K)));
}

/* Clears columns of the last block that are beyond K. */
static __device__ __forceinline__ void clear_rest(const decode_args *a, const share *s,
                                                  const pipeline *r) {
    int bytes = bytes_of(a, s);
    for (int i = r->lane; i < a->m * 8; i += 32)
        if (bytes + i % 8 * 16 < s->count * X_BLOCK)
            store_shared(r->x + i / 8 * a->x_pitch + bytes + i % 8 * 16, make_uint4(0, 0, 0, 0));
}

/* Copy of all of the warp's columns of x, a lane for each token. Of two blocks that share x, each
 * copies every other token to both. */
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

/* Copies the tokens of fresh stages. */
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

/* Copies the tokens of a stage that is refilled. */
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

/* Addresses that a lane reads in a stage: its words of 4 vectors, its scales, and pieces of x. */
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
        int row = min(8 * i + g, a->m - 1); /* tokens beyond the last repeat it */
        uint32_t piece = a->x_stays ? row * a->x_pitch + 32 * t
                                    : row * X_BLOCK + ((2 * t ^ turn_of(r, row)) << 4);
        p.x[i][0] = r->x + piece;
        p.x[i][1] = a->x_stays ? p.x[i][0] + 16 : r->x + (piece ^ 16);
    }
    return p;
}

template <class S> using sums = float[S::slabs][S::tiles][4];

/* Multiplies COUNT slabs by the blocks of a stage. */
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

/* Calls multiply_stage with code of its own for every number of slabs. */
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

static_assert(sizeof(barriers) <= MOQ_NVFP4_DECODE_DECLARED, "more is declared");

/* ---- epilogue ---- */

static __device__ __forceinline__ float2 load_sums(uint32_t from) {
    uint2 v = load_shared_pair(from);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

static __device__ __forceinline__ void store_sums(uint32_t to, float x, float y) {
    store_shared_pair(to, make_uint2(__float_as_uint(x), __float_as_uint(y)));
}

/* Stages a warp's sums as [pair of tokens][row_pitch]; `staged` is the lane's first address. */
template <class S>
static __device__ __forceinline__ void stage_sums(uint32_t staged, int pairs, int lane,
                                                  const sums<S> &sum) {
#pragma unroll
    for (int tile = 0; tile < S::tiles; tile++) {
        if (4 * tile + lane % 4 >= pairs)
            continue;
#pragma unroll
        for (int slab = 0; slab < S::slabs; slab++) {
            uint32_t to = staged + (4 * tile * S::row_pitch + slab * MOQ_PACK_ROWS) * 8;
            const float (&d)[4] = sum[slab][tile];
            store_sums(to, d[0], d[1]);
            store_sums(to + 64, d[2], d[3]);
        }
    }
}

/* Adds the sums of a pair of tokens over the warps that split K. */
template <int WARPS>
static __device__ __forceinline__ float2 gather(const decode_args *a, uint32_t staged) {
    float2 v[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        v[i] = i < 1 << a->log_splits ? load_sums(staged + (uint32_t)(i * a->staged_bytes))
                                      : make_float2(0, 0);
#pragma unroll
    for (int half = WARPS / 2; half; half /= 2) {
#pragma unroll
        for (int i = 0; i < WARPS / 2; i++) {
            if (i < half) {
                v[i].x += v[i + half].x;
                v[i].y += v[i + half].y;
            }
        }
    }
    return v[0];
}

/* Row of a round that a thread writes. */
typedef struct {
    int row, n;
    bool meant;
    float factor, bias;
} output_row;

static __device__ __forceinline__ output_row output_of(const decode_args *a, int slab, int slabs,
                                                       int row) {
    output_row o;
    o.row = row;
    o.n = slab * MOQ_PACK_ROWS + row;
    o.meant = o.n < a->n && row < slabs * MOQ_PACK_ROWS;
    o.factor = o.meant ? a->output_scale[o.n] * MOQ_NVFP4_FACTOR : 0;
    o.bias = 0;
    return o;
}

/* Loads the bias. It may come from the preceding kernel, unlike scales. */
static __device__ __forceinline__ void fetch_bias(const decode_args *a, output_row *o) {
    if (o->meant)
        o->bias = moq_load_bias(&a->out, o->n);
}

/* Addresses by which a thread adds the sums of its row of a round, computed before the sums are
 * there, off the critical path.
 *
 * Blocks of a cluster send each other sums in boxes, [ranks][pairs][rows of a block], used in turn:
 * a block that has received all of a box knows that the previous one has been read. */
typedef struct {
    uint32_t staged;      /* of the first of the warps that split K */
    uint32_t box, posted; /* this block's box and its barrier */
    uint32_t to, bar;     /* the box of the block that owns the row, and its barrier */
    int parity;
    bool owned;     /* this block writes the row */
    int pair, step; /* the thread's first pair of tokens, and the step to the next */
    int box_size;   /* bytes from rank to rank */
} sum_places;

template <class S>
static __device__ __forceinline__ sum_places sum_places_of(const decode_args *a, uint32_t smem,
                                                           uint32_t posted, int group, int round,
                                                           int slabs, int row) {
    sum_places m = {};
    m.step = 1;
    m.staged = smem + (uint32_t)(a->staged_at + (round & 1) * a->staged_turn +
                                 (group << a->log_splits) * a->staged_bytes + row * 8);
    if (a->log_ranks) {
        int own = slabs * (MOQ_PACK_ROWS / MAX_RANKS), owner = row >= own, rank = rank_of(a);
        int pairs = (a->m + 1) / 2;
        m.box_size = S::rank_rows * pairs * 8;
        m.box = smem +
                (uint32_t)(a->inbox_at + ((round & 1) * S::rows * pairs + row - owner * own) * 8);
        m.posted = posted + 8u * (round & 1);
        m.parity = round >> 1 & 1;
        m.owned = owner == rank;
        m.to = address_in((uint32_t)owner, m.box + (uint32_t)(rank * m.box_size));
        m.bar = address_in((uint32_t)owner, m.posted);
    }
    return m;
}

/* Adds the sums of a pair from all ranks. */
static __device__ __forceinline__ float2 add_ranks(uint32_t box, int size) {
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < MAX_RANKS; i++) {
        float2 v = load_sums(box + (uint32_t)(i * size));
        sum.x += v.x;
        sum.y += v.y;
    }
    return sum;
}

template <class S>
static __device__ __forceinline__ void store_pair(const decode_args *a, const output_row *o,
                                                  int pair, float2 value) {
    moq_output out = a->out;
    out.dtype = S::type == MOQ_NVFP4_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    if (!o->meant)
        return;
    moq_store_output(&out, 2 * pair, o->n, value.x * o->factor, o->bias);
    if (2 * pair + 1 < a->m)
        moq_store_output(&out, 2 * pair + 1, o->n, value.y * o->factor, o->bias);
}

/* Adds a row's sums, of every `step`th pair, and writes them or sends them to the block that owns
 * the row. */
template <class S>
static __device__ __forceinline__ void gather_row(const decode_args *a, const sum_places *m,
                                                  int slabs, const output_row *o) {
    int pairs = (a->m + 1) / 2;
    if (o->row >= slabs * MOQ_PACK_ROWS)
        return;
#pragma unroll 1
    for (int pair = m->pair; pair < pairs; pair += m->step) {
        float2 v = gather<S::warps>(a, m->staged + (uint32_t)(pair * S::row_pitch * 8));
        if (a->log_ranks)
            send_pair(m->to + (uint32_t)(pair * S::rank_rows * 8), v, m->bar);
        else
            store_pair<S>(a, o, pair, v);
    }
}

/* Writes an owned row from the sums that have arrived. */
template <class S>
static __device__ __forceinline__ void write_row(const decode_args *a, const sum_places *m,
                                                 int slabs, const output_row *o) {
    int pairs = (a->m + 1) / 2;
    if (!m->owned || o->row >= slabs * MOQ_PACK_ROWS)
        return;
    mbarrier_wait(m->posted, m->parity);
#pragma unroll 1
    for (int pair = m->pair; pair < pairs; pair += m->step)
        store_pair<S>(a, o, pair,
                      add_ranks(m->box + (uint32_t)(pair * S::rank_rows * 8), m->box_size));
}

/* Expects the bytes of a round's sums from other blocks. */
static __device__ __forceinline__ void expect_sums(const decode_args *a, uint32_t posted,
                                                   int slabs) {
    mbarrier_expect(posted, slabs * MOQ_PACK_ROWS * ((a->m + 1) / 2) * 8);
}

/* Finishes all rounds but the last, by the adding warp. */
template <class S>
static __device__ __forceinline__ void finish_rounds(const decode_args *a, uint32_t smem,
                                                     barriers *bar) {
    constexpr int ROWS = (S::rows + 31) / 32; /* rows of a lane */
    int lane = threadIdx.x % 32, groups = S::warps >> a->log_splits;
    uint32_t posted = shared_address(bar->posted);
    int most = share_of<S>(a, 0, 0).rounds;
#pragma unroll 1
    for (int i = 0; i < (most - 1) * groups; i++) {
        int round = i / groups, group = i % groups;
        share s = share_of<S>(a, 0, group);
        if (round + 1 >= s.rounds)
            continue;
        int slab = first_of(&s, round), slabs = slabs_of(&s, round);
        output_row o[ROWS];
        sum_places m[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            o[j] = output_of(a, slab, slabs, lane + 32 * j);
            m[j] = sum_places_of<S>(a, smem, posted, group, round, slabs, lane + 32 * j);
            fetch_bias(a, &o[j]);
        }
        if (a->log_ranks && lane == 0)
            expect_sums(a, m[0].posted, slabs);
        mbarrier_wait(shared_address(&bar->staged[group][round & 1]), round >> 1 & 1);
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            gather_row<S>(a, &m[j], slabs, &o[j]);
#pragma unroll
        for (int j = 0; j < ROWS && a->log_ranks; j++)
            write_row<S>(a, &m[j], slabs, &o[j]);
        warp_releases<false>(shared_address(&bar->free[group][round & 1]));
    }
}

/* Finishes the last round, by all warps that split K. The boxes of a cluster are used in turn, so
 * the round before must be done. */
template <class S>
static __device__ __forceinline__ void finish_last(const decode_args *a, const sum_places *m,
                                                   barriers *bar, const share *s, int group,
                                                   const output_row *o) {
    int last = s->rounds - 1, slabs = slabs_of(s, last);
    if (a->log_ranks && threadIdx.x == 0)
        expect_sums(a, m->posted, slabs);
    if (a->log_ranks && last > 0)
        mbarrier_wait(shared_address(&bar->free[group][~last & 1]), (last - 1) >> 1 & 1);
    mbarrier_wait(shared_address(&bar->staged[group][last & 1]), last >> 1 & 1);
    gather_row<S>(a, m, slabs, o);
    if (a->log_ranks)
        write_row<S>(a, m, slabs, o);
}

/* ---- the kernel ---- */

static __device__ __forceinline__ void init_barriers(const decode_args *a, barriers *bar,
                                                     int lane) {
    if (lane < 2 * MAX_GROUPS) {
        mbarrier_init(shared_address(&bar->staged[0][lane]), WARP_ARRIVALS << a->log_splits);
        mbarrier_init(shared_address(&bar->free[0][lane]), WARP_ARRIVALS);
    }
    if (lane < MAX_SPLITS)
        mbarrier_init(shared_address(&bar->kept[lane]), 1);
    if (lane < 2)
        mbarrier_init(shared_address(&bar->posted[lane]), 1);
}

/* Runs a warp's mainloop over its rounds; sums are staged for others to add. */
template <class S>
static __device__ __forceinline__ void
multiply_rounds(const decode_args *a, const CUtensorMap *tokens, uint32_t smem, barriers *bar,
                const pipeline *r, const share *s, const piece_of_x *piece, next_stage *next,
                int warp) {
    int group = warp >> a->log_splits, pairs = (a->m + 1) / 2;
    uint32_t staged_bar = shared_address(bar->staged[group]);
    uint32_t free_bar = shared_address(bar->free[group]);
    uint32_t staged = smem + (uint32_t)(a->staged_at + warp * a->staged_bytes +
                                        (r->lane % 4 * S::row_pitch + r->lane / 4) * 8);
    find_now(staged);
    lane_places<S> places = places_of<S>(a, r);
    pipeline_state place = {0, 0};
#pragma unroll 1
    for (int round = 0; round < s->rounds; round++) {
        int slabs = slabs_of(s, round);
        sums<S> sum = {};
#pragma unroll 1
        for (int done = 0; done < s->count; done += a->turn) {
            mbarrier_wait(r->full + 8u * place.index, place.parity);
            multiply_slabs<S, S::slabs>(a, places, place.index, done, min(a->turn, s->count - done),
                                        slabs, sum);
            warp_meets();
            if (is_meant(s, next)) {
                fetch_weights<S>(a, s, r, next, place.index);
                if (!a->x_stays)
                    fetch_columns<S>(a, tokens, s, r, piece, next->done, place.index);
                advance_stage(a, s, next);
            }
            advance(&place, a->stages);
        }
        if (round > 1)
            mbarrier_wait(free_bar + 8u * (round & 1), (round >> 1 & 1) ^ 1);
        stage_sums<S>(staged + (uint32_t)((round & 1) * a->staged_turn), pairs, r->lane, sum);
        warp_releases<false>(staged_bar + 8u * (round & 1));
    }
}

template <class S>
static __global__ void __launch_bounds__(S::threads, S::at_once)
    nvfp4_decode(const __grid_constant__ CUtensorMap tokens,
                 const __grid_constant__ decode_args args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ barriers bar;
    const decode_args *a = &args;
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32;
    launch_dependents();
    bool adds = warp == S::warps; /* the adding warp has no share of W */
    int split = warp & ((1 << a->log_splits) - 1), group = warp >> a->log_splits;
    pipeline r;
    r.lane = lane;
    uint32_t smem = shared_address(shared);
    r.stages = smem + (uint32_t)(warp * a->warp_bytes);
    r.full = shared_address(bar.stage + warp * S::max_stages);
    r.x = a->x_stays ? smem + (uint32_t)(a->x_at + split * a->m * a->x_pitch)
                     : r.stages + (uint32_t)(a->stages * WEIGHTS);
    r.policy = policy_evict_first();
    if (adds) {
        init_barriers(a, &bar, lane);
    } else if (lane < a->stages) { /* one arrival for weights, and one of each lane for x */
        mbarrier_init(r.full + 8u * lane, a->x_stays ? 1 : 1 + 32);
    }
    mbarrier_init_fence();
    barriers_are_ready(2, S::threads);
    if (in_cluster(a))
        cluster_arrive();
    if (a->boxes && threadIdx.x == 0)
        prefetch_map(&tokens);

    share s = {};
    if (!adds)
        s = share_of<S>(a, split, group);
    next_stage next = start_of(a, &s, lane);
    int fresh = 0; /* stages filled before x may be read */
    for (; fresh < a->stages && is_meant(&s, &next); fresh++) {
        fetch_weights<S>(a, &s, &r, &next, fresh);
        advance_stage(a, &s, &next);
    }
    piece_of_x piece = piece_of(a, &s, &r);
    tokens_of_x all = all_of(a, &s, &r);
    int threads = 32 << a->log_splits, index = (int)threadIdx.x & (threads - 1);
    int last = s.rounds - 1;
    int slabs = s.rounds ? slabs_of(&s, last) : 0;
    output_row out = output_of(a, first_of(&s, last), slabs, index % S::rows);
    sum_places meets =
        sum_places_of<S>(a, smem, shared_address(bar.posted), group, last, slabs, out.row);
    meets.pair = index / S::rows;
    meets.step = threads / S::rows;
    find_now(meets.staged);
    find_now(meets.to);
    find_now(meets.bar);
    find_now(meets.box);
    find_now(meets.pair);
    find_now(out.row);
    find_now(out.n);
    if (a->x_stays && group == 0)
        clear_rest(a, &s, &r);
    barrier_sync(1, S::threads);
    if (in_cluster(a))
        cluster_wait();
    wait_for_predecessor();
    if (adds) {
        finish_rounds<S>(a, smem, &bar);
        return;
    }
    uint32_t kept = shared_address(&bar.kept[split]);
    if (!a->x_stays)
        fetch_fresh(a, &piece, &s, &r, fresh);
    else if (group == 0)
        fetch_all(a, &all, lane, kept);
    fetch_bias(a, &out);
    if (a->x_stays)
        mbarrier_wait(kept, 0);
    multiply_rounds<S>(a, &tokens, smem, &bar, &r, &s, &piece, &next, warp);
    if (s.rounds)
        finish_last<S>(a, &meets, &bar, &s, group, &out);
}

/* ---- launch ---- */

template <int WARPS, int SLABS, int TILES> static const void *kernel_of(moq_dtype dtype) {
    return dtype == MOQ_DT_F16
               ? (const void *)nvfp4_decode<shape<WARPS, SLABS, TILES, MOQ_NVFP4_F16>>
               : (const void *)nvfp4_decode<shape<WARPS, SLABS, TILES, MOQ_NVFP4_BF16>>;
}

static const void *kernel_for(const moq_nvfp4_decode_config *config, const moq_linear_call *call) {
    moq_dtype dtype = call->spec->dtype;
    if (config->warps == 16)
        return kernel_of<16, 4, 1>(dtype);
    if (call->m > 8)
        return kernel_of<8, 4, 2>(dtype);
    return config->slabs == 2   ? kernel_of<8, 2, 1>(dtype)
           : config->slabs == 4 ? kernel_of<8, 4, 1>(dtype)
                                : kernel_of<8, 8, 1>(dtype);
}

extern "C" moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_device device;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    moq_nvfp4_decode_share share;
    const moq_nvfp4_decode_config *config = moq_nvfp4_decode_expand_config(call, &share);
    decode_args args = {};
    memcpy(&args, &share, sizeof share);
    args.weight = call->weight;
    args.output_scale = call->output_scale;
    args.x = moq_rows_of(call->x);
    args.out = moq_output_of(call);
    CUtensorMap tokens = {};
    if (args.boxes)
        MOQ_TRY(moq_tensor_map_rows(&tokens, args.x.data, args.m, 2 * spec->in_features,
                                    2 * args.x.stride, (uint32_t)args.x_rows, err));
    unsigned cluster = in_cluster(&args) ? 2 : 1;
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = kernel_for(config, call),
                         .grid =
                             dim3(((unsigned)device.sm_count << config->two) / cluster * cluster),
                         .block = dim3((unsigned)(32 * (config->warps + 1))),
                         .cluster = cluster > 1 ? cluster : 0,
                         .shared = (size_t)args.shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&tokens, &args};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::nvfp4_decode
