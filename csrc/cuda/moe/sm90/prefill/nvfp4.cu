/* NVFP4 experts for prefill on Hopper: rows of 16 bits by the exact packed weights of the experts.
 * nvfp4_epilogue.h has the epilogue.
 *
 * Layouts: W packed as prepared (core/nvfp4_packed.h); rows bfloat16 or float16, sorted by expert
 * or gathered from x; g [rows, I] of 16 bits, d [rows, H] bfloat16 or float32.
 *
 * Tile: 512 rows of W by up to 64 rows of tokens, which are the columns of the products, or 256
 * rows by up to 32, 64 or 128, or 128 by up to 288. Each of four warpgroups multiplies two waves of
 * 64 rows or one, each of two warpgroups one. In the first product half of these are rows of gate
 * and half are the rows of up beside them: a wave of each, or, of one wave, 32 rows of each. A step
 * is 64 columns, a unit of each slab and 128 bytes of each row; in tiles of up to 128 rows it is
 * twice or four times as much, as the cost of a step beside its products stays the same. Tiles of
 * 256 rows of W have half the columns of those of 512 to be scheduled.
 *
 * Mainloop: four warps fill a pipeline of steps. Rows that are tokens of x they gather, 16 bytes a
 * lane in the swizzle that TMA would make; all else comes by TMA. A warpgroup decodes a piece of a
 * step into registers while the products of the piece before are under way. Four lanes need the
 * same scales; each makes a quarter of a step's and gets the others through shared memory.
 *
 * Tile scheduler: dynamic, as memory serves blocks unequally and tiles are not alike. The warp that
 * copies W acquires the next tile from a counter while it copies the one before. Tiles are counted
 * in the order of their widths, widest first, so that a block meets each width once and the last
 * tiles are short. No list is made: a block notes in bits which tiles have which width, 32 tiles a
 * word, and finds a tile by counting bits.
 *
 * Bound (docs/lab/experts-prefill.md): with few rows the instructions that decode, 80 of a warp for
 * a unit with the rest of the loop, so that schedulers issue in 65 to 70 of 100 cycles, and how
 * evenly tiles come out; with many rows the tensor cores, 1152 cycles of products a step of 128
 * rows by 288, and L2, which delivers 36 bytes a cycle and multiprocessor to such tiles. Between,
 * in tiles of 256 rows by up to 128, both, as they slow each other. */
#include "core/nvfp4_packed.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/wgmma.h"
#include "cuda/moe/sm90/prefill/gemm.h"
#include "cuda/moe/sm90/prefill/nvfp4_epilogue.h"
#include "cuda/moe/sm90/prefill/prefill_config.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_prefill {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)
#define WAVE_SLABS (WAVE_ROWS / MOQ_PACK_ROWS)
#define WAVE_BYTES (WAVE_SLABS * MOQ_PACK_BYTES)
#define COPIERS    2 /* warps that gather rows */

/* Shape of tiles of up to MOST rows, of which N are multiplied, in steps of UNITS blocks of
 * columns. */
