/* FP8 linear for up to 16 tokens on Hopper: y[m, n] = round(sx * wx[n] * sum_k X[m, k] W[n, k] +
 * bias[n]).
 *
 * W is e4m3 [N, K] as the checkpoint has it. X is quantized here to e4m3 as the layer prescribes:
 * one scale, one a token, or one for 128 columns. Reading W once bounds it, so everything serves to
 * keep the memory busy: one block a multiprocessor, a producer that copies W through a pipeline and
 * never looks at x, 8 or 16 warps that multiply.
 *
 * - A tile is 16 rows of W, a step 512 columns of it: 8 boxes of 8 rows x 128 bytes in the 128-byte
 *   swizzle, [half of the rows][128 columns][8][128]. To wgmma these are 64 "rows" of one operand:
 *   the 16 rows four times, with other 128 columns each time. The other operand has 2, 8 or 16
 *   tokens four times in the same way. Only those blocks of the product are used in which both
 *   columns agree; the others cost nothing, as tensor cores idle here. A tile is thus small enough
 *   for 132 blocks to share any N evenly, K is split within the block, and no weight passes through
 *   a register.
 * - FP8 wgmma keeps about 14 bits of its sums, so every 128 columns they are added to float32 sums,
 *   under the block scales.
 * - Of G warpgroups, i makes the steps i, i + G, ... of a round of tiles. Their sums are added in
 *   shared memory in a fixed order. The number of stages is a multiple of G, so that each stage has
 *   one owner: a group that skipped a phase of a barrier could not tell it from the next.
 * - W is constant, so the pipeline fills before the preceding kernel has ended (PDL). For one or
 *   two tokens of a small W, a block takes half a multiprocessor, so that the next call's blocks
 *   have filled their pipelines when this one's end.
 * - Every block reads all of x from the L2, which is the bound where x is long: there two blocks of
 *   a cluster share rows of W, split K, and send each other their sums.
 * - x must fit beside the pipeline. If it does not, K is done in passes, with the sums kept from
 *   pass to pass.
 *
 * Measurements (H200, in a graph): docs/lab/fp8-decode.md. */
#include "core/invariant.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/fp8_decode_config.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::fp8_decode {

#define UNIT       8                   /* rows: what clusters share N by */
#define TILE       16                  /* rows of W */
#define STEP       MOQ_FP8_DECODE_STEP /* columns of W that a product takes */
#define SLICES     4                   /* slices of 128 columns in a step */
#define MAX_RANKS  2
#define MAX_TOKENS 16

/* Compile-time shape: warpgroups that multiply, tokens that an operand has room for, and how x is
 * quantized; AS_IS: x is codes. Two warpgroups and half of the shared memory leave room for a block
 * of the next call. */
template <int GROUPS, int TOKENS, int MODE> struct shape {
    static constexpr int groups = GROUPS, warps = 4 * GROUPS, consumers = 128 * GROUPS;
    static constexpr int threads =
        consumers + 128; /* the producer's warpgroup gives its registers away */
    static constexpr int blocks = GROUPS == 2 ? 2 : 1; /* of a multiprocessor */
    static constexpr int registers = GROUPS == 2 ? 104 : 112;
    static constexpr int tokens = TOKENS, mode = MODE;
    static constexpr bool coded = MODE == MOQ_INPUT_AS_IS;
    static constexpr int x_bytes = coded ? 1 : 2; /* bytes of a value */
    /* Tokens of a warp's pieces in turn. */
    static constexpr int tokens_of_warp = TOKENS > warps ? TOKENS / warps : 1;
    /* Share of a warp in a tile: 8 rows of W, and pairs of tokens, some of them a lane's. */
    static constexpr int pairs = 8 * TOKENS / 2, pairs_of_lane = TOKENS > 8 ? TOKENS / 8 : 1;
    /* A round is tiles whose sums are added at once, two outputs a thread. */
    static constexpr int round = consumers / (2 * pairs), round_rows = TILE * round;
};

typedef struct {
    int m, n, k;
    int log_rows;                     /* log2 of the tokens, rounded up */
    int ranks, log_ranks, rank_steps; /* blocks of a cluster, which split K, and steps of each */
    int units, more_units;  /* rows of a cluster in units, and how many clusters have one more */
    int passes, pass_steps; /* passes over a block's split of K, and steps of each but the last */
    int stages;
    int flight;                        /* stages under way at once */
    int codes_at, staged_at, inbox_at; /* offsets in shared memory */
    int scales_at;                     /* by groups: [steps of a pass][4][tokens] floats */
    int blocks_at;                     /* [2 rounds][block_rows][slices of a pass] floats */
    int block_rows;                    /* rows of block scales that a round may touch */
    int kept_at;                       /* with several passes: [rounds][consumers] float2 */
    moq_rows x;
    moq_output out;
    const float *input_scale;  /* one for each partition, or NULL */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, K / 128] */
    moq_partitions partitions;
} decode_args;

/* Addresses of a block's shared memory; as numbers where copies and products want them. */
typedef struct {
    uint32_t pipeline, codes;
    uint32_t full, empty; /* barriers of the stages */
    uint32_t told,
        posted;           /* barriers of the cluster: maxima, and two boxes of sums, have arrived */
    float *scale;         /* scales of tokens, or of groups */
    uint32_t *maxima;     /* maxima of tokens, in this block */
    uint32_t *all_maxima; /* [ranks][MAX_TOKENS] */
    float2 *staged, *inbox, *kept;
    float *blocks; /* scales of W, of two rounds in turn */
} block_memory;

/* ---- partition of the work ---- */

static __device__ __forceinline__ int rank_of(const decode_args *a) {
    return (int)blockIdx.x & (a->ranks - 1);
}

/* Rows [begin, end) of one partition. */
typedef struct {
    int begin, end, partition;
} segment;

