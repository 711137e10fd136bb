/* The FP8 linear for a few tokens on Hopper, sm90_fp8_decode.cu: what its parts share, and the part
 * that reads and quantizes x.
 *
 * Everything between the end of the preceding kernel and the first product is on the critical path,
 * at four to six cycles an instruction: addresses and places are found before the wait. */
#ifndef MOQ_CUDA_SM90_FP8_DECODE_H
#define MOQ_CUDA_SM90_FP8_DECODE_H

#include "cuda/load.h"
#include "cuda/ptx.h"

#define GROUPS     4 /* warpgroups that multiply */
#define WARPS      (4 * GROUPS)
#define CONSUMERS  (32 * WARPS)
#define UNIT       8   /* rows that clusters share N by */
#define STEP       512 /* columns of W that a product takes */
#define SLICES     4   /* of 128 columns in a step */
#define MAX_RANKS  2
#define MAX_TOKENS 16
/* Tokens that the pieces of a warp are of, in turn. */
#define TOKENS_OF_WARP (MAX_TOKENS > WARPS ? MAX_TOKENS / WARPS : 1)

typedef struct {
    int m, n, k;
    int log_rows;                     /* of the tokens, rounded up to a power of two */
    int ranks, log_ranks, rank_steps; /* blocks of a cluster, which share K, and steps of each */
    int units, more_units;            /* of a cluster, and how many clusters have one more */
    int passes, pass_steps;           /* over a block's part of K, and steps of each but the last */
    int stages;
    int flight;                        /* stages on their way at once */
    int codes_at, parked_at, inbox_at; /* offsets in shared memory */
    int scales_at;                     /* by groups: [steps of a pass][4][16] floats */
    int kept_at;                       /* more than one pass: [rounds][CONSUMERS] float2 */
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
    uint32_t ring, codes;
    uint32_t full, empty;  /* barriers of the stages */
    uint32_t told, posted; /* barriers of the cluster: maxima are here; sums are, in two boxes */
    float *scale;          /* of tokens, or of groups */
    uint32_t *maxima;      /* of tokens, of this block */
    uint32_t *all_maxima;  /* [ranks][MAX_TOKENS] */
    float2 *parked, *inbox, *kept;
} block_memory;

/* ---- who does what ---- */

static __device__ __forceinline__ int rank_of(const decode_args *a) {
    return (int)blockIdx.x & (a->ranks - 1);
}

/* Rows [begin, end) that belong to one partition. */
typedef struct {
    int begin, end, partition;
} segment;

/* Those of this cluster, from the partition of the first on. */
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
typedef struct {
    int column, chunks; /* the first, and chunks of a row */
    int pieces, shift;  /* of a row */
    int turns;          /* of a warp */
} x_share;

static __device__ __forceinline__ x_share share_of(const decode_args *a, int column, int columns) {
    x_share r;
    r.column = column;
    r.chunks = min(columns, a->k - column) / 16;
    r.pieces = (r.chunks + 31) / 32;
    r.shift = (int)((blockIdx.x >> a->log_ranks) % (uint32_t)r.pieces);
    r.turns = ((r.pieces << a->log_rows) + WARPS - 1) / WARPS;
    return r;
}

/* A lane's chunk of a piece. */
typedef struct {
    moq_chunk value;
    const uint4 *from; /* NULL: none, the values are zeros */
    uint32_t to;       /* its codes */
    int token, chunk;
} x_piece;

#define BATCH 4 /* pieces that are loaded before the first is used: their latency is paid once */

/* Where 16 codes of a token from column 16 * chunk of the pass on lie: the operand of a step is
 * [4 slices][8 * MT tokens][128], in groups of 8 rows, the 16-byte pieces of a row xored with it.
 */
template <int MT> static __device__ __forceinline__ uint32_t code_at(int token, int chunk) {
    int row = chunk / 8 % SLICES * 8 * MT + token;
    return (uint32_t)(chunk / 32 * (SLICES * MT * 1024) + row * 128 + (chunk % 8 ^ row % 8) * 16);
}

template <int MT>
static __device__ __forceinline__ void aim_pieces(const decode_args *a, const block_memory *b,
                                                  const x_share *r, int turn, x_piece (&p)[BATCH]) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        int index = (turn + i) * WARPS + (int)threadIdx.x / 32;
        int piece = index >> a->log_rows, turned = piece + r->shift;
        turned -= turned >= r->pieces ? r->pieces : 0;
        p[i].token = index & ((1 << a->log_rows) - 1);
        p[i].chunk = turned * 32 + (int)threadIdx.x % 32;
        p[i].to = b->codes + code_at<MT>(p[i].token, p[i].chunk);
        p[i].from = NULL;
        if (piece < r->pieces && p[i].token < a->m && p[i].chunk < r->chunks)
            p[i].from = (const uint4 *)((const uint16_t *)a->x.data + p[i].token * a->x.stride +
                                        r->column + p[i].chunk * 16);
    }
}

static __device__ __forceinline__ void load_pieces(x_piece (&p)[BATCH]) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        p[i].value = moq_chunk();
        if (p[i].from) {
            p[i].value.word[0] = p[i].from[0];
            p[i].value.word[1] = p[i].from[1];
        }
    }
}

static __device__ __forceinline__ bool is_anyones(const x_piece *p) {
    return __any_sync(0xffffffffu, p->from != NULL);
}

