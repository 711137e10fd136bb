/* Tiles of NVFP4 experts on Hopper for many tokens: how packed units of W and rows of 16 bits come
 * to them.
 *
 * A tile is 64 rows of an expert's W for each of its warpgroups by up to S::tokens rows of tokens,
 * which are the columns of the products. In the first product half of a warpgroup's rows are gate
 * and half are up, eight by eight, so that a thread has both sums of an output. A step is 64
 * columns, a unit of each slab and 128 bytes of each row, in a ring of steps. Four warps fill it:
 * rows that are tokens of x, each where it happens to be, they gather, 16 bytes a lane in the
 * swizzle that the copy engine would make; everything else comes by the copy engine.
 *
 * What bounds it: L2, which has to deliver 36 bytes a cycle and multiprocessor where tiles are
 * large. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_TILE_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_TILE_H

#include "cuda/linear/sm90/sm90_nvfp4_many_tile.h"
#include "cuda/moe/sm90/sm90_moe_many_tile.h"

namespace moq::moe_many {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)
#define WAVE_SLABS (WAVE_ROWS / MOQ_PACK_ROWS)
#define WAVE_BYTES (WAVE_SLABS * MOQ_PACK_BYTES)
#define COPIERS    4  /* warps */
#define D_ROWS     32 /* of d that leave at a time */
#define D_PIECES   3  /* of so many rows there is room for, in a warpgroup */

/* Tiles of up to 288 rows of two warpgroups, or up to 64 of four, of which N are multiplied. */
template <nvfp4_many::operand_type TYPE, product_use FOR, int GROUPS, int N> struct unit_shape {
    static constexpr nvfp4_many::operand_type type = TYPE;
    static constexpr product_use use = FOR;
    static constexpr bool pair = false, large = GROUPS == 2, halves = FOR == OF_GATE_AND_UP;
    static constexpr int warpgroups = GROUPS, T = N;
    static constexpr int registers = large ? 224 : 104, copier_registers = large ? 56 : 64;
    static constexpr int tokens = large ? 288 : 64, box_rows = large ? 32 : 16;
    static constexpr int token_bytes = tokens * 128, weight_bytes = GROUPS * WAVE_BYTES;
    /* Bytes of outputs on their way, of a warpgroup: of a row of g, and all. */
    static constexpr int row_bytes = halves ? 64 : 128;
    static constexpr int room =
        FOR == OF_D ? D_PIECES * D_ROWS * 256 : (large ? 128 : tokens) * row_bytes;
    static constexpr int columns = (halves ? 32 : 64) * GROUPS; /* of the output */
    /* Rows whose products are one instruction, and whose outputs are made at a time. */
    static constexpr int part = N > 256 ? N / 2 : N;
    static constexpr int at_once = N <= 96 ? N : N == 288 ? 96 : N / 2;
    template <int M> using of_width = unit_shape<TYPE, FOR, GROUPS, M>;
};

/* ---- the order of tiles ---- */

/* How many columns of products a tile of so many rows has: one of a few numbers, for each of which
 * there is code; the largest one for what is rarely asked for, which is compiled for that alone. */
template <class S> static __device__ __forceinline__ int width_of(const gemm_args *a, int rows) {
    if (S::use != OF_D && !is_plain(&a->act))
        return S::tokens;
    if (S::large)
        return rows > 256 ? 288 : rows > 192 ? 256 : rows > 128 ? 192 : rows > 96 ? 128 : 96;
    return rows > 32 ? 64 : rows > 16 ? 32 : 16;
}

/* Widths from the largest one on, 0 behind the last. */
template <class S> static __device__ __forceinline__ int width_after(int width) {
    if (S::large)
        return width == 288 ? 256 : width == 256 ? 192 : width == 192 ? 128 : width == 128 ? 96 : 0;
    return width == 64 ? 32 : width == 32 ? 16 : 0;
}

