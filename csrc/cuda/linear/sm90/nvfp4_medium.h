/* Tiles of the NVFP4 linears for some tokens on Hopper, exact (nvfp4_medium.cu) and with FP8
 * products (nvfp4_fp8_medium.cu): copies of their operands, and exact products.
 *
 * A tile is some rows of W by some tokens; a step is 128 columns of both. W is in the packed layout
 * (core/nvfp4_packed.h): a matrix of bytes with a row for each 16 rows of W and 576 bytes for each
 * 64 columns, of which the copy engine brings a box. x comes in the 128-byte swizzle. Beyond the
 * last columns both are zeros.
 *
 * A warp reads the codes of its 16 rows and 64 columns with one load a lane and decodes them into
 * the fragments of four products, while the products of the 64 columns before are under way: two
 * sets of fragments take turns. Four lanes need the same scales; each makes a quarter of a step's,
 * which come to the others through shared memory. */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_MEDIUM_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_MEDIUM_H

#include "core/nvfp4_packed.h"
#include "cuda/choice/nvfp4_medium.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"
#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/gemm_epilogue.h"
#include "cuda/linear/sm90/gemm_pipeline.h"
#include "cuda/linear/sm90/gemm_scheduler.h"

namespace moq::nvfp4_medium {

using namespace gemm;

#define STEP MOQ_NVFP4_MEDIUM_STEP
#define UNIT MOQ_PACK_BYTES
static_assert(MAX_STAGES == MOQ_NVFP4_MEDIUM_STAGES, "as the choice counts them");

typedef struct {
    int m, n;
    int steps;     /* of 128 columns */
    int row_tiles; /* along W */
    int columns;   /* along the tokens */
    int tokens;    /* of a tile, at most T */
    int stages;
    int flight;      /* of them whose weights are on their way at once, to begin with */
    int split_steps; /* of a block, where K is divided, */
    int more_splits; /* and how many blocks have one more */
    int room,
        side; /* where sums of other blocks come to, in shared memory, and float4 of each share */
    int turn; /* where outputs turn around */
    moq_output out;
    const float *output_scale; /* [N] */
    const float *fold_scale;   /* of e4m3: [N], powers of two, */
    const float *x_scale;      /* and [m] */
    bool per_token;
    int turn_step;  /* from where a warpgroup's outputs turn around to the next one's */
    int tail_tiles; /* tiles at the end whose steps all blocks share evenly */
    stream_k_tail tail;
    float4 *handed;  /* sums of other blocks, and */
    uint64_t *ready; /* whether they are there, of each warp */
} gemm_args;

struct operand_copies;

/* A block's tile: 64 rows of W for each of ROW_GROUPS, by T tokens. Of K_GROUPS warpgroups with the
 * same rows each takes every so many steps. PARTS: the blocks of a cluster share K too. */
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
    /* Registers of those who multiply and of those who copy, where not all have the same. */
    static constexpr bool uneven = T * ROW_GROUPS * K_GROUPS >= 384;
    static constexpr int registers = consumers == 512 ? 112 : 152;
    static constexpr int copier_registers = consumers == 512 ? 32 : 56;
    /* A warp copies weights, another tokens. */
    static constexpr int copier = consumers, token_arrivals = 1;
    static constexpr int threads = consumers + (uneven ? 128 : 64);
    static constexpr int weight_rows = 64 * ROW_GROUPS, tokens = T;
    static constexpr int weight_bytes = weight_rows / 16 * 2 * UNIT;
    static constexpr int token_size = 2; /* bytes of a value */
    static constexpr int token_bytes = T * STEP * token_size;
    /* Products that a set of fragments is for: two of T = 128 where registers are few. */
    static constexpr int depth = T == 128 && consumers == 512 ? 2 : 4;
    static constexpr int pieces = STEP / 16 / depth; /* of a step */
    /* Copies of weights before the rest of a block is ready, 14 to 18 KB: x waits behind more of
     * them (docs/lab/nvfp4-medium.md). */
    static constexpr int first_copies = ROW_GROUPS == 1 ? 3 : 4 / ROW_GROUPS;
    /* Both sets are decoded before the first tokens are there: 1 % where products take long. */
    static constexpr bool early = T == 128;
    static_assert(K_GROUPS <= 2, "warpgroups of other steps have code of their own");
    static constexpr int stage = (token_bytes + weight_bytes + 1023) / 1024 * 1024;
    /* Sums of other blocks have room beside the ring, rather than where it was. */
    static constexpr bool own_room = T < 128;
    /* Which factors outputs have. */
    static constexpr bool tokens_first = false, row_factors = true, token_factors = false;
    static constexpr float unit = MOQ_NVFP4_FACTOR;
};

