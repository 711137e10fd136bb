/* NVFP4 medium kernels on Hopper, exact (nvfp4_medium.cu) and with FP8 products
 * (nvfp4_fp8_medium.cu): tile, copies, exact mainloop, stream-K tail and kernel.
 *
 * A tile is some rows of W by some tokens, a step 128 columns of both. W is packed
 * (core/nvfp4_packed.h): a matrix of bytes with a row for 16 rows of W and 576 bytes for 64
 * columns, of which the copy engine brings a box. x arrives in the 128-byte swizzle. Both are zeros
 * beyond the last columns.
 *
 * A warp reads the codes of its 16 rows and 64 columns with one load a lane and decodes them into
 * the fragments of four products, while the products of the previous 64 columns are under way: two
 * sets of fragments take turns. Four lanes need the same scales; each makes a quarter of a step's
 * and passes them through shared memory. */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_MEDIUM_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_MEDIUM_H

#include "core/nvfp4_packed.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/gemm_epilogue.h"
#include "cuda/linear/sm90/gemm_pipeline.h"
#include "cuda/linear/sm90/gemm_scheduler.h"
#include "cuda/linear/sm90/nvfp4_medium_config.h"

namespace moq::nvfp4_medium {

using namespace gemm;

#define STEP MOQ_NVFP4_MEDIUM_STEP
#define UNIT MOQ_PACK_BYTES
static_assert(MAX_STAGES == MOQ_NVFP4_MEDIUM_STAGES, "as the choice counts them");

typedef struct {
    int m, n;
    int rows;      /* of W in a tile (general.h) */
    int steps;     /* steps of 128 columns */
    int row_tiles; /* tiles along W */
    int columns;   /* tiles along the tokens */
    int tokens;    /* tokens of a tile, at most T */
    int stages;
    int flight;      /* stages whose weights are under way at once at the start */
    int split_steps; /* split-K: steps of a block */
    int more_splits; /* split-K: blocks with one step more */
    int room, side;  /* offset of sums of other blocks in shared memory, and float4 of each share */
    int turn;        /* offset of staged outputs */
    moq_output out;
    const float *output_scale; /* [N] */
    const float *fold_scale;   /* FP8 products: [N], powers of two */
    const void *weight_scale;  /* scales beside W: [N, steps] words (general.h) */
    const float *x_scale;      /* FP8 products: [m] */
    bool per_token;
    int turn_step;  /* from a warpgroup's staged outputs to the next one's */
    int tail_tiles; /* tiles of the stream-K tail */
    stream_k_tail tail;
    float4 *handed;  /* partial sums of blocks */
    uint64_t *ready; /* flags of the warps that have stored theirs */
} gemm_args;

struct operand_copies;

/* Tile of a block: 64 rows of W for each of ROW_GROUPS, by T tokens. K_GROUPS warpgroups with the
 * same rows take steps in turn. SPLIT_K: the blocks of a cluster split K, too. */
template <moq_nvfp4_type TYPE, int T_, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K> struct tile {
    typedef gemm_args args;
    typedef layer_tiles<false> tiles;
    typedef operand_copies copies;
    static constexpr bool stream_k = true, staggered = true;
    static constexpr bool share_tokens = false, share_weights = false;
    static __device__ __forceinline__ int tile_tokens(const gemm_args *a) {
        return a->tokens;
    }
    static constexpr moq_nvfp4_type type = TYPE;
    static constexpr int T = T_, WAVES = 1, row_groups = ROW_GROUPS, k_groups = K_GROUPS;
    static constexpr bool split_k = SPLIT_K, pair = false;
    static constexpr int consumers = 128 * ROW_GROUPS * K_GROUPS;
    /* Registers of consumers and producers, where they differ. */
    static constexpr bool uneven = T * ROW_GROUPS * K_GROUPS >= 384;
    static constexpr int registers = consumers == 512 ? 112 : 152;
    static constexpr int copier_registers = consumers == 512 ? 32 : 56;
    /* One warp copies weights, another tokens. */
    static constexpr int copier = consumers, token_arrivals = 1;
    static constexpr int sorters = 0; /* warps that put tokens in another order, in turn */
    static constexpr int room_bytes = consumers / 32 * (2 * MOQ_NVFP4_MEDIUM_SCALES);
    static constexpr int threads = consumers + (uneven ? 128 : 64);
    static constexpr int weight_rows = 64 * ROW_GROUPS, tokens = T;
    static constexpr int weight_bytes = weight_rows / 16 * 2 * UNIT;
    static constexpr int token_size = 2; /* bytes of a value */
    static constexpr int token_bytes = T * STEP * token_size;
    /* Products that a set of fragments is for: two of T = 128 where registers are few. */
    static constexpr int depth = T == 128 && consumers == 512 ? 2 : 4;
    static constexpr int pieces = STEP / 16 / depth; /* pieces of a step */
    /* Copies of weights before the block's other barriers are ready, 14 to 18 KB: more would delay
     * x (docs/lab/nvfp4-medium.md). */
    static constexpr int first_copies = ROW_GROUPS == 1 ? 3 : 4 / ROW_GROUPS;
    /* Decodes two sets of fragments before the first tokens arrive: 1 % where products take long.
     */
    static constexpr bool early = T == 128;
    static_assert(K_GROUPS <= 2, "warpgroups of other steps have code of their own");
    static constexpr int stage = (token_bytes + weight_bytes + 1023) / 1024 * 1024;
    /* Sums of other blocks have room beside the pipeline, rather than in its place. */
    static constexpr bool own_room = T < 128;
    /* Scales that outputs have. */
    static constexpr bool tokens_first = false, row_factors = true, token_factors = false;
    static constexpr float unit = MOQ_NVFP4_FACTOR;
};

/* ---- copies of a step: tokens come first in a stage ---- */

/* Copies the tokens of a step. */
template <class S>
static __device__ __forceinline__ void copy_tokens(const gemm_args *a, const producer_pipeline *p,
                                                   const next_copy *f) {
    uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage);
    uint32_t bar = p->barriers.tokens + 8u * f->slot.index;
    mbarrier_expect(bar, a->tokens * (STEP * S::token_size));
#pragma unroll
    for (int box = 0; box < S::token_size; box++, to += S::T * STEP) {
        int column = (S::token_size * f->step + box) * STEP;
        copy_box_2d(to, p->tokens, column, f->where.token, bar, p->token_policy);
    }
}

