/* Outputs of the GEMMs of Hopper: sums over parts of K brought together, scaled, rounded, stored.
 *
 * The shape of a tile S says what there is: T columns of the product; row_groups warpgroups that
 * have 64 rows (or some times 64) of it each, by k_groups that have every so many steps of K;
 * whether tokens are its rows; whether outputs have factors of their row of W and their token; and
 * the type of the kernel's arguments, which have m, n, out, output_scale, x_scale, per_token, and
 * where in shared memory is what. */
#ifndef MOQ_CUDA_SM90_GEMM_OUTPUTS_H
#define MOQ_CUDA_SM90_GEMM_OUTPUTS_H

#include "cuda/load.h"
#include "cuda/ptx.h"

#define CHUNK       32                  /* tokens that are turned around at a time */
#define PITCH       (64 + 4)            /* floats, free of bank conflicts */
#define TURN_BYTES  (CHUNK * PITCH * 4) /* of a warpgroup */
#define EIGHT_BYTES (8 * 128)           /* of eight tokens of a warpgroup, as outputs */

/* Where a tile is: rows of W from `row` to `end` at most, tokens from `token` to `last`. */
typedef struct {
    int row, end, partition, token, last;
} place;

/* ---- factors ---- */

/* What rows of W and tokens of a tile bring to its outputs. */
typedef struct {
    float factor[256], bias[256], x[256];
} board;

/* What a thread fetches of that before products are made, so that nothing waits for it after. */
typedef struct {
    float factor, bias, x;
} margin;

template <class S>
static __device__ __forceinline__ margin fetch_margin(const typename S::args *a, const place *at) {
    margin f = {1.0f, 0.0f, 1.0f};
    int n = at->row + threadIdx.x;
    if (threadIdx.x < S::weight_rows && n < at->end) {
        if (S::row_factors)
            f.factor = a->output_scale[n] * S::unit;
        f.bias = moq_load_bias(&a->out, n);
    }
    if constexpr (S::token_factors) {
        int m = at->token + threadIdx.x;
        if (threadIdx.x < S::tokens && m < at->last)
            f.x = a->x_scale[a->per_token ? m : 0];
    }
    return f;
}

template <class S> static __device__ __forceinline__ void post_margin(const margin *f, board *b) {
    if (threadIdx.x < S::weight_rows) {
        b->factor[threadIdx.x] = f->factor;
        b->bias[threadIdx.x] = f->bias;
    }
    if (S::token_factors && threadIdx.x < S::tokens)
        b->x[threadIdx.x] = f->x;
}

/* What the sum of a token and a row is multiplied by. */
template <class S>
static __device__ __forceinline__ float scaled(const board *b, int token, int own, float sum) {
    if (!S::row_factors)
        return sum;
    return sum * (S::token_factors ? b->x[token] * b->factor[own] : b->factor[own]);
}

/* ---- stores ---- */

/* Stores `count` outputs, 8 if there are more, of token m from n on; in one go where it can. */
static __device__ __forceinline__ void store_eight(const moq_output *out, int64_t m, int n,
                                                   int count, uint4 word) {
    uint16_t *to = (uint16_t *)out->data + m * out->stride + n;
    if (count >= 8 && (uintptr_t)to % 16 == 0) {
        *(uint4 *)to = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            to[i] = (uint16_t)((&word.x)[i / 2] >> (i % 2 * 16));
}

/* ---- tokens are the columns: they pass through shared memory, where rows become columns ---- */

/* Puts this thread's sums of 8 tokens, the j-th 8 of a chunk, in their places. */
static __device__ __forceinline__ void turn_around(float *turn, int j, float4 sum) {
    int lane = threadIdx.x % 32;
    float *to = turn + (8 * j + lane % 4 * 2) * PITCH + threadIdx.x % 128 / 32 * 16 + lane / 4;
    to[0] = sum.x;
    to[PITCH] = sum.y;
    to[8] = sum.z;
    to[PITCH + 8] = sum.w;
}

/* Writes `tokens` tokens of a chunk, the tile's from `first` on, of 64 rows from `row` on. */
template <class S>
static __device__ __forceinline__ void write_chunk(const typename S::args *a, const board *b,
                                                   const float *turn, const place *at, int row,
                                                   int first, int tokens) {
    int thread = threadIdx.x % 128, own = row + thread % 8 * 8;
    int n = at->row + own, group = threadIdx.x / 128;
    barrier_sync(2 + group, 128);
#pragma unroll
    for (int pass = 0; pass < CHUNK / 16; pass++) {
        int token = pass * 16 + thread / 8, m = at->token + first + token;
        if (token >= tokens || m >= at->last || n >= at->end)
            continue;
        const float4 *from = (const float4 *)(turn + token * PITCH + thread % 8 * 8);
        float4 low = from[0], high = from[1];
        float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            value[i] = scaled<S>(b, first + token, own + i, value[i]);
            if (a->out.bias)
                value[i] = __fadd_rn(value[i], b->bias[own + i]);
        }
        uint4 word;
#pragma unroll
        for (int i = 0; i < 4; i++)
            (&word.x)[i] = moq_narrow_pair(a->out.dtype, value[2 * i], value[2 * i + 1]);
        store_eight(&a->out, m, n, at->end - n, word);
    }
    barrier_sync(2 + group, 128);
}

