/* Sums of a tile of the NVFP4 GEMM of Hopper for many tokens whose K several blocks share, brought
 * together by way of the L2. Sent from block to block of a cluster they take as long
 * (docs/lab/nvfp4-prefill.md).
 *
 * Two ways. The blocks of a cluster have a part each: every one hands over what it does not own and
 * adds to some of the tokens what the others have. Or shares of the work are even, so that a block
 * may have the first steps of a tile and another the last, which adds all of the tile's sums. Sums
 * are [blocks] [warpgroups][eights of tokens][threads], always added in the same order. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_SPLIT_K_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_PREFILL_SPLIT_K_H

#include "cuda/linear/sm90/sm90_nvfp4_prefill_tile.h"

namespace moq::nvfp4_prefill {

template <class S>
static __device__ __forceinline__ float4 *sums_of(const gemm_args *a, int block, int group) {
    return a->handed + (int64_t)(block * 2 + group) * (S::T / 8 * 128) + threadIdx.x % 128;
}

/* Hands over all sums but a block's own. */
template <class S>
static __device__ __forceinline__ void hand_over(float4 *to, const float (&sum)[S::T / 2],
                                                 chunks own) {
#pragma unroll
    for (int j = 0; j < S::T / 8; j++)
        if (j * 8 / CHUNK < own.first || j * 8 / CHUNK >= own.end)
            __stcg(to + j * 128,
                   make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
}

/* Adds another's to a block's own. */
template <class S>
static __device__ __forceinline__ void add(const float4 *from, float (&sum)[S::T / 2], chunks own) {
    constexpr int AT_ONCE = 16;
#pragma unroll
    for (int first = 0; first < S::T / 8; first += AT_ONCE) {
        float4 other[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int chunk = (first + i) * 8 / CHUNK;
            other[i] = make_float4(0, 0, 0, 0);
            if (chunk >= own.first && chunk < own.end)
                other[i] = __ldcg(from + (first + i) * 128);
        }
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

/* ---- the parts of a cluster ---- */

/* The tokens that a part adds up. */
template <class S> static __device__ __forceinline__ chunks chunks_of(int split, int splits) {
    constexpr int ALL = S::T / CHUNK;
    return {(split * ALL + splits - 1) / splits, ((split + 1) * ALL + splits - 1) / splits};
}

template <class S>
static __device__ __forceinline__ chunks add_parts(const gemm_args *a, int group,
                                                   float (&sum)[S::T / 2]) {
    int blocks = S::pair ? 2 : 1, rank = (int)rank_in_cluster(), split = rank / blocks;
    chunks own = chunks_of<S>(split, a->splits);
    hand_over<S>(sums_of<S>(a, (int)blockIdx.x, group), sum, own);
    cluster_sync();
    int first = (int)blockIdx.x - split * blocks;
    for (int other = 0; other < a->splits; other++)
        if (other != split)
            add<S>(sums_of<S>(a, first + other * blocks, group), sum, own);
    return own;
}

/* ---- even shares ---- */

static __device__ __forceinline__ uint64_t *flag_of(const gemm_args *a, int block, int group) {
    return a->ready + block * 2 + group;
}

/* Hands over all sums. A warp of the block announces it, so that the warpgroup does not wait until
 * they are in memory. */
template <class S>
static __device__ __forceinline__ void leave(const gemm_args *a, int group,
                                             const float (&sum)[S::T / 2]) {
    hand_over<S>(sums_of<S>(a, (int)blockIdx.x, group), sum, {0, 0});
    barrier_arrive(4 + group, 128 + 32);
}

/* The warp that announces a block's sums. */
template <class S> static __device__ __forceinline__ void announce(const gemm_args *a, int group) {
    for (work w = begin<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        if (w.end == a->steps)
            continue;
        barrier_sync(4 + group, 128 + 32);
        if (threadIdx.x % 32 == 0)
            store_release(flag_of(a, (int)blockIdx.x, group), READY);
    }
}

/* Adds the sums of the tile's steps before this block's, those of the blocks before, from the last
 * to the first. */
template <class S>
static __device__ __forceinline__ void add_earlier(const gemm_args *a, const work *w, int group,
                                                   float (&sum)[S::T / 2]) {
    int blocks = S::pair ? 2 : 1, others = earlier_ones(a, w, (int)blockIdx.x / blocks);
    for (int i = threadIdx.x % 128; i < others; i += 128)
        await_sums(flag_of(a, (int)blockIdx.x - (i + 1) * blocks, group));
    barrier_sync(2 + group, 128);
    for (int i = 1; i <= others; i++)
        add<S>(sums_of<S>(a, (int)blockIdx.x - i * blocks, group), sum, {0, S::T / CHUNK});
}

} // namespace moq::nvfp4_prefill

#endif
