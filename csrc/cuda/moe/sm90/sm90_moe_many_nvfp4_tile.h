/* Tiles of NVFP4 experts on Hopper for many tokens: how packed units of W and rows of 16 bits come
 * to them.
 *
 * A tile is 512 rows of an expert's W by up to 64 rows of tokens, which are the columns of the
 * products, or 256 rows by up to 128, or 128 by up to 288. Of four warpgroups each multiplies two
 * waves of 64 rows or one, of two warpgroups one. In the first product half of these are rows of
 * gate and half are the rows of up beside them: a wave of each, or, of one wave, 32 rows of each. A
 * step is 64 columns, a unit of each slab and 128 bytes of each row, in a ring of steps. Four warps
 * fill it: rows that are tokens of x, each where it happens to be, they gather, 16 bytes a lane in
 * the swizzle that the copy engine would make; everything else comes by the copy engine.
 *
 * What bounds it: not the copies, but where rows are many the L2, which delivers 36 bytes a cycle
 * and multiprocessor to tiles of 288. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_TILE_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_TILE_H

#include "cuda/linear/sm90/sm90_nvfp4_many_tile.h"
#include "cuda/moe/sm90/sm90_moe_many_tile.h"

namespace moq::moe_many {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)
#define WAVE_SLABS (WAVE_ROWS / MOQ_PACK_ROWS)
#define WAVE_BYTES (WAVE_SLABS * MOQ_PACK_BYTES)
#define COPIERS    2 /* warps that gather rows */
/* Bytes that warps of gate and of up hand each other of 16 rows, in a warpgroup. */
#define HANDED   2048
#define D_PIECES 3 /* of so many rows of d there is room for, in a warpgroup */

/* Tiles of up to MOST rows, of which N are multiplied, in steps of UNITS blocks of columns. */
template <nvfp4_many::operand_type TYPE, product_use FOR, int MOST, int N, int UNITS = 1>
struct unit_shape {
    static constexpr nvfp4_many::operand_type type = TYPE;
    static constexpr product_use use = FOR;
    static constexpr bool pair = false, gated = FOR == OF_GATE_AND_UP;
    static constexpr bool large = MOST > 128;
    static constexpr int warpgroups = large ? 2 : 4, tokens = MOST, units = UNITS;
    static constexpr int waves = MOST > 64 || UNITS > 1 ? 1 : 2;
    static constexpr int own_units = waves * units; /* of a warp in a step */
    static constexpr int T = N;
    static constexpr bool mixed = gated && waves == 1; /* a wave has rows of gate and of up */
    static constexpr int registers = large ? 224 : 112, copier_registers = large ? 56 : 32;
    static constexpr int box_rows = large ? 32 : 16; /* that the copy engine brings at a time */
    static constexpr int panel_bytes = tokens * 128, token_bytes = units * panel_bytes;
    static constexpr int weight_bytes = warpgroups * own_units * WAVE_BYTES;
    /* From one unit of a warp to the next. */
    static constexpr int unit_bytes = units > 1 ? MOQ_PACK_BYTES : weight_bytes / 2;
    static constexpr int box_slabs = warpgroups * waves * WAVE_SLABS / 2;
    static constexpr int columns = box_slabs * MOQ_PACK_ROWS * (gated ? 1 : 2); /* of the output */
    static constexpr int columns_of_wave = mixed ? WAVE_ROWS / 2 : WAVE_ROWS;
    /* Rows whose products are one instruction, of those that come first. */
    static constexpr int part = N == 80 ? 48 : N == 112 ? 64 : N == 288 ? 144 : N;
    /* Groups of 16 columns whose operands are in registers at a time, twice: fewer where sums leave
     * less room. */
    static constexpr int depth = own_units == 1 || (waves == 2 && N == 64) ? 2 : 4;
    /* Bytes of scales of a step that a warp makes for its lanes: [unit][row g][group, rows g and
     * g + 8]. */
    static constexpr int scales = own_units * 128;
    static constexpr int at_once = large ? 32 : 16; /* rows of outputs that leave at a time */
    /* Bytes of outputs on their way, of a warpgroup: of a row of g and all, with what warps of gate
     * and of up hand each other; of d, unless it is stored from registers, pieces of some rows. */
    static constexpr bool from_registers = MOST == 64;
    static constexpr int row_bytes = columns_of_wave * 2, piece_bytes = at_once * 256;
    static constexpr int room = FOR != OF_D
                                    ? at_once * row_bytes + (mixed ? at_once / 16 * HANDED : 0)
                                : from_registers ? 0
                                                 : D_PIECES * piece_bytes;
    template <int M> using of_width = unit_shape<TYPE, FOR, MOST, M, UNITS>;
};

/* ---- the order of tiles ---- */

/* How many columns of products a tile of so many rows has: one of a few numbers, for each of which
 * there is code; the largest one for what is rarely asked for, which is compiled for that alone. */
template <class S> static __device__ __forceinline__ int width_of(const gemm_args *a, int rows) {
    if (S::use != OF_D && !is_plain(&a->act))
        return S::tokens;
    if (S::large)
        return rows > 256 ? 288 : rows > 192 ? 256 : rows > 128 ? 192 : rows > 96 ? 128 : 96;
    if (S::tokens == 128)
        return rows > 32 ? max(64, (rows + 15) / 16 * 16) : 32;
    return rows > 16 ? (rows + 15) / 16 * 16 : 16;
}