template <moq_nvfp4_type TYPE, product_use FOR, int MOST, int N, int UNITS = 1, int WAVES = 1>
struct unit_shape {
    static constexpr moq_nvfp4_type type = TYPE;
    static constexpr product_use use = FOR;
    static constexpr bool gated = FOR == OF_GATE_AND_UP;
    static constexpr bool large = MOST > 128;
    static constexpr int warpgroups = large ? 2 : 4, tokens = MOST, units = UNITS;
    static constexpr int waves = WAVES, box_units = UNITS > 2 ? 2 : UNITS;
    static constexpr int own_units = waves * units; /* units of a warp in a step */
    static constexpr int T = N;
    static constexpr bool mixed = gated && waves == 1; /* one wave has rows of gate and of up */
    static constexpr int registers = large ? 224 : 112, copier_registers = large ? 56 : 32;
    static constexpr int box_rows = large ? 32 : 16; /* rows of a TMA box */
    static constexpr int panel_bytes = tokens * 128, token_bytes = units * panel_bytes;
    static constexpr int weight_bytes = warpgroups * own_units * WAVE_BYTES;
    /* Returns the offset of a warp's unit `own`: waves follow each other, in a wave the boxes of a
     * slab's neighbouring units. */
    static __host__ __device__ constexpr int unit_at(int own) {
        return own / units * (weight_bytes / 2) +
               own % units / box_units * (box_slabs * box_units * MOQ_PACK_BYTES) +
               own % box_units * MOQ_PACK_BYTES;
    }
    static constexpr int box_slabs = warpgroups * waves * WAVE_SLABS / 2;
    static constexpr int columns =
        box_slabs * MOQ_PACK_ROWS * (gated ? 1 : 2); /* columns of the output */
    static constexpr int columns_of_wave = mixed ? WAVE_ROWS / 2 : WAVE_ROWS;
    /* Tokens of the first of the wgmma instructions of a step. */
    static constexpr int first_tokens = N == 80 ? 48 : N == 112 ? 64 : N == 288 ? 144 : N;
    /* Groups of 16 columns whose operands are in registers at a time, double-buffered: fewer if
     * sums leave less room. */
    static constexpr int depth = own_units == 1 || N > 64 || (waves == 2 && N == 64) ? 2 : 4;
    /* Bytes of scales that a warp makes for its lanes in a step: [unit][row g][group, rows g and g
     * + 8]. */
    static constexpr int scales = own_units * 128;
    static constexpr int at_once = large ? 32 : 16; /* rows of an epilogue step */
    /* Bytes of staged outputs of a warpgroup: a row of g and all rows, with sums that warps of gate
     * and of up hand each other; pieces of d, unless it is stored from registers. */
    static constexpr bool from_registers = MOST <= 128;
    static constexpr bool rounds_d = TYPE == MOQ_NVFP4_BF16;
    static constexpr int row_bytes = columns_of_wave * 2;
    static constexpr int piece_bytes = at_once * (rounds_d ? 128 : 256);
    static constexpr int room = FOR != OF_D
                                    ? at_once * row_bytes + (mixed ? at_once / 16 * HANDED : 0)
                                : from_registers ? 0
                                                 : D_PIECES * piece_bytes;
    template <int M> using of_width = unit_shape<TYPE, FOR, MOST, M, UNITS, WAVES>;
};

/* ---- widths of products ---- */

/* Returns the width of the products for so many rows: one of a few, each with its own code. Rare
 * activations use the largest, the only one compiled for them. */
template <class S> static __device__ __forceinline__ int width_of(const gemm_args *a, int rows) {
    if (!is_usual<S::use>(&a->act))
        return S::tokens;
    if (S::large)
        return rows > 256 ? 288 : rows > 192 ? 256 : rows > 128 ? 192 : rows > 96 ? 128 : 96;
    if (S::tokens == 128)
        return rows > 32 ? max(64, (rows + 15) / 16 * 16) : 32;
    return rows > 16 ? (rows + 15) / 16 * 16 : 16;
}

/* Returns the next smaller width, 0 after the last. */
template <class S> static __device__ __forceinline__ int width_after(int width) {
    if (S::large)
        return width == 288 ? 256 : width == 256 ? 192 : width == 192 ? 128 : width == 128 ? 96 : 0;
    return S::tokens == 128 && width <= 64 ? width - 32 : width - 16;
}

/* Returns the number of widths. */
template <class S> static __device__ __forceinline__ constexpr int widths_of(void) {
    return S::large ? 5 : S::tokens == 128 ? 6 : S::tokens / 16;
}

/* ---- tile scheduler: order of tiles ---- */

#define ALL_LANES 0xffffffffu

#define NOTED_WORDS      48 /* words of noted tiles */
#define MOST_WIDTHS      6
#define SCHEDULER_STAGES 8 /* published tiles that some warps may not have read */

/* The tile scheduler in shared memory: bits of widths, and a queue of published tiles. */
typedef struct {
    int4 place[SCHEDULER_STAGES]; /* expert, first row, rows, tile of W; -1 after the last tile */
    uint32_t suits[MOST_WIDTHS * NOTED_WORDS]; /* [width][word] */
    int end;                                   /* number of all tiles */
} scheduler_state;

