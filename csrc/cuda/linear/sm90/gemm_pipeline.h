/* Pipeline of the Hopper GEMMs whose weights and tokens have barriers of their own: the barriers of
 * its stages and the two producer threads, one for weights and one for tokens. Threads before
 * S::copier multiply or quantize tokens.
 *
 * The shape S of a tile says how to copy a step: S::copies::weights<S>(args, pipeline, copy) and
 * S::copies::tokens<S>(args, pipeline, copy). Small tiles are bound by what a step costs the
 * producer thread. */
#ifndef MOQ_CUDA_LINEAR_SM90_GEMM_PIPELINE_H
#define MOQ_CUDA_LINEAR_SM90_GEMM_PIPELINE_H

#include "cuda/device/ptx.h"
#include "cuda/linear/sm90/gemm_epilogue.h"
#include "cuda/linear/sm90/gemm_scheduler.h"

namespace moq::gemm {

#define MAX_STAGES 24
#define BARRIERS   (3 * MAX_STAGES + 2)

/* Barriers of the stages: weights are full, tokens are full, both are empty. */
typedef struct {
    uint32_t weights, tokens, empty;
} stage_barriers;

/* Sources and destinations of a producer's copies. */
typedef struct {
    const CUtensorMap *weights, *tokens;
    uint32_t pipeline, scales; /* in shared memory; token scales by groups */
    stage_barriers barriers;
    uint64_t weight_policy, token_policy;
    int rank; /* rank in a pair of blocks */
} producer_pipeline;

/* Cursor of a producer: the next step to copy. */
typedef struct {
    work at;
    tile_place where;
    int step, left; /* steps of the current tile */
    pipeline_state slot;
    int copied;
} next_copy;

/* Returns whether a step is left to copy. */
static __device__ __forceinline__ bool more(const next_copy *f) {
    return has_steps(&f->at);
}

template <class S>
static __device__ __forceinline__ void begin_tile(const typename S::args *a, next_copy *f) {
    f->left = f->at.end - f->at.first;
    f->step = f->at.first;
    if (S::staggered)
        f->step = first_step(&f->at, S::split_k ? f->at.number : f->at.number / a->columns);
}

template <class S>
static __device__ __forceinline__ next_copy begin_copies(const typename S::args *a,
                                                         const producer_pipeline *p) {
    work at = start<S>(a);
    next_copy f = {at, place_of<S>(a, at.number, p->rank)};
    begin_tile<S>(a, &f);
    return f;
}

template <class S>
static __device__ __forceinline__ void advance_copy(const typename S::args *a,
                                                    const producer_pipeline *p, next_copy *f) {
    advance(&f->slot, a->stages);
    f->copied++;
    if (++f->step == f->at.end && S::staggered)
        f->step = f->at.first;
    if (S::staggered ? --f->left > 0 : f->step < f->at.end)
        return;
    next_tile<S>(a, &f->at);
    if (!more(f))
        return;
    f->where = place_of<S>(a, f->at.number, p->rank);
    begin_tile<S>(a, f);
}

static __device__ __forceinline__ void wait_for_room(const producer_pipeline *p,
                                                     const next_copy *f) {
    mbarrier_wait(p->barriers.empty + 8u * f->slot.index, f->slot.parity ^ 1);
}

/* Copies the first weights as soon as their own barriers are initialised. */
template <class S>
static __device__ __forceinline__ void copy_first(const typename S::args *a,
                                                  const producer_pipeline *p, next_copy *f) {
    for (int i = 0; i < S::first_copies; i++)
        mbarrier_init(p->barriers.weights + 8u * i, 1);
    mbarrier_init_fence();
    for (int i = 0; i < S::first_copies && more(f); i++) {
        S::copies::template weights<S>(a, p, f);
        advance_copy<S>(a, p, f);
    }
}

/* Initialises the barriers of the pipeline and of the cluster, some in each warp since each takes
 * 30 ns. Pairs of blocks synchronise afterwards. */
template <class S>
static __device__ __forceinline__ void set_up(const typename S::args *a, const producer_pipeline *p,
                                              const cluster_barriers *meet, next_copy *f) {
    constexpr int WARPS = S::copier / 32;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == S::copier) {
        prefetch_map(p->weights);
        *f = begin_copies<S>(a, p);
        copy_first<S>(a, p, f);
    } else if (threadIdx.x == S::copier + 32) {
        prefetch_map(p->tokens);
    } else if (warp < WARPS && threadIdx.x % 32 == 0) {
        if (S::split_k && warp == 0) {
            mbarrier_init(meet->posted, 1);
            mbarrier_init(meet->ready, S::consumers / 32 * WARP_ARRIVALS * blocks_in_cluster());
        }
#pragma unroll 1
        for (int i = warp + S::first_copies; i < a->stages; i += WARPS)
            mbarrier_init(p->barriers.weights + 8u * i,
                          1); /* the producer has initialised the first ones */
#pragma unroll 1
        for (int i = warp; i < a->stages; i += WARPS) {
            mbarrier_init(p->barriers.tokens + 8u * i, S::token_arrivals);
            mbarrier_init(p->barriers.empty + 8u * i,
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
    if (S::split_k && blocks_in_cluster() > 1)
        cluster_arrive(); /* blocks that send sums here wait for it */
}

/* Copies the weights of all steps after copy_first, without waiting for the preceding kernel. Until
 * the pipeline was full once, at most a->flight stages are under way, so that x is not queued
 * behind weights. */
template <class S>
static __device__ __forceinline__ void produce_weights(const typename S::args *a,
                                                       const producer_pipeline *p, next_copy f) {
    while (more(&f)) {
        if (f.copied >= a->stages)
            wait_for_room(p, &f);
        else if (f.copied >= a->flight)
            mbarrier_wait(p->barriers.weights + 8u * (f.copied - a->flight), 0);
        S::copies::template weights<S>(a, p, &f);
        advance_copy<S>(a, p, &f);
    }
}

template <class S>
static __device__ __forceinline__ void produce_tokens(const typename S::args *a,
                                                      const producer_pipeline *p) {
    next_copy f = begin_copies<S>(a, p);
    wait_for_predecessor();
    while (more(&f)) {
        wait_for_room(p, &f);
        S::copies::template tokens<S>(a, p, &f);
        advance_copy<S>(a, p, &f);
    }
}

} // namespace moq::gemm

#endif
