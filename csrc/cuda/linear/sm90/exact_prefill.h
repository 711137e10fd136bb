/* Exact prefill kernels on Hopper, of NVFP4 weights (nvfp4_prefill.cu) and of MXFP8, int8 and int4
 * ones (general_prefill.cu): producer of tokens, mainloop, kernel and launch. Tile, partial sums
 * and epilogue are in nvfp4_prefill.h.
 *
 * A class P has what depends on the weights: P::produce<S> copies them; P::operands is what a lane
 * keeps of them from tile to tile; P::codes<S> and P::scales<S> tell where it reads; P::multiply<S>
 * adds the products of a tile's steps. */
#ifndef MOQ_CUDA_LINEAR_SM90_EXACT_PREFILL_H
#define MOQ_CUDA_LINEAR_SM90_EXACT_PREFILL_H

#include "cuda/device/wgmma.h"
#include "cuda/linear/sm90/nvfp4_prefill.h"
#include "cuda/linear/sm90/nvfp4_prefill_config.h"

namespace moq::nvfp4_prefill {

#define THREADS      384
#define APART_TOKENS 512 /* most tokens for which tiles begin with different steps */

/* ---- producers ---- */

/* Returns the step of a tile that a block copies first, the same for both blocks of a pair. Tiles
 * are staggered only with few tokens. */
template <class S>
static __device__ __forceinline__ int first_step_of(const gemm_args *a, const work *w) {
    return a->apart ? first_step(w, place_of<S>(a, w->number, 0).row / ROWS) : w->first;
}

/* Returns the first byte of a row of x that a stage has, of the last `left` stages of the tile. */
template <class S> static __device__ __forceinline__ int column_of(int step, int left) {
    return S::halves == 1 ? step * 128 : step * 256 + left % 2 * 128;
}

template <class S>
static __device__ __forceinline__ void
produce_tokens(const gemm_args *a, const producer_pipeline *p, const CUtensorMap *map) {
    pipeline_state slot = {0, 0};
    uint64_t keep = policy_evict_normal();
    prefetch_map(map);
    wait_for_predecessor();
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        int token = place_of<S>(a, w.number, p->rank).token;
        int step = first_step_of<S>(a, &w);
        for (int left = (w.end - w.first) * S::halves; left > 0;
             left--, step = S::halves == 1 || left % 2 == 0 ? step_after(&w, step) : step) {
            uint32_t full = p->full + 8u * slot.index;
            uint32_t to = p->to + (uint32_t)(slot.index * S::token_bytes);
            mbarrier_wait(p->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, S::token_bytes);
            if (S::share_tokens) {
                int half = p->rank * (S::T / 2);
                copy_box_2d_to(to + half * 128, map, column_of<S>(step, left), token + half, full,
                               keep, 3);
            } else {
                copy_box_2d(to, map, column_of<S>(step, left), token, full, keep);
            }
            advance(&slot, p->stages);
        }
    }
}

/* ---- mainloop: a warpgroup decodes a unit into operands in registers while the products of
 * the previous unit are under way ---- */

/* Stages as a thread reads them. */
typedef struct {
    uint32_t full, empty;
    uint64_t x;             /* operand in the first stage */
    uint32_t codes, scales; /* addresses of this lane, in the first stage */
    int stages;
} consumer_pipeline;

/* Operand of a unit in a thread: 4 registers for each group of 16 columns. */
typedef struct {
    uint32_t group[MOQ_PACK_GROUPS][4];
} operand_unit;

static __device__ __forceinline__ void await(const consumer_pipeline *t,
                                             const pipeline_state *slot) {
    mbarrier_wait(t->full + 8u * slot->index, slot->parity);
}

template <class S>
static __device__ __forceinline__ void release(const consumer_pipeline *t,
                                               const pipeline_state *slot) {
    warp_releases<S::pair>(t->empty + 8u * slot->index);
}

