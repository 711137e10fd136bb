/* How weights and rows come to the tiles of sm90_moe_many_tile.h: a ring in shared memory, which
 * warps of their own fill.
 *
 * W comes in boxes of the copy engine. So do rows that are side by side in memory; rows that are
 * tokens of x, each where it happens to be, are gathered 16 bytes a lane by two warps, in the
 * swizzle that the copy engine would make. They tell of a step some steps later, when what they
 * asked for has come. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_COPIES_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_COPIES_H

#include "cuda/moe/sm90/sm90_moe_many_tile.h"

namespace moq::moe_many {

typedef struct {
    const CUtensorMap *map;
    uint32_t ring, full, empty; /* in shared memory; barriers of the stages */
} copy_ring;

/* S says how W is stored: box_bytes of a wave's rows of a step, box_step between steps in the map,
 * and row_unit, the rows that the map counts as one; weight_stage between stages. */
template <class S, product_use USE>
static __device__ __forceinline__ void produce_weights(const gemm_args *a, const copy_ring *r) {
    constexpr int BOXES = 2 * S::warpgroups;
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(r->map);
    if (!a->early)
        wait_for_predecessor();
    for (tile_queue q = tiles_of_block<S>(a); q.number < q.end; q.number += q.stride) {
        place p = place_at<S>(a, q.number);
        int first = p.rows.expert * a->height, row[BOXES];
#pragma unroll
        for (int i = 0; i < BOXES; i++)
            row[i] = first + row_of_wave<S, USE>(a, p.along, i / 2, i % 2) / S::row_unit;
        for (int step = 0; step < a->steps; step++) {
            uint32_t to = r->ring + (uint32_t)(slot.index * S::weight_stage);
            uint32_t full = r->full + 8u * slot.index;
            mbarrier_wait(r->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, BOXES * S::box_bytes);
#pragma unroll
            for (int i = 0; i < BOXES; i++) {
                if (!S::pair)
                    copy_box_2d(to + i * S::box_bytes, r->map, step * S::box_step, row[i], full,
                                policy);
                else if (i / (BOXES / 2) == rank)
                    copy_box_2d_to(to + i * S::box_bytes, r->map, step * S::box_step, row[i], full,
                                   policy, 3);
            }
            advance(&slot, a->stages);
        }
    }
}

/* Rows come in boxes of S::box_rows, as many as there are rows. `scales` is where those of groups
 * go, in the first stage. */
template <class S>
static __device__ __forceinline__ void produce_rows(const gemm_args *a, const copy_ring *r,
                                                    uint32_t scales) {
    constexpr int SCALES = S::groups ? S::tokens * 4 : 0;
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(r->map);
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block<S>(a); q.number < q.end; q.number += q.stride) {
        moe::row_tile rows = place_at<S>(a, q.number).rows;
        int boxes = (rows.rows + S::box_rows - 1) / S::box_rows;
        for (int step = 0; step < a->steps; step++) {
            uint32_t full = r->full + 8u * slot.index;
            uint32_t to = r->ring + (uint32_t)(slot.index * S::row_stage);
            mbarrier_wait(r->empty + 8u * slot.index, slot.parity ^ 1);
            mbarrier_expect(full, boxes * (S::box_rows * 128) + SCALES);
            for (int i = 0; i < boxes; i++)
                copy_box_2d(to + i * (S::box_rows * 128), r->map, step * 128,
                            rows.first + i * S::box_rows, full, policy);
            if (S::groups)
                copy_bytes(scales + (uint32_t)slot.index * SCALES,
                           a->x_scale + step * a->x_scale_stride + rows.first, SCALES, full);
            advance(&slot, a->stages);
        }
    }
}

/* ---- rows that are gathered ---- */

/* Steps that were asked for and not told of yet. */
typedef struct {
    ring_place next; /* the first of them */
    int count;
} steps_on_their_way;

/* Tells of the first of them, which has come. */
static __device__ __forceinline__ void tell(const copy_ring *r, int stages, steps_on_their_way *w) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(r->full + 8u * w->next.index);
    advance(&w->next, stages);
    w->count--;
}

