/* NVFP4 prefill kernels on Hopper, exact (nvfp4_prefill.cu) and with FP8 products
 * (nvfp4_fp8_prefill.cu): tile, partial sums and epilogue.
 *
 * W gives the 64 rows of wgmma, from registers, where packed codes (core/nvfp4_packed.h) become
 * operands; tokens give its columns. A tile is 128 rows of W by T tokens. A step is 128 bytes of a
 * token's columns in the 128-byte swizzle, by one unit of each of 8 slabs.
 *
 * What bounds it: the tensor cores, of exact products; decoding and folding with fewer tokens
 * (docs/lab/nvfp4-prefill.md). */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_PREFILL_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_PREFILL_H

#include "core/nvfp4_packed.h"
#include "cuda/choice/grid.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/gemm_scheduler.h"

namespace moq::nvfp4_prefill {

using namespace gemm;

#define CONSUMERS  256 /* threads of the two warpgroups that multiply, 64 rows each */
#define ROWS       128
#define SLABS      (ROWS / MOQ_PACK_ROWS)
#define MAX_STAGES 16
#define CHUNK      32 /* tokens whose outputs leave at once */
#define TURN_BYTES (CHUNK * 64 * 2)

/* Type of the operands. */
typedef enum { AS_BF16, AS_F16, AS_E4M3 } operand_type;

typedef struct {
    int m, n;
    int slabs, blocks; /* units of W, along rows and K */
    int steps;
    int row_tiles; /* tiles along W, of a block or pair of blocks */
    int columns;   /* tiles along the tokens */
    int band;      /* columns done together, so that tokens stay in the L2 */
    int stages;
    bool boxed;     /* y can be written by bulk tensor stores */
    bool apart;     /* tiles of different rows begin with different steps */
    int tail_tiles; /* tiles of the stream-K tail */
    stream_k_tail tail;
    float4 *handed;  /* partial sums of blocks */
    uint64_t *ready; /* flags of the warpgroups that have stored theirs */
    const uint8_t *weight;
    moq_output out;
    const float *output_scale; /* [N] */
    const float *fold_scale;   /* FP8 products: [N], powers of two */
    const float *x_scale;      /* FP8 products: token scales, for whole tiles of tokens */
    const void *weight_scale;  /* scales beside W: [N, steps] words (general_prefill.h) */
} gemm_args;

/* Tile of a block; a pair of blocks has 256 rows by T tokens or 128 rows by 2T tokens. FAST: sums
 * of e4m3 stay in the tensor cores. */
template <operand_type TYPE, int T_, moq_sharing SHARE, bool FAST> struct tile {
    typedef gemm_args args;
    typedef layer_tiles<true> tiles;
    static constexpr bool split_k = false, stream_k = true;
    static constexpr operand_type type = TYPE;
    static constexpr int T = T_, weight_rows = ROWS;
    static __device__ __forceinline__ int tile_tokens(const gemm_args *) {
        return T;
    }
    static constexpr bool share_tokens = SHARE == MOQ_SHARE_TOKENS, pair = SHARE != MOQ_ALONE;
    static constexpr bool share_weights = SHARE == MOQ_SHARE_WEIGHTS;
    static constexpr bool quantized = TYPE == AS_E4M3, fast = FAST;
    static constexpr int units = quantized ? 2 : 1;                 /* units of a slab in a step */
    static constexpr int slabs = share_weights ? SLABS / 2 : SLABS; /* slabs that a block copies */
    static constexpr int halves = 1;                                /* stages of a step */
    static constexpr int ring_stages = 0; /* where W has a pipeline of its own */
    static constexpr bool ring = ring_stages > 0;
    /* Outputs are scaled by a factor of their row, if rows have any, and by a number. */
    static constexpr bool row_factors = true;
    static constexpr float unit = MOQ_NVFP4_FACTOR;
    /* Rows of W that a thread has of each 16: g and g + 8, or 2g and 2g + 1. */
    static constexpr bool paired_rows = false;
    static constexpr bool adds = !quantized; /* outputs may get an addend */
    static constexpr int token_bytes = T * 128, slab_bytes = units * MOQ_PACK_BYTES;
    static constexpr int weight_bytes = slabs * slab_bytes;
    /* Threads that fold weights into e4m3, and registers of consumers and of folding threads. */
    static constexpr int folders = 128;
    static constexpr bool full = T == 256 && !fast; /* registers are full of sums */
    static constexpr int registers = full ? 224 : 216;
    static constexpr int folder_registers = full ? 40 : 56;
    /* Chunks of outputs that a warpgroup can stage: all of a tile, but two for a single block with
     * 256 tokens, whose stages leave less room; two are faster than four or six
     * (docs/lab/nvfp4-fp8.md). */
    static constexpr int rooms = quantized && T == 256 && !pair ? 2 : T / CHUNK;
    /* Token halves that are multiplied one after the other, and promoted sums of one. */
    static constexpr int splits_of_tokens = T == 256 ? 2 : 1;
    static constexpr int sums = T / 2 / splits_of_tokens;
};

/* Epilogue operands of a warpgroup: scales of a tile's rows and tokens. */
template <class S> struct tile_scales {
    float factor[64], fold[64];
    float x[S::quantized ? S::T : 2];
};

/* ---- producers ---- */

/* Pipeline that a producer fills. */
typedef struct {
    uint32_t full, empty; /* barriers of the stages */
    uint32_t to;          /* address of the first stage */
    int stages, rank;
} producer_pipeline;

/* ---- epilogue operands ---- */

/* Starts copies of the scales of a tile's rows and tokens; copy_async_wait waits for them. */
template <class S>
static __device__ __forceinline__ void fetch_tile_scales(const gemm_args *a, tile_scales<S> *b,
                                                         const tile_place *at, int group) {
    int thread = threadIdx.x % 128, n = at->row + group * 64 + thread % 64;
    int row = n < a->n ? n : 0, bytes = n < a->n ? 4 : 0;
    if (S::row_factors && thread < 64)
        copy_async_4(shared_address(&b->factor[thread]), a->output_scale + row, bytes);
    else if (S::quantized)
        copy_async_4(shared_address(&b->fold[thread - 64]), a->fold_scale + row, bytes);
    for (int i = thread; S::quantized && i < S::T; i += 128)
        copy_async_4(shared_address(&b->x[i]), a->x_scale + at->token + i, 4);
    copy_async_commit();
}

/* Stores `count` outputs of a token, at most 8; one 16-byte store where they are `whole`. */
static __device__ __forceinline__ void store_eight(uint16_t *to, int count, bool whole,
                                                   uint4 word) {
    if (whole) {
        *(uint4 *)to = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count)
            to[i] = (uint16_t)((&word.x)[i / 2] >> (i % 2 * 16));
}

/* Range of chunks of a tile's tokens. */
typedef struct {
    int first, end;
} chunks;

/* ---- stream-K tail: a block may have the first steps of a tile and a later one the last, which
 * adds all of the tile's sums. Partial sums are exchanged through the L2 as
 * [blocks][warpgroups][eights of tokens][threads], always added in one order ---- */

template <class S>
static __device__ __forceinline__ float4 *sums_of(const gemm_args *a, int block, int group) {
    return a->handed + (int64_t)(block * 2 + group) * (S::T / 8 * 128) + threadIdx.x % 128;
}

/* Adds another block's sums. */
template <class S>
static __device__ __forceinline__ void add(const float4 *from, float (&sum)[S::T / 2]) {
    constexpr int AT_ONCE = 16;
#pragma unroll
    for (int first = 0; first < S::T / 8; first += AT_ONCE) {
        float4 other[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            other[i] = __ldcg(from + (first + i) * 128);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int j = first + i;
            sum[4 * j] += other[i].x;
            sum[4 * j + 1] += other[i].y;
            sum[4 * j + 2] += other[i].z;
            sum[4 * j + 3] += other[i].w;
        }
    }
}

static __device__ __forceinline__ uint64_t *flag_of(const gemm_args *a, int block, int group) {
    return a->ready + block * 2 + group;
}

/* Stores all sums. A warp of its own announces them, so that the warpgroup need not wait until they
 * are in memory. */
template <class S>
static __device__ __forceinline__ void store_partial_sums(const gemm_args *a, int group,
                                                          const float (&sum)[S::T / 2]) {
    float4 *to = sums_of<S>(a, (int)blockIdx.x, group);
#pragma unroll
    for (int j = 0; j < S::T / 8; j++)
        __stcg(to + j * 128,
               make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    barrier_arrive(4 + group, 128 + 32);
}

/* Announces a block's partial sums when they are stored, in a warp of its own. */
template <class S> static __device__ __forceinline__ void announce(const gemm_args *a, int group) {
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        if (w.end == a->steps)
            continue;
        barrier_sync(4 + group, 128 + 32);
        if (threadIdx.x % 32 == 0)
            store_release(flag_of(a, (int)blockIdx.x, group), READY);
    }
}

/* Adds the partial sums of the tile's earlier steps, of the blocks before this one, from the last
 * to the first. */
template <class S>
static __device__ __forceinline__ void add_partial_sums(const gemm_args *a, const work *w,
                                                        int group, float (&sum)[S::T / 2]) {
    int blocks = S::pair ? 2 : 1, others = earlier_workers(a, w, (int)blockIdx.x / blocks);
    for (int i = threadIdx.x % 128; i < others; i += 128)
        await_sums(flag_of(a, (int)blockIdx.x - (i + 1) * blocks, group));
    barrier_sync(2 + group, 128);
    for (int i = 1; i <= others; i++)
        add<S>(sums_of<S>(a, (int)blockIdx.x - i * blocks, group), sum);
}

/* ---- epilogue: outputs are staged in shared memory and leave by bulk tensor stores under the
 * products of the next tile. All blocks have outputs at about the same time, so that the L2 bounds
 * how fast they leave (docs/lab/nvfp4-prefill.md). A warpgroup has 64 rows of a tile, chunk after
 * chunk of tokens, 128 bytes a token in the 128-byte swizzle ---- */

#define TOGETHER 2 /* chunks stored at once */

typedef struct {
    const CUtensorMap *map; /* map of y in boxes of a chunk by 64 rows, if y can have one */
    uint32_t room;          /* staged outputs of the warpgroup, S::rooms chunks */
} output_path;

/* Returns what a row's sums are scaled by. */
template <class S>
static __device__ __forceinline__ float factor_of(const tile_scales<S> *b, int row) {
    if (!S::row_factors)
        return S::unit;
    if (!S::quantized)
        return b->factor[row] * S::unit;
    return b->factor[row] * moq_unfold(b->fold[row]);
}

/* Returns the first of the two rows that a thread has of the 64 of a warpgroup. */
template <class S> static __device__ __forceinline__ int row_of_thread(void) {
    int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    return thread / 32 * 16 + lane / 4 * (S::paired_rows ? 2 : 1);
}

/* Distance of a thread's two rows. */
template <class S> constexpr int APART = S::paired_rows ? 1 : 8;

/* Adds an addend to two outputs of row n of W, of token m and the next one. */
static __device__ __forceinline__ void add_addends(const gemm_args *a, int m, int n, float &low,
                                                   float &high) {
    const float *addend = a->out.addend + m * a->out.addend_stride + n;
    if (n < a->n && m < a->m)
        low = __fadd_rn(low, addend[0]);
    if (n < a->n && m + 1 < a->m)
        high = __fadd_rn(high, addend[a->out.addend_stride]);
}

/* Stages outputs of 16 tokens from `first` on: of rows 2g and 2g + 1, of two tokens each, of eight
 * tokens after eight. */
static __device__ __forceinline__ void stage_pairs(uint32_t room, int first,
                                                   const uint32_t (&matrix)[4]) {
    int lane = threadIdx.x % 32, piece = threadIdx.x / 32 % 4 * 2 + lane / 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int token = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
        uint32_t pair =
            __byte_perm(matrix[i / 2 * 2], matrix[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
        store_shared_word(room + token * 128 + (piece ^ token % 8) * 16 + lane / 4 % 4 * 4, pair);
    }
}

/* Scales, rounds and stages a chunk from token `first` on, whose tokens have their scales at `x`;
 * `row` is the thread's first row of W. */
template <class S>
static __device__ __forceinline__ void
stage_outputs(const gemm_args *a, uint32_t room, int first, int row, const float *x,
              const float *sum, const float (&factor)[2], const float (&bias)[2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    bool add = a->out.bias != NULL;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t matrix[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *two = sum + 4 * (half * 2 + i / 2) + 2 * (i % 2);
            float2 own = {1.0f, 1.0f};
            if (S::quantized)
                own = *(const float2 *)&x[(half * 2 + i / 2) * 8 + lane % 4 * 2];
            float low = two[0] * (own.x * factor[i % 2]), high = two[1] * (own.y * factor[i % 2]);
            if (add) {
                low = __fadd_rn(low, bias[i % 2]);
                high = __fadd_rn(high, bias[i % 2]);
            }
            if (S::adds && a->out.addend)
                add_addends(a, first + (half * 2 + i / 2) * 8 + lane % 4 * 2, row + 8 * (i % 2),
                            low, high);
            matrix[i] = moq_narrow_pair(a->out.dtype, low, high);
        }
        if (S::paired_rows) {
            stage_pairs(room, half * 16, matrix);
            continue;
        }
        int token = half * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
        store_matrices_turned(room + token * 128 + (piece ^ token % 8) * 16, matrix);
    }
}

/* Stores staged chunks of a tile without the copy engine, where y is not aligned for it. */
static __device__ __forceinline__ void store_staged(const gemm_args *a, uint32_t room,
                                                    const tile_place *at, int row, chunks part) {
    int thread = threadIdx.x % 128, n = row + thread % 8 * 8;
    int end = min(part.end * CHUNK, a->m - at->token);
#pragma unroll 1
    for (int token = part.first * CHUNK + thread / 8; token < end; token += 16) {
        uint16_t *to = (uint16_t *)a->out.data + (at->token + token) * a->out.stride + n;
        uint4 word = load_shared(room + token * 128 + (thread % 8 ^ token % 8) * 16);
        store_eight(to, a->n - n, n + 8 <= a->n && (uintptr_t)to % 16 == 0, word);
    }
}

/* Writes the outputs of a warpgroup's rows of a tile. The first thread must call store_boxes_wait()
 * before the block ends. */
template <class S>
static __device__ __forceinline__ void write_boxes(const gemm_args *a, const output_path *path,
                                                   const tile_scales<S> *b, const tile_place *at,
                                                   int group, const float *sum) {
    static_assert(S::T % (TOGETHER * CHUNK) == 0, "all chunks leave together with others");
    int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    int row = at->row + group * 64, own = warp * 16 + lane / 4 * (S::paired_rows ? 2 : 1);
    float factor[2], bias[2];
    copy_async_wait<0>();
    if (thread == 0)
        store_boxes_wait(); /* the previous tile has left */
    barrier_sync(2 + group, 128);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int n = row + own + APART<S> * i;
        factor[i] = factor_of<S>(b, own + APART<S> * i);
        bias[i] = n < a->n ? moq_load_bias(&a->out, n) : 0.0f;
    }
#pragma unroll
    for (int chunk = 0; chunk < S::T / CHUNK; chunk++) {
        if (chunk >= S::rooms && chunk % TOGETHER == 0) {
            if (thread == 0)
                store_boxes_wait(); /* earlier chunks of this tile have left */
            barrier_sync(2 + group, 128);
        }
        stage_outputs<S>(a, path->room + chunk % S::rooms * TURN_BYTES, at->token + chunk * CHUNK,
                         row + own, b->x + S::quantized * chunk * CHUNK, sum + chunk * (CHUNK / 2),
                         factor, bias);
        if ((chunk + 1) % TOGETHER != 0)
            continue;
        chunks some = {chunk - chunk % TOGETHER, chunk + 1};
        uint32_t room =
            path->room - chunk / S::rooms * (S::rooms * TURN_BYTES); /* room of the first chunk */
        fence_async_proxy();
        barrier_sync(2 + group, 128);
        if (!a->boxed)
            store_staged(a, room, at, row, some);
        else if (thread == 0)
            for (int i = some.first; i < some.end; i++)
                store_box_2d(path->map, row * 2, at->token + i * CHUNK, room + i * TURN_BYTES);
    }
}

} // namespace moq::nvfp4_prefill

#endif