/* Widths from the largest one on, 0 behind the last. */
template <class S> static __device__ __forceinline__ int width_after(int width) {
    if (S::large)
        return width == 288 ? 256 : width == 256 ? 192 : width == 192 ? 128 : width == 128 ? 96 : 0;
    return S::tokens == 128 && width <= 64 ? width - 32 : width - 16;
}

/* The first tiles of a block, each a lane's: all warps go through them once for every width, which
 * would look at memory again. */
typedef struct {
    int end; /* of all tiles */
    place tile[32];
} tile_board;

/* By one warp; the others may look after the block has met. */
template <class S>
static __device__ __forceinline__ void post_tiles(const gemm_args *a, tile_board *b) {
    tile_queue q = tiles_of_block<S>(a);
    int lane = threadIdx.x % 32, own = q.number + lane * q.stride;
    if (own < q.end)
        b->tile[lane] = place_at<S>(a, own);
    if (lane == 0)
        b->end = q.end;
}

/* The tile of a block that comes `i`-th from tile `number` on. */
template <class S>
static __device__ __forceinline__ place tile_from(const gemm_args *a, const tile_board *b,
                                                  int number, int i) {
    return number == (int)blockIdx.x ? b->tile[i] : place_at<S>(a, number + i * (int)gridDim.x);
}

/* Calls `make` for the tiles of a block that have this width. Tiles of one width follow each other:
 * where the loop over tiles has code for several, ptxas finds no registers for their products
 * (docs/lab/moe.md). By whole warps, a lane of which looks at every 32nd tile. */
template <class S, class F>
static __device__ __forceinline__ void for_tiles(const gemm_args *a, const tile_board *b, int width,
                                                 F make) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int number = (int)blockIdx.x; number < b->end; number += 32 * (int)gridDim.x) {
        bool suits = number + lane * (int)gridDim.x < b->end &&
                     width_of<S>(a, tile_from<S>(a, b, number, lane).rows.rows) == width;
        uint32_t left = __ballot_sync(0xffffffffu, suits);
#pragma unroll 1
        for (; left; left &= left - 1)
            make(tile_from<S>(a, b, number, __ffs((int)left) - 1));
    }
}

/* ---- the copy engine ---- */

typedef struct {
    const CUtensorMap *units, *rows;
    const tile_board *tiles;
    uint32_t weights, x, full, empty, gathered; /* in shared memory: the ring, and barriers */
} feed;

/* Asks for a step's units of a tile. */
template <class S>
static __device__ __forceinline__ void copy_units(const gemm_args *a, const feed *f, const place *p,
                                                  int step, const ring_place *slot,
                                                  uint64_t policy) {
    uint32_t to = f->weights + (uint32_t)(slot->index * S::weight_bytes);
    uint32_t full = f->full + 8u * slot->index;
    int slab = p->rows.expert * a->height + p->along * S::columns / MOQ_PACK_ROWS;
    mbarrier_expect(full, S::weight_bytes);
#pragma unroll
    for (int i = 0; i < 2; i++)
        copy_box_2d(to + i * (S::weight_bytes / 2), f->units, step * (S::units * UNIT_WORDS),
                    slab + i * (S::gated ? a->half / MOQ_PACK_ROWS : S::box_slabs), full, policy);
}

template <class S>
static __device__ __forceinline__ void produce_units(const gemm_args *a, const feed *f) {
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, f->tiles, width, [&](place p) {
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
    ring_place slot = {0, 0};
    uint64_t policy = policy_evict_normal();
    wait_for_predecessor();
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, f->tiles, width, [&](place p) {
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
    ring_place slot = {0, 0};
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, f->tiles, width, [&](place p) {
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
    ring_place slot = {0, 0};
    for (int width = S::tokens; width; width = width_after<S>(width))
        for_tiles<S>(a, f->tiles, width, [&](place) {
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

/* The warps that copy. */
template <class S> static __device__ __forceinline__ void fill(const gemm_args *a, const feed *f) {
    int warp = (int)threadIdx.x / 32 - S::warpgroups * 4;
    bool gathering = S::tokens == 64 && S::use != OF_D && a->slot;
    if (warp == 0)
        produce_units<S>(a, f);
    else if (gathering && warp == 3)
        let_products_see<S>(a, f);
    else if (gathering)
        gather<S>(a, f, warp - 1);
    else if (warp == 1)
        produce_rows<S>(a, f);
}

/* Barriers of the stages, full and empty ones and those of gathered rows, and the tiles of a block.
 * By all threads, before anything else. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, const feed *f,
                                              tile_board *tiles) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(f->full + 8u * i, 2); /* of weights and of rows */
            mbarrier_init(f->empty + 8u * i, S::warpgroups * 4 * WARP_ARRIVALS);
            mbarrier_init(f->gathered + 8u * i, 32 * COPIERS);
        }
        mbarrier_init_fence();
        prefetch_map(f->units);
        prefetch_map(f->rows);
    }
    if (threadIdx.x / 32 == 2)
        touch_parameter(*a);
    if (threadIdx.x / 32 == 1) {
        if (!a->early)
            wait_for_predecessor();
        post_tiles<S>(a, tiles);
    }
    __syncthreads();
}

} // namespace moq::moe_many

#endif