/* Notes the widths of tiles in bits, by all warps before the block synchronizes. */
template <class S>
static __device__ __forceinline__ void note_widths(const gemm_args *a, scheduler_state *b) {
    int lane = threadIdx.x % 32, count = a->count[1], words = (count + 31) / 32;
#pragma unroll 1
    for (int word = threadIdx.x / 32; words <= NOTED_WORDS && word < words;
         word += S::warpgroups * 4 + 4) {
        int tile = 32 * word + lane, own = tile < count ? width_of<S>(a, a->tiles[tile].rows) : 0;
        uint32_t *to = b->suits + word;
        for (int width = S::tokens; width; width = width_after<S>(width), to += words) {
            uint32_t suits = __ballot_sync(ALL_LANES, own == width);
            if (lane == 0)
                *to = suits;
        }
    }
    if (threadIdx.x == 0)
        b->end = count * a->row_tiles;
}

/* Start of the search for the next tile, which is never before: a word, and the tiles before it. */
typedef struct {
    int word, before;
} tile_search;

/* Returns word `at` of all widths; it is computed if there are more tiles than are noted. */
template <class S>
static __device__ __forceinline__ uint32_t word_of_tiles(const gemm_args *a,
                                                         const scheduler_state *b, int words,
                                                         int at) {
    if (words <= NOTED_WORDS)
        return b->suits[at];
    int width = S::tokens;
    uint32_t suits = 0;
    for (; at >= words; at -= words)
        width = width_after<S>(width);
#pragma unroll 1
    for (int i = 0; i < 32; i++) {
        int tile = 32 * at + i;
        if (tile < a->count[1] && width_of<S>(a, a->tiles[tile].rows) == width)
            suits |= 1u << i;
    }
    return suits;
}

/* Finds the tile that comes `number`-th, by a warp. */
template <class S>
static __device__ __forceinline__ place find_tile(const gemm_args *a, const scheduler_state *b,
                                                  tile_search *s, int number) {
    int words = (a->count[1] + 31) / 32, all = words * widths_of<S>(), lane = threadIdx.x % 32;
    int wanted = number / a->row_tiles, along = number - wanted * a->row_tiles;
    for (;;) {
        int at = s->word + lane;
        uint32_t suits = at < all ? word_of_tiles<S>(a, b, words, at) : 0;
        int own = __popc(suits), sum = own;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            int other = __shfl_up_sync(ALL_LANES, sum, i);
            sum += lane >= i ? other : 0;
        }
        uint32_t found = __ballot_sync(ALL_LANES, s->before + sum > wanted);
        if (found) {
            int from = __ffs((int)found) - 1;
            int rest = wanted - s->before - __shfl_sync(ALL_LANES, sum - own, from);
            suits = __shfl_sync(ALL_LANES, suits, from);
            bool it = suits >> lane & 1 && __popc(suits & ((1u << lane) - 1)) == rest;
            int bit = __ffs((int)__ballot_sync(ALL_LANES, it)) - 1;
            return {a->tiles[(s->word + from) % words * 32 + bit], along};
        }
        s->before += __shfl_sync(ALL_LANES, sum, 31);
        s->word += 32;
    }
}

/* ---- tile scheduler: acquired and published tiles ---- */

/* Adds 1 and returns the value before. ptxas would turn an addition into one for all lanes and wait
 * for its answer at once. */