/* Returns the number of this warp's 16 rows of W among those of its block. */
template <class S> static __device__ __forceinline__ int slab_of_warp(void) {
    return threadIdx.x / (128 * S::k_groups) * 4 + threadIdx.x % 128 / 32;
}

struct operand_copies {
    template <class S>
    static __device__ __forceinline__ void weights(const gemm_args *, const producer_pipeline *p,
                                                   const next_copy *f) {
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage + S::token_bytes);
        uint32_t bar = p->barriers.weights + 8u * f->slot.index;
        mbarrier_expect(bar, S::weight_bytes);
        copy_box_2d(to, p->weights, f->step * (2 * UNIT / 8), f->where.row / 16, bar,
                    p->weight_policy);
    }

    template <class S>
    static __device__ __forceinline__ void tokens(const gemm_args *a, const producer_pipeline *p,
                                                  const next_copy *f) {
        copy_tokens<S>(a, p, f);
    }

    /* Returns where this lane reads codes in the first stage. */
    template <class S> static __device__ __forceinline__ uint32_t codes(uint32_t pipeline) {
        uint32_t lane = threadIdx.x % 32;
        return pipeline + S::token_bytes + slab_of_warp<S>() * (2 * UNIT) +
               16 * (lane ^ (lane >> 3));
    }

    /* Returns where this lane reads the scales that it decodes. */
    template <class S> static __device__ __forceinline__ uint32_t scales(uint32_t pipeline) {
        uint32_t lane = threadIdx.x % 32;
        return pipeline + S::token_bytes + slab_of_warp<S>() * (2 * UNIT) + MOQ_PACK_SCALES +
               lane / 16 * UNIT + lane % 16 * 4;
    }
};

/* ---- mainloop ---- */

/* First stage as a warp reads it. */
typedef struct {
    stage_barriers barriers;
    uint32_t codes, scales; /* addresses of this lane */
    uint32_t room;          /* of this warp: decoded scales of two steps; or of the block */
    uint64_t tokens;        /* operand of wgmma */
    uint32_t stages;
} consumer_pipeline;

