/* A block of the NVFP4 linears for some tokens on Hopper, exact or with FP8 products: its barriers,
 * who copies, and what becomes of sums.
 *
 * Products are a class P of the caller: P::rows is what they have of a thread's rows, P::fetch
 * brings it, P::multiply adds steps to the sums (as `multiply` of sm90_nvfp4_medium_tile.h),
 * P::complete puts into the factors of the outputs what the products left out.
 */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_FRAME_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_FRAME_H

#include "cuda/linear/sm90/sm90_nvfp4_medium_tile.h"

namespace moq::nvfp4_medium {

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
static __device__ __forceinline__ void leave(const gemm_args *a, const float (&sum)[S::T / 2]) {
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
static __device__ __forceinline__ void add_earlier(const gemm_args *a, const work *w,
                                                   float (&sum)[S::T / 2]) {
    constexpr int PIECE = S::T / 8 < 16 ? S::T / 8 : 16;   /* eights at once, of so many */
    constexpr int AT_ONCE = 64 / S::T > 1 ? 64 / S::T : 1; /* blocks */
    int block = (int)blockIdx.x, others = same_in_warp(earlier_ones(a, w, block));
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

/* ---- the kernel. DIVIDED: blocks share K of some tiles ---- */

template <class S, class P, bool DIVIDED>
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
        if (DIVIDED && end < a->steps) {
            leave<S>(a, sum);
            continue;
        }
        if (DIVIDED && steps < a->steps)
            add_earlier<S>(a, &w, sum);
        if (S::token_factors)
            post_columns<S>(&terms, b + group);
        write_columns<S>(a, b + group, turn, &at, row, &terms.row[0], sum);
    }
}

template <class S, class P, bool DIVIDED>
static __global__ void __launch_bounds__(S::threads, 1)
    nvfp4_medium(const __grid_constant__ CUtensorMap weights,
                 const __grid_constant__ CUtensorMap tokens,
                 const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ column_terms<S> terms[S::consumers / 128];
    __shared__ __align__(16) uint8_t scales[S::consumers / 32 * (2 * SCALES)];
    static_assert(sizeof terms <= COLUMN_TERMS_BYTES, "what lay_out counts on");
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
        consume<S, P, DIVIDED>(&args, &t, smem, terms, &meet);
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

} // namespace moq::nvfp4_medium

#endif