/* ---- copies of a step: in a stage tokens are first ---- */

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
        uint32_t to = p->pipeline + (uint32_t)(f->slot.index * S::stage);
        uint32_t bar = p->barriers.tokens + 8u * f->slot.index;
        mbarrier_expect(bar, a->tokens * (STEP * S::token_size));
#pragma unroll
        for (int box = 0; box < S::token_size; box++, to += S::T * STEP) {
            int column = (S::token_size * f->step + box) * STEP;
            copy_box_2d(to, p->tokens, column, f->where.token, bar, p->token_policy);
        }
    }
};

/* ---- products ---- */

/* What a warp takes steps from, in the first stage. */
typedef struct {
    stage_barriers barriers;
    uint32_t codes, scales; /* of this lane */
    uint32_t room;          /* of this warp: scales as operands, of two steps */
    uint64_t tokens;        /* the operand */
    uint32_t stages;
} consumer_pipeline;

/* Bytes of a warp's scales of a step as products need them: of 16 rows and 8 groups, [units][g]
 * [groups of the unit, rows g and g + 8]. Four lanes need the same: each makes a quarter. */
#define SCALES MOQ_NVFP4_MEDIUM_SCALES

/* A step of a warpgroup: the place in the ring, of it, of its barriers and of its scales, and the
 * parity of the phase in which it is used next. The compiler has to see that all threads have the
 * same, or every product takes its operand through two registers. */
typedef struct {
    uint32_t at, barriers, parity, scales;
} stage_place;

/* To the next step of this warpgroup. */
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

/* Where a lane puts the scales that it makes of a step, four of two groups of rows g and g + 8, and
 * where it finds those that it needs. */
typedef struct {
    uint32_t made, needed;
} scale_places;

static __device__ __forceinline__ scale_places find_scale_places(const consumer_pipeline *t) {
    uint32_t lane = threadIdx.x % 32;
    return {kept(t->room + lane * 8), kept(t->room + lane / 4 * 16)};
}

/* Makes the scales of a step. */
template <class S>
static __device__ __forceinline__ void make_scales(const consumer_pipeline *t, const stage_place *s,
                                                   const scale_places *p) {
    uint32_t four = load_shared_word(t->scales + s->at);
    store_shared_pair(p->made + s->scales, {moq_nvfp4_scales<S::type>(four, false),
                                            moq_nvfp4_scales<S::type>(four, true)});
    __syncwarp();
}

/* Decodes a piece of a step. */
template <class S>
static __device__ __forceinline__ void decode(const consumer_pipeline *t, const stage_place *s,
                                              const scale_places *p, int piece, fragments<S> *f) {
    int first = piece * S::depth; /* of the products of the step, four to a unit */
    uint32_t from = t->codes + s->at + first / 4 * UNIT + first % 4 * 4;
    uint32_t scales_from = p->needed + s->scales + first / 4 * (SCALES / 2) + first % 4 * 4;
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

/* The products of these fragments have ended: until here they stay in their registers. */
template <class S> static __device__ __forceinline__ void give_up(fragments<S> *f) {
#pragma unroll
    for (int i = 0; i < S::depth * 4; i++)
        asm volatile("" : "+r"(f->a[i / 4][i % 4])::"memory");
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t, const stage_place *s) {
    warp_releases<false>(t->barriers.empty + s->barriers, 0);
}

/* Adds `steps` steps of this warpgroup from `s` on to the sums: while a piece is multiplied the
 * next is decoded. */
template <class S>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, int steps,
                                                stage_place *s, float (&sum)[S::T / 2]) {
    fragments<S> set[2] = {};
    stage_place before = *s;
    scale_places p = find_scale_places(t);
    if (steps <= 0)
        return;
    mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
    make_scales<S>(t, s, &p);
    decode<S>(t, s, &p, 0, &set[0]);
    if (S::early)
        decode<S>(t, s, &p, 1, &set[1]);
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
                decode<S>(t, s, &p, piece + 1, other);
        }
        before = *s;
        advance_own<S>(s, t->stages);
        if (left > 1) {
            mbarrier_wait(t->barriers.weights + s->barriers, s->parity);
            make_scales<S>(t, s, &p);
            decode<S>(t, s, &p, 0, &set[0]);
        }
    }
    wgmma_wait<0>();
    give_up<S>(&set[1]);
    stay_here(sum);
    release<S>(t, &before);
}