static __device__ __forceinline__ int count_up(int32_t *counter) {
    int before;
    asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

/* Publishes a tile, by one warp. */
static __device__ __forceinline__ void publish_tile(scheduler_state *b, uint32_t posted,
                                                    pipeline_state *at, const place *p) {
    mbarrier_wait(posted + 8u * (SCHEDULER_STAGES + at->index), at->parity ^ 1);
    if (threadIdx.x % 32 == 0) {
        b->place[at->index] = make_int4(p->rows.expert, p->rows.first, p->rows.rows, p->along);
        mbarrier_arrive(posted + 8u * at->index);
    }
    advance(at, SCHEDULER_STAGES);
}

/* A consumer's position in the queue of published tiles. */
typedef struct {
    const scheduler_state *state;
    uint32_t posted; /* barriers of full places, then of empty ones */
    pipeline_state at;
    place now; /* the next tile; along is -1 after the last */
} scheduler_consumer;

static __device__ __forceinline__ void fetch_next_tile(scheduler_consumer *r) {
    mbarrier_wait(r->posted + 8u * r->at.index, r->at.parity);
    int4 p = r->state->place[r->at.index];
    r->now = {{p.x, p.y, p.z}, p.w};
    warp_releases<false>(r->posted + 8u * (SCHEDULER_STAGES + r->at.index));
    advance(&r->at, SCHEDULER_STAGES);
}

static __device__ __forceinline__ scheduler_consumer open_scheduler(const scheduler_state *b,
                                                                    uint32_t posted) {
    scheduler_consumer r = {b, posted, {0, 0}, {}};
    fetch_next_tile(&r);
    return r;
}

/* Calls `make` for the tiles of the block. */
template <class F>
static __device__ __forceinline__ void for_tiles(const scheduler_state *b, uint32_t posted,
                                                 F make) {
#pragma unroll 1
    for (scheduler_consumer r = open_scheduler(b, posted); r.now.along >= 0; fetch_next_tile(&r))
        make(r.now);
}

/* Calls `make` for the next tiles that have this width. */
template <class S, class F>
static __device__ __forceinline__ void for_tiles_of_width(const gemm_args *a, scheduler_consumer *r,
                                                          F make) {
#pragma unroll 1
    while (r->now.along >= 0 && width_of<S>(a, r->now.rows.rows) == S::T) {
        make(r->now);
        fetch_next_tile(r);
    }
}

/* ---- producers: TMA ---- */

typedef struct {
    const CUtensorMap *units, *rows;
    scheduler_state *tiles;
    /* Producers' view of shared memory: the pipeline, and barriers; `posted` has SCHEDULER_STAGES
     * of full, then of empty places of the queue. */
    uint32_t weights, x, full, empty, gathered, posted;
} feed;

/* Copies a step's units of a tile. */
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

/* Acquires the tiles, each while the copies of the one before are in flight, and copies their
 * units. */
template <class S>
static __device__ __forceinline__ void produce_units(const gemm_args *a, const feed *f) {
    pipeline_state slot = {0, 0}, at = {0, 0};
    uint64_t policy = policy_evict_normal();
    tile_search search = {0, 0};
    int number = (int)blockIdx.x, lane = threadIdx.x % 32;
    while (number < f->tiles->end) {
        place p = find_tile<S>(a, f->tiles, &search, number);
        int acquired = 0; /* arrives before the next tile's turn: nothing uses it earlier */
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

/* ---- producers: gathered rows ---- */

/* Offsets in x of a tile's rows, in 16 bytes: rows lane and lane + 32. */
typedef struct {
    uint32_t offset[2];
} gathered_rows;

/* Returns the token of x that a gathered row is. */
static __device__ __forceinline__ int token_of(const gemm_args *a, int row) {
    return a->slot[row] / a->top_k;
}

static __device__ __forceinline__ gathered_rows find_rows(const gemm_args *a, const place *p) {
    gathered_rows g;
    int lane = threadIdx.x % 32, last = p->rows.rows - 1;
#pragma unroll
    for (int i = 0; i < 2; i++)
        g.offset[i] =
            (uint32_t)(a->x_stride / 16) * token_of(a, p->rows.first + min(32 * i + lane, last));
    return g;
}

/* Gathers a step's columns of rows 8 * i + own, 16 bytes of each 64 a lane. `to` is the place of
 * the first row. */
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

/* Gathers rows, by two warps. The copies themselves arrive at a step's barrier. */
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

/* Makes gathered rows visible to the async proxy, by which wgmma reads them, for all consumers,
 * whom the fence would hold up. A warp without copies does it: others would wait for their copies
 * of later steps. */
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

/* ---- producers and barriers ---- */

template <class S> static __device__ __forceinline__ bool gathers(const gemm_args *a) {
    return S::tokens <= 64 && S::use != OF_D && a->slot;
}

/* Runs the producer warps. */
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

/* Initializes the barriers of stages, gathered rows and published tiles, and notes the tiles. All
 * threads call, first of all. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, const feed *f) {
    int readers = S::warpgroups * 4 + (gathers<S>(a) ? COPIERS + 1 : 1); /* readers of tiles */
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(f->full + 8u * i, 2); /* arrivals for weights and for rows */
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

/* Stages as a consumer thread reads them: barriers, its operand, and its codes and scales. */
typedef struct {
    uint32_t full, empty;
    uint64_t x;
    uint32_t codes, scales;
    int stages;
} consumer_pipeline;

/* A consumer thread: its pipeline, and places of the scales that it makes of a step and that it
 * needs. */
typedef struct {
    consumer_pipeline pipeline;
    uint32_t made, needed;
} unit_reader;

/* Returns a consumer thread's reader; `scales` is where scales begin in shared memory. */
template <class S>
static __device__ __forceinline__ unit_reader reader_of(const feed *f, uint32_t scales,
                                                        int stages) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int slab = S::mixed ? warp % 4 / 2 * S::box_slabs + warp / 4 * 2 + warp % 2 : warp;
    uint32_t unit = f->weights + slab / S::box_slabs * (S::weight_bytes / 2) +
                    slab % S::box_slabs * (S::box_units * MOQ_PACK_BYTES),
             of_warp = scales + warp * (2 * S::scales);
    uint32_t four = S::own_units == 1 ? lane / 2 * 4
                                      : S::unit_at(lane * S::own_units / 32) +
                                            lane % (32 / S::own_units) * (2 * S::own_units);
    return {{f->full, f->empty, wgmma_operand(f->x), unit + moq_pack_word_at(lane / 4, lane % 4, 0),
             unit + MOQ_PACK_SCALES + four, stages},
            kept(of_warp + lane * (S::own_units * 4)),
            kept(of_warp + lane / 4 * 16)};
}

/* Waits for a step, and makes a quarter of the scales that this lane and three others need. */
template <class S>
static __device__ __forceinline__ void open_step(const unit_reader *t, const pipeline_state *slot,
                                                 uint32_t to) {
    constexpr moq_nvfp4_type TYPE = S::type;
    mbarrier_wait(t->pipeline.full + 8u * slot->index, slot->parity);
    uint32_t from = t->pipeline.scales + (uint32_t)(slot->index * S::weight_bytes);
    if constexpr (S::own_units == 4) {
        uint2 eight = load_shared_pair(from);
        store_shared(
            to, {moq_nvfp4_scales<TYPE>(eight.x, false), moq_nvfp4_scales<TYPE>(eight.x, true),
                 moq_nvfp4_scales<TYPE>(eight.y, false), moq_nvfp4_scales<TYPE>(eight.y, true)});
    } else if constexpr (S::own_units == 2) {
        uint32_t four = load_shared_word(from);
        store_shared_pair(
            to, {moq_nvfp4_scales<TYPE>(four, false), moq_nvfp4_scales<TYPE>(four, true)});
    } else {
        uint32_t four = load_shared_word(from);
        store_shared_word(to, moq_nvfp4_scales<TYPE>(four >> threadIdx.x % 2 * 16, false));
    }
    __syncwarp();
}

/* Operands of some products of 16 columns. */
template <class S> struct piece_operands {
    uint32_t group[S::depth][4];
};

/* Codes and scales of a piece of a step, S::depth groups of a wave. */
template <class S> struct packed_piece {
    uint32_t word[S::depth], scale[S::depth];
};

/* Loads a piece; `scales` is the place of the first piece's. */
template <class S>
static __device__ __forceinline__ packed_piece<S>
load_piece(const unit_reader *t, const pipeline_state *slot, uint32_t scales, int piece) {
    int unit = piece * S::depth / MOQ_PACK_GROUPS, first = piece * S::depth % MOQ_PACK_GROUPS;
    uint32_t from = t->pipeline.codes + (uint32_t)(slot->index * S::weight_bytes) +
                    S::unit_at(unit) + 4 * first;
    packed_piece<S> p;
    scales += unit * 128 + 4 * first;
    if constexpr (S::depth == 4) {
        *(uint4 *)p.word = load_shared(from);
        *(uint4 *)p.scale = load_shared(scales);
    } else {
        *(uint2 *)p.word = load_shared_pair(from);
        *(uint2 *)p.scale = load_shared_pair(scales);
    }
    return p;
}

template <class S>
static __device__ __forceinline__ void decode_piece(const packed_piece<S> *p,
                                                    piece_operands<S> *o) {
    constexpr moq_nvfp4_type TYPE = S::type;
#pragma unroll
    for (int s = 0; s < S::depth; s++)
        moq_nvfp4_fragment<TYPE>(p->word[s], p->scale[s], o->group[s]);
}

template <class S, int COUNT>
static __device__ __forceinline__ void multiply_tokens(const uint32_t (&weights)[4], uint64_t rows,
                                                       float *sum) {
    float (&some)[COUNT] = *(float (*)[COUNT])sum;
    if constexpr (S::type == MOQ_NVFP4_BF16)
        wgmma_bf16(some, weights, rows);
    else
        wgmma_f16(some, weights, rows);
}

/* Issues the products of a piece. The low half of the rows' operand has the address: a sum of 64
 * bits would take more instructions. */
template <class S>
static __device__ __forceinline__ void queue_piece(const unit_reader *t, const pipeline_state *slot,
                                                   int piece, const piece_operands<S> *o,
                                                   float (&sum)[S::T / 2]) {
    uint32_t at = (uint32_t)t->pipeline.x + (uint32_t)(slot->index * (S::token_bytes / 16)) +
                  2 * (piece * S::depth % MOQ_PACK_GROUPS) +
                  piece * S::depth / MOQ_PACK_GROUPS % S::units * (S::panel_bytes / 16);
    uint64_t rest = t->pipeline.x >> 32 << 32;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < S::depth; s++, at += 2) {
        multiply_tokens<S, S::first_tokens / 2>(o->group[s], rest | at, sum);
        if constexpr (S::first_tokens < S::T)
            multiply_tokens<S, (S::T - S::first_tokens) / 2>(
                o->group[s], rest | (at + S::first_tokens * 8), sum + S::first_tokens / 2);
    }
    wgmma_commit();
}

/* Marks the end of the products of these operands: until here they stay in their registers. */
template <class S> static __device__ __forceinline__ void give_up(piece_operands<S> *o) {
#pragma unroll
    for (int i = 0; i < 4 * S::depth; i++)
        asm volatile("" : "+r"(o->group[i / 4][i % 4])::"memory");
}

/* Multiplies a tile's steps: a piece is decoded under the products of the one before. */
template <class S>
static __device__ __forceinline__ void
multiply(const unit_reader *t, int steps, pipeline_state *slot, float (&sum)[S::waves][S::T / 2]) {
    constexpr int PIECES = S::own_units * MOQ_PACK_GROUPS / S::depth;
    piece_operands<S> set[2] = {};
    pipeline_state before = *slot, next = *slot;
    uint32_t made = t->made, needed = t->needed;
    open_step<S>(t, slot, made);
    packed_piece<S> packed = load_piece<S>(t, slot, needed, 0);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        advance(&next, t->pipeline.stages);
        made ^= S::scales;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            piece_operands<S> *own = &set[piece % 2], *other = &set[1 - piece % 2];
            if (piece == PIECES - 1 && left > 1)
                open_step<S>(t, &next, made);
            decode_piece<S>(&packed, own);
            if (piece < PIECES - 1)
                packed = load_piece<S>(t, slot, needed, piece + 1);
            else if (left > 1)
                packed = load_piece<S>(t, &next, needed ^ S::scales, 0);
            queue_piece<S>(t, slot, piece, own, sum[piece * S::waves / PIECES]);
            wgmma_wait<1>(); /* the products of the piece before have ended */
            give_up<S>(other);
            if (piece == 0 && left < steps)
                warp_releases<false>(t->pipeline.empty + 8u * before.index);
        }
        needed ^= S::scales;
        before = *slot;
        *slot = next;
    }
    wgmma_wait<0>();
    give_up<S>(&set[1]);