/* S::lag steps are on their way, fewer than there are stages by two or more. What a warp has of a
 * tile: rows 4 * (2 * i + warp) + lane / 8, 16 bytes of them a lane. `places`
 * is shared memory for where they begin, 64 numbers. */
template <class S>
static __device__ __forceinline__ void gather_rows(const gemm_args *a, const copy_ring *r,
                                                   uint32_t scales, uint32_t *places, int warp) {
    int lane = threadIdx.x % 32, chunk = lane % 8;
    ring_place slot = {0, 0};
    steps_on_their_way w = {{0, 0}, 0};
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block<S>(a); q.number < q.end; q.number += q.stride) {
        moe::row_tile rows = place_at<S>(a, q.number).rows;
        int fours = (rows.rows + 3) / 4, own = (fours + 1 - warp) / GATHERERS;
        __syncwarp();
        for (int i = lane; i < own * 4; i += 32) {
            int row = i / 4 * (4 * GATHERERS) + warp * 4 + i % 4;
            places[i] = (uint32_t)source_of(a, rows.first + min(row, rows.rows - 1));
        }
        __syncwarp();
        for (int step = 0; step < a->steps; step++) {
            uint32_t to = r->ring + (uint32_t)(slot.index * S::row_stage);
            int column = step * 128 + chunk * 16, bytes = column < a->bytes ? 16 : 0;
            const uint8_t *from = a->x + (bytes ? column : 0);
            mbarrier_wait(r->empty + 8u * slot.index, slot.parity ^ 1);
#pragma unroll 4
            for (int i = 0; i < own; i++) {
                int row = i * (4 * GATHERERS) + warp * 4 + lane / 8;
                copy_async_16(to + row * 128 + (chunk ^ row % 8) * 16,
                              from + places[i * 4 + lane / 8] * a->x_stride, bytes);
            }
            for (int i = lane; S::groups && i < own * 4; i += 32) {
                int row = i / 4 * (4 * GATHERERS) + warp * 4 + i % 4;
                copy_async_4(scales + (uint32_t)(slot.index * S::tokens + row) * 4,
                             a->x_scale + step * a->x_scale_stride + places[i], 4);
            }
            copy_async_commit();
            advance(&slot, a->stages);
            if (++w.count > S::lag) {
                copy_async_wait<S::lag>();
                tell(r, a->stages, &w);
            }
        }
    }
    copy_async_wait<0>();
    while (w.count > 0)
        tell(r, a->stages, &w);
}

/* ---- barriers ---- */

/* Weights are there, rows are there, both may be replaced. */
typedef struct {
    uint32_t weights, rows, empty;
} ring_barriers;

/* By all threads, before anything else. Units of packed weights arrive where rows do. */
template <class S>
static __device__ __forceinline__ ring_barriers make_barriers(const gemm_args *a,
                                                              uint64_t *memory) {
    uint32_t first = fixed_shared_address(memory);
    ring_barriers b = {first, first + 8 * MANY_STAGES, first + 16 * MANY_STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(b.weights + 8u * i, 1);
            mbarrier_init(b.rows + 8u * i, (a->slot ? GATHERERS : 1) + (S::row_unit > 1));
            mbarrier_init(b.empty + 8u * i, S::warpgroups * 4 * (S::pair ? 2 : 1) * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    if (S::pair)
        cluster_sync(); /* the other block knows them, too */
    else
        __syncthreads();
    return b;
}

/* The threads that copy. */
template <class S, product_use USE>
static __device__ __forceinline__ void produce(const gemm_args *a, const copy_ring *weights,
                                               const copy_ring *rows, uint32_t scales,
                                               uint32_t (&places)[GATHERERS][BOARD / GATHERERS]) {
    int thread = (int)threadIdx.x - S::warpgroups * 128, warp = thread / 32;
    bool gathered = USE != OF_D && a->slot;
    if (thread == 0)
        produce_weights<S, USE>(a, weights);
    else if (thread == 32 && !gathered)
        produce_rows<S>(a, rows, scales);
    else if (warp >= 4 - GATHERERS && gathered)
        gather_rows<S>(a, rows, scales, places[warp - (4 - GATHERERS)], warp - (4 - GATHERERS));
}

} // namespace moq::moe_many

#endif