/* Bytes of a warp's decoded scales of a step: 16 rows and 8 groups, [units][g][groups of the unit,
 * rows g and g + 8]. Four lanes need the same scales; each makes a quarter. */
#define SCALES MOQ_NVFP4_MEDIUM_SCALES

/* Pipeline state of a warpgroup as offsets: of the stage, its barriers and its scales, and the
 * parity of its phase. The compiler must see that it is uniform, or every product passes its
 * operand through two registers. */
typedef struct {
    uint32_t at, barriers, parity, scales;
} stage_place;

/* Moves on to the next step of this warpgroup. */
template <class S>
static __device__ __forceinline__ void advance_own(stage_place *s, uint32_t stages) {
    s->at += S::k_groups * S::stage;
    s->barriers += S::k_groups * 8;
    s->scales ^= SCALES;
    if (s->barriers >= stages * 8) {
        s->at -= stages * S::stage;
        s->barriers -= stages * 8;
        s->parity ^= 1;
    }
}

/* Fragments of some products of 16 columns. */
template <class S> struct fragments {
    uint32_t a[S::depth][4];
};

/* Addresses of a lane's scales: those that it makes of a step, four of two groups of rows g and g +
 * 8, and those that it needs. */
typedef struct {
    uint32_t made, needed;
} scale_places;

static __device__ __forceinline__ scale_places find_scale_places(const consumer_pipeline *t) {
    uint32_t lane = threadIdx.x % 32;
    return {kept(t->room + lane * 8), kept(t->room + lane / 4 * 16)};
}

/* Decoder of packed codes. */
struct packed_decoder {
    scale_places p;

    /* Decodes this lane's scales of a step. */
    template <class S>
    __device__ __forceinline__ void begin_step(const consumer_pipeline *t, const stage_place *s) {
        uint32_t four = load_shared_word(t->scales + s->at);
        store_shared_pair(p.made + s->scales, {moq_nvfp4_scales<S::type>(four, false),
                                               moq_nvfp4_scales<S::type>(four, true)});
        __syncwarp();
    }

    /* Decodes a piece of a step. */
    template <class S>
    __device__ __forceinline__ void decode(const consumer_pipeline *t, const stage_place *s,
                                           int piece, fragments<S> *f) const {
        int first = piece * S::depth; /* index among the products of the step, four to a unit */
        uint32_t from = t->codes + s->at + first / 4 * UNIT + first % 4 * 4;
        uint32_t scales_from = p.needed + s->scales + first / 4 * (SCALES / 2) + first % 4 * 4;
        uint32_t codes[S::depth], scales[S::depth];
        if constexpr (S::depth == 4) {
            *(uint4 *)codes = load_shared(from);
            *(uint4 *)scales = load_shared(scales_from);
        } else {
            *(uint2 *)codes = load_shared_pair(from);
            *(uint2 *)scales = load_shared_pair(scales_from);
        }
#pragma unroll
        for (int i = 0; i < S::depth; i++)
            moq_nvfp4_fragment<S::type>(codes[i], scales[i], f->a[i]);
    }
};

template <class S>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const stage_place *s,
                                             int piece, const fragments<S> *f,
                                             float (&sum)[S::T / 2]) {
    int first = piece * S::depth;
    uint64_t right =
        t->tokens + s->at / 16 + (uint32_t)(first / 4 * (S::T * STEP / 16) + first % 4 * 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::depth; i++) {
        if constexpr (S::type == MOQ_NVFP4_F16)
            wgmma_f16(sum, f->a[i], right + 2 * i);
        else
            wgmma_bf16(sum, f->a[i], right + 2 * i);
    }
    wgmma_commit();
}

/* Marks the end of these fragments' products: until here they stay in their registers. */
template <class S> static __device__ __forceinline__ void give_up(fragments<S> *f) {
#pragma unroll
    for (int i = 0; i < S::depth * 4; i++)
        asm volatile("" : "+r"(f->a[i / 4][i % 4])::"memory");
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t, const stage_place *s) {
    warp_releases<false>(t->barriers.empty + s->barriers);
}

/* Adds `steps` steps of this warpgroup from `s` on to the sums. While a piece is multiplied, the
 * next is decoded, by a class that reads the codes. */