#pragma unroll
    for (int wave = 0; wave < S::waves; wave++)
        stay_here(sum[wave]);
    warp_releases<false>(t->pipeline.empty + 8u * before.index);
}

/* A consumer warpgroup: tiles of the block, and staged outputs. */
typedef struct {
    scheduler_consumer tiles;
    uint32_t room;
    int next; /* next piece of d */
    maps_of_d maps;
} unit_consumer;

/* Makes the tiles of one width. */
template <class S>
static __device__ __forceinline__ void make_tiles(const gemm_args *a, const unit_reader *t,
                                                  pipeline_state *slot, int group,
                                                  unit_consumer *path) {
    for_tiles_of_width<S>(a, &path->tiles, [&](place p) {
        float sum[S::waves][S::T / 2] = {};
        terms e[2] = {find_terms<S>(a, &p, group, 0), find_terms<S>(a, &p, group, S::waves - 1)};
        multiply<S>(t, a->steps, slot, sum);
        complete(&e[0]);
        complete(&e[1]);
        if constexpr (S::use != OF_D)
            write_g<S>(a, &p, path->room, e, group, sum);
#pragma unroll
        for (int i = 0; S::use == OF_D && i < S::waves; i++) {
            int column = column_of_wave<S>(&p, group, i);
            if constexpr (S::from_registers)
                store_d<S>(a, &p, &e[i], column, sum[i]);
            else
                write_d<S>(&path->maps, &p, path->room, &e[i], group, column, &path->next, sum[i]);
        }
    });
}