/* Returns the rows of this cluster; first_segment finds their partition. */
static __device__ __forceinline__ segment cluster_rows(const decode_args *a) {
    int index = (int)blockIdx.x >> a->log_ranks;
    int first = index * a->units + min(index, a->more_units);
    int end = first + a->units + (index < a->more_units);
    segment s = {first * UNIT, (int)min((int64_t)end * UNIT, (int64_t)a->n), 0};
    return s;
}

/* Returns the part of `rest` that is in the partition of its first row. */
static __device__ __forceinline__ segment first_segment(const decode_args *a, segment rest) {
    while (a->partitions.end[rest.partition] <= rest.begin)
        rest.partition++;
    rest.end = min(rest.end, a->partitions.end[rest.partition]);
    return rest;
}

static __device__ __forceinline__ int steps_of(const decode_args *a, int pass) {
    return min(a->pass_steps, a->rank_steps - pass * a->pass_steps);
}

static __device__ __forceinline__ int first_column(const decode_args *a, int pass) {
    return (rank_of(a) * a->rank_steps + pass * a->pass_steps) * STEP;
}

/* ---- quantization of x. Instructions between the end of the preceding kernel and the first
 * product are on the critical path, four to six cycles each: addresses are computed before the wait
 * ---- */

/* Share of x of a warp. x is cut into pieces of 32 chunks of 16 values of one token; warps take a
 * piece of each token and then the next. Blocks begin at different pieces, so that they do not all
 * ask the L2 for one line. */
template <class S> struct x_share {
    int chunks, pieces, shift; /* of a row */
    int turns;                 /* pieces of a warp */
    /* Tokens of the warp's pieces in turn, and the addresses of their first columns. */
    int token[S::tokens_of_warp];
    const uint8_t *row[S::tokens_of_warp];
};

template <class S>
static __device__ __forceinline__ x_share<S> share_of(const decode_args *a, int column,
                                                      int columns) {
    x_share<S> r;
    r.chunks = min(columns, a->k - column) / 16;
    r.pieces = (r.chunks + 31) / 32;
    r.shift = (int)((blockIdx.x >> a->log_ranks) % (uint32_t)r.pieces);
    r.turns = ((r.pieces << a->log_rows) + S::warps - 1) / S::warps;
#pragma unroll
    for (int i = 0; i < S::tokens_of_warp; i++) {
        r.token[i] = (i * S::warps + (int)threadIdx.x / 32) & ((1 << a->log_rows) - 1);
        r.row[i] = (const uint8_t *)a->x.data + (r.token[i] * a->x.stride + column) * S::x_bytes;
    }
    return r;
}

#define BATCH 4 /* pieces loaded before the first is used: latency is paid once */

/* Chunk of a lane in a piece; -1 for none, whose values are zeros. */
typedef struct {
    moq_chunk value;
    int chunk;
} x_piece;

/* Returns the offset of 16 codes of a token, from column 16 * chunk of the pass on. The operand of
 * a step is [4 slices][tokens][128], in groups of 8 rows whose 16-byte pieces are xored with the
 * row. */
template <class S> static __device__ __forceinline__ uint32_t code_at(int token, int chunk) {
    int row = chunk / 8 % SLICES * S::tokens + token;
    return (uint32_t)(chunk / (8 * SLICES) * (SLICES * S::tokens * 128) + row * 128 +
                      (chunk % 8 ^ row % 8) * 16);
}

template <class S>
static __device__ __forceinline__ void aim_pieces(const decode_args *a, const x_share<S> *r,
                                                  int turn, x_piece (&p)[BATCH]) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        int piece = ((turn + i) * S::warps + (int)threadIdx.x / 32) >> a->log_rows;
        int turned = piece + r->shift;
        turned -= turned >= r->pieces ? r->pieces : 0;
        int chunk = turned * 32 + (int)threadIdx.x % 32;
        bool meant = piece < r->pieces && r->token[i % S::tokens_of_warp] < a->m;
        p[i].chunk = meant && chunk < r->chunks ? chunk : -1;
    }
}

template <class S>
static __device__ __forceinline__ void load_pieces(const x_share<S> *r, x_piece (&p)[BATCH]) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        p[i].value = moq_chunk();
        if (p[i].chunk >= 0) {
            const uint4 *from =
                (const uint4 *)(r->row[i % S::tokens_of_warp] + p[i].chunk * 16 * S::x_bytes);
            p[i].value.word[0] = from[0];
            if (!S::coded)
                p[i].value.word[1] = from[1];
        }
    }
}

static __device__ __forceinline__ bool is_anyones(const x_piece *p) {
    return __any_sync(0xffffffffu, p->chunk >= 0);
}

/* Returns the rows of x with a 16-bit dtype, so that the compiler drops float32. */
static __device__ __forceinline__ moq_rows rows_of(const decode_args *a) {
    moq_rows x = a->x;
    x.dtype = x.dtype == MOQ_DT_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    return x;
}

/* Returns the scale of a token, or of all, from the maxima of the blocks. */
template <class S>
static __device__ __forceinline__ float scale_from(const decode_args *a, const block_memory *b,
                                                   int token) {
    uint32_t most = 0;
    for (int i = 0; i < a->ranks; i++)
        most = max(most, b->all_maxima[i * MAX_TOKENS + token]);
    return S::mode == MOQ_INPUT_E4M3_TOKEN ? moq_token_scale(__uint_as_float(most))
                                           : moq_tensor_scale(__uint_as_float(most));
}

/* Quantizes loaded pieces into shared memory. By groups, scales are [K / 128 of the pass][tokens],
 * and eight lanes have a group, since rows are multiples of 128. `inverse` is the reciprocal of the
 * one scale of all tokens. */
