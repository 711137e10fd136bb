/* How packed units of W and rows of 16 bits come to the tiles of NVFP4 experts on Hopper
 * (sm90_moe_prefill_nvfp4_tile.h): a ring of steps in shared memory. Four warps fill it: rows that
 * are tokens of x, each where it happens to be, they gather, 16 bytes a lane in the swizzle that
 * the copy engine would make; everything else comes by the copy engine. The one that copies W
 * claims tiles for its block, each while it copies the one before. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_COPIES_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_COPIES_H

#include "cuda/moe/sm90/sm90_moe_prefill_nvfp4_scheduler.h"

namespace moq::moe_prefill {

/* ---- the copy engine ---- */

typedef struct {
    const CUtensorMap *units, *rows;
    scheduler_state *tiles;
    /* In shared memory: the ring, and barriers; behind those of posted claims those of seen ones.
     */
    uint32_t weights, x, full, empty, gathered, posted;
} feed;

/* Asks for a step's units of a tile. */
template <class S>
static __device__ __forceinline__ void copy_units(const gemm_args *a, const feed *f, const place *p,
                                                  int step, const pipeline_state *slot,
                                                  uint64_t policy) {
    uint32_t to = f->weights + (uint32_t)(slot->index * S::weight_bytes);
    uint32_t full = f->full + 8u * slot->index;
    int slab = p->rows.expert * a->height + p->along * S::columns / MOQ_PACK_ROWS;
    mbarrier_expect(full, S::weight_bytes);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int unit = 0; unit < S::units; unit += S::box_units)
            copy_box_2d(to + i * (S::weight_bytes / 2) + unit * (S::box_slabs * MOQ_PACK_BYTES),
                        f->units, (step * S::units + unit) * UNIT_WORDS,
                        slab + i * (S::gated ? a->half / MOQ_PACK_ROWS : S::box_slabs), full,
                        policy);
}

/* Claims the tiles, each while the copies of the one before are on their way. */
template <class S>
static __device__ __forceinline__ void produce_units(const gemm_args *a, const feed *f) {
    pipeline_state slot = {0, 0}, at = {0, 0};
    uint64_t policy = policy_evict_normal();
    tile_search search = {0, 0};
    int number = (int)blockIdx.x, lane = threadIdx.x % 32;
    while (number < f->tiles->end) {
        place p = find_tile<S>(a, f->tiles, &search, number);
        int acquired = 0; /* is here when the next tile's turn comes: nothing looks at it before */
        publish_tile(f->tiles, f->posted, &at, &p);
        if (lane == 0)
            acquired = count_up(a->acquired);
        for (int step = 0; step < a->steps; step++) {
            mbarrier_wait(f->empty + 8u * slot.index, slot.parity ^ 1);
            if (lane == 0)
                copy_units<S>(a, f, &p, step, &slot, policy);
            advance(&slot, a->stages);
        }
        number = (int)gridDim.x + __shfl_sync(ALL_LANES, acquired, 0);
    }
    place none = {{0, 0, 0}, -1};
    publish_tile(f->tiles, f->posted, &at, &none);
}

template <class S>
static __device__ __forceinline__ void copy_rows(const gemm_args *a, const feed *f, const place *p,
                                                 int step, const pipeline_state *slot,
                                                 uint64_t policy) {
    constexpr int BOX = S::box_rows * 128;
    int boxes = (p->rows.rows + S::box_rows - 1) / S::box_rows;
    uint32_t full = f->full + 8u * slot->index;
    uint32_t to = f->x + (uint32_t)(slot->index * S::token_bytes);
    mbarrier_expect(full, S::units * boxes * BOX);
    for (int i = 0; i < boxes; i++)
#pragma unroll
        for (int unit = 0; unit < S::units; unit++)
            copy_box_2d(to + unit * S::panel_bytes + i * BOX, f->rows,
                        (step * S::units + unit) * 128, p->rows.first + i * S::box_rows, full,
                        policy);
}

template <class S>
static __device__ __forceinline__ void produce_rows(const gemm_args *a, const feed *f) {
    pipeline_state slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    wait_for_predecessor();
    for_tiles(f->tiles, f->posted, [&](place p) {
        for (int step = 0; step < a->steps; step++) {
            mbarrier_wait(f->empty + 8u * slot.index, slot.parity ^ 1);
            if (threadIdx.x % 32 == 0)
                copy_rows<S>(a, f, &p, step, &slot, policy);
            advance(&slot, a->stages);
        }
    });
}

/* ---- rows that are gathered ---- */

/* Where the rows of a tile begin in x, in 16 bytes: those of lane and lane + 32. */
typedef struct {
    uint32_t offset[2];
} gathered_rows;