/* Makes all tiles of the block, in the order of width_after. */
template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const unit_reader *t, int group,
                                               unit_consumer path) {
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* the next kernel may rely on the groups */
    fetch_next_tile(&path.tiles);
    make_tiles<S>(a, t, &slot, group, &path);
    if constexpr (S::large) {
        make_tiles<typename S::template of_width<256>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<192>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<128>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<96>>(a, t, &slot, group, &path);
    } else if constexpr (S::tokens == 128) {
        make_tiles<typename S::template of_width<112>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<96>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<80>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<64>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<32>>(a, t, &slot, group, &path);
    } else {
        if constexpr (S::tokens > 32) {
            make_tiles<typename S::template of_width<48>>(a, t, &slot, group, &path);
            make_tiles<typename S::template of_width<32>>(a, t, &slot, group, &path);
        }
        make_tiles<typename S::template of_width<16>>(a, t, &slot, group, &path);
    }
    if (S::use == OF_D && !S::from_registers)
        store_wait<0>();
}

#define BARRIERS (3 * MANY_STAGES + 2 * SCHEDULER_STAGES)

template <class S>
static __global__ void __launch_bounds__(128 * (S::warpgroups + 1), 1)
    experts_of_units(const __grid_constant__ CUtensorMap weights,
                     const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a,
                     const __grid_constant__ CUtensorMap whole_d,
                     const __grid_constant__ CUtensorMap eight_of_d) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ scheduler_state tiles;
    uint32_t full = fixed_shared_address(barrier), empty = full + 8 * MANY_STAGES;
    uint32_t gathered = empty + 8 * MANY_STAGES;
    uint32_t x = fixed_shared_address(smem), room = x + a.stages * S::token_bytes;
    uint32_t scales = room + S::warpgroups * S::room;
    uint32_t units = scales + S::warpgroups * 4 * 2 * S::scales;
    feed f = {&weights, &rows, &tiles, units, x, full, empty, gathered, gathered + 8 * MANY_STAGES};
    set_up<S>(&a, &f);
    if (threadIdx.x < S::warpgroups * 128) {
        more_registers<S::registers>();
        int group = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* uniform */
        unit_reader t = reader_of<S>(&f, scales, a.stages);
        consume<S>(&a, &t, group,
                   {{&tiles, f.posted}, room + group * S::room, 0, {&whole_d, &eight_of_d}});
    } else {
        fewer_registers<S::copier_registers>();
        fill<S>(&a, &f);
    }
}

