/* Producers of the FP8 prefill kernels of experts on Hopper: two threads fill a pipeline of steps
 * with weights and rows by TMA.
 *
 * The thread that copies W is the dynamic tile scheduler of its block. It acquires each tile as
 * late as the answer comes in time and publishes it to the others: memory serves blocks unequally,
 * and a block that is served well makes more tiles. Neighbouring tiles of rows, often of one
 * expert, have each tile of W one after the other. W comes from memory once for them, and L2 may
 * evict it first; without that memory is slower by a tenth (docs/lab/experts-prefill.md).
 *
 * Layout: in each 16 rows of W the even ones come before the odd ones (moq_tensor_map_pairs), so
 * that the two rows of a product that a thread has, eight apart, are neighbouring columns of the
 * output. */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_FP8_MAINLOOP_H
#define MOQ_CUDA_MOE_SM90_PREFILL_FP8_MAINLOOP_H

#include "cuda/moe/sm90/prefill/gemm.h"

namespace moq::moe_prefill {

/* ---- published tiles ---- */

/* Returns the place of a tile in the order of the head: tiles of W alternate among TOGETHER tiles
 * of rows. */
static __device__ __forceinline__ place place_in_turn(const gemm_args *a, int number) {
    constexpr int TOGETHER = MOQ_MOE_PREFILL_TOGETHER;
    int all = TOGETHER * a->row_tiles, group = number / all, rest = number - group * all;
    int first = group * TOGETHER, tiles = min(TOGETHER, a->count[1] - first);
    int along = rest / tiles;
    return {a->tiles[first + rest - along * tiles], along};
}

#define SCHEDULER_STAGES 4 /* published tiles that some warps may not have read */

/* A queue of published tiles in shared memory, with barriers of full and empty places. */
typedef struct {
    int4 *place; /* expert, first row, rows, tile of W; -1 after the last tile */
    uint32_t full, empty;
} scheduler_queue;

/* Publishes a tile, by the thread that acquires tiles. */
static __device__ __forceinline__ void publish_tile(const scheduler_queue *b, pipeline_state *at,
                                                    const place *p) {
    mbarrier_wait(b->empty + 8u * at->index, at->parity ^ 1);
    b->place[at->index] = make_int4(p->rows.expert, p->rows.first, p->rows.rows, p->along);
    mbarrier_arrive(b->full + 8u * at->index);
    advance(at, SCHEDULER_STAGES);
}

/* Reads a published tile, by the other threads, which then arrive at b->empty. */
static __device__ __forceinline__ place read_published_tile(const scheduler_queue *b,
                                                            const pipeline_state *at) {
    mbarrier_wait(b->full + 8u * at->index, at->parity);
    int4 p = b->place[at->index];
    return {{p.x, p.y, p.z}, p.w};
}

/* ---- pipeline of weights ---- */

typedef struct {
    const CUtensorMap *map;
    uint32_t pipeline, full, empty; /* in shared memory: stages, and their barriers */
} copy_pipeline;

/* Copies the steps `begin` to `end` of W of a tile. */
template <class S, product_use USE>
static __device__ __forceinline__ void copy_weights(const gemm_args *a, const copy_pipeline *r,
                                                    const place *p, int begin, int end,
                                                    pipeline_state *slot) {
    constexpr int BOXES = 2 * S::warpgroups, BOX = WAVE_ROWS * 128;
    int first = p->rows.expert * a->height, row[BOXES];
    uint64_t policy = policy_evict_first();
#pragma unroll
    for (int i = 0; i < BOXES; i++)
        row[i] = first + row_of_wave<S, USE>(a, p->along, i / 2, i % 2);
#pragma unroll 1
    for (int step = begin; step < end; step++) {
        uint32_t to = r->pipeline + (uint32_t)(slot->index * S::stage);
        uint32_t full = r->full + 8u * slot->index;
        mbarrier_wait(r->empty + 8u * slot->index, slot->parity ^ 1);
        mbarrier_expect(full, BOXES * BOX);
#pragma unroll
        for (int i = 0; i < BOXES; i++)
            copy_pairs(to + i * BOX, r->map, step * 128, row[i], full, policy);
        advance(slot, a->stages);
    }
}

/* ---- dynamic tile scheduler ---- */

#define LEAD 4 /* steps of W before the end of a tile at which the next one is acquired */

static __device__ __forceinline__ int acquire_tile(const gemm_args *a) {
    return (int)gridDim.x + atomicAdd(a->acquired, 1);
}

/* Copies W of tiles of more than LEAD steps. */
template <class S, product_use USE>
static __device__ __forceinline__ void produce_long(const gemm_args *a, const copy_pipeline *r,
                                                    const scheduler_queue *scheduler,
                                                    pipeline_state *at) {
    pipeline_state slot = {0, 0};
    int number = blockIdx.x, end = a->count[1] * a->row_tiles;
    while (number < end) {
        place p = place_in_turn(a, number);
        publish_tile(scheduler, at, &p);
        copy_weights<S, USE>(a, r, &p, 0, a->steps - LEAD, &slot);
        number = acquire_tile(a);
        copy_weights<S, USE>(a, r, &p, a->steps - LEAD, a->steps, &slot);
    }
}

/* Copies W of shorter tiles, which end before the counter answers: each is acquired two ahead, and
 * found one ahead. */
template <class S, product_use USE>
static __device__ __forceinline__ void produce_short(const gemm_args *a, const copy_pipeline *r,
                                                     const scheduler_queue *scheduler,
                                                     pipeline_state *at) {
    pipeline_state slot = {0, 0};
    int number = blockIdx.x, end = a->count[1] * a->row_tiles;
    if (number >= end)
        return;
    int next = acquire_tile(a);
    place p = place_in_turn(a, number);
    while (number < end) {
        publish_tile(scheduler, at, &p);
        int later = acquire_tile(a);
        place q = place_in_turn(a, min(next, end - 1));
        copy_weights<S, USE>(a, r, &p, 0, a->steps, &slot);
        number = next;
        next = later;
        p = q;
    }
}

template <class S, product_use USE>
static __device__ __forceinline__ void produce_weights(const gemm_args *a, const copy_pipeline *r,
                                                       const scheduler_queue *scheduler) {
    pipeline_state at = {0, 0};
    prefetch_map(r->map);
    if (!a->early)
        wait_for_predecessor();
    if (a->steps > LEAD)
        produce_long<S, USE>(a, r, scheduler, &at);
    else
        produce_short<S, USE>(a, r, scheduler, &at);
    place none = {{0, 0, 0}, -1};
    publish_tile(scheduler, &at, &none);
}

/* ---- pipeline of rows ---- */

/* Waits until the first product has written the g of a tile's rows by ordinary stores. TMA then
 * reads them for this thread. */
static __device__ __forceinline__ void await_rows(const gemm_args *a, const place *p) {
    while (load_acquire(a->written + p->rows.first) < a->writers)
        ;
    fence_async_proxy_of_memory();
}

/* Copies all steps of a tile's rows, in boxes of S::box_rows, as many as there are rows. `scales`
 * is the place of group scales in the first stage. */
template <class S>
static __device__ __forceinline__ void copy_rows(const gemm_args *a, const copy_pipeline *r,
                                                 uint32_t scales, const place *p,
                                                 pipeline_state *slot) {
    constexpr int SCALES = S::groups ? S::tokens * 4 : 0;
    uint64_t policy = policy_evict_normal();
    int boxes = (p->rows.rows + S::box_rows - 1) / S::box_rows;
    for (int step = 0; step < a->steps; step++) {
        uint32_t full = r->full + 8u * slot->index;
        uint32_t to = r->pipeline + (uint32_t)(slot->index * S::stage);
        mbarrier_wait(r->empty + 8u * slot->index, slot->parity ^ 1);
        mbarrier_expect(full, boxes * (S::box_rows * 128) + SCALES);
        for (int i = 0; i < boxes; i++)
            copy_box_2d(to + i * (S::box_rows * 128), r->map, step * 128,
                        p->rows.first + i * S::box_rows, full, policy);
        if (S::groups)
            copy_bytes(scales + (uint32_t)slot->index * SCALES,
                       a->x_scale + step * a->x_scale_stride + p->rows.first, SCALES, full);
        advance(slot, a->stages);
    }
}

template <class S>
static __device__ __forceinline__ void produce_rows(const gemm_args *a, const copy_pipeline *r,
                                                    uint32_t scales,
                                                    const scheduler_queue *scheduler) {
    pipeline_state slot = {0, 0}, at = {0, 0};
    prefetch_map(r->map);
    if (!a->linked)
        wait_for_predecessor();
    for (;;) {
        place p = read_published_tile(scheduler, &at);
        mbarrier_arrive(scheduler->empty + 8u * at.index);
        advance(&at, SCHEDULER_STAGES);
        if (p.along < 0)
            return;
        if (a->linked)
            await_rows(a, &p);
        copy_rows<S>(a, r, scales, &p, &slot);
    }
}

/* ---- barriers ---- */

/* Barriers of the pipeline: weights full, rows full, both empty. */
typedef struct {
    uint32_t weights, rows, empty;
} pipeline_barriers;

#define PIPELINE_BARRIERS (3 * MANY_STAGES + 2 * SCHEDULER_STAGES)

/* Returns the scheduler's queue, whose barriers follow the pipeline's. */
static __device__ __forceinline__ scheduler_queue scheduler_queue_at(const pipeline_barriers *b,
                                                                     int4 *places) {
    uint32_t full = b->empty + 8 * MANY_STAGES;
    return {places, full, full + 8 * SCHEDULER_STAGES};
}

/* Initializes the barriers; all threads call, first of all. */
template <class S>
static __device__ __forceinline__ pipeline_barriers make_barriers(const gemm_args *a,
                                                                  uint64_t *memory) {
    constexpr int WARPS = S::warpgroups * 4;
    uint32_t first = fixed_shared_address(memory);
    pipeline_barriers b = {first, first + 8 * MANY_STAGES, first + 16 * MANY_STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(b.weights + 8u * i, 1);
            mbarrier_init(b.rows + 8u * i, 1);
            mbarrier_init(b.empty + 8u * i, WARPS * WARP_ARRIVALS);
        }
        scheduler_queue scheduler = scheduler_queue_at(&b, NULL);
        for (int i = 0; i < SCHEDULER_STAGES; i++) {
            mbarrier_init(scheduler.full + 8u * i, 1);
            mbarrier_init(scheduler.empty + 8u * i, 2 + WARPS * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    return b;
}

/* Runs the producer threads; `scales` is passed to produce_rows. */
template <class S, product_use USE>
static __device__ __forceinline__ void produce(const gemm_args *a, const copy_pipeline *weights,
                                               const copy_pipeline *rows, uint32_t scales,
                                               const scheduler_queue *scheduler) {
    int thread = (int)threadIdx.x - S::warpgroups * 128;
    if (thread == 0)
        produce_weights<S, USE>(a, weights, scheduler);
    else if (thread == 32)
        produce_rows<S>(a, rows, scales, scheduler);
}

} // namespace moq::moe_prefill

#endif