template <class S, class DECODER>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, DECODER d, int steps,
                                                stage_place *s, float (&sum)[S::T / 2]) {
    fragments<S> set[2] = {};
    stage_place before = *s;
    if (steps <= 0)
        return;
    mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
    d.template begin_step<S>(t, s);
    d.template decode<S>(t, s, 0, &set[0]);
    if (S::early)
        d.template decode<S>(t, s, 1, &set[1]);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        mbarrier_wait(t->barriers.tokens + s->barriers, s->parity);
#pragma unroll
        for (int piece = 0; piece < S::pieces; piece++) {
            fragments<S> *own = &set[piece % 2], *other = &set[1 - piece % 2];
            issue<S>(t, s, piece, own, sum);
            wgmma_wait<1>();
            give_up<S>(other);
            if (piece == 0 && left < steps)
                release<S>(t, &before);
            bool have = S::early && piece == 0 && left == steps;
            if (piece + 1 < S::pieces && !have)
                d.template decode<S>(t, s, piece + 1, other);
        }
        before = *s;
        advance_own<S>(s, t->stages);
        if (left > 1) {
            mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
            d.template begin_step<S>(t, s);
            d.template decode<S>(t, s, 0, &set[0]);
        }
    }
    wgmma_wait<0>();
    give_up<S>(&set[1]);
    stay_here(sum);
    release<S>(t, &before);
}

/* ---- the kernel's frame, exact or with FP8 products. A class P has the products: P::rows is what
 * they need of a thread's rows, P::fetch loads it, P::multiply adds steps to the sums, and
 * P::complete puts what products leave out into the scales of the outputs ---- */

/* Returns a number that is the same in all of a warp so that the compiler knows it. Otherwise it
 * passes operands whose stage depends on the number through two registers, a fifth of the
 * instructions. */
static __device__ __forceinline__ int same_in_warp(int number) {
    return __reduce_max_sync(0xffffffffu, number);
}

/* ---- partial sums of the stream-K tail ---- */

static __device__ __forceinline__ uint64_t *flag_of(const gemm_args *a, int block, int warps) {
    return a->ready + block * warps + threadIdx.x / 32;
}

template <class S>
static __device__ __forceinline__ float4 *sums_of(const gemm_args *a, int block) {
    return a->handed + (int64_t)block * (S::T / 8 * S::consumers) + threadIdx.x;
}

/* Stores a warp's partial sums for the block that has the tile's last steps; the same warp of that
 * block adds them. */
template <class S>
static __device__ __forceinline__ void store_partial_sums(const gemm_args *a,
                                                          const float (&sum)[S::T / 2]) {
    float4 *to = sums_of<S>(a, (int)blockIdx.x);
#pragma unroll
    for (int j = 0; j < S::T / 8; j++)
        __stcg(to + j * S::consumers,
               make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        store_release(flag_of(a, (int)blockIdx.x, S::consumers / 32), READY);
}

/* Adds the partial sums of the tile's earlier steps, of the blocks before this one, from the last
 * to the first. */
template <class S>
static __device__ __forceinline__ void add_partial_sums(const gemm_args *a, const work *w,
                                                        float (&sum)[S::T / 2]) {
    constexpr int EIGHTS = S::T / 8;                       /* of tokens */
    constexpr int AT_ONCE = 64 / S::T > 1 ? 64 / S::T : 1; /* blocks at once */
    int block = (int)blockIdx.x, others = same_in_warp(earlier_workers(a, w, block));
    for (int i = threadIdx.x % 32; i < others; i += 32)
        await_sums(flag_of(a, block - i - 1, S::consumers / 32));
    __syncwarp();
    for (int first = 1; first <= others; first += AT_ONCE) {
        float4 other[AT_ONCE][EIGHTS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int j = 0; j < EIGHTS; j++) {
                other[i][j] = make_float4(0, 0, 0, 0);
                if (first + i <= others)
                    other[i][j] = __ldcg(sums_of<S>(a, block - first - i) + j * S::consumers);
            }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int j = 0; j < EIGHTS; j++) {
                sum[4 * j] += other[i][j].x;
                sum[4 * j + 1] += other[i][j].y;
                sum[4 * j + 2] += other[i][j].z;
                sum[4 * j + 3] += other[i][j].w;
            }
    }
}

/* ---- the kernel. STREAM_K: blocks share the steps of some tiles ---- */

