/* Outputs of the FP8 GEMM of Hopper: sums over parts of K brought together, scaled, rounded,
 * stored.
 */
#ifndef MOQ_CUDA_SM90_GEMM_OUTPUTS_H
#define MOQ_CUDA_SM90_GEMM_OUTPUTS_H

#include "cuda/sm90_gemm_tile.h"

#define CHUNK      32       /* tokens that are turned around at a time */
#define PITCH      (64 + 4) /* floats, free of bank conflicts */
#define TURN_BYTES (2 * CHUNK * PITCH * 4)

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
static __device__ __forceinline__ margin fetch_margin(const gemm_args *a, const place *at) {
    margin f = {1.0f, 0.0f, 1.0f};
    int n = at->row + threadIdx.x, m = at->token + threadIdx.x;
    if (threadIdx.x < S::weight_rows && n < at->end) {
        if (!S::groups)
            f.factor = a->output_scale[n];
        f.bias = moq_load_bias(&a->out, n);
    }
    if (!S::groups && threadIdx.x < S::tokens && m < a->m)
        f.x = a->x_scale[a->per_token ? m : 0];
    return f;
}

template <class S> static __device__ __forceinline__ void post_margin(const margin *f, board *b) {
    if (threadIdx.x < S::weight_rows) {
        b->factor[threadIdx.x] = f->factor;
        b->bias[threadIdx.x] = f->bias;
    }
    if (threadIdx.x < S::tokens)
        b->x[threadIdx.x] = f->x;
}

/* ---- stores ---- */

static __device__ __forceinline__ uint32_t pack_pair(moq_dtype dtype, float low, float high) {
    uint32_t word;
    if (dtype == MOQ_DT_BF16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&word, &pair, 4);
    } else {
        __half2 pair = __floats2half2_rn(low, high);
        memcpy(&word, &pair, 4);
    }
    return word;
}

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
static __device__ __forceinline__ void write_chunk(const gemm_args *a, const board *b,
                                                   const float *turn, const place *at, int row,
                                                   int first, int tokens) {
    int thread = threadIdx.x % 128, own = row + thread % 8 * 8;
    int n = at->row + own, group = threadIdx.x / 128;
    barrier_sync(2 + group, 128);
#pragma unroll
    for (int pass = 0; pass < CHUNK / 16; pass++) {
        int token = pass * 16 + thread / 8, m = at->token + first + token;
        if (token >= tokens || m >= a->m || n >= at->end)
            continue;
        const float4 *from = (const float4 *)(turn + token * PITCH + thread % 8 * 8);
        float4 low = from[0], high = from[1];
        float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (!S::groups)
                value[i] *= b->x[first + token] * b->factor[own + i];
            if (a->out.bias)
                value[i] = __fadd_rn(value[i], b->bias[own + i]);
        }
        uint4 word;
#pragma unroll
        for (int i = 0; i < 4; i++)
            (&word.x)[i] = pack_pair(a->out.dtype, value[2 * i], value[2 * i + 1]);
        store_eight(&a->out, m, n, at->end - n, word);
    }
    barrier_sync(2 + group, 128);
}

template <class S>
static __device__ __forceinline__ void write_columns(const gemm_args *a, const board *b,
                                                     float *turn, const place *at, int row,
                                                     const float (&sum)[S::T / 2]) {
#pragma unroll
    for (int chunk = 0; chunk < S::T / CHUNK; chunk++) {
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j++) {
            int i = (chunk * (CHUNK / 8) + j) * 4;
            turn_around(turn, j, make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
        }
        write_chunk<S>(a, b, turn, at, row, chunk * CHUNK, CHUNK);
    }
}

/* ---- tokens are the rows ---- */

/* Exchanges words among four neighbours: lane i of them gets word i of all. */
static __device__ __forceinline__ uint4 exchange(uint4 w, int lane) {
    uint32_t a = __shfl_xor_sync(0xffffffffu, lane & 1 ? w.x : w.y, 1);
    uint32_t b = __shfl_xor_sync(0xffffffffu, lane & 1 ? w.z : w.w, 1);
    w = lane & 1 ? make_uint4(a, w.y, b, w.w) : make_uint4(w.x, a, w.z, b);
    a = __shfl_xor_sync(0xffffffffu, lane & 2 ? w.x : w.z, 2);
    b = __shfl_xor_sync(0xffffffffu, lane & 2 ? w.y : w.w, 2);
    return lane & 2 ? make_uint4(a, b, w.z, w.w) : make_uint4(w.x, w.y, a, b);
}