/* The rows of x, as the compiler does not know them: of 16-bit values. */
static __device__ __forceinline__ moq_rows rows_of(const decode_args *a) {
    moq_rows x = a->x;
    x.dtype = x.dtype == MOQ_DT_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
    return x;
}

/* The scale of a token, or of all, from the maxima of the blocks. */
template <int MODE>
static __device__ __forceinline__ float scale_from(const decode_args *a, const block_memory *b,
                                                   int token) {
    uint32_t most = 0;
    for (int i = 0; i < a->ranks; i++)
        most = max(most, b->all_maxima[i * MAX_TOKENS + token]);
    return MODE == MOQ_INPUT_E4M3_TOKEN ? moq_token_scale(__uint_as_float(most))
                                        : moq_tensor_scale(__uint_as_float(most));
}

/* Codes of what was loaded. By groups the scales are [K / 128 of the pass][16], and eight lanes
 * have a group: rows are multiples of 128. `inverse` is that of the scale of all tokens. */
template <int MODE>
static __device__ __forceinline__ void store_pieces(const decode_args *a, const block_memory *b,
                                                    const x_piece (&p)[BATCH], float inverse) {
    moq_rows x = rows_of(a);
    float own[TOKENS_OF_WARP];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float value[16];
        uint4 code;
        if (!is_anyones(&p[i]))
            continue;
        moq_widen(&x, &p[i].value, value);
        if (MODE == MOQ_INPUT_E4M3_TENSOR) {
            code = moq_codes_multiplied(value, inverse);
        } else if (MODE == MOQ_INPUT_E4M3_TOKEN) {
            if (i < TOKENS_OF_WARP)
                own[i] = scale_from<MODE>(a, b, p[i].token);
            code = moq_codes_divided(value, own[i % TOKENS_OF_WARP]);
        } else {
            float group = moq_group_scale(__uint_as_float(
                moq_max_of_lanes(moq_chunk_amax_bits(&p[i].value, false, x.dtype), 8)));
            code = moq_codes_divided(value, group);
            if (p[i].from && p[i].chunk % 8 == 0)
                b->scale[p[i].chunk / 8 * MAX_TOKENS + p[i].token] = group;
        }
        if (p[i].from)
            store_shared(p[i].to, code);
    }
}

/* Adds what was loaded to the maxima of the tokens, or of all. */
template <int MODE>
static __device__ __forceinline__ void raise_maxima(const decode_args *a, const x_piece (&p)[BATCH],
                                                    uint32_t *maxima) {
    moq_rows x = rows_of(a);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        if (!is_anyones(&p[i]))
            continue;
        uint32_t most = moq_max_of_lanes(moq_chunk_amax_bits(&p[i].value, false, x.dtype), 32);
        if (threadIdx.x % 32 == 0)
            atomicMax(maxima + (MODE == MOQ_INPUT_E4M3_TOKEN ? p[i].token : 0), most);
    }
}

/* Makes the maxima of this block known to all of the cluster, and waits for theirs. */
static __device__ __forceinline__ void share_maxima(const decode_args *a, const block_memory *b) {
    barrier_sync(1, CONSUMERS);
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
template <int MT, int MODE>
static __device__ __forceinline__ void find_scales(const decode_args *a, const block_memory *b,
                                                   const x_share *r, x_piece (&p)[BATCH]) {
    if (a->passes == 1 && r->turns <= BATCH) {
        raise_maxima<MODE>(a, p, b->maxima);
    } else {
        x_share all = share_of(a, first_column(a, 0), a->rank_steps * STEP);
#pragma unroll 1
        for (int turn = 0; turn < all.turns; turn += BATCH) {
            aim_pieces<MT>(a, b, &all, turn, p);
            load_pieces(p);
            raise_maxima<MODE>(a, p, b->maxima);
        }
        aim_pieces<MT>(a, b, r, 0, p);
        load_pieces(p);
    }
    share_maxima(a, b);
    if (threadIdx.x < MAX_TOKENS)
        b->scale[threadIdx.x] = scale_from<MODE>(a, b, (int)threadIdx.x);
}

/* Quantizes the columns of a pass, the scales first where `find` says so. `first` is the first time
 * that x is read. */
template <int MT, int MODE>
static __device__ __forceinline__ void quantize_pass(const decode_args *a, const block_memory *b,
                                                     int pass, bool find, bool first) {
    x_share r = share_of(a, first_column(a, pass), steps_of(a, pass) * STEP);
    x_piece p[BATCH];
    float inverse = 0;
    aim_pieces<MT>(a, b, &r, 0, p);
    if (MODE == MOQ_INPUT_E4M3_TENSOR && !find)
        inverse = __frcp_rn(b->scale[0]);
    if (first) {
        wait_for_predecessor();
        if (a->ranks > 1)
            cluster_wait();
    }
    load_pieces(p);
    if (MODE != MOQ_INPUT_E4M3_GROUP && find) {
        find_scales<MT, MODE>(a, b, &r, p);
        if (MODE == MOQ_INPUT_E4M3_TENSOR)
            inverse = __frcp_rn(scale_from<MODE>(a, b, 0));
    }
#pragma unroll 1
    for (int turn = BATCH;; turn += BATCH) {
        store_pieces<MODE>(a, b, p, inverse);
        if (turn >= r.turns)
            break;
        aim_pieces<MT>(a, b, &r, turn, p);
        load_pieces(p);
    }
}

#endif
