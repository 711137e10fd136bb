/* Tiles of the NVFP4 linears for many tokens on Hopper, exact (sm90_nvfp4_prefill.cu) and with FP8
 * products (sm90_nvfp4_fp8_prefill.cu): which a block makes, and how tokens and scales come to it.
 *
 * W gives the 64 rows of wgmma, from registers, where packed codes (core/nvfp4_packed.h) become
 * operands; tokens give its columns. A tile is 128 rows of W by T tokens. A step is 128 bytes of
 * the columns of a token in the 128-byte swizzle, by one unit of each of 8 slabs. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_TILE_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_TILE_H

#include "core/nvfp4_packed.h"
#include "cuda/choice/grid.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/sm90_schedule.h"

namespace moq::nvfp4_prefill {

using namespace gemm;

#define CONSUMERS  256 /* threads of the two warpgroups that multiply, 64 rows each */
#define ROWS       128
#define SLABS      (ROWS / MOQ_PACK_ROWS)
#define MAX_STAGES 16
#define CHUNK      32 /* tokens whose outputs leave at a time */
#define TURN_BYTES (CHUNK * 64 * 2)

/* What the operands are. */
typedef enum { AS_BF16, AS_F16, AS_E4M3 } operand_type;

typedef struct {
    int m, n;
    int slabs, blocks; /* units of W, along rows and K */
    int steps;
    int row_tiles; /* of a block or pair of blocks */
    int columns;   /* tiles along the tokens */
    int band;      /* columns that are done together, for the sake of L2 */
    int stages;
    bool boxed;     /* whether the copy engine can write the outputs */
    bool apart;     /* whether tiles of other rows begin with other steps */
    int tail_tiles; /* tiles at the end whose steps all blocks share evenly */
    stream_k_tail tail;
    int splits;      /* of K of a tile, one for each block of a cluster, or 0 */
    float4 *handed;  /* sums of other blocks, and */
    uint64_t *ready; /* whether they are there, of each warpgroup */
    const uint8_t *weight;
    moq_output out;
    const float *output_scale; /* [N] */
    const float *fold_scale;   /* of e4m3: [N], powers of two, */
    const float *x_scale;      /* and scales of whole tiles of tokens */
} gemm_args;

/* A pair of blocks has 256 rows by T tokens or 128 rows by 2T tokens. FAST: sums of e4m3 stay in
 * the tensor cores. */
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
    static constexpr int units = quantized ? 2 : 1;                 /* of a slab in a step */
    static constexpr int slabs = share_weights ? SLABS / 2 : SLABS; /* that a block copies */
    static constexpr int token_bytes = T * 128, slab_bytes = units * MOQ_PACK_BYTES;
    static constexpr int weight_bytes = slabs * slab_bytes;
    /* Threads that fold weights into e4m3, twice as many where that is faster
     * (docs/lab/nvfp4-fp8.md), and the registers of threads that multiply and that fold. */
    static constexpr bool twice = T < 128 || (T == 128 && SHARE == MOQ_ALONE);
    static constexpr int folders = twice ? 256 : 128;
    static constexpr bool full = T == 256 && !fast; /* of sums */
    static constexpr int registers = twice ? 144 : full ? 224 : 216;
    static constexpr int folder_registers = twice ? 64 : full ? 40 : 56;
    /* Chunks of outputs that a warpgroup has room for: all of a tile, but where a block alone has
     * 256 tokens, whose stages leave less, two are faster than four or six (docs/lab/nvfp4-fp8.md).
     */
    static constexpr int rooms = quantized && T == 256 && !pair ? 2 : T / CHUNK;
    /* Parts of the tokens that are multiplied one after the other, and promoted sums of one. */
    static constexpr int splits_of_tokens = T == 256 || (T == 128 && twice) ? 2 : 1;
    static constexpr int sums = T / 2 / splits_of_tokens;
};

/* What rows and tokens of a tile bring to its outputs, of a warpgroup. */
template <class S> struct tile_scales {
    float factor[64], fold[64];
    float x[S::quantized ? S::T : 2];
};