/* Adds the products of a stage's unit. */
template <class S>
static __device__ __forceinline__ void issue(const consumer_pipeline *t, const pipeline_state *slot,
                                             const operand_unit *o, float (&sum)[S::T / 2]) {
    uint64_t x = t->x + (uint32_t)(slot->index * (S::token_bytes / 16));
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++) {
        if constexpr (S::type == AS_BF16)
            wgmma_bf16(sum, o->group[s], x + 2 * s);
        else
            wgmma_f16(sum, o->group[s], x + 2 * s);
    }
    wgmma_commit();
}

/* Issues the products of a stage, an even or an odd one, then waits for those of the stage before
 * and releases it. */
template <class S, int HALF, class D>
static __device__ __forceinline__ void
follow(const consumer_pipeline *t, D *d, pipeline_state *slot, pipeline_state *before, bool first,
       const operand_unit *o, float (&sum)[S::T / 2]) {
    if constexpr (S::ring)
        await(t, slot); /* tokens alone */
    issue<S>(t, slot, o, sum);
    if constexpr (S::ring && HALF == 1)
        d->template release_codes<S>(t); /* all have come to registers */
    if (!first) {
        wgmma_wait<1>();
        release<S>(t, before);
    }
    *before = *slot;
    advance(slot, t->stages);
}

/* Adds the products of `units` stages to the sums. D decodes units, by turns from even and odd
 * stages of the tile. */
template <class S, class D>
static __device__ __forceinline__ void multiply(const consumer_pipeline *t, D *d, int units,
                                                pipeline_state *slot, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    pipeline_state before = *slot;
    d->template decode<S, 0>(t, slot, &even);
#pragma unroll 1
    for (int unit = 0;; unit += 2) {
        follow<S, 0>(t, d, slot, &before, unit == 0, &even, sum);
        if (S::halves == 1 && unit + 1 == units)
            break;
        d->template decode<S, 1>(t, slot, &odd);
        follow<S, 1>(t, d, slot, &before, false, &odd, sum);
        if (unit + 2 == units)
            break;
        d->template decode<S, 0>(t, slot, &even);
    }
    wgmma_wait<0>();
    stay_here(sum);
    release<S>(t, &before);
}

/* ---- the kernel ---- */

/* Runs a warpgroup's mainloop and epilogue. STREAM_K: blocks share a stream-K tail; without it the
 * code is 2 % faster in layers of short K. */
template <class S, class P, bool STREAM_K>
static __device__ __forceinline__ void consume(const gemm_args *a, const consumer_pipeline *t,
                                               tile_scales<S> *b, const output_path *path,
                                               int group, int rank) {
    pipeline_state slot = {0, 0};
    typename P::operands own = {};
    wait_for_predecessor();
    for (work w = start<S>(a); has_steps(&w); next_tile<S>(a, &w)) {
        tile_place at = place_of<S>(a, w.number, rank);
        float sum[S::T / 2] = {};
        if (!STREAM_K || w.end == a->steps) /* this block writes the outputs */
            fetch_tile_scales<S>(a, b, &at, group);
        P::template multiply<S>(a, t, &own, &w, &at, group, &slot, sum);
        if (STREAM_K && w.end < a->steps) {
            store_partial_sums<S>(a, group, sum);
            continue;
        }
        if (STREAM_K && w.first > 0)
            add_partial_sums<S>(a, &w, group, sum);
        write_boxes<S>(a, path, b, &at, group, sum);
    }
}

/* Barriers of the stages: full, then empty; where W has a ring of its own, those behind them. */
#define RING_FULL  (16 * MAX_STAGES)
#define RING_EMPTY (24 * MAX_STAGES)

