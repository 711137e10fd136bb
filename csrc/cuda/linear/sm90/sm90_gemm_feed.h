/* The barriers and the threads that copy of the GEMMs of Hopper whose weights and tokens have
 * barriers of their own: sm90_fp8_many_tile.h and sm90_nvfp4_some_tile.h end with it. Of them it
 * takes gemm_args, pipes and feed, the next step to copy if there are `more`, which begin_feed and
 * next_feed tell, and copy_weights and copy_tokens of a step. Warps before the thread S::copier
 * multiply, or bring tokens themselves. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_GEMM_FEED_H
#define MOQ_CUDA_LINEAR_SM90_SM90_GEMM_FEED_H

#define BARRIERS (3 * MAX_STAGES + 2)

static __device__ __forceinline__ void wait_for_room(const pipes *p, const feed *f) {
    mbarrier_wait(p->gate.empty + 8u * f->slot.index, f->slot.parity ^ 1);
}

/* Copies the first weights as soon as their own barriers are there. */
template <class S>
static __device__ __forceinline__ void copy_first(const gemm_args *a, const pipes *p, feed *f) {
    for (int i = 0; i < S::first_copies; i++)
        mbarrier_init(p->gate.weights + 8u * i, 1);
    mbarrier_init_fence();
    for (int i = 0; i < S::first_copies && more(f); i++) {
        copy_weights<S>(p, f);
        next_feed<S>(a, p, f);
    }
}

/* Makes the barriers of the ring and of the cluster, some by every warp: they take 30 ns each. The
 * blocks of a cluster know of each other's. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, const pipes *p,
                                              const meeting *meet, feed *f) {
    constexpr int WARPS = S::copier / 32;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == S::copier) {
        prefetch_map(p->weights);
        *f = begin_feed<S>(a, p);
        copy_first<S>(a, p, f);
    } else if (threadIdx.x == S::copier + 32) {
        prefetch_map(p->tokens);
    } else if (warp < WARPS && threadIdx.x % 32 == 0) {
        if (S::parts && warp == 0) {
            mbarrier_init(meet->posted, 1);
            mbarrier_init(meet->ready, S::consumers / 32 * WARP_ARRIVALS * blocks_in_cluster());
        }
#pragma unroll 1
        for (int i = warp + S::first_copies; i < a->stages; i += WARPS)
            mbarrier_init(p->gate.weights + 8u * i, 1); /* the first are the copying thread's */
#pragma unroll 1
        for (int i = warp; i < a->stages; i += WARPS) {
            mbarrier_init(p->gate.tokens + 8u * i, S::token_arrivals);
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

/* Copies the others. They do not depend on the kernel before; no more of them are on their way than
 * keep the memory busy, until the ring was full once, so that x is not queued behind them. */
template <class S>
static __device__ __forceinline__ void produce_weights(const gemm_args *a, const pipes *p, feed f) {
    while (more(&f)) {
        if (f.copied >= a->stages)
            wait_for_room(p, &f);
        else if (f.copied >= a->flight)
            mbarrier_wait(p->gate.weights + 8u * (f.copied - a->flight), 0);
        copy_weights<S>(p, &f);
        next_feed<S>(a, p, &f);
    }
}

template <class S>
static __device__ __forceinline__ void produce_tokens(const gemm_args *a, const pipes *p) {
    feed f = begin_feed<S>(a, p);
    wait_for_predecessor();
    while (more(&f)) {
        wait_for_room(p, &f);
        copy_tokens<S>(a, p, &f);
        next_feed<S>(a, p, &f);
    }
}

#endif