template <class S>
static __device__ __forceinline__ void store_pieces(const decode_args *a, const block_memory *b,
                                                    const x_share<S> *r, const x_piece (&p)[BATCH],
                                                    float inverse) {
    moq_rows x = rows_of(a);
    float own[S::tokens_of_warp];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float value[16];
        uint4 code;
        int token = r->token[i % S::tokens_of_warp];
        if (!is_anyones(&p[i]))
            continue;
        if (!S::coded)
            moq_widen(&x, &p[i].value, value);
        if (S::coded) {
            code = p[i].value.word[0];
        } else if (S::mode == MOQ_INPUT_E4M3_TENSOR) {
            code = moq_codes_multiplied(value, inverse);
        } else if (S::mode == MOQ_INPUT_E4M3_TOKEN) {
            if (i < S::tokens_of_warp)
                own[i] = scale_from<S>(a, b, token);
            code = moq_codes_divided(value, own[i % S::tokens_of_warp]);
        } else {
            float group = moq_group_scale(__uint_as_float(
                moq_max_of_lanes(moq_chunk_amax_bits(&p[i].value, false, x.dtype), 8)));
            code = moq_codes_divided(value, group);
            if (p[i].chunk >= 0 && p[i].chunk % 8 == 0)
                b->scale[p[i].chunk / 8 * S::tokens + token] = group;
        }
        if (p[i].chunk >= 0)
            store_shared(b->codes + code_at<S>(token, p[i].chunk), code);
    }
}

/* Raises the maxima of the tokens, or of all, by loaded pieces. */
template <class S>
static __device__ __forceinline__ void raise_maxima(const decode_args *a, const x_share<S> *r,
                                                    const x_piece (&p)[BATCH], uint32_t *maxima) {
    moq_rows x = rows_of(a);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (!is_anyones(&p[i]))
            continue;
        uint32_t most = moq_max_of_lanes(moq_chunk_amax_bits(&p[i].value, false, x.dtype), 32);
        if (threadIdx.x % 32 == 0)
            atomicMax(maxima +
                          (S::mode == MOQ_INPUT_E4M3_TOKEN ? r->token[i % S::tokens_of_warp] : 0),
                      most);
    }
}

/* Sends the maxima of this block to all of the cluster, and waits for theirs. */
template <class S>
static __device__ __forceinline__ void share_maxima(const decode_args *a, const block_memory *b) {
    barrier_sync(1, S::consumers);
    if (a->ranks == 1)
        return;
    if (threadIdx.x < MAX_TOKENS) {
        uint32_t to = shared_address(b->all_maxima + rank_of(a) * MAX_TOKENS + threadIdx.x);
#pragma unroll 1
        for (int i = 0; i < a->ranks; i++)
            send_word(address_in(i, to), b->maxima[threadIdx.x], address_in(i, b->told));
    }
    mbarrier_wait(b->told, 0);
}

/* Finds the scales of tokens, or of all, from the whole of K. Pieces of the pass `r` are loaded
 * again at the end. */
template <class S>
static __device__ __forceinline__ void find_scales(const decode_args *a, const block_memory *b,
                                                   const x_share<S> *r, x_piece (&p)[BATCH]) {
    if (a->passes == 1 && r->turns <= BATCH) {
        raise_maxima<S>(a, r, p, b->maxima);
    } else {
        x_share<S> all = share_of<S>(a, first_column(a, 0), a->rank_steps * STEP);
#pragma unroll 1
        for (int turn = 0; turn < all.turns; turn += BATCH) {
            aim_pieces<S>(a, &all, turn, p);
            load_pieces<S>(&all, p);
            raise_maxima<S>(a, &all, p, b->maxima);
        }
        aim_pieces<S>(a, r, 0, p);
        load_pieces<S>(r, p);
    }
    share_maxima<S>(a, b);
    if (threadIdx.x < MAX_TOKENS)
        b->scale[threadIdx.x] = scale_from<S>(a, b, (int)threadIdx.x);
}

/* Quantizes the columns of a pass, and finds the scales before if `find`. `first`: x is read for
 * the first time. */
template <class S>
static __device__ __forceinline__ void quantize_pass(const decode_args *a, const block_memory *b,
                                                     int pass, bool find, bool first) {
    x_share<S> r = share_of<S>(a, first_column(a, pass), steps_of(a, pass) * STEP);
    x_piece p[BATCH];
    float inverse = 0;
    aim_pieces<S>(a, &r, 0, p);
    if (S::mode == MOQ_INPUT_E4M3_TENSOR && !find)
        inverse = __frcp_rn(b->scale[0]);
    if (first) {
        wait_for_predecessor();
        if (a->ranks > 1)
            cluster_wait();
    }
    load_pieces<S>(&r, p);
    if (S::mode != MOQ_INPUT_E4M3_GROUP && find) {
        find_scales<S>(a, b, &r, p);
        if (S::mode == MOQ_INPUT_E4M3_TENSOR)
            inverse = __frcp_rn(scale_from<S>(a, b, 0));
    }
#pragma unroll 1
    for (int turn = BATCH;; turn += BATCH) {
        store_pieces<S>(a, b, &r, p, inverse);
        if (turn >= r.turns)
            break;
        aim_pieces<S>(a, &r, turn, p);
        load_pieces<S>(&r, p);
    }
}

#define STAGE       (TILE * STEP)
#define MAX_STAGE   28
#define BARRIERS    (2 * MAX_STAGE + 3)
#define KEPT_ROUNDS 8 /* rounds of a block whose sums are kept between passes */
/* Stages under way at once: enough for the memory's latency. More would only queue, and delay reads
 * of x. */
#define FLIGHT       6
#define SMALL_FLIGHT 4 /* with two blocks a multiprocessor */
#define LEAST_STAGES 8
#define DECLARED     1024 /* bytes of shared memory declared in the kernel, and alignment */
static_assert(8 * BARRIERS + 4 * MAX_TOKENS * (2 + MAX_RANKS) <= DECLARED, "more is declared");

/* ---- the producer ---- */

/* State of the producer. */
typedef struct {
    const CUtensorMap *map;
    pipeline_state place, landed; /* the next stage, and the one that is awaited */
    int flying;                   /* stages under way */
} producer;