template <class S, class P, bool STREAM_K>
static __global__ void __launch_bounds__(THREADS, 1)
    exact_prefill(const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap tokens,
                  const __grid_constant__ CUtensorMap outputs,
                  const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[(S::ring ? 4 : 2) * MAX_STAGES];
    __shared__ __align__(16) tile_scales<S> epilogue[2];
    uint32_t first = fixed_shared_address(barrier), x = fixed_shared_address(smem);
    uint32_t room = x + args.stages * S::token_bytes; /* staged outputs */
    uint32_t units = room + 2 * S::T * 128;
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    uint32_t full = first, empty = first + 8 * MAX_STAGES;
    launch_dependents();
    if (threadIdx.x % 32 == 0) { /* some in every warp: each takes 30 ns */
#pragma unroll 1
        for (int i = (int)threadIdx.x / 32; i < args.stages; i += THREADS / 32) {
            mbarrier_init(full + 8u * i, S::ring ? 1 : 2);
            mbarrier_init(empty + 8u * i, CONSUMERS / 32 * (S::pair ? 2 : 1) * WARP_ARRIVALS);
        }
        if constexpr (S::ring) {
            int i = (int)threadIdx.x / 32 - 4;
            if (i >= 0 && i < S::ring_stages) {
                mbarrier_init(first + RING_FULL + 8u * i, 1);
                mbarrier_init(first + RING_EMPTY + 8u * i, CONSUMERS / 32 * WARP_ARRIVALS);
            }
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (threadIdx.x < CONSUMERS) {
        more_registers<232>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128,
                                0); /* shuffled, so that the compiler sees it is uniform */
        uint32_t own = units + threadIdx.x / 32 * P::template warp_bytes<S>;
        int lane = threadIdx.x % 32;
        consumer_pipeline t = {full,
                               empty,
                               wgmma_operand(x),
                               own + P::codes_at(lane / 4, lane % 4),
                               own + P::scales_at(lane / 4),
                               args.stages};
        output_path path = {&outputs, room + group * S::T * 128};
        consume<S, P, STREAM_K>(&args, &t, &epilogue[group], &path, group, rank);
        if (threadIdx.x % 128 == 0)
            store_boxes_wait();
    } else {
        fewer_registers<40>();
        producer_pipeline of_weights = {full, empty, units, args.stages, rank};
        producer_pipeline of_tokens = {full, empty, x, args.stages, rank};
        if (threadIdx.x == CONSUMERS)
            P::template produce<S>(&args, &of_weights, &weights);
        else if (threadIdx.x == CONSUMERS + 32)
            produce_tokens<S>(&args, &of_tokens, &tokens);
        else if (STREAM_K && threadIdx.x >= CONSUMERS + 64)
            announce<S>(&args, (int)threadIdx.x / 32 % 2);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- the launch (nvfp4_prefill.cu) ---- */

/* Kernels and sizes of a shape of tiles (nvfp4_prefill_config.h). */
typedef struct {
    int stage;             /* bytes of a stage: tokens, and weights that have no ring */
    int rest;              /* bytes of the ring of weights and of staged outputs */
    int fixed;             /* bytes of static shared memory */
    const void *kernel[2]; /* for whole tiles, with a stream-K tail */
} variant;

template <class S, class P> static variant variant_of(void) {
    return {S::token_bytes + (S::ring ? 0 : S::weight_bytes),
            S::T * ROWS * 2 + (S::ring ? S::ring_stages * S::weight_bytes : 0),
            2 * (int)sizeof(tile_scales<S>) + (S::ring ? 32 : 16) * MAX_STAGES,
            {(const void *)exact_prefill<S, P, false>, (const void *)exact_prefill<S, P, true>}};
}

/* Bytes of a call's workspace: flags of its blocks, partial sums behind them. */
int64_t workspace_of(const moq_nvfp4_prefill_config *config);

/* Launches a config's kernel. K has so many steps; W is described by `weights`. */
moq_status launch_exact(const moq_linear_call *call, const moq_nvfp4_prefill_config *config,
                        const variant *v, int64_t steps, const CUtensorMap *weights, moq_err *err);

} // namespace moq::nvfp4_prefill

#endif
