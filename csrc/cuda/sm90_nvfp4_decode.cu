/* NVFP4 linear for a few tokens on Hopper: y[m, n] = round(wx[n] * sum_k X[m, k] W[n, k] +
 * bias[n]).
 *
 * W is in the packed layout (core/nvfp4_pack.h), X bfloat16 or float16 of at most 16 tokens;
 * products are exact, sums float32. W is read once, 0.5625 bytes a weight, but what bounds it is
 * what makes operands of the codes: 71 to 78 instructions of a warp for the 1024 weights of a unit,
 * 0.9 of them logic operations a weight. So warps have nothing to do with each other until sums are
 * brought together:
 *
 * - K is split over the warps of a block, and over the two blocks of a cluster where that is
 * better; rows over clusters. Where K is short, groups of warps take different rows.
 * - A warp has a ring of stages of its own, which it fills itself: a stage is 8 units of W, some
 *   slabs by some blocks of K, by bulk copies, and those columns of x, unless all that a warp needs
 *   of x fits beside its ring and is needed again. It waits for nothing but its stages.
 * - W is constant, so rings are filled before the preceding kernel has ended (dependent launch); x
 *   follows when it has. Where half of a multiprocessor is enough for its rings, a block takes no
 *   more, so that the blocks of the next call are there when this one ends.
 * - A lane owns whole groups: lane (g, t) reads the words of group t of rows g and g + 8, 4 weights
 *   of each row for a step of 16 columns, so that a block scale is decoded once for its 16 weights.
 *   The columns of x are taken in that order: two loads of 16 bytes for 64 columns of a token.
 * - Sums of warps, then of blocks, are added in one order, whatever the timing. How K is split
 *   depends on the number of tokens, so the bits of a row may, too.
 *
 * The FP8 kernel for a few tokens (sm90_fp8_decode.cu) has the same parts, but weights that need no
 * decoder: there warps share stages, a producer fills them, and x is quantized ahead of the
 * products.
 *
 * Measured (H200, in a graph): see docs/lab.md. */
#include "core/nvfp4_pack.h"
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/load.h"
#include "cuda/nvfp4_decode.h"
#include "cuda/ptx.h"

#include <math.h>

#define STAGES      96 /* of a block, at most */
#define STAGE_UNITS 8  /* of W in a stage */
#define WEIGHTS     (STAGE_UNITS * MOQ_PACK_BYTES)
#define MAX_RANKS   2
#define X_BLOCK     128        /* bytes of a token in a block of K */
#define KEPT        (80 << 10) /* bytes of x that a block keeps, at most */
#define SHORT       2048       /* columns up to which fewer than 8 warps may share K */
#define DECLARED    1024       /* bytes of shared memory declared in the kernel */
static_assert(8 * (STAGES + 2) <= DECLARED, "more is declared");

/* What is known when the kernel is compiled: the warps of a block, slabs of W that a warp
 * multiplies with what it has read of x, tiles of 8 tokens, and the type of x. */
template <int WARPS, int SLABS, int TILES, moq_nvfp4_type TYPE> struct shape {
    static constexpr int warps = WARPS, max_stages = STAGES / WARPS;
    static constexpr int slabs = SLABS, tiles = TILES, blocks = STAGE_UNITS / SLABS;
    static constexpr int rows = SLABS * MOQ_PACK_ROWS,
                         row_pitch = rows + 4; /* parked, no conflicts */
    static constexpr moq_nvfp4_type type = TYPE;
};

typedef struct {
    int m, n, k;
    int log_ranks, log_parts; /* blocks of a cluster, and warps of a block, that share K */
    int blocks, more_blocks;  /* of K of a warp, and how many warps have one more */
    int clusters;             /* that have rows */
    int slabs, more_slabs;    /* of a cluster, and how many have one more */
    int turn;                 /* blocks of K in a stage */
    int stages;               /* of a warp */
    int stage_bytes;          /* weights, then x: [blocks][m][128], */
    bool x_stays;             /* or that is kept behind the stages, for all rounds */
    int warp_bytes;           /* of its stages, and x */
    int parked_at, parked_bytes, parked_turn; /* sums: offset; bytes of a warp, of a round or 0 */
    int inbox_at; /* [2][ranks][pairs of tokens][rows of a rank] float2 */
    int64_t slab_bytes;
    const uint8_t *weight;
    const float *output_scale;
    moq_rows x;
    moq_output out;
} decode_args;