template <class S>
static __device__ __forceinline__ void write_columns(const typename S::args *a, const board *b,
                                                     float *turn, const place *at, int row,
                                                     const float (&sum)[S::T / 2]) {
    constexpr int AT_ONCE = S::T < CHUNK ? S::T : CHUNK;
#pragma unroll
    for (int first = 0; first < S::T; first += AT_ONCE) {
#pragma unroll
        for (int j = 0; j < AT_ONCE / 8; j++) {
            int i = (first / 8 + j) * 4;
            turn_around(turn, j, make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
        }
        write_chunk<S>(a, b, turn, at, row, first, AT_ONCE);
    }
}

/* ---- tokens are the rows ---- */

/* Writes 64 tokens, the tile's from `row` on. */
template <class S>
static __device__ __forceinline__ void write_rows(const typename S::args *a, const board *b,
                                                  const place *at, int row,
                                                  const float (&sum)[S::T / 2]) {
    int lane = threadIdx.x % 32, token = row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    int m = at->token + token;
#pragma unroll
    for (int j = 0; j < S::T / 8; j += 4) {
        uint4 word[2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int half = i % 2, own = (j + i / 2) * 8 + lane % 4 * 2;
            float value[2];
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                value[odd] = sum[4 * (j + i / 2) + 2 * half + odd];
                value[odd] = scaled<S>(b, token + 8 * half, own + odd, value[odd]);
                if (a->out.bias)
                    value[odd] = __fadd_rn(value[odd], b->bias[own + odd]);
            }
            (&word[half].x)[i / 2] = moq_narrow_pair(a->out.dtype, value[0], value[1]);
        }
        int n = at->row + (j + lane % 4) * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 own = moq_exchange_words(word[half], lane % 4);
            if (m + 8 * half < at->last && n < at->end)
                store_eight(&a->out, m + 8 * half, n, at->end - n, own);
        }
    }
}

/* ---- two outputs at a time: `value` are sums of a token and the rows `own` and one further ----
 */

template <class S>
static __device__ __forceinline__ void write_pair(const typename S::args *a, const board *b,
                                                  const place *at, int token, int own, float low,
                                                  float high) {
    int m = at->token + token, n = at->row + own;
    uint16_t *to = (uint16_t *)a->out.data + m * a->out.stride + n;
    low = scaled<S>(b, token, own, low);
    high = scaled<S>(b, token, own + 1, high);
    if (a->out.bias) {
        low = __fadd_rn(low, b->bias[own]);
        high = __fadd_rn(high, b->bias[own + 1]);
    }
    uint32_t word = moq_narrow_pair(a->out.dtype, low, high);
    if (m >= at->last || n >= at->end)
        return;
    if (n + 1 < at->end && (uintptr_t)to % 4 == 0) {
        *(uint32_t *)to = word;
        return;
    }
    to[0] = (uint16_t)word;
    if (n + 1 < at->end)
        to[1] = (uint16_t)(word >> 16);
}

/* Writes what a thread has the sums of: eight columns of the product from `column` on, by the rows
 * of its warpgroup from `row` on. Where tokens are columns, two neighbours have two rows of the
 * same two tokens; each takes one token. */