/* Writes 64 tokens, the tile's from `row` on. */
template <class S>
static __device__ __forceinline__ void write_rows(const gemm_args *a, const board *b,
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
                if (!S::groups)
                    value[odd] *= b->x[token + 8 * half] * b->factor[own + odd];
                if (a->out.bias)
                    value[odd] = __fadd_rn(value[odd], b->bias[own + odd]);
            }
            (&word[half].x)[i / 2] = pack_pair(a->out.dtype, value[0], value[1]);
        }
        int n = at->row + (j + lane % 4) * 8;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 own = exchange(word[half], lane % 4);
            if (m + 8 * half < a->m && n < at->end)
                store_eight(&a->out, m + 8 * half, n, at->end - n, own);
        }
    }
}

/* Writes two outputs each of two tokens, of which a thread has the sums: the tile's 8 columns from
 * `column` on. */
template <class S>
static __device__ __forceinline__ void write_pairs(const gemm_args *a, const board *b,
                                                   const place *at, int column, float4 sum) {
    int lane = threadIdx.x % 32, token = own_row(1), own = column + lane % 4 * 2;
    int n = at->row + own;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int m = at->token + token + 8 * half;
        float value[2] = {half ? sum.z : sum.x, half ? sum.w : sum.y};
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            if (!S::groups)
                value[odd] *= b->x[token + 8 * half] * b->factor[own + odd];
            if (a->out.bias)
                value[odd] = __fadd_rn(value[odd], b->bias[own + odd]);
        }
        uint32_t word = pack_pair(a->out.dtype, value[0], value[1]);
        uint16_t *to = (uint16_t *)a->out.data + m * a->out.stride + n;
        if (m >= a->m || n >= at->end)
            continue;
        if (n + 1 < at->end && (uintptr_t)to % 4 == 0) {
            *(uint32_t *)to = word;
            continue;
        }
        to[0] = (uint16_t)word;
        if (n + 1 < at->end)
            to[1] = (uint16_t)(word >> 16);
    }
}

/* ---- parts of K ---- */

/* Sums over parts of K, of the blocks of a cluster or the warpgroups in them, are brought together:
 * each gets all parts of some of the columns of the product, eight at a time,
 * [eights][parts][threads], and adds them in the order of the parts. */
template <class S>
static __device__ __forceinline__ void bring_together(const gemm_args *a, uint8_t *shared, board *b,
                                                      const margin *edge, const place *at,
                                                      const float (&sum)[S::T / 2]) {
    constexpr int EIGHTS = S::T / 8, SPLIT = S::by_steps ? 2 : 1;
    int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    int parts = (int)blocks_in_cluster() * SPLIT;
    int part = (int)rank_in_cluster() * SPLIT + (S::by_steps ? group : 0);
    int side = (EIGHTS + parts - 1) / parts * parts * 128; /* of a warpgroup */
    uint32_t room = shared_address(shared + a->room);
    if (blocks_in_cluster() == 1)
        barrier_sync(1, CONSUMERS); /* the ring is not needed any more */
    else if (S::own_room)
        cluster_wait(); /* all blocks run */
    else
        cluster_sync(); /* no block needs its ring any more */
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        int owner = ((j + 1) * parts - 1) / EIGHTS, local = j - owner * EIGHTS / parts;
        int slot = (S::by_steps ? owner % 2 : group) * side + (local * parts + part) * 128 + thread;
        store_shared_of(room + 16u * slot, owner / SPLIT,
                        make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    }
    post_margin<S>(edge, b);
    if (blocks_in_cluster() == 1)
        barrier_sync(1, CONSUMERS);
    else
        cluster_sync();
    int first = part * EIGHTS / parts, count = (part + 1) * EIGHTS / parts - first;
    const float4 *mine = (const float4 *)(shared + a->room) + group * side + thread;
    float *turn = (float *)(shared + a->turn) + group * (CHUNK * PITCH);
    for (int base = 0; base < count; base += CHUNK / 8) {
        int here = min(count - base, CHUNK / 8);
        for (int j = 0; j < here; j++) {
            float4 total = mine[(base + j) * parts * 128];
            for (int i = 1; i < parts; i++) {
                float4 other = mine[((base + j) * parts + i) * 128];
                total.x += other.x;
                total.y += other.y;
                total.z += other.z;
                total.w += other.w;
            }
            if constexpr (S::tokens_first)
                write_pairs<S>(a, b, at, (first + base + j) * 8, total);
            else
                turn_around(turn, j, total);
        }
        if constexpr (!S::tokens_first)
            write_chunk<S>(a, b, turn, at, S::by_steps ? 0 : group * 64, (first + base) * 8,
                           here * 8);
    }
}

#endif