static __device__ __forceinline__ gathered_rows find_rows(const gemm_args *a, const place *p) {
    gathered_rows g;
    int lane = threadIdx.x % 32, last = p->rows.rows - 1;
#pragma unroll
    for (int i = 0; i < 2; i++)
        g.offset[i] =
            (uint32_t)(a->x_stride / 16) * source_of(a, p->rows.first + min(32 * i + lane, last));
    return g;
}

/* Asks for a step's columns of rows 8 * i + own, 16 bytes of each 64 a lane. `to` is where the
 * first one goes. */
template <class S>
static __device__ __forceinline__ void gather_step(const gemm_args *a, const gathered_rows *g,
                                                   int rows, int own, int step, uint32_t to) {
    int column = step * (S::units * 128) + (int)threadIdx.x % 8 * 16;
    const uint8_t *from[S::units];
    int bytes[S::units];
#pragma unroll
    for (int unit = 0; unit < S::units; unit++, column += 128) {
        bytes[unit] = column < a->bytes ? 16 : 0;
        from[unit] = a->x + (bytes[unit] ? column : 0);
    }
#pragma unroll
    for (int i = 0; i < S::tokens / 8; i++)
        if (8 * i < rows) {
            uint32_t offset = __shfl_sync(0xffffffffu, g->offset[i / 4], 8 * i % 32 + own);
#pragma unroll
            for (int unit = 0; unit < S::units; unit++)
                copy_async_16(to + unit * S::panel_bytes + i * 1024,
                              from[unit] + (uint64_t)offset * 16, bytes[unit]);
        }
}

/* By two warps. A step's barrier hears of its copies from the threads that asked, when they have
 * come. */
template <class S>
static __device__ __forceinline__ void gather(const gemm_args *a, const feed *f, int warp) {
    int lane = threadIdx.x % 32, own = 4 * warp + lane / 8;
    uint32_t swizzled = f->x + own * 128 + (lane % 8 ^ own) * 16;
    pipeline_state slot = {0, 0};
    for_tiles(f->tiles, f->posted, [&](place p) {
        gathered_rows rows = find_rows(a, &p);
        for (int step = 0; step < a->steps; step++) {
            mbarrier_wait(f->empty + 8u * slot.index, slot.parity ^ 1);
            gather_step<S>(a, &rows, p.rows.rows, own, step,
                           swizzled + (uint32_t)(slot.index * S::token_bytes));
            copy_async_arrive(f->gathered + 8u * slot.index);
            advance(&slot, a->stages);
        }
    });
}

/* Makes gathered rows known to the copy engine's side, where products read them, in the place of
 * all that multiply, whom that would hold up. By a warp that copies nothing: it would wait for its
 * copies of the steps behind. */
template <class S>
static __device__ __forceinline__ void let_products_see(const gemm_args *a, const feed *f) {
    pipeline_state slot = {0, 0};
    for_tiles(f->tiles, f->posted, [&](place) {
        for (int step = 0; step < a->steps; step++) {
            mbarrier_wait(f->gathered + 8u * slot.index, slot.parity);
            fence_async_proxy();
            if (threadIdx.x % 32 == 0)
                mbarrier_arrive(f->full + 8u * slot.index);
            advance(&slot, a->stages);
        }
    });
}

/* ---- all of them ---- */

template <class S> static __device__ __forceinline__ bool gathers(const gemm_args *a) {
    return S::tokens <= 64 && S::use != OF_D && a->slot;
}

/* The warps that copy. */
template <class S> static __device__ __forceinline__ void fill(const gemm_args *a, const feed *f) {
    int warp = (int)threadIdx.x / 32 - S::warpgroups * 4;
    if (warp == 0)
        produce_units<S>(a, f);
    else if (gathers<S>(a) && warp == 3)
        let_products_see<S>(a, f);
    else if (gathers<S>(a))
        gather<S>(a, f, warp - 1);
    else if (warp == 1)
        produce_rows<S>(a, f);
}

/* Barriers of the stages, full and empty ones and those of gathered rows, and of claims, and what
 * tiles there are. By all threads, before anything else. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, const feed *f) {
    int readers = S::warpgroups * 4 + (gathers<S>(a) ? COPIERS + 1 : 1); /* of claims */
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(f->full + 8u * i, 2); /* of weights and of rows */
            mbarrier_init(f->empty + 8u * i, S::warpgroups * 4 * WARP_ARRIVALS);
            mbarrier_init(f->gathered + 8u * i, 32 * COPIERS);
        }
        for (int i = 0; i < SCHEDULER_STAGES; i++) {
            mbarrier_init(f->posted + 8u * i, 1);
            mbarrier_init(f->posted + 8u * (SCHEDULER_STAGES + i), readers * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
        prefetch_map(f->units);
        prefetch_map(f->rows);
    }
    if (threadIdx.x / 32 == 2)
        touch_parameter(*a);
    if (!a->early)
        wait_for_predecessor();
    note_widths<S>(a, f->tiles);
    __syncthreads();
}

} // namespace moq::moe_prefill

#endif