template <class S>
static __device__ __forceinline__ void write_eight(const typename S::args *a, const board *b,
                                                   const place *at, int row, int column,
                                                   float4 sum) {
    int lane = threadIdx.x % 32, upper = row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    column += lane % 4 * 2;
    if (S::tokens_first) {
        write_pair<S>(a, b, at, upper, column, sum.x, sum.y);
        write_pair<S>(a, b, at, upper + 8, column, sum.z, sum.w);
        return;
    }
    bool odd = lane & 4;
    float x = __shfl_xor_sync(0xffffffffu, odd ? sum.x : sum.y, 4);
    float z = __shfl_xor_sync(0xffffffffu, odd ? sum.z : sum.w, 4);
    write_pair<S>(a, b, at, column + odd, upper - odd, odd ? x : sum.x, odd ? sum.y : x);
    write_pair<S>(a, b, at, column + odd, upper - odd + 8, odd ? z : sum.z, odd ? sum.w : z);
}

/* ---- the same where outputs have a factor of their row alone: scaled and rounded first, then
 * turned around as 16 bits, 128 bytes a token for the 64 rows of a warpgroup. Half of the stores to
 * shared memory and a quarter of the instructions (docs/lab.md) ---- */

/* Of a thread's two rows, 8 apart; factors as they are in memory, so that nothing waits for them
 * before the products. */
typedef struct {
    float factor[2], bias[2];
} rows_edge;

static __device__ __forceinline__ int first_row_of_thread(int row) {
    return row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

/* Of the 64 rows from `row` on; before the kernel's predecessor has ended. */
template <class S>
static __device__ __forceinline__ rows_edge fetch_factors(const typename S::args *a,
                                                          const place *at, int row) {
    rows_edge e = {};
    int n = at->row + first_row_of_thread(row);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (n + 8 * i < at->end)
            e.factor[i] = a->output_scale[n + 8 * i];
    return e;
}

/* After it. */
template <class S>
static __device__ __forceinline__ void fetch_biases(const typename S::args *a, const place *at,
                                                    int row, rows_edge *e) {
    int n = at->row + first_row_of_thread(row);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (n + 8 * i < at->end)
            e->bias[i] = moq_load_bias(&a->out, n + 8 * i);
}

/* Outputs of eight tokens from this thread's sums of them, turned: the 16 bytes of rows 8i and on
 * of a token at (i ^ token % 8) * 16. */
template <class S>
static __device__ __forceinline__ void park_eight(const typename S::args *a, uint32_t room,
                                                  const rows_edge *e, float4 sum) {
    int lane = threadIdx.x % 32, piece = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float factor = e->factor[i] * S::unit;
        float low = (i ? sum.z : sum.x) * factor, high = (i ? sum.w : sum.y) * factor;
        if (a->out.bias) {
            low = __fadd_rn(low, e->bias[i]);
            high = __fadd_rn(high, e->bias[i]);
        }
        half[i] = moq_narrow_pair(a->out.dtype, low, high);
    }
    store_two_matrices_turned(room + lane % 8 * 128 + (piece ^ lane % 8) * 16, half[0], half[1]);
}

/* Stores what a warpgroup has parked: `count` tokens, the tile's from `first` on, of the 64 rows
 * from `row` on. */
template <class S>
static __device__ __forceinline__ void carry_out(const typename S::args *a, uint32_t room,
                                                 const place *at, int row, int first, int count) {
    int thread = threadIdx.x % 128, n = at->row + row + thread % 8 * 8;
    int end = min(count, at->last - at->token - first);
    if (n >= at->end)
        return;
#pragma unroll 4
    for (int token = thread / 8; token < end; token += 16)
        store_eight(&a->out, at->token + first + token, n, at->end - n,
                    load_shared(room + token * 128 + (thread % 8 ^ token % 8) * 16));
}

/* Writes a tile's outputs from a warpgroup's sums, at most 64 tokens in its room at a time. */
template <class S>
static __device__ __forceinline__ void write_turned(const typename S::args *a, uint32_t room,
                                                    const place *at, int row, const rows_edge *e,
                                                    const float (&sum)[S::T / 2]) {
    constexpr int AT_ONCE = S::T < 64 ? S::T : 64;
    int group = threadIdx.x / 128;
#pragma unroll
    for (int first = 0; first < S::T; first += AT_ONCE) {
        barrier_sync(2 + group, 128); /* what was there has been stored */
#pragma unroll
        for (int j = 0; j < AT_ONCE / 8; j++) {
            const float *four = sum + (first / 8 + j) * 4;
            park_eight<S>(a, room + j * EIGHT_BYTES, e,
                          make_float4(four[0], four[1], four[2], four[3]));
        }
        barrier_sync(2 + group, 128);
        carry_out<S>(a, room, at, row, first, AT_ONCE);
    }
}