template <class S, class P, bool STREAM_K>
static __device__ __forceinline__ void consume(const gemm_args *a, const consumer_pipeline *t,
                                               uint8_t *shared, column_terms<S> *b,
                                               const cluster_barriers *meet) {
    int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128,
                            0); /* shuffled, so that the compiler sees it is uniform */
    int row = group / S::k_groups * 64;
    uint32_t turn = shared_address(shared + a->turn) + group * a->turn_step;
    stage_place step = {};
    for (work w = start<S>(a);; next_tile<S>(a, &w)) {
        int end = same_in_warp(w.end), steps = end - same_in_warp(w.first);
        if (steps == 0)
            return;
        tile_place at = place_of<S>(a, w.number, 0);
        float sum[S::T / 2] = {};
        tile_terms<S> terms = {};
        typename P::rows own = P::fetch(a, &w, at.row + row);
        fetch_early<S>(a, &at, row, &terms);
        P::template complete<S>(a, &at, row, &terms);
        wait_for_predecessor(); /* returns at once from the second tile on */
        if (S::split_k && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks of the cluster run */
        fetch_late<S>(a, &at, row, &terms);
        if (S::k_groups == 1 || group % S::k_groups == 0) {
            P::template multiply<S>(t, own, (steps + S::k_groups - 1) / S::k_groups, &step, sum);
        } else {
            stage_place second = {S::stage, 8};
            P::template multiply<S>(t, own, steps / S::k_groups, &second, sum);
        }
        if constexpr (S::split_k) {
            reduce_splits<S>(a, shared, b + group, meet, &terms, &at, sum);
            return;
        }
        if (STREAM_K && end < a->steps) {
            store_partial_sums<S>(a, sum);
            continue;
        }
        if (STREAM_K && steps < a->steps)
            add_partial_sums<S>(a, &w, sum);
        if (S::token_factors)
            post_columns<S>(&terms, b + group);
        write_columns<S>(a, b + group, turn, &at, row, &terms.row[0], sum);
    }
}

/* Puts tokens in the order that a lane's codes have, where there are S::sorters: warps between the
 * copies and the products, whose barriers are `sorted`. Each has stages of its own: one that met
 * only some phases of a barrier could take a phase for the one before the last. */
template <class S>
static __device__ __forceinline__ void sort_tokens(const gemm_args *a, const producer_pipeline *p,
                                                   uint32_t sorted, uint32_t room, int sorter) {
    next_copy f = begin_copies<S>(a, p);
    while (more(&f)) {
        if (f.slot.index % S::sorters == sorter) {
            mbarrier_wait(p->barriers.tokens + 8u * f.slot.index, f.slot.parity);
            S::copies::template sort<S>(a, p->pipeline + (uint32_t)(f.slot.index * S::stage),
                                        room + (uint32_t)(f.slot.index * S::stage_room));
            fence_async_proxy();
            warp_releases<false>(sorted + 8u * f.slot.index);
        }
        advance_copy<S>(a, p, &f);
    }
}