/* ---- who does what ---- */

/* The part of K and the rows that a warp has, and where it is in its way through both. */
typedef struct {
    int begin, count; /* blocks of K */
    int slab, end;    /* the first slab of this round, and where those of the cluster end */
    int step;         /* slabs from round to round */
} share;

static __device__ __forceinline__ share share_of(const decode_args *a, int warps, int slabs,
                                                 int warp) {
    share s;
    int rank = (int)blockIdx.x & ((1 << a->log_ranks) - 1),
        cluster = (int)blockIdx.x >> a->log_ranks;
    int part = (rank << a->log_parts) + (warp & ((1 << a->log_parts) - 1));
    s.begin = part * a->blocks + min(part, a->more_blocks);
    s.count = a->blocks + (part < a->more_blocks);
    s.slab = cluster * a->slabs + min(cluster, a->more_slabs);
    s.end = cluster < a->clusters ? s.slab + a->slabs + (cluster < a->more_slabs) : 0;
    s.slab += (warp >> a->log_parts) * slabs;
    s.step = (warps >> a->log_parts) * slabs;
    return s;
}

/* ---- the ring of a warp ---- */

typedef struct {
    uint32_t stages, full; /* memory and barriers */
    uint32_t x;            /* of the first stage, or of all columns */
    uint64_t policy;
    int lane;
} ring;

/* What a stage is filled with next. */
typedef struct {
    int slab, done; /* blocks of K before it */
} cursor;

static __device__ __forceinline__ void advance_cursor(const decode_args *a, const share *s,
                                                      cursor *c) {
    c->done += a->turn;
    if (c->done >= s->count) {
        c->done = 0;
        c->slab += s->step;
    }
}

static __device__ __forceinline__ bool is_meant(const share *s, const cursor *c) {
    return c->slab < s->end && s->count > 0;
}

template <class S>
static __device__ __forceinline__ void fetch_weights(const decode_args *a, const share *s,
                                                     const ring *r, const cursor *c, int stage) {
    if (r->lane != 0)
        return;
    uint32_t bytes = (uint32_t)(min(a->turn, s->count - c->done) * MOQ_PACK_BYTES);
    uint32_t to = r->stages + (uint32_t)(stage * a->stage_bytes), bar = r->full + 8u * stage;
    const uint8_t *from =
        a->weight + c->slab * a->slab_bytes + (s->begin + c->done) * MOQ_PACK_BYTES;
    int slabs = min(S::slabs, s->end - c->slab);
    mbarrier_expect(bar, slabs * bytes);
#pragma unroll
    for (int i = 0; i < S::slabs; i++) {
        if (i < slabs)
            copy_bytes_once(to + i * S::blocks * MOQ_PACK_BYTES, from, bytes, bar, r->policy);
        from += a->slab_bytes;
    }
}

/* Columns of x from block `first` of K on, 16 bytes a lane; zeros beyond K. Pieces of a row are
 * xored with it, so that lanes that read the same piece of 8 rows meet no bank twice. */
static __device__ __forceinline__ void fetch_tokens(const decode_args *a, const ring *r, int first,
                                                    int blocks, uint32_t to, uint32_t bar) {
    int piece = r->lane % 8, row = r->lane / 8, column = first * MOQ_PACK_K + piece * 8;
    const uint16_t *x = (const uint16_t *)a->x.data;
#pragma unroll 1
    for (int i = row; i < blocks * a->m; i += 4) {
        while (row >= a->m) {
            row -= a->m;
            column += MOQ_PACK_K;
        }
        const uint16_t *from = column < a->k ? x + row * a->x.stride + column : x;
        copy_async_16(to + i * X_BLOCK + ((piece ^ (row & 7)) << 4), from, column < a->k ? 16 : 0);
        row += 4;
    }
    copy_async_arrive(bar);
}

/* The tokens' part of a stage. */
static __device__ __forceinline__ void fetch_columns(const decode_args *a, const share *s,
                                                     const ring *r, const cursor *c, int stage) {
    uint32_t to = r->stages + (uint32_t)(stage * a->stage_bytes) + WEIGHTS;
    fetch_tokens(a, r, s->begin + c->done, min(a->turn, s->count - c->done), to,
                 r->full + 8u * stage);
}