/* ---- parts of K ---- */

/* Barriers of a cluster for that, each used once: sums of others are here, and all blocks are done
 * with their rings. */
typedef struct {
    uint32_t posted, ready;
} meeting;

/* The part that adds up the j-th eight columns of the product. */
template <class S> static __device__ __forceinline__ int owner_of(int j, int parts) {
    return j * parts / (S::T / 8);
}

/* Those of a part. */
typedef struct {
    int first, count;
} eights;

template <class S> static __device__ __forceinline__ eights eights_of(int part, int parts) {
    eights e = {0, 0};
#pragma unroll
    for (int j = 0; j < S::T / 8; j++) { /* shorter than to divide */
        e.first += owner_of<S>(j, parts) < part;
        e.count += owner_of<S>(j, parts) == part;
    }
    return e;
}

/* Bytes that a block gets from others. */
template <class S> static __device__ __forceinline__ int bytes_to_come(void) {
    int parts = (int)blocks_in_cluster() * S::k_groups, part = (int)rank_in_cluster() * S::k_groups;
    int count = 0;
#pragma unroll
    for (int i = 0; i < S::k_groups; i++)
        count += eights_of<S>(part + i, parts).count;
    return count * (parts - S::k_groups) * (S::row_groups * 128) * 16;
}

/* Sums over parts of K, of the blocks of a cluster and the warpgroups in them, are brought
 * together: each gets all parts of some of the columns of the product, eight at a time,
 * [warpgroups][eights][parts][threads], and adds them in the order of the parts. Warpgroups count
 * the parts of the first rows, then of the next. TURNED: with factors of `own_rows` alone, outputs
 * turn around at `turn`, which may be where the ring was: all are done with it. */
template <class S, bool TURNED = false>
static __device__ __forceinline__ void
bring_together(const typename S::args *a, uint8_t *shared, board *b, const meeting *meet,
               const margin *edge, const place *at, const float (&sum)[S::T / 2],
               const rows_edge *own_rows = NULL, uint32_t turn = 0) {
    constexpr int SPLIT = S::k_groups;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128, rows = group / SPLIT;
    int blocks = (int)blocks_in_cluster(), parts = blocks * SPLIT;
    int rank = (int)rank_in_cluster(), part = rank * SPLIT + group % SPLIT;
    uint32_t room = shared_address(shared + a->room);
    if (!S::own_room) {
        warp_releases_all(meet->ready, blocks);
        mbarrier_wait(meet->ready, 0);
    }
    int before = 0, local = 0; /* the owner of the eight before, and which of its eights this is */
#pragma unroll
    for (int j = 0; j < S::T / 8; j++) {
        int owner = owner_of<S>(j, parts), side = rows * SPLIT + owner % SPLIT;
        local = owner == before ? local : 0;
        before = owner;
        uint32_t to = room + 16u * (side * a->side + (local++ * parts + part) * 128 + thread);
        float4 four = make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]);
        int block = owner / SPLIT;
        if (block != rank)
            send_four(address_in(block, to), four, address_in(block, meet->posted));
        else
            store_shared(to, make_uint4(__float_as_uint(four.x), __float_as_uint(four.y),
                                        __float_as_uint(four.z), __float_as_uint(four.w)));
    }
    if (!TURNED)
        post_margin<S>(edge, b);
    eights own = eights_of<S>(part, parts);
    const float4 *mine = (const float4 *)(shared + a->room) + group * a->side + thread;
    barrier_sync(1, S::consumers);
    if (blocks > 1)
        mbarrier_wait(meet->posted, 0);
    for (int j = 0; j < own.count; j++) {
        float4 total = mine[j * parts * 128];
        for (int i = 1; i < parts; i++) {
            float4 other = mine[(j * parts + i) * 128];
            total.x += other.x;
            total.y += other.y;
            total.z += other.z;
            total.w += other.w;
        }
        if constexpr (TURNED)
            park_eight<S>(a, turn + j * EIGHT_BYTES, own_rows, total);
        else
            write_eight<S>(a, b, at, rows * 64, (own.first + j) * 8, total);
    }
    if constexpr (TURNED) {
        barrier_sync(2 + group, 128);
        carry_out<S>(a, turn, at, rows * 64, own.first * 8, own.count * 8);
    }
}

#endif
