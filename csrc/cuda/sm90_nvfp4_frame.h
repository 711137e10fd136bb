/* A block of the NVFP4 GEMM of Hopper, exact or with FP8 products: its barriers, who copies, and
 * what becomes of sums.
 *
 * Products are a class P of the caller: P::rows is what they have of a thread's rows, P::fetch
 * brings it, P::multiply adds steps to the sums (as `multiply` of sm90_nvfp4_gemm.h), P::complete
 * puts into the factors of the outputs what the products left out. */
#ifndef MOQ_CUDA_SM90_NVFP4_FRAME_H
#define MOQ_CUDA_SM90_NVFP4_FRAME_H

#include "cuda/sm90_nvfp4_gemm.h"

#define BARRIERS (3 * MAX_STAGES + 2)

template <class S, class P>
static __device__ __forceinline__ void consume(const gemm_args *a, const taps *t, uint8_t *shared,
                                               board *b, const meeting *meet) {
    int group =
        __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
    float *turn = (float *)(shared + a->turn) + group * (CHUNK * PITCH);
    spot step = {};
    for (cursor c = start<S>(a); c.left > 0; c.left--, c.tile += c.stride) {
        place at = place_of<S>(a, c.tile);
        float sum[S::T / 2] = {};
        margin edge = {};
        rows_edge rows = {};
        int row = group / S::k_groups * 64;
        typename P::rows own = P::fetch(a, at.row + row);
        if (!S::token_factors)
            rows = fetch_factors<S>(a, &at, row);
        wait_for_predecessor(); /* at once from the second tile on */
        if (S::parts && !S::pair && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks run */
        if constexpr (S::token_factors)
            edge = fetch_margin<S>(a, &at);
        else
            fetch_biases<S>(a, &at, row, &rows);
        P::template complete<S>(a, &at, &edge);
        if (S::k_groups == 1 || group % S::k_groups == 0) {
            P::template multiply<S>(t, own, (c.end - c.first + S::k_groups - 1) / S::k_groups,
                                    &step, sum);
        } else {
            spot second = {S::stage, 8, 0};
            P::template multiply<S>(t, own, (c.end - c.first) / S::k_groups, &second, sum);
        }
        if constexpr (S::parts && S::token_factors) {
            bring_together<S>(a, shared, b, meet, &edge, &at, sum);
            return;
        } else if constexpr (S::parts) {
            bring_together<S, true>(a, shared, b, meet, &edge, &at, sum, &rows,
                                    shared_address(shared + a->turn + group * a->turn_step));
            return;
        } else if constexpr (!S::token_factors) {
            write_turned<S>(a, shared_address(turn), &at, row, &rows, sum);
            continue;
        }
        barrier_sync(1, S::consumers); /* the tile before is written */
        post_margin<S>(&edge, b);
        barrier_sync(1, S::consumers);
        write_columns<S>(a, b, turn, &at, group * 64, sum);
    }
}

/* Barriers of the ring and of the cluster, some by every warp: they take 30 ns each. The blocks of
 * a cluster know of each other's. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, const pipes *p,
                                              const meeting *meet, feed *f) {
    constexpr int WARPS = S::consumers / 32;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == S::consumers) {
        prefetch_map(p->weights);
        *f = begin_feed<S>(a, p);
        copy_first<S>(a, p, f);
    } else if (threadIdx.x == S::consumers + 32) {
        prefetch_map(p->tokens);
    } else if (warp < WARPS && threadIdx.x % 32 == 0) {
        if (S::parts && warp == 0) {
            mbarrier_init(meet->posted, 1);
            mbarrier_init(meet->ready, WARPS * WARP_ARRIVALS * blocks_in_cluster());
        }
#pragma unroll 1
        for (int i = warp + S::first_copies; i < a->stages; i += WARPS)
            mbarrier_init(p->gate.weights + 8u * i, 1); /* the first are the copying thread's */
#pragma unroll 1
        for (int i = warp; i < a->stages; i += WARPS) {
            mbarrier_init(p->gate.tokens + 8u * i, 1);
            mbarrier_init(p->gate.empty + 8u * i,
                          S::row_groups * (S::pair ? 8 : 4) * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair) {
        cluster_sync();
        return;
    }
    __syncthreads();
    if (S::parts && blocks_in_cluster() > 1)
        cluster_arrive(); /* for whoever waits to send sums here */
}

template <class S, class P>
static __global__ void __launch_bounds__(S::threads, 1)
    nvfp4_gemm(const __grid_constant__ CUtensorMap weights,
               const __grid_constant__ CUtensorMap tokens, const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ board edge;
    uint32_t first = fixed_shared_address(barrier), ring = fixed_shared_address(smem);
    gates gate = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    meeting meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    pipes p = {&weights, &tokens, ring, gate, args.columns == 1 ? once : keep, keep};
    feed f = {};
    launch_dependents();
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < S::consumers) {
        if (S::uneven)
            more_registers<S::registers>();
        int slab = threadIdx.x / (128 * S::k_groups) * 4 + threadIdx.x % 128 / 32;
        int lane = threadIdx.x % 32;
        const uint8_t *unit = smem + S::token_bytes + slab * (2 * UNIT);
        taps t = {gate, unit + 16 * (lane ^ (lane >> 3)), unit + MOQ_PACK_SCALES + 8 * (lane / 4),
                  wgmma_operand(ring), (uint32_t)args.stages};
        if (S::parts && threadIdx.x == 0)
            mbarrier_expect(meet.posted, bytes_to_come<S>());
        consume<S, P>(&args, &t, smem, &edge, &meet);
    } else {
        if (S::uneven)
            fewer_registers<S::copier_registers>();
        if (threadIdx.x == S::consumers)
            produce_weights<S>(&args, &p, f);
        else if (threadIdx.x == S::consumers + 32)
            produce_tokens<S>(&args, &p);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

#endif