static __device__ __forceinline__ void produce_tile(const decode_args *a, const block_memory *b,
                                                    producer *p, int row, int end, int pass) {
    uint64_t policy = policy_evict_first();
    int steps = steps_of(a, pass), halves = end - row > UNIT ? 2 : 1;
    int block = first_column(a, pass) / 128;
#pragma unroll 1
    for (int step = 0; step < steps; step++, block += SLICES) {
        int index = p->place.index;
        uint32_t stage = b->pipeline + (uint32_t)(index * STAGE), bar = b->full + 8u * index;
        mbarrier_wait(b->empty + 8u * index, p->place.parity ^ 1);
        if (++p->flying > a->flight) {
            mbarrier_wait(b->full + 8u * p->landed.index, p->landed.parity);
            advance(&p->landed, a->stages);
        }
        mbarrier_expect(bar, (uint32_t)(halves * STAGE / 2));
        copy_box_3d(stage, p->map, 0, row, block, bar, policy);
        if (halves == 2)
            copy_box_3d(stage + STAGE / 2, p->map, 0, row + UNIT, block, bar, policy);
        advance(&p->place, a->stages);
    }
}

static __device__ __forceinline__ void produce(const decode_args *a, const CUtensorMap *map,
                                               const block_memory *b) {
    producer p = {map};
    segment rest = cluster_rows(a);
    while (rest.begin < rest.end) {
        segment s = first_segment(a, rest);
        for (int pass = 0; pass < a->passes; pass++) {
#pragma unroll 1
            for (int row = s.begin; row < s.end; row += TILE)
                produce_tile(a, b, &p, row, s.end, pass);
        }
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

/* ---- mainloop ---- */

template <class S> struct product {
    /* m64 x n(4 * tokens); a lane has [slice of the column][8 tokens][4] */
    float d[2 * S::tokens];
};

/* Returns the used value of a warp's first or second slice. A warp has rows g and g + 8 of the
 * operand: one row of W, in slices 2 * odd and 2 * odd + 1. With two tokens, a row of the product
 * has all slices, one a lane, and half of the lanes return a value that is not used. */
template <class S>
static __device__ __forceinline__ float meant(const product<S> &c, bool odd, int second, int m,
                                              int i) {
    constexpr int slice = S::tokens / 2;
    if constexpr (S::tokens == 2)
        return c.d[2 * second + i];
    else
        return odd ? c.d[(2 + second) * slice + 4 * m + 2 * second + i]
                   : c.d[second * slice + 4 * m + 2 * second + i];
}

/* Adds the used values of a step to the lane's sums. */
template <class S>
static __device__ __forceinline__ void add_meant(float (&sum)[2 * S::pairs_of_lane],
                                                 const product<S> &c, bool odd) {
#pragma unroll
    for (int i = 0; i < 2 * S::pairs_of_lane; i++) {
        float first = meant<S>(c, odd, 0, i / 2, i % 2), second = meant<S>(c, odd, 1, i / 2, i % 2);
        if (S::tokens == 2)
            sum[i] += threadIdx.x & 1 ? second : first;
        else
            sum[i] += first + second;
    }
}

/* Adds the used values of a step under block scales: `x` points to the scales of the tokens in the
 * step, `w` are the scales of W in the warp's two slices. */
template <class S>
static __device__ __forceinline__ void add_scaled(float (&sum)[2 * S::pairs_of_lane],
                                                  const product<S> &c, bool odd, const float *x,
                                                  float2 w) {
    int lane = threadIdx.x % 4;
    x += 2 * lane + (S::tokens == 2 ? 0 : 2 * odd * S::tokens);
#pragma unroll
    for (int i = 0; i < 2 * S::pairs_of_lane; i++) {
        float first = meant<S>(c, odd, 0, i / 2, i % 2), second = meant<S>(c, odd, 1, i / 2, i % 2);
        if (S::tokens == 2) {
            sum[i] += (lane & 1 ? second : first) * (x[i] * (lane & 1 ? w.y : w.x));
        } else {
            sum[i] += first * (x[i / 2 * 8 + i % 2] * w.x);
            sum[i] += second * (x[S::tokens + i / 2 * 8 + i % 2] * w.y);
        }
    }
}

/* Step of a tile, in a stage of the pipeline. */
typedef struct {
    int tile, step;
    pipeline_state at;
} tile_step;

/* Progress of a warpgroup in a round: it makes every fourth, or second, of the steps of its tiles.
 * Steps are dealt out over rounds and passes, so that a stage always has the same group. The next
 * step is found while others are multiplied. */
template <class S> struct group_round {
    segment rows;
    int row, pass;        /* first row of the round */
    int tiles, steps;     /* tiles of the round, steps of a tile */
    int left;             /* steps from the group's next one on */
    pipeline_state place; /* pipeline state of the group */
    int tile, step;       /* step after `next` */
    tile_step next;
    int count;        /* number of rounds */
    int row_in_block; /* of the lane's row in the first tile, from the round's first block row on */
};

template <class S>
static __device__ __forceinline__ void find_next(const decode_args *a, group_round<S> *r) {
    r->next.tile = r->tile;
    r->next.step = r->step;
    r->next.at = r->place;
    if (r->left <= 0)
        return;
    r->place.index += S::groups;
    if (r->place.index >= a->stages) {
        r->place.index -= a->stages;
        r->place.parity ^= 1;
    }
    r->step += S::groups;
    while (r->step >= r->steps) {
        r->step -= r->steps;
        r->tile++;
    }
}

/* Returns where the block scales of a round lie. */
template <class S>
static __device__ __forceinline__ float *blocks_of(const decode_args *a, const block_memory *b,
                                                   int count) {
    return b->blocks + (count & 1) * a->block_rows * a->pass_steps * SLICES;
}

/* Starts copies of the scales of W of the round from `row` on; zeros beyond K. */
template <class S>
static __device__ __forceinline__ void ask_for_blocks(const decode_args *a, const block_memory *b,
                                                      segment rows, int row, int pass, int count) {
    int all = a->k / 128, slices = SLICES * a->pass_steps, first = first_column(a, pass) / 128;
    int block = moq_block_row(&a->partitions, rows.partition, row);
    int last = moq_block_row(&a->partitions, rows.partition, rows.end - 1);
    uint32_t to = shared_address(blocks_of<S>(a, b, count));
#pragma unroll 1
    for (int i = 0; i < a->block_rows; i++) {
        const float *from = a->block_scale + (int64_t)min(block + i, last) * all + first;
#pragma unroll 1
        for (int slice = threadIdx.x; slice < slices; slice += S::consumers) {
            bool is = first + slice < all;
            copy_async_4(to + 4u * (i * slices + slice), is ? from + slice : from, is ? 4 : 0);
        }
    }
    copy_async_commit();
}

/* Begins the round from `row` on; `dealt` counts the steps of earlier rounds. */
template <class S>
static __device__ __forceinline__ void begin_round(const decode_args *a, group_round<S> *r,
                                                   segment rows, int row, int pass, int *dealt) {
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    r->rows = rows;
    r->row = row;
    r->pass = pass;
    r->tiles = min(S::round, (rows.end - row + TILE - 1) / TILE);
    r->steps = steps_of(a, pass);
    if (S::mode == MOQ_INPUT_E4M3_GROUP) {
        int begin = rows.partition ? a->partitions.end[rows.partition - 1] : 0;
        r->row_in_block =
            (row - begin) % 128 + (int)threadIdx.x / 64 % 2 * UNIT + (int)threadIdx.x % 32 / 4;
    }
    r->count++;
    r->tile = 0;
    r->step = (group - *dealt) & (S::groups - 1);
    r->left = r->tiles * r->steps - r->step;
    *dealt += r->tiles * r->steps;
    while (r->step >= r->steps) {
        r->step -= r->steps;
        r->tile++;
    }
    find_next<S>(a, r);
}

/* Issues the product of a step when its stage is full. */
template <class S>
static __device__ __forceinline__ void start_step(const block_memory *b, const tile_step *s,
                                                  product<S> &c) {
    mbarrier_wait(b->full + 8u * s->at.index, s->at.parity);
    uint64_t w = wgmma_operand(b->pipeline + (uint32_t)(s->at.index * STAGE));
    uint64_t x = wgmma_operand(b->codes + (uint32_t)(s->step * SLICES * S::tokens * 128));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
        wgmma_e4m3(c.d, w + 2 * i, x + 2 * i, i);
    wgmma_commit();
}

/* Sums of a lane, and the tile that they belong to. */
template <class S> struct lane_sums {
    float of[2 * S::pairs_of_lane];
    int tile, warp;
};

/* Stages the sums of tiles before `tile` as [tile][warp][pair]. */
template <class S>
static __device__ __forceinline__ void stage_sums(const block_memory *b, lane_sums<S> &sum,
                                                  int tile) {
    int lane = threadIdx.x % 32;
    for (; sum.tile < tile; sum.tile++) {
        float2 *to = b->staged + (sum.tile * S::warps + sum.warp) * S::pairs;
        if constexpr (S::tokens == 2) {
            float2 pair = {sum.of[0] + __shfl_xor_sync(0xffffffffu, sum.of[0], 1),
                           sum.of[1] + __shfl_xor_sync(0xffffffffu, sum.of[1], 1)};
            if (lane % 4 == 2 * (sum.warp & 1))
                to[lane / 4] = pair;
        } else {
#pragma unroll
            for (int m = 0; m < S::pairs_of_lane; m++)
                to[m * 32 + lane] = make_float2(sum.of[2 * m], sum.of[2 * m + 1]);
        }
#pragma unroll
        for (int i = 0; i < 2 * S::pairs_of_lane; i++)
            sum.of[i] = 0;
    }
}

/* Adds the finished product of a step, and releases its stage. */
template <class S>
static __device__ __forceinline__ void end_step(const decode_args *a, const block_memory *b,
                                                const group_round<S> *r, const tile_step *s,
                                                const product<S> &c, lane_sums<S> &sum) {
    bool odd = sum.warp & 1;
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(b->empty + 8u * s->at.index);
    stage_sums<S>(b, sum, s->tile);
    if (S::mode == MOQ_INPUT_E4M3_GROUP) {
        int block = (r->row_in_block + s->tile * TILE) / 128;
        int slice = (block * a->pass_steps + s->step) * SLICES + 2 * odd;
        float2 w = *(const float2 *)(blocks_of<S>(a, b, r->count) + slice);
        add_scaled<S>(sum.of, c, odd, b->scale + s->step * SLICES * S::tokens, w);
    } else {
        add_meant<S>(sum.of, c, odd);
    }
}

/* Begins the next step, and finds the one after it. */
template <class S>
static __device__ __forceinline__ void begin_step(const decode_args *a, const block_memory *b,
                                                  group_round<S> *r, tile_step *step,
                                                  product<S> &c) {
    *step = r->next;
    start_step<S>(b, step, c);
    r->left -= S::groups;
    find_next<S>(a, r);
}

/* Sums the products of a round and stages the sums. One step is multiplied while the previous one
 * is added. */
template <class S>
static __device__ __forceinline__ void sum_round(const decode_args *a, const block_memory *b,
                                                 group_round<S> *r) {
    lane_sums<S> sum = {};
    sum.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    product<S> c[2];
    tile_step step[2];
    if (r->left > 0) {
        begin_step<S>(a, b, r, &step[0], c[0]);
#pragma unroll 1
        for (;;) {
            if (r->left <= 0) {
                wgmma_wait<0>();
                end_step<S>(a, b, r, &step[0], c[0], sum);
                break;
            }
            begin_step<S>(a, b, r, &step[1], c[1]);
            wgmma_wait<1>();
            end_step<S>(a, b, r, &step[0], c[0], sum);
            if (r->left <= 0) {
                wgmma_wait<0>();
                end_step<S>(a, b, r, &step[1], c[1], sum);
                break;
            }
            begin_step<S>(a, b, r, &step[0], c[0]);
            wgmma_wait<1>();
            end_step<S>(a, b, r, &step[1], c[1], sum);
        }
    }
    stage_sums<S>(b, sum, r->tiles);
}

/* ---- epilogue ---- */

/* Outputs of a thread in a round: two tokens of a row, as a lane of the products has them. */
typedef struct {
    int tile, half, pair; /* indices in the staged sums */
    int row, token;       /* row in the half's 8, and first token */
} output_place;

template <class S> static __device__ __forceinline__ output_place output_place_of(int index) {
    constexpr int lanes = S::tokens == 2 ? 1 : 4; /* lanes that share a row */
    output_place o = {index / (2 * S::pairs), index / S::pairs % 2, index % S::pairs};
    o.row = o.pair % (8 * lanes) / lanes;
    o.token = o.pair / (8 * lanes) * 8 + o.pair % lanes * 2;
    return o;
}

/* Adds a thread's outputs over all warps, if the round has its tile. */
template <class S>
static __device__ __forceinline__ float2 gather_sums(const float2 *staged, int tiles) {
    output_place o = output_place_of<S>(threadIdx.x);
    float2 sum = {0, 0};
    if (o.tile >= tiles)
        return sum;
#pragma unroll
    for (int i = 0; i < 2 * S::groups; i++) {
        int warp = i / 2 * 4 + o.half * 2 + i % 2;
        float2 v = staged[(o.tile * S::warps + warp) * S::pairs + o.pair];
        sum.x += v.x;
        sum.y += v.y;
    }
    return sum;
}

/* Epilogue operands of a thread's outputs in a round, without the scale of x. */
typedef struct {
    int token, n; /* first token */
    bool meant;
    float factor, bias;
} output_terms;

template <class S>
static __device__ __forceinline__ output_terms terms_of(const decode_args *a, segment s, int row) {
    int share = S::consumers >> a->log_ranks;
    output_place o = output_place_of<S>(rank_of(a) * share + threadIdx.x);
    output_terms t;
    t.token = o.token;
    t.n = row + o.tile * TILE + o.half * UNIT + o.row;
    t.meant = threadIdx.x < share && t.token < a->m && t.n < s.end;
    t.factor = t.meant && S::mode != MOQ_INPUT_E4M3_GROUP ? a->output_scale[t.n] : 1.0f;
    t.bias = 0;
    return t;
}

/* Loads the bias. It may come from the preceding kernel, unlike scales. */
static __device__ __forceinline__ void fetch_bias(const decode_args *a, output_terms *t) {
    if (t->meant)
        t->bias = moq_load_bias(&a->out, t->n);
}

template <class S>
static __device__ __forceinline__ void store_outputs(const decode_args *a, const float *scale,
                                                     const output_terms *t, float2 value) {
    moq_output out = a->out; /* 16 bits and no addend, so that the compiler drops others */
    out.addend = NULL;
    out.dtype = out.dtype == MOQ_DT_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    if (!t->meant)
        return;
    if (S::mode != MOQ_INPUT_E4M3_GROUP) {
        value.x *= scale[S::mode == MOQ_INPUT_E4M3_TOKEN ? t->token : 0] * t->factor;
        value.y *= scale[S::mode == MOQ_INPUT_E4M3_TOKEN ? t->token + 1 : 0] * t->factor;
    }
    moq_store_output(&out, t->token, t->n, value.x, t->bias);
    if (t->token + 1 < a->m)
        moq_store_output(&out, t->token + 1, t->n, value.y, t->bias);
}

/* Sends the sums of this block to the blocks that own the outputs, and adds the sums received for
 * its own. Boxes are used in turn, counted by `posted`: a block that has received all of a box
 * knows that the previous one has been read. */
template <class S>
static __device__ __forceinline__ float2 exchange_sums(const decode_args *a, const block_memory *b,
                                                       int posted, float2 own) {
    int share = S::consumers >> a->log_ranks, box = posted & 1;
    uint32_t bar = b->posted + 8u * box, owner = threadIdx.x * a->ranks / S::consumers;
    const float2 *inbox = b->inbox + box * S::consumers;
    uint32_t to = shared_address(inbox + rank_of(a) * share + (threadIdx.x & (share - 1)));
    if (threadIdx.x == 0)
        mbarrier_expect(bar, S::consumers * 8);
    send_pair(address_in(owner, to), own, address_in(owner, bar));
    mbarrier_wait(bar, posted >> 1 & 1);
    float2 sum = {0, 0};
    if (threadIdx.x < share) {
#pragma unroll 1
        for (int i = 0; i < a->ranks; i++) {
            float2 v = inbox[i * share + threadIdx.x];
            sum.x += v.x;
            sum.y += v.y;
        }
    }
    return sum;
}

/* Adds the warps' sums of a round; writes the outputs in the last pass. */
template <class S>
static __device__ __forceinline__ void finish_round(const decode_args *a, const block_memory *b,
                                                    const group_round<S> *r, const output_terms *t,
                                                    int *posted) {
    float2 *kept = b->kept + (r->row - r->rows.begin) / S::round_rows * S::consumers;
    float2 value = gather_sums<S>(b->staged, r->tiles);
    if (r->pass > 0) {
        float2 before = kept[threadIdx.x];
        value.x += before.x;
        value.y += before.y;
    }
    if (r->pass + 1 < a->passes) {
        kept[threadIdx.x] = value;
        return;
    }
    if (a->ranks > 1)
        value = exchange_sums<S>(a, b, (*posted)++, value);
    store_outputs<S>(a, b->scale, t, value);
}

/* ---- the kernel ---- */

/* Prefetches scales of the outputs into the L2; all of them are constant. */
template <class S>
static __device__ __forceinline__ void prefetch_scales(const decode_args *a, segment rest) {
    if (S::mode != MOQ_INPUT_E4M3_GROUP) {
#pragma unroll 1
        for (int n = rest.begin + threadIdx.x * 32; n < rest.end; n += S::consumers * 32)
            prefetch_l2(a->output_scale + n);
        return;
    }
    int blocks = a->k / 128;
    while (rest.begin < rest.end) {
        segment s = first_segment(a, rest);
        int first = moq_block_row(&a->partitions, s.partition, s.begin);
        int last = moq_block_row(&a->partitions, s.partition, s.end - 1);
#pragma unroll 1
        for (int i = threadIdx.x * 32; i < (last - first + 1) * blocks; i += S::consumers * 32)
            prefetch_l2(a->block_scale + (int64_t)first * blocks + i);
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

/* Clears the codes where K ends within a step: W is zero there, and x must be a number. */
template <class S>
static __device__ __forceinline__ void clear_codes(const decode_args *a, const block_memory *b) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a->pass_steps * SLICES * S::tokens * 8; i += S::consumers)
        store_shared(b->codes + 16u * i, make_uint4(0, 0, 0, 0));
    if (S::mode == MOQ_INPUT_E4M3_GROUP) {
#pragma unroll 1
        for (int i = threadIdx.x; i < a->pass_steps * SLICES * S::tokens; i += S::consumers)
            b->scale[i] = 0;
    }
}

template <class S>
static __device__ __forceinline__ void consume(const decode_args *a, const block_memory *b) {
    bool given = S::coded || (S::mode == MOQ_INPUT_E4M3_TENSOR && a->input_scale);
    segment rest = cluster_rows(a);
    group_round<S> r;
    r.count = 0;
    r.place.index = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    r.place.parity = 0;
    int posted = 0, dealt = 0;
    constexpr bool by_blocks = S::mode == MOQ_INPUT_E4M3_GROUP;
    if (a->k % STEP)
        clear_codes<S>(a, b);
    prefetch_scales<S>(a, rest);
    for (bool fresh = true; rest.begin < rest.end; fresh = false) {
        segment s = first_segment(a, rest);
        if (given && threadIdx.x == 0) /* given with the weights: no kernel is waited for */
            b->scale[0] = a->input_scale[s.partition];
        if (fresh || given)
            barrier_sync(1, S::consumers);
        for (int pass = 0; pass < a->passes; pass++) {
            output_terms terms = terms_of<S>(a, s, s.begin);
            begin_round<S>(a, &r, s, s.begin, pass, &dealt);
            if (by_blocks)
                ask_for_blocks<S>(a, b, s, s.begin, pass, r.count);
            if (fresh || given || a->passes > 1) {
                bool first = fresh && pass == 0;
                quantize_pass<S>(a, b, pass, first && !given, first);
                fence_async_proxy();
            }
            fetch_bias(a, &terms);
            if (by_blocks)
                copy_async_wait<0>();
            barrier_sync(1, S::consumers);
            for (;;) {
                if (by_blocks && r.row + S::round_rows < s.end)
                    ask_for_blocks<S>(a, b, s, r.row + S::round_rows, pass, r.count + 1);
                sum_round<S>(a, b, &r);
                if (by_blocks)
                    copy_async_wait<0>();
                barrier_sync(1, S::consumers);
                finish_round<S>(a, b, &r, &terms, &posted);
                int row = r.row + S::round_rows;
                if (row >= s.end)
                    break;
                terms = terms_of<S>(a, s, row);
                fetch_bias(a, &terms);
                begin_round<S>(a, &r, s, row, pass, &dealt);
                barrier_sync(1, S::consumers); /* before the next round's sums are staged */
            }
            if (pass + 1 < a->passes || s.end < rest.end)
                barrier_sync(1, S::consumers); /* before codes or scales are replaced */
        }
        rest.begin = s.end;
        rest.partition = s.partition;
    }
}

template <class S>
static __global__ void __launch_bounds__(S::threads, S::blocks)
    fp8_decode(const __grid_constant__ CUtensorMap map, const __grid_constant__ decode_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ float scale[MAX_TOKENS];
    __shared__ uint32_t maxima[(1 + MAX_RANKS) * MAX_TOKENS];
    const decode_args *a = &args;
    block_memory b = {};
    b.full = shared_address(barrier);
    b.empty = b.full + 8 * MAX_STAGE;
    b.told = b.empty + 8 * MAX_STAGE;
    b.posted = b.told + 8;
    launch_dependents();
    if (threadIdx.x % 32 == 0) { /* one thread would take 2 us */
#pragma unroll
        for (int i = 0; i < BARRIERS; i += S::threads / 32) {
            int index = i + threadIdx.x / 32;
            if (index < BARRIERS)
                mbarrier_init(b.full + 8u * index,
                              index >= MAX_STAGE && index < 2 * MAX_STAGE ? 4 : 1);
        }
        mbarrier_init_fence();
    }
    if (threadIdx.x == S::consumers + 32)
        prefetch_map(&map);
    if (threadIdx.x < MAX_TOKENS)
        maxima[threadIdx.x] = 0;
    __syncwarp();
    if (a->ranks > 1)
        cluster_arrive();
    b.pipeline = shared_address(smem);
    b.codes = b.pipeline + a->codes_at;
    b.scale = S::mode == MOQ_INPUT_E4M3_GROUP ? (float *)(smem + a->scales_at) : scale;
    b.maxima = maxima;
    b.all_maxima = a->ranks > 1 ? maxima + MAX_TOKENS : maxima;
    b.staged = (float2 *)(smem + a->staged_at);
    b.inbox = (float2 *)(smem + a->inbox_at);
    b.kept = (float2 *)(smem + a->kept_at);
    b.blocks = (float *)(smem + a->blocks_at);
    __syncthreads();
    if (threadIdx.x < S::consumers) {
        more_registers<S::registers>();
        if (threadIdx.x == 0 && a->ranks > 1)
            mbarrier_expect(b.told, a->ranks * MAX_TOKENS * 4);
        consume<S>(a, &b);
    } else {
        fewer_registers<24>();
        if (a->ranks > 1)
            cluster_wait_for_racecheck();
        if (threadIdx.x == S::consumers)
            produce(a, &map, &b);
    }
}

/* ---- launch ---- */

/* Shares N out to as many clusters as fit the chip, or more if passes limit the rounds of one. */
static void share_rows(decode_args *a, moq_fp8_decode_config *config, int sm_count) {
    int units = (int)(((int64_t)a->n + UNIT - 1) / UNIT), clusters = sm_count / config->ranks;
    int most = KEPT_ROUNDS * (256 * config->groups / config->tokens) / UNIT;
    if (a->passes > 1)
        clusters = max(clusters, (units + most - 1) / most);
    config->clusters = min(clusters, units);
    a->units = units / config->clusters;
    a->more_units = units % config->clusters;
}

/* Lays out a block's shared memory and returns its size: the pipeline, then x, then the rest. K is
 * split into passes until x leaves most of it to the pipeline, which needs about 64 KB to keep the
 * memory busy. */
static size_t smem_layout(decode_args *a, moq_fp8_decode_config *config, bool by_groups,
                          const moq_cuda_device *device) {
    int limit = (int)device->shared_per_block, consumers = 128 * config->groups;
    int most = (config->groups == 2 ? (limit + 1024) / 2 - 1024 : limit) - DECLARED;
    int boxes = config->ranks > 1 ? 2 * 8 * consumers : 0;
    a->ranks = config->ranks;
    a->log_ranks = config->ranks == 2;
    a->rank_steps = (a->k + STEP - 1) / STEP / config->ranks;
    for (int splits = 1;; splits++) {
        a->pass_steps = (a->rank_steps + splits - 1) / splits;
        a->passes = (a->rank_steps + a->pass_steps - 1) / a->pass_steps;
        share_rows(a, config, device->sm_count);
        int rows =
            min((a->units + 1) * UNIT, 256 * config->groups / config->tokens); /* rows of a round */
        int staged = (rows + TILE - 1) / TILE * (128 * config->groups * config->tokens);
        a->block_rows = (rows + 126) / 128 + 1;
        int64_t slices = (int64_t)a->pass_steps * SLICES, codes = slices * config->tokens * 128;
        int64_t scales = by_groups ? slices * config->tokens * 4 : 0;
        int64_t blocks = by_groups ? slices * 2 * a->block_rows * 4 : 0;
        int kept = a->passes > 1 ? KEPT_ROUNDS * consumers * 8 : 0;
        int64_t rest = codes + staged + boxes + scales + blocks + kept;
        if (rest > most)
            continue;
        a->stages = min((int)(most - rest) / STAGE / config->groups * config->groups, MAX_STAGE);
        a->flight = min(a->stages, config->groups == 2 ? SMALL_FLIGHT : FLIGHT);
        a->codes_at = a->stages * STAGE;
        a->staged_at = a->codes_at + (int)codes;
        a->inbox_at = a->staged_at + staged;
        a->scales_at = a->inbox_at + boxes;
        a->blocks_at = a->scales_at + (int)scales;
        a->kept_at = a->blocks_at + (int)blocks;
        if (a->stages < LEAST_STAGES && a->pass_steps > 1)
            continue;
        MOQ_ASSERT(a->stages >= config->groups &&
                   a->stages % config->groups == 0);                  /* each stage has one owner */
        MOQ_ASSERT(a->codes_at % 1024 == 0 && a->staged_at % 8 == 0); /* swizzled; float2 */
        MOQ_ASSERT(a->inbox_at % 8 == 0 && a->blocks_at % 8 == 0 && a->kept_at % 8 == 0);
        MOQ_ASSERT(a->codes_at + rest <= most && a->kept_at + kept == a->codes_at + rest);
        MOQ_ASSERT(a->m <= MAX_TOKENS && a->ranks <= MAX_RANKS);
        return (size_t)(a->codes_at + rest);
    }
}

template <int GROUPS, int TOKENS> static const void *kernel_of(moq_input_mode mode) {
    switch (mode) {
    case MOQ_INPUT_AS_IS:
        return (const void *)fp8_decode<shape<GROUPS, TOKENS, MOQ_INPUT_AS_IS>>;
    case MOQ_INPUT_E4M3_TENSOR:
        return (const void *)fp8_decode<shape<GROUPS, TOKENS, MOQ_INPUT_E4M3_TENSOR>>;
    case MOQ_INPUT_E4M3_TOKEN:
        return (const void *)fp8_decode<shape<GROUPS, TOKENS, MOQ_INPUT_E4M3_TOKEN>>;
    default:
        return (const void *)fp8_decode<shape<GROUPS, TOKENS, MOQ_INPUT_E4M3_GROUP>>;
    }
}

static const void *kernel_for(const moq_fp8_decode_config *config, moq_input_mode mode) {
    if (config->groups == 2)
        return kernel_of<2, 2>(mode);
    return config->tokens == 2   ? kernel_of<4, 2>(mode)
           : config->tokens == 8 ? kernel_of<4, 8>(mode)
                                 : kernel_of<4, 16>(mode);
}

extern "C" moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_device device;
    CUtensorMap map;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    decode_args args = {
        .m = (int)call->m, .n = (int)spec->out_features, .k = (int)spec->in_features};
    args.x = moq_rows_of(call->x);
    args.out = moq_output_of(call);
    args.input_scale = call->input_scale;
    args.output_scale = call->output_scale;
    args.block_scale = (const float *)call->weight_scale;
    args.partitions = moq_partitions_of(spec);
    moq_input_mode mode = spec->quantized_input ? MOQ_INPUT_AS_IS : spec->input;
    while (1 << args.log_rows < args.m)
        args.log_rows++;
    moq_fp8_decode_config config = moq_fp8_decode_expand_config(call);
    size_t shared = smem_layout(&args, &config, spec->input == MOQ_INPUT_E4M3_GROUP, &device);
    MOQ_TRY(moq_tensor_map_blocks(&map, call->weight, args.n, args.k, args.k, UNIT, SLICES, err));
    moq_launch launch = {.what = "FP8 linear",
                         .kernel = kernel_for(&config, mode),
                         .grid = dim3((unsigned)(config.clusters * config.ranks)),
                         .block = dim3((unsigned)(128 * config.groups + 128)),
                         .cluster = config.ranks > 1 ? (unsigned)config.ranks : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&map, &args};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::fp8_decode