template <class S, class P, bool STREAM_K>
static __global__ void __launch_bounds__(S::threads, 1)
    nvfp4_medium(const __grid_constant__ CUtensorMap weights,
                 const __grid_constant__ CUtensorMap tokens,
                 const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ column_terms<S> terms[S::consumers / 128];
    __shared__ __align__(16) uint8_t beside[S::room_bytes];
    __shared__ __align__(8) uint64_t sorted_barrier[S::sorters ? MAX_STAGES : 1];
    static_assert(sizeof terms <= COLUMN_TERMS_BYTES, "as the launch counts them");
    uint32_t first = fixed_shared_address(barrier), pipeline = fixed_shared_address(smem);
    stage_barriers barriers = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    cluster_barriers meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    producer_pipeline p = {
        &weights, &tokens, pipeline, 0, barriers, args.columns == 1 ? once : keep, keep, 0};
    next_copy f = {};
    uint32_t sorted = fixed_shared_address(sorted_barrier);
    launch_dependents();
    if (S::sorters && threadIdx.x == S::copier + 64)
        for (int i = 0; i < args.stages; i++)
            mbarrier_init(sorted + 8u * i, WARP_ARRIVALS);
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < S::consumers) {
        if (S::uneven)
            more_registers<S::registers>();
        uint32_t room = shared_address(beside) + (S::sorters ? 0 : threadIdx.x / 32 * (2 * SCALES));
        stage_barriers read = {first, S::sorters ? sorted : barriers.tokens, barriers.empty};
        consumer_pipeline t = {read,
                               kept(S::copies::template codes<S>(pipeline)),
                               kept(S::copies::template scales<S>(pipeline)),
                               room,
                               wgmma_operand(pipeline),
                               (uint32_t)args.stages};
        if (S::split_k && threadIdx.x == 0)
            mbarrier_expect(meet.posted, bytes_to_come<S>());
        consume<S, P, STREAM_K>(&args, &t, smem, terms, &meet);
    } else {
        if (S::uneven)
            fewer_registers<S::copier_registers>();
        if (threadIdx.x == S::copier)
            produce_weights<S>(&args, &p, f);
        else if (threadIdx.x == S::copier + 32)
            produce_tokens<S>(&args, &p);
        if constexpr (S::sorters > 0) {
            int sorter = (int)threadIdx.x / 32 - S::copier / 32 - 2;
            if (sorter >= 0 && sorter < S::sorters)
                sort_tokens<S>(&args, &p, sorted, shared_address(beside), sorter);
        }
    }
}

/* Kernels and threads of a shape of tiles. */
typedef struct {
    int threads;
    const void *kernel[2]; /* for whole tiles; with a stream-K tail, or NULL */
} variant;

/* ---- exact products. Each type of activations is compiled in a file of its own: both take half a
 * minute ---- */

/* Products of the weights as they are: they need nothing of a row. */
struct exact_products {
    typedef struct {
    } rows;
    static __device__ __forceinline__ rows fetch(const gemm_args *, const work *, int) {
        return {};
    }
    template <class S>
    static __device__ __forceinline__ void complete(const gemm_args *, const tile_place *, int,
                                                    tile_terms<S> *) {
    }
    template <class S>
    static __device__ __forceinline__ void multiply(const consumer_pipeline *t, rows, int steps,
                                                    stage_place *s, float (&sum)[S::T / 2]) {
        nvfp4_medium::multiply<S>(t, packed_decoder{find_scale_places(t)}, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <moq_nvfp4_type TYPE, int T, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K, bool SHARED>
static variant variant_of(void) {
    typedef tile<TYPE, T, ROW_GROUPS, K_GROUPS, SPLIT_K> shape;
    static_assert(shape::stage == MOQ_NVFP4_MEDIUM_STAGE(T, ROW_GROUPS, 2, MOQ_PACKED_STEP),
                  "as the choice counts it");
    return {shape::threads,
            {(const void *)nvfp4_medium<shape, exact_products, false>,
             SHARED ? (const void *)nvfp4_medium<shape, exact_products, SHARED> : NULL}};
}

/* ---- the launch, exact or with FP8 products (nvfp4_medium.cu) ---- */

typedef moq_nvfp4_medium_layout layout;

/* Workspace of a stream-K tail: flags of the warps, then partial sums; empty without a tail. */
typedef struct {
    int64_t flags, bytes;
} sums_room;

sums_room room_of_sums(const moq_nvfp4_medium_config *config);

/* Returns the kernels of every shape for activations of float16 (nvfp4_medium_f16.cu). */
const variant *float16_variants(void);

/* Refuses a call of more tokens than the kernels take. */
moq_status refuse(const moq_linear_call *call, moq_err *err);

/* Makes the arguments of a call; partial sums go to `room`. */
gemm_args begin_args(const moq_linear_call *call, const moq_nvfp4_medium_config *config, layout l,
                     void *room);

/* Describes W in the packed layout. */
moq_status map_packed(CUtensorMap *map, const moq_linear_call *call,
                      const moq_nvfp4_medium_config *config, moq_err *err);

/* Launches a config's kernel, found in `variants`, one for each shape. x has a row of `width` bytes
 * for each token, `stride` bytes apart. */
moq_status launch_tiles(const moq_linear_call *call, const moq_nvfp4_medium_config *config,
                        layout l, const variant *variants, const gemm_args *args,
                        const CUtensorMap *weights, const void *x, int64_t width, int64_t stride,
                        moq_err *err);

} // namespace moq::nvfp4_medium

#endif