/* ---- launch ---- */

/* A shape and use for the launch. */
typedef struct {
    int stage, room, warpgroups, box_slabs, units, box_units, box_rows, at_once;
    const void *kernel;
} unit_variant;

template <class S> static unit_variant variant_of(void) {
    return {S::token_bytes + S::weight_bytes,
            S::warpgroups * (S::room + 4 * 2 * S::scales),
            S::warpgroups,
            S::box_slabs,
            S::units,
            S::box_units,
            S::box_rows,
            S::at_once,
            (const void *)experts_of_units<S>};
}

template <moq_nvfp4_type TYPE, product_use USE>
static unit_variant variant_of_tile(int rows, bool deep) {
    if (rows == 32)
        return variant_of<unit_shape<TYPE, USE, 32, 32, 4>>();
    if (deep)
        return variant_of<unit_shape<TYPE, USE, 64, 64, 2>>();
    if (rows == 64)
        return variant_of<unit_shape<TYPE, USE, 64, 64, 2, 2>>();
    if (rows == 128)
        return variant_of<unit_shape<TYPE, USE, 128, 128, 2>>();
    return variant_of<unit_shape<TYPE, USE, 288, 288>>();
}

template <moq_nvfp4_type TYPE> static unit_variant variant_for(const moe::expert_product *p) {
    int rows = p->tile_rows;
    bool deep = moq_moe_nvfp4_is_deep(moq_tiling_row(p->call->config.tiling));
    product_use use = use_of(p);
    return use == OF_D     ? variant_of_tile<TYPE, OF_D>(rows, deep)
           : use == OF_ONE ? variant_of_tile<TYPE, OF_ONE>(rows, deep)
                           : variant_of_tile<TYPE, OF_GATE_AND_UP>(rows, deep);
}