/* Calls `make` for the tiles of a block that have this width. Tiles of one width follow each other:
 * where the loop over tiles has code for several, ptxas finds no registers for their products
 * (docs/lab/moe.md). By whole warps, a lane of which looks at every 32nd tile. */
template <class S, class F>
static __device__ __forceinline__ void for_tiles(const gemm_args *a, int width, F make) {
    tile_queue q = tiles_of_block<S>(a);
#pragma unroll 1
    for (int number = q.number; number < q.end; number += 32 * q.stride) {
        int own = number + (int)threadIdx.x % 32 * q.stride;
        bool suits = own < q.end && width_of<S>(a, place_at<S>(a, own).rows.rows) == width;
        uint32_t left = __ballot_sync(0xffffffffu, suits);
#pragma unroll 1
        for (; left; left &= left - 1)
            make(place_at<S>(a, number + (__ffs((int)left) - 1) * q.stride));
    }
}

/* ---- the copy engine ---- */

typedef struct {
    const CUtensorMap *units, *rows;
    uint32_t weights, x, full, empty; /* in shared memory: the ring, barriers of the stages */
} feed;

/* Asks for a step's units of a tile. */
template <class S>
static __device__ __forceinline__ void copy_units(const gemm_args *a, const feed *f, const place *p,
                                                  int step, const ring_place *slot,
                                                  uint64_t policy) {
    constexpr int WAVES = S::halves ? S::warpgroups / 2 : S::warpgroups; /* of gate */
    uint32_t to = f->weights + (uint32_t)(slot->index * S::weight_bytes);
    uint32_t full = f->full + 8u * slot->index;
    int slab = p->rows.expert * a->height + p->along * S::columns / MOQ_PACK_ROWS;
    mbarrier_expect(full, S::weight_bytes);
#pragma unroll
    for (int i = 0; i < S::warpgroups; i++) {
        int own = slab + i % WAVES * WAVE_SLABS + (i < WAVES ? 0 : a->half / MOQ_PACK_ROWS);
        copy_box_2d(to + i * WAVE_BYTES, f->units, step * UNIT_WORDS, own, full, policy);
    }
}

template <class S>
static __device__ __forceinline__ void produce_units(const gemm_args *a, const feed *f) {
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(f->units);
    if (!a->early)
        wait_for_predecessor();
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, width, [&](place p) {
            for (int step = 0; step < a->steps; step++) {
                mbarrier_wait(f->empty + 8u * slot.index, slot.parity ^ 1);
                if (threadIdx.x % 32 == 0)
                    copy_units<S>(a, f, &p, step, &slot, policy);
                advance(&slot, a->stages);
            }
        });
}

template <class S>
static __device__ __forceinline__ void copy_rows(const gemm_args *a, const feed *f, const place *p,
                                                 int step, const ring_place *slot,
                                                 uint64_t policy) {
    constexpr int BOX = S::box_rows * 128;
    int boxes = (p->rows.rows + S::box_rows - 1) / S::box_rows;
    uint32_t full = f->full + 8u * slot->index;
    uint32_t to = f->x + (uint32_t)(slot->index * S::token_bytes);
    mbarrier_expect(full, boxes * BOX);
    for (int i = 0; i < boxes; i++)
        copy_box_2d(to + i * BOX, f->rows, step * 128, p->rows.first + i * S::box_rows, full,
                    policy);
}

template <class S>
static __device__ __forceinline__ void produce_rows(const gemm_args *a, const feed *f) {
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    prefetch_map(f->rows);
    wait_for_predecessor();
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, width, [&](place p) {
            for (int step = 0; step < a->steps; step++) {
                mbarrier_wait(f->empty + 8u * slot.index, slot.parity ^ 1);
                if (threadIdx.x % 32 == 0)
                    copy_rows<S>(a, f, &p, step, &slot, policy);
                advance(&slot, a->stages);
            }
        });
}

/* ---- rows that are gathered ---- */