/* A block of the NVFP4 linears for some tokens on Hopper, exact or with FP8 products: its barriers,
 * who copies, and what becomes of sums.
 *
 * Products are a class P of the caller: P::rows is what they have of a thread's rows, P::fetch
 * brings it, P::multiply adds steps to the sums (as `multiply` of nvfp4_medium.h),
 * P::complete puts into the factors of the outputs what the products left out.
 */

/* A number that is one in a warp, as the compiler does not see: it would pass what products take
 * from a ring whose place depends on it through two registers, a fifth of the instructions. */
static __device__ __forceinline__ int same_in_warp(int number) {
    return __reduce_max_sync(0xffffffffu, number);
}

/* ---- sums of tiles that blocks share ---- */

static __device__ __forceinline__ uint64_t *flag_of(const gemm_args *a, int block, int warps) {
    return a->ready + block * warps + threadIdx.x / 32;
}

template <class S>
static __device__ __forceinline__ float4 *sums_of(const gemm_args *a, int block) {
    return a->handed + (int64_t)block * (S::T / 8 * S::consumers) + threadIdx.x;
}

/* Leaves a warp's sums for the block that has the last steps of the tile, whose same warp takes
 * them. */
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

/* Adds the sums of the tile's steps before this block's, those of the blocks before, from the last
 * to the first. */
template <class S>
static __device__ __forceinline__ void add_partial_sums(const gemm_args *a, const work *w,
                                                        float (&sum)[S::T / 2]) {
    constexpr int PIECE = S::T / 8 < 16 ? S::T / 8 : 16;   /* eights at once, of so many */
    constexpr int AT_ONCE = 64 / S::T > 1 ? 64 / S::T : 1; /* blocks */
    int block = (int)blockIdx.x, others = same_in_warp(earlier_workers(a, w, block));
    for (int i = threadIdx.x % 32; i < others; i += 32)
        await_sums(flag_of(a, block - i - 1, S::consumers / 32));
    __syncwarp();
    for (int first = 1; first <= others; first += AT_ONCE) {
#pragma unroll
        for (int begin = 0; begin < S::T / 8; begin += PIECE) {
            float4 other[AT_ONCE][PIECE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int j = 0; j < PIECE; j++) {
                    other[i][j] = make_float4(0, 0, 0, 0);
                    if (first + i <= others)
                        other[i][j] =
                            __ldcg(sums_of<S>(a, block - first - i) + (begin + j) * S::consumers);
                }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                for (int j = 0; j < PIECE; j++) {
                    sum[4 * (begin + j)] += other[i][j].x;
                    sum[4 * (begin + j) + 1] += other[i][j].y;
                    sum[4 * (begin + j) + 2] += other[i][j].z;
                    sum[4 * (begin + j) + 3] += other[i][j].w;
                }
        }
    }
}

/* ---- the kernel. STREAM_K: blocks share K of some tiles ---- */