/* A unit as a lane has it: its vector of codes, and the scales of its rows. */
typedef struct {
    uint4 codes;
    uint2 scales;
} packed_unit;

static __device__ __forceinline__ packed_unit load_unit(uint32_t unit) {
    int lane = threadIdx.x % 32;
    return {load_shared(unit + moq_pack_word_at(lane / 4, lane % 4, 0)),
            load_shared_pair(unit + moq_pack_scale_at(lane / 4, 0))};
}

/* ---- the order of work ---- */

/* What a block begins with. The blocks of a cluster may have parts of K of a tile here, which is
 * not known when the kernel is compiled. */
template <class S> static __device__ __forceinline__ work begin(const gemm_args *a) {
    int blocks = S::pair ? 2 : 1, tiles = a->row_tiles * a->columns;
    if (a->splits > 1) {
        int tile = (int)blockIdx.x / (blocks * a->splits), split = (int)rank_in_cluster() / blocks;
        return {tile, tiles, tile + 1, a->steps * split / a->splits,
                a->steps * (split + 1) / a->splits};
    }
    return work_of<S>(a, (int)blockIdx.x / blocks, (int)gridDim.x / blocks, tiles - a->tail_tiles);
}

/* The step of a tile that a block copies first: only with few tokens do tiles of other rows begin
 * with other ones. Both blocks of a pair have the same. */
template <class S>
static __device__ __forceinline__ int first_step_of(const gemm_args *a, const work *w) {
    return a->apart ? first_step(w, place_of<S>(a, w->number, 0).row / ROWS) : w->first;
}

/* ---- the producers ---- */

/* The ring that a producer fills. */
typedef struct {
    uint32_t full, empty; /* barriers of the stages */
    uint32_t to;          /* the ring */
    int stages, rank;
} producer_pipeline;

template <class S>
static __device__ __forceinline__ void
produce_tokens(const gemm_args *a, const producer_pipeline *p, const CUtensorMap *map) {
    pipeline_state slot = {0, 0};
    uint64_t keep = policy_evict_normal();
    prefetch_map(map);
    wait_for_predecessor();
    for (work w = begin<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        int token = place_of<S>(a, w.number, p->rank).token;
        int step = first_step_of<S>(a, &w);
        for (int left = w.end - w.first; left > 0; left--, step = step_after(&w, step)) {
            uint32_t full = p->full + 8u * slot.index;
            uint32_t to = p->to + (uint32_t)(slot.index * S::token_bytes);
            mbarrier_wait(p->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, S::token_bytes);
            if (S::share_tokens) {
                int half = p->rank * (S::T / 2);
                copy_box_2d_to(to + half * 128, map, step * 128, token + half, full, keep,
                               (uint16_t)(3 << (rank_in_cluster() & ~1u)));
            } else {
                copy_box_2d(to, map, step * 128, token, full, keep);
            }
            advance(&slot, p->stages);
        }
    }
}

/* ---- outputs ---- */

/* Asks for what a tile's rows and tokens bring, which arrives by copy_async_wait. */
template <class S>
static __device__ __forceinline__ void fetch_tile_scales(const gemm_args *a, tile_scales<S> *b,
                                                         const tile_place *at, int group) {
    int thread = threadIdx.x % 128, n = at->row + group * 64 + thread % 64;
    int row = n < a->n ? n : 0, bytes = n < a->n ? 4 : 0;
    if (thread < 64)
        copy_async_4(shared_address(&b->factor[thread]), a->output_scale + row, bytes);
    else if (S::quantized)
        copy_async_4(shared_address(&b->fold[thread - 64]), a->fold_scale + row, bytes);
    for (int i = thread; S::quantized && i < S::T; i += 128)
        copy_async_4(shared_address(&b->x[i]), a->x_scale + at->token + i, 4);
    copy_async_commit();
}

/* Stores `count` outputs of a token, 8 if there are more; in one go where they are `whole`. */
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

/* Some of the chunks of a tile's tokens. */
typedef struct {
    int first, end;
} chunks;

} // namespace moq::nvfp4_prefill

#endif