/* Sets the stages that fit beside the outputs; returns the dynamic shared memory. */
static int set_stages(gemm_args *a, const unit_variant *v, int limit) {
    int stages = (limit - 1024 - BARRIERS * 8 - (int)sizeof(scheduler_state) - v->room) / v->stage;
    a->stages = stages < MANY_STAGES ? stages : MANY_STAGES;
    MOQ_ASSERT(a->stages >= 2); /* one is filled while the other is multiplied */
    return a->stages * v->stage + v->room;
}

moq_status multiply_nvfp4(const moe::expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    unit_variant v =
        spec->dtype == MOQ_DT_F16 ? variant_for<MOQ_NVFP4_F16>(p) : variant_for<MOQ_NVFP4_BF16>(p);
    int64_t k = spec->in_features, blocks = moq_pack_blocks(k);
    int64_t slabs = moq_pack_slabs(spec->out_features);
    int64_t row_of_d = spec->out_features * (p->d_dtype == MOQ_DT_BF16 ? 2 : 4);
    int limit;
    CUtensorMap weights, rows, of_d[2];
    MOQ_TRY(find_shared_limit(p, &limit, err));
    gemm_args a = args_of(p, (blocks + v.units - 1) / v.units, slabs, v.box_slabs / WAVE_SLABS);
    int shared = set_stages(&a, &v, limit);
    MOQ_TRY(moq_tensor_map_words(&weights, p->weight->weight, p->call->spec->experts * slabs,
                                 blocks * UNIT_WORDS, v.box_slabs, v.box_units * UNIT_WORDS, err));
    rows = of_d[0] = of_d[1] = weights; /* unused if rows are gathered, and if g is made */
    if (!p->gathered)
        MOQ_TRY(moq_tensor_map_rows(&rows, p->rows->data, p->most_rows, k * 2,
                                    moe::row_bytes(moe::ROWS_VALUES, spec->dtype, k),
                                    (uint32_t)v.box_rows, err));
    for (int i = 0; !p->first && i < 2; i++)
        MOQ_TRY(moq_tensor_map_rows(&of_d[i], p->out, p->most_rows, row_of_d, row_of_d,
                                    i ? 8u : (uint32_t)v.at_once, err));
    return launch(p, v.kernel, &a, shared, &weights, &rows, v.warpgroups, false, err, of_d);
}

} // namespace moq::moe_prefill