/* The rows that a warp gathers of a tile, 16 * i + 4 * warp + lane / 8, 16 bytes of each a lane:
 * where they begin in x, in 16 bytes. */
template <class S> struct gathered {
    static constexpr int COUNT = S::tokens / (4 * COPIERS);
    uint32_t offset[COUNT];
};

template <class S>
static __device__ __forceinline__ gathered<S> find_rows(const gemm_args *a, const place *p,
                                                        int warp) {
    gathered<S> g;
    int own = 4 * warp + (int)threadIdx.x % 32 / 8;
    uint32_t unit = (uint32_t)(a->x_stride / 16);
#pragma unroll
    for (int i = 0; i < g.COUNT; i++) {
        g.offset[i] = 0;
        if (16 * i < p->rows.rows)
            g.offset[i] = unit * source_of(a, p->rows.first + min(16 * i + own, p->rows.rows - 1));
    }
    return g;
}

/* Asks for 64 columns of them. `to` is where the first one goes. */
template <class S>
static __device__ __forceinline__ void gather_step(const gemm_args *a, const gathered<S> *g,
                                                   int rows, int step, uint32_t to) {
    int column = step * 128 + (int)threadIdx.x % 8 * 16, bytes = column < a->bytes ? 16 : 0;
    const uint8_t *from = a->x + (bytes ? column : 0);
#pragma unroll
    for (int i = 0; i < g->COUNT; i++)
        if (16 * i < rows)
            copy_async_16(to + i * 2048, from + (uint64_t)g->offset[i] * 16, bytes);
}

/* By four warps, of which the first one asks for units, too. A step's barrier hears of its copies
 * from the threads that asked, when they have come; that they came so is made known to the products
 * by who multiplies (let_products_see). A fence here would wait for the steps behind. */
template <class S>
static __device__ __forceinline__ void gather(const gemm_args *a, const feed *f, int warp) {
    int lane = threadIdx.x % 32, own = 4 * warp + lane / 8;
    uint32_t swizzled = f->x + own * 128 + (lane % 8 ^ own % 8) * 16;
    uint64_t policy = policy_evict_normal();
    ring_place slot = {0, 0};
    wait_for_predecessor();
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, width, [&](place p) {
            gathered<S> rows = find_rows<S>(a, &p, warp);
            for (int step = 0; step < a->steps; step++) {
                mbarrier_wait(f->empty + 8u * slot.index, slot.parity ^ 1);
                if (warp == 0 && lane == 0)
                    copy_units<S>(a, f, &p, step, &slot, policy);
                __syncwarp();
                gather_step<S>(a, &rows, p.rows.rows, step,
                               swizzled + (uint32_t)(slot.index * S::token_bytes));
                copy_async_arrive(f->full + 8u * slot.index);
                advance(&slot, a->stages);
            }
        });
}

/* Before products of rows that were gathered. */
template <class S> static __device__ __forceinline__ void let_products_see(void) {
    if (S::use != OF_D)
        fence_async_proxy();
}

/* ---- all of them ---- */

/* The warps that copy. */
template <class S> static __device__ __forceinline__ void fill(const gemm_args *a, const feed *f) {
    int warp = (int)threadIdx.x / 32 - S::warpgroups * 4;
    if (S::use != OF_D && a->slot)
        gather<S>(a, f, warp);
    else if (warp == 0)
        produce_units<S>(a, f);
    else if (warp == 1)
        produce_rows<S>(a, f);
}

/* Barriers of the stages, full and empty ones; by all threads, before anything else. */
template <class S>
static __device__ __forceinline__ void make_stage_barriers(const gemm_args *a, uint32_t full,
                                                           uint32_t empty) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(full + 8u * i, 1 + (a->slot ? 32 * COPIERS : 1));
            mbarrier_init(empty + 8u * i, S::warpgroups * 4 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

} // namespace moq::moe_many

#endif