/* ---- products ---- */

/* Where a lane reads a stage: its words of 4 vectors, its scales, and pieces of x. */
template <class S> struct lane_places {
    uint32_t word[4], scale, x[S::tiles][2];
};

template <class S>
static __device__ __forceinline__ lane_places<S> places_of(const decode_args *a, const ring *r) {
    lane_places<S> p;
    int g = r->lane / 4, t = r->lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        p.word[i] = r->stages + (uint32_t)moq_pack_word_at(g, i, t);
    p.scale = r->stages + (uint32_t)moq_pack_scale_at(g, t);
#pragma unroll
    for (int i = 0; i < S::tiles; i++) {
        int row = min(8 * i + g, a->m - 1); /* tokens that are not there: any that is */
        p.x[i][0] = r->x + row * X_BLOCK + ((2 * t ^ (row & 7)) << 4);
        p.x[i][1] = p.x[i][0] ^ 16;
    }
    return p;
}

template <class S> using sums = float[S::slabs][S::tiles][4];

template <class S>
static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&w)[4],
                                                uint32_t x0, uint32_t x1) {
    const uint32_t x[2] = {x0, x1};
    if (S::type == MOQ_NVFP4_F16)
        mma_f16(sum, w, x);
    else
        mma_bf16(sum, w, x);
}

/* Two slabs by a block of K, `x` its columns. Words 0 and 1 have columns 0..3 of the lane's group
 * and 8..11, words 2 and 3 the rest: the steps are such that two neighbouring words of x belong to
 * each. Slabs take turns, so that products that add to the same sums do not follow each other. */
template <class S>
static __device__ __forceinline__ void multiply_pair(const lane_places<S> &p, uint32_t unit,
                                                     const uint4 (&x)[S::tiles][2],
                                                     float (&sum)[2][S::tiles][4]) {
    constexpr uint32_t slab = S::blocks * MOQ_PACK_BYTES;
    uint32_t word[2][4], scales[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        scales[i] = load_shared_half(p.scale + unit + i * slab);
#pragma unroll
        for (int j = 0; j < 4; j++)
            word[i][j] = load_shared_word(p.word[j] + unit + i * slab);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        scales[i] = moq_nvfp4_scales<S::type>(scales[i], false);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            moq_nvfp4_fragment<S::type>(word[i][j], scales[i], a[i]);
            moq_nvfp4_fragment<S::type>(word[i][j + 1], scales[i], b[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int tile = 0; tile < S::tiles; tile++) {
                const uint32_t *v = &x[tile][half].x + j;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint32_t w[4] = {a[i][2 * half], a[i][2 * half + 1], b[i][2 * half],
                                           b[i][2 * half + 1]};
                    multiply<S>(sum[i][tile], w, v[0], v[1]);
                }
            }
        }
    }
}

template <class S>
static __device__ __forceinline__ void multiply_stage(const decode_args *a, lane_places<S> p,
                                                      int stage, int done, int blocks,
                                                      sums<S> &sum) {
    uint32_t at = (uint32_t)(stage * a->stage_bytes), step = (uint32_t)(a->m * X_BLOCK);
    uint32_t x_at = a->x_stays ? done * step : at;
#pragma unroll
    for (int i = 0; i < 4; i++)
        p.word[i] += at;
    p.scale += at;
#pragma unroll
    for (int i = 0; i < 2 * S::tiles; i++)
        p.x[i / 2][i % 2] += x_at;
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        uint4 x[S::tiles][2];
#pragma unroll
        for (int i = 0; i < 2 * S::tiles; i++) {
            x[i / 2][i % 2] = load_shared(p.x[i / 2][i % 2]);
            p.x[i / 2][i % 2] += step;
        }
#pragma unroll
        for (int slab = 0; slab < S::slabs; slab += 2)
            multiply_pair<S>(p, slab * S::blocks * MOQ_PACK_BYTES, x,
                             (float (&)[2][S::tiles][4])sum[slab]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            p.word[i] += MOQ_PACK_BYTES;
        p.scale += MOQ_PACK_BYTES;
    }
}

/* ---- sums and outputs ---- */