template <class S, class P, bool STREAM_K>
static __device__ __forceinline__ void consume(const gemm_args *a, const consumer_pipeline *t,
                                               uint8_t *shared, column_terms<S> *b,
                                               const cluster_barriers *meet) {
    int group =
        __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
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
        typename P::rows own = P::fetch(a, at.row + row);
        fetch_early<S>(a, &at, row, &terms);
        P::template complete<S>(a, &at, row, &terms);
        wait_for_predecessor(); /* at once from the second tile on */
        if (S::split_k && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks run */
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

template <class S, class P, bool STREAM_K>
static __global__ void __launch_bounds__(S::threads, 1)
    nvfp4_medium(const __grid_constant__ CUtensorMap weights,
                 const __grid_constant__ CUtensorMap tokens,
                 const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ column_terms<S> terms[S::consumers / 128];
    __shared__ __align__(16) uint8_t scales[S::consumers / 32 * (2 * SCALES)];
    static_assert(sizeof terms <= COLUMN_TERMS_BYTES, "as the launch counts them");
    uint32_t first = fixed_shared_address(barrier), pipeline = fixed_shared_address(smem);
    stage_barriers barriers = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    cluster_barriers meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    producer_pipeline p = {
        &weights, &tokens, pipeline, 0, barriers, args.columns == 1 ? once : keep, keep, 0};
    next_copy f = {};
    launch_dependents();
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < S::consumers) {
        if (S::uneven)
            more_registers<S::registers>();
        int slab = threadIdx.x / (128 * S::k_groups) * 4 + threadIdx.x % 128 / 32;
        int lane = threadIdx.x % 32;
        uint32_t unit = pipeline + (uint32_t)(S::token_bytes + slab * (2 * UNIT));
        uint32_t room = shared_address(scales) + threadIdx.x / 32 * (2 * SCALES);
        consumer_pipeline t = {barriers,
                               kept(unit + 16 * (lane ^ (lane >> 3))),
                               kept(unit + MOQ_PACK_SCALES + lane / 16 * UNIT + lane % 16 * 4),
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
    }
}

/* What a launch needs to know of a shape of tiles. */
typedef struct {
    int threads;
    const void *kernel[2]; /* for whole tiles, for shared ones or NULL */
} variant;

/* Kernels of the NVFP4 linear of some tokens on Hopper with exact products (nvfp4_medium.cu):
 * what a file that compiles them for one type of activations includes. Compiling them for both
 * types takes half a minute. */

/* Products of the weights as they are: nothing of a row is needed before its outputs. */
struct exact_products {
    typedef struct {
    } rows;
    static __device__ __forceinline__ rows fetch(const gemm_args *, int) {
        return {};
    }
    template <class S>
    static __device__ __forceinline__ void complete(const gemm_args *, const tile_place *, int,
                                                    tile_terms<S> *) {
    }
    template <class S>
    static __device__ __forceinline__ void multiply(const consumer_pipeline *t, rows, int steps,
                                                    stage_place *s, float (&sum)[S::T / 2]) {
        nvfp4_medium::multiply<S>(t, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <moq_nvfp4_type TYPE, int T, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K, bool SHARED>
static variant variant_of(void) {
    typedef tile<TYPE, T, ROW_GROUPS, K_GROUPS, SPLIT_K> shape;
    static_assert(shape::stage == MOQ_NVFP4_MEDIUM_STAGE(T, ROW_GROUPS, 2),
                  "as the choice counts it");
    return {shape::threads,
            {(const void *)nvfp4_medium<shape, exact_products, false>,
             SHARED ? (const void *)nvfp4_medium<shape, exact_products, SHARED> : NULL}};
}

/* ---- the launch, exact or with FP8 products (nvfp4_medium.cu) ---- */

typedef moq_nvfp4_medium_layout layout;

/* Workspace of tiles whose steps blocks share: flags of the warps, then sums; none without them. */
typedef struct {
    int64_t flags, bytes;
} sums_room;

sums_room room_of_sums(const moq_nvfp4_medium_config *config);

/* Returns the kernels of every shape for activations of float16 (nvfp4_medium_f16.cu). */
const variant *float16_variants(void);

/* Refuses a call of more tokens than the kernels take. */
moq_status refuse(const moq_linear_call *call, moq_err *err);

/* Makes the arguments of a call; sums that blocks hand over go to `room`. */
gemm_args begin_args(const moq_linear_call *call, const moq_nvfp4_medium_config *config, layout l,
                     void *room);

/* Launches a config's kernel, found in `variants`, one for each shape. x has a row of `width` bytes
 * for each token, `stride` bytes apart. */
moq_status launch_tiles(const moq_linear_call *call, const moq_nvfp4_medium_config *config,
                        layout l, const variant *variants, const gemm_args *args, const void *x,
                        int64_t width, int64_t stride, moq_err *err);

} // namespace moq::nvfp4_medium

#endif
