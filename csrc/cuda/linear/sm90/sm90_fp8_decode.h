/* The FP8 linear for a few tokens on Hopper, sm90_fp8_decode.cu: what its parts share, and the part
 * that reads and quantizes x.
 *
 * Everything between the end of the preceding kernel and the first product is on the critical path,
 * at four to six cycles an instruction: addresses and places are found before the wait. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_FP8_DECODE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_FP8_DECODE_H

#include "cuda/choice/fp8_decode.h"
#include "cuda/device/load.h"
#include "cuda/device/ptx.h"

namespace moq::fp8_decode {

#define UNIT       8                   /* rows that clusters share N by */
#define TILE       16                  /* rows of W */
#define STEP       MOQ_FP8_DECODE_STEP /* columns of W that a product takes */
#define SLICES     4                   /* of 128 columns in a step */
#define MAX_RANKS  2
#define MAX_TOKENS 16

/* What is known when the kernel is compiled: warpgroups that multiply, tokens that an operand has
 * room for, and how x is quantized; AS_IS: it is codes. Two warpgroups and half of the shared
 * memory leave room for a block of the next call. */
template <int GROUPS, int TOKENS, int MODE> struct shape {
    static constexpr int groups = GROUPS, warps = 4 * GROUPS, consumers = 128 * GROUPS;
    static constexpr int threads = consumers + 128;    /* the producer's gives its registers away */
    static constexpr int blocks = GROUPS == 2 ? 2 : 1; /* a multiprocessor */
    static constexpr int registers = GROUPS == 2 ? 104 : 112;
    static constexpr int tokens = TOKENS, mode = MODE;
    static constexpr bool coded = MODE == MOQ_INPUT_AS_IS;
    static constexpr int x_bytes = coded ? 1 : 2; /* of a value */
    /* Tokens that the pieces of a warp are of, in turn. */
    static constexpr int tokens_of_warp = TOKENS > warps ? TOKENS / warps : 1;
    /* What a warp has of a tile: 8 rows of W and pairs of tokens, some a lane. */
    static constexpr int pairs = 8 * TOKENS / 2, pairs_of_lane = TOKENS > 8 ? TOKENS / 8 : 1;
    /* A round: tiles whose sums are brought together at once, two outputs a thread. */
    static constexpr int round = consumers / (2 * pairs), round_rows = TILE * round;
};

typedef struct {
    int m, n, k;
    int log_rows;                     /* of the tokens, rounded up to a power of two */
    int ranks, log_ranks, rank_steps; /* blocks of a cluster, which share K, and steps of each */
    int units, more_units;            /* of a cluster, and how many clusters have one more */
    int passes, pass_steps;           /* over a block's part of K, and steps of each but the last */
    int stages;
    int flight;                        /* stages on their way at once */
    int codes_at, staged_at, inbox_at; /* offsets in shared memory */
    int scales_at;                     /* by groups: [steps of a pass][4][tokens] floats */
    int blocks_at;                     /* [2 rounds][block_rows][slices of a pass] floats */
    int block_rows;                    /* of scales that rows of a round may have */
    int kept_at;                       /* more than one pass: [rounds][consumers] float2 */
    moq_rows x;
    moq_output out;
    const float *input_scale;  /* one a partition, or NULL */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, K / 128] */
    moq_partitions partitions;
} decode_args;

/* Where a block has what: addresses in shared memory, numbers where copies and products want them.
 */
typedef struct {
    uint32_t pipeline, codes;
    uint32_t full, empty;  /* barriers of the stages */
    uint32_t told, posted; /* barriers of the cluster: maxima are here; sums are, in two boxes */
    float *scale;          /* of tokens, or of groups */
    uint32_t *maxima;      /* of tokens, of this block */
    uint32_t *all_maxima;  /* [ranks][MAX_TOKENS] */
    float2 *staged, *inbox, *kept;
    float *blocks; /* scales of W, of two rounds in turn */
} block_memory;

/* ---- who does what ---- */

static __device__ __forceinline__ int rank_of(const decode_args *a) {
    return (int)blockIdx.x & (a->ranks - 1);
}

/* Rows [begin, end) that belong to one partition. */
typedef struct {
    int begin, end, partition;
} segment;

/* The rows of this cluster; their partition is found by first_segment. */
static __device__ __forceinline__ segment cluster_rows(const decode_args *a) {
    int index = (int)blockIdx.x >> a->log_ranks;
    int first = index * a->units + min(index, a->more_units);
    int end = first + a->units + (index < a->more_units);
    segment s = {first * UNIT, (int)min((int64_t)end * UNIT, (int64_t)a->n), 0};
    return s;
}

/* The part of `rest` in the partition of its first row. */
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

/* ---- x ---- */

/* x in pieces of 32 chunks of 16 values, each of one token, which warps take in turn, a piece of
 * each token and then the next. Blocks begin at different ones, so that they do not all ask the L2
 * for the same line. */
template <class S> struct x_share {
    int chunks, pieces, shift; /* of a row */
    int turns;                 /* of a warp */
    /* The token of each of the warp's pieces in turn, and where its first column is. */
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

#define BATCH 4 /* pieces that are loaded before the first is used: their latency is paid once */

/* A lane's chunk of a piece; -1: none, the values are zeros. */
typedef struct {
    moq_chunk value;
    int chunk;
} x_piece;

/* Where 16 codes of a token from column 16 * chunk of the pass on lie: the operand of a step is
 * [4 slices][tokens][128], in groups of 8 rows, the 16-byte pieces of a row xored with it. */
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

/* The rows of x, as the compiler does not know them: of 16-bit values. */
static __device__ __forceinline__ moq_rows rows_of(const decode_args *a) {
    moq_rows x = a->x;
    x.dtype = x.dtype == MOQ_DT_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    return x;
}

/* The scale of a token, or of all, from the maxima of the blocks. */
template <class S>
static __device__ __forceinline__ float scale_from(const decode_args *a, const block_memory *b,
                                                   int token) {
    uint32_t most = 0;
    for (int i = 0; i < a->ranks; i++)
        most = max(most, b->all_maxima[i * MAX_TOKENS + token]);
    return S::mode == MOQ_INPUT_E4M3_TOKEN ? moq_token_scale(__uint_as_float(most))
                                           : moq_tensor_scale(__uint_as_float(most));
}

/* Codes of what was loaded. By groups the scales are [K / 128 of the pass][tokens], and eight lanes
 * have a group: rows are multiples of 128. `inverse` is that of the scale of all tokens. */
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

/* Adds what was loaded to the maxima of the tokens, or of all. */
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

/* Makes the maxima of this block known to all of the cluster, and waits for theirs. */
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

/* Finds the scales of tokens, or of all, from the whole of K. What is loaded of the pass `r` is
 * that again in the end. */
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

/* Quantizes the columns of a pass, the scales first where `find` says so. `first` is the first time
 * that x is read. */
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

} // namespace moq::fp8_decode

#endif