/* Leaves a warp's sums where they are brought together: [pair of tokens][row_pitch]. */
template <class S>
static __device__ __forceinline__ void park_sums(float2 *parked, int pairs, int lane,
                                                 const sums<S> &sum) {
#pragma unroll
    for (int tile = 0; tile < S::tiles; tile++) {
        int pair = 4 * tile + lane % 4;
        if (pair >= pairs)
            continue;
#pragma unroll
        for (int slab = 0; slab < S::slabs; slab++) {
            float2 *to = parked + pair * S::row_pitch + slab * MOQ_PACK_ROWS + lane / 4;
            const float (&d)[4] = sum[slab][tile];
            to[0] = make_float2(d[0], d[1]);
            to[8] = make_float2(d[2], d[3]);
        }
    }
}

/* Adds up what the warps that share K have of a pair. */
template <int WARPS>
static __device__ __forceinline__ float2 gather(const decode_args *a, const uint8_t *parked) {
    float2 v[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        v[i] = i < 1 << a->log_parts ? *(const float2 *)(parked + i * a->parked_bytes)
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

/* A thread's outputs of a round: of one row, and every so many pairs of tokens. */
typedef struct {
    int row, n;
    int pair, pair_step;
    bool meant;
    float factor, bias;
} output_row;

template <class S>
static __device__ __forceinline__ output_row output_of(const decode_args *a, const share *s,
                                                       int index) {
    output_row o;
    o.row = index % S::rows;
    o.pair = index / S::rows;
    o.pair_step = (32 << a->log_parts) / S::rows;
    o.n = s->slab * MOQ_PACK_ROWS + o.row;
    o.meant = o.n < min(a->n, s->end * MOQ_PACK_ROWS) && 2 * o.pair < a->m;
    o.factor = o.meant ? a->output_scale[o.n] * MOQ_NVFP4_FACTOR : 0;
    o.bias = 0;
    return o;
}

/* The bias, unlike scales, may be the work of the kernel before: not until that has ended. */
static __device__ __forceinline__ void fetch_bias(const decode_args *a, output_row *o) {
    if (o->meant)
        o->bias = moq_load_bias(&a->out, o->n);
}

/* What the blocks of a cluster send each other of a round: [ranks][pairs][rows of a block]. Boxes
 * are used in turn: whoever has all of a box knows that the one before has been read. */
typedef struct {
    float2 *sums;
    uint32_t posted;
    int rank, owner; /* of a thread's row */
    int pitch, size; /* from pair to pair, from rank to rank */
    int parity;
} box;

template <class S>
static __device__ __forceinline__ box box_of(const decode_args *a, uint8_t *smem, uint32_t posted,
                                             int round, int row, int pairs) {
    box b;
    b.pitch = S::rows >> a->log_ranks;
    b.size = b.pitch * pairs;
    b.rank = (int)blockIdx.x & ((1 << a->log_ranks) - 1);
    b.owner = row / b.pitch;
    b.sums = (float2 *)(smem + a->inbox_at) + (round & 1) * S::rows * pairs + row % b.pitch;
    b.posted = posted + 8u * (round & 1);
    b.parity = round >> 1 & 1;
    return b;
}

/* Adds up what came of a pair. */
static __device__ __forceinline__ float2 add_ranks(const box *b, int pair) {
    float2 sum = {0, 0};
#pragma unroll
    for (int i = 0; i < MAX_RANKS; i++) {
        float2 v = b->sums[i * b->size + pair * b->pitch];
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

/* Brings the sums of a round together and writes the outputs. All of a box is sent before any of it
 * is waited for. */
template <class S>
static __device__ __forceinline__ void finish_round(const decode_args *a, uint8_t *smem,
                                                    const uint8_t *parked, uint32_t posted,
                                                    int round, const output_row *o) {
    int pairs = (a->m + 1) / 2;
    parked += o->row * 8;
    if (!a->log_ranks) {
#pragma unroll 1
        for (int pair = o->pair; pair < pairs; pair += o->pair_step)
            store_pair<S>(a, o, pair, gather<S::warps>(a, parked + pair * S::row_pitch * 8));
        return;
    }
    box b = box_of<S>(a, smem, posted, round, o->row, pairs);
    if (threadIdx.x == 0)
        mbarrier_expect(b.posted, S::rows * pairs * 8);
    uint32_t to = address_in(b.owner, shared_address(b.sums + b.rank * b.size));
    uint32_t bar = address_in(b.owner, b.posted);
#pragma unroll 1
    for (int pair = o->pair; pair < pairs; pair += o->pair_step)
        send_pair(to + pair * b.pitch * 8, gather<S::warps>(a, parked + pair * S::row_pitch * 8),
                  bar);
    if (b.owner != b.rank || o->pair >= pairs)
        return;
    mbarrier_wait(b.posted, b.parity);
#pragma unroll 1
    for (int pair = o->pair; pair < pairs; pair += o->pair_step)
        store_pair<S>(a, o, pair, add_ranks(&b, pair));
}

/* ---- the kernel ---- */

template <class S>
static __global__ void __launch_bounds__(32 * S::warps, 2)
    nvfp4_decode(const __grid_constant__ decode_args args) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[STAGES + 2];
    const decode_args *a = &args;
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    ring r;
    r.lane = (int)threadIdx.x % 32;
    r.stages = shared_address(smem) + (uint32_t)(warp * a->warp_bytes);
    r.x = r.stages + (uint32_t)(a->x_stays ? a->stages * a->stage_bytes : WEIGHTS);
    r.full = shared_address(barrier + warp * S::max_stages);
    r.policy = policy_evict_first();
    uint32_t posted = shared_address(barrier + STAGES);
    launch_dependents();
    uint32_t kept = r.full + 8u * a->stages;
    if (r.lane <= a->stages) /* weights, and lanes with their part of x, or they by themselves */
        mbarrier_init(r.full + 8u * r.lane, r.lane == a->stages ? 32 : a->x_stays ? 1 : 1 + 32);
    if (a->log_ranks && threadIdx.x < 2)
        mbarrier_init(posted + 8u * threadIdx.x, 1);
    mbarrier_init_fence();
    __syncwarp();
    if (a->log_ranks)
        cluster_arrive();

    share s = share_of(a, S::warps, S::slabs, warp);
    cursor next = {s.slab, 0}, x_next = next;
    for (int i = 0; i < a->stages && is_meant(&s, &next); i++) {
        fetch_weights<S>(a, &s, &r, &next, i);
        advance_cursor(a, &s, &next);
    }
    int group_threads = 32 << a->log_parts, index = (int)threadIdx.x & (group_threads - 1);
    int pairs = (a->m + 1) / 2;
    lane_places<S> places = places_of<S>(a, &r);
    output_row out = output_of<S>(a, &s, index);
    wait_for_predecessor();
    if (a->x_stays)
        fetch_tokens(a, &r, s.begin, s.count, r.x, kept);
    for (int i = 0; i < a->stages && !a->x_stays && is_meant(&s, &x_next); i++) {
        fetch_columns(a, &s, &r, &x_next, i);
        advance_cursor(a, &s, &x_next);
    }
    if (a->log_ranks)
        cluster_wait();
    fetch_bias(a, &out);

    if (a->x_stays)
        mbarrier_wait(kept, 0);
    ring_place place = {0, 0};
#pragma unroll 1
    for (int round = 0; s.slab < s.end; round++) {
        sums<S> sum = {};
#pragma unroll 1
        for (int done = 0; done < s.count; done += a->turn) {
            mbarrier_wait(r.full + 8u * place.index, place.parity);
            multiply_stage<S>(a, places, place.index, done, min(a->turn, s.count - done), sum);
            warp_meets();
            if (is_meant(&s, &next)) {
                fetch_weights<S>(a, &s, &r, &next, place.index);
                if (!a->x_stays)
                    fetch_columns(a, &s, &r, &next, place.index);
                advance_cursor(a, &s, &next);
            }
            advance(&place, a->stages);
        }
        uint8_t *parked = smem + a->parked_at + (round & 1) * a->parked_turn;
        park_sums<S>((float2 *)(parked + warp * a->parked_bytes), pairs, r.lane, sum);
        barrier_sync(1 + (warp >> a->log_parts), group_threads);
        parked += (warp >> a->log_parts << a->log_parts) * a->parked_bytes;
        finish_round<S>(a, smem, parked, posted, round, &out);
        s.slab += s.step;
        if (s.slab < s.end) {
            index = (index + S::rows) & (group_threads - 1); /* whose turn it is to add up */
            out = output_of<S>(a, &s, index);
            fetch_bias(a, &out);
        }
    }
}

/* ---- launch ---- */

/* A way to run a call. */
typedef struct {
    int warps, slabs, tiles, log_ranks, log_parts;
    bool whole; /* a block has a multiprocessor to itself */
} way;

static int quotient_up(int a, int b) {
    return (a - 1) / b + 1;
}

/* Rounds of the cluster that has most. */
static int rounds_of(const decode_args *a, const way *w) {
    int most = a->slabs + (a->more_slabs > 0);
    return quotient_up(most, w->slabs * (w->warps >> w->log_parts));
}

/* Shares rows and K out. */
static void share_out(decode_args *a, const way *w, int sm_count) {
    int slabs = quotient_up(a->n, MOQ_PACK_ROWS), blocks = (int)moq_pack_blocks(a->k);
    int parts = 1 << (w->log_ranks + w->log_parts);
    a->log_ranks = w->log_ranks;
    a->log_parts = w->log_parts;
    a->blocks = blocks / parts;
    a->more_blocks = blocks % parts;
    a->clusters = min(sm_count >> w->log_ranks, slabs);
    a->slabs = slabs / a->clusters;
    a->more_slabs = slabs % a->clusters;
    int most = a->blocks + (a->more_blocks > 0);
    a->turn = quotient_up(most, quotient_up(most, STAGE_UNITS / w->slabs));
    int columns = most * a->m * X_BLOCK;
    a->x_stays = rounds_of(a, w) > 1 && w->warps * columns <= KEPT;
    a->stage_bytes = WEIGHTS + (a->x_stays ? 0 : a->turn * a->m * X_BLOCK);
    a->slab_bytes = moq_pack_blocks(a->k) * MOQ_PACK_BYTES;
}

/* Shares shared memory out, and returns its bytes: the rings, sums, and what comes from the other
 * block. Of a single round, sums go where the rings were. Half of a multiprocessor where that has
 * two stages; a whole one has one of every shape at least, 8 slabs for 16 tokens being the largest.
 */
static size_t lay_out(decode_args *a, way *w, const moq_cuda_device *device) {
    int limit = (int)device->shared_per_block, rounds = rounds_of(a, w), pairs = (a->m + 1) / 2;
    int rows = w->slabs * MOQ_PACK_ROWS, parked = pairs * (rows + 4) * 8;
    int boxes = w->log_ranks ? 2 * rows * pairs * 8 : 0;
    int most = a->blocks + (a->more_blocks > 0);
    int needed = min(rounds * quotient_up(most, a->turn), STAGES / w->warps - 1);
    int x = a->x_stays ? most * a->m * X_BLOCK : 0;
    for (w->whole = false;; w->whole = true) {
        int room = (w->whole ? limit : (limit + 1024) / 2 - 1024) - DECLARED - boxes;
        int stages = min(needed, room / w->warps / a->stage_bytes);
        bool alias = rounds == 1 && stages * a->stage_bytes >= parked;
        if (!alias)
            stages = min(needed, (room / w->warps - 2 * parked - x) / a->stage_bytes);
        if (!w->whole && stages < min(needed, 16 / w->warps))
            continue;
        a->stages = stages;
        a->warp_bytes = stages * a->stage_bytes + x;
        a->parked_at = alias ? 0 : w->warps * a->warp_bytes;
        a->parked_bytes = alias ? a->warp_bytes : parked;
        a->parked_turn = alias ? 0 : w->warps * parked;
        a->inbox_at = w->warps * (a->warp_bytes + (alias ? 0 : 2 * parked));
        return (size_t)(a->inbox_at + boxes);
    }
}

/* Seconds of a call, fitted to 185 times on an H200 (docs/lab.md), a tenth off in the mean: the
 * instructions of the warps of a block, the end of each round, x from the L2, the exchange of a
 * cluster. `cost` is of a unit, by slabs; its instructions alone would take 10 ns. */
static double seconds_of(const decode_args *a, const way *w) {
    static const double cost[2][3] = {{2.14e-8, 2.09e-8, 2.11e-8}, {1.90e-8, 2.42e-8, 3.26e-8}};
    int most = a->blocks + (a->more_blocks > 0), rounds = rounds_of(a, w);
    double blocks = (double)most * w->warps;
    double unit = w->warps == 16 ? 1.68e-8 : cost[w->tiles - 1][w->slabs / 4];
    double ends = rounds * (w->warps == 16 ? 1.1e-6 : 6.6e-7);
    double exchange = w->log_ranks ? rounds * 2.1e-7 - 7e-8 : 0;
    double x = (a->x_stays ? 1 : rounds) * blocks * X_BLOCK * a->m;
    return 1.15e-6 + rounds * blocks * w->slabs * unit + ends + exchange +
           x * (w->tiles == 1 ? 2.15e-11 : 3.1e-11);
}

/* Whether a kernel was compiled for it, with rows for all threads of a group, and with blocks that
 * share K only where their warps do. */
static bool is_way(const way *w) {
    if (w->warps == 16 && (w->slabs > 2 || w->tiles > 1))
        return false;
    return 1 << w->log_parts <= w->warps && 32 << w->log_parts >= w->slabs * MOQ_PACK_ROWS &&
           (!w->log_ranks || 1 << w->log_parts == w->warps);
}

/* The best of all ways. */
static way way_of(decode_args *a, int sm_count, double *seconds) {
    way best = {};
    *seconds = INFINITY;
    for (int i = 0; i < 2 * 3 * 4 * 2; i++) {
        way w = {8 << i % 2, 2 << i / 2 % 3, a->m > 8 ? 2 : 1, i / 24, 1 + i / 6 % 4, false};
        if (!is_way(&w) || (w.log_parts < 3 && a->k > SHORT))
            continue;
        share_out(a, &w, sm_count);
        double estimate = seconds_of(a, &w);
        if (estimate < *seconds) {
            *seconds = estimate;
            best = w;
        }
    }
    return best;
}

template <int SLABS> static const void *kernel_of(int tiles, moq_dtype dtype) {
    if (dtype == MOQ_DT_F16)
        return tiles == 1 ? (const void *)nvfp4_decode<shape<8, SLABS, 1, MOQ_NVFP4_F16>>
                          : (const void *)nvfp4_decode<shape<8, SLABS, 2, MOQ_NVFP4_F16>>;
    return tiles == 1 ? (const void *)nvfp4_decode<shape<8, SLABS, 1, MOQ_NVFP4_BF16>>
                      : (const void *)nvfp4_decode<shape<8, SLABS, 2, MOQ_NVFP4_BF16>>;
}

static const void *kernel_for(const way *w, moq_dtype dtype) {
    if (w->warps == 16)
        return dtype == MOQ_DT_F16 ? (const void *)nvfp4_decode<shape<16, 2, 1, MOQ_NVFP4_F16>>
                                   : (const void *)nvfp4_decode<shape<16, 2, 1, MOQ_NVFP4_BF16>>;
    return w->slabs == 2   ? kernel_of<2>(w->tiles, dtype)
           : w->slabs == 4 ? kernel_of<4>(w->tiles, dtype)
                           : kernel_of<8>(w->tiles, dtype);
}

extern "C" double moq_cuda_nvfp4_decode_seconds(const moq_linear_spec *spec, int64_t m) {
    decode_args args = {.m = (int)m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    double seconds, bytes = (double)args.n * args.k * MOQ_PACK_BYTES / (MOQ_PACK_K * MOQ_PACK_ROWS);
    way_of(&args, spec->target.sm_count, &seconds);
    /* The ways were timed side by side; as the plan's choice among other kernels the best of them
     * takes so much longer in long calls, and less in short ones (24 of 16 layers, docs/lab.md). */
    return fmax(1.16 * seconds - 0.8e-6, 1.2e-6 + bytes / 4.39e12);
}

extern "C" moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_device device;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    decode_args args = {
        .m = (int)call->m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    double seconds;
    way w = way_of(&args, device.sm_count, &seconds);
    share_out(&args, &w, device.sm_count);
    size_t shared = lay_out(&args, &w, &device);
    args.weight = call->weight;
    args.output_scale = call->output_scale;
    args.x = moq_rows_of(call->x);
    args.out = moq_output_of(call);
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = kernel_for(&w, spec->dtype),
                         .grid = dim3((unsigned)((device.sm_count >> w.log_ranks) << w.log_ranks)),
                         .block = dim3((unsigned)(32 * w.warps)),
                         .cluster = w.log_ranks ? 1u << w.log_ranks : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}
