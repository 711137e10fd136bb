/* Which tiles of NVFP4 experts on Hopper a block makes: it claims one after the other from a
 * counter, as the memory serves blocks unequally, and tiles are not alike.
 *
 * Tiles are counted in the order of their widths, those with the most columns of products first, so
 * that a block meets each width once, and the last tiles are short ones. No list of them is made:
 * a block notes in bits which tiles have which width, 32 tiles a word, and whoever claims finds a
 * tile by counting bits. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_SCHEDULER_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_SCHEDULER_H

#include "cuda/moe/sm90/sm90_moe_prefill_nvfp4_tile.h"

namespace moq::moe_prefill {

/* ---- the order of tiles ---- */

#define ALL_LANES 0xffffffffu

#define NOTED_WORDS      48 /* of tiles that are noted */
#define MOST_WIDTHS      6
#define SCHEDULER_STAGES 8 /* that some warps may not have seen yet */

/* In shared memory: the bits, and a ring of claims. */
typedef struct {
    int4 place[SCHEDULER_STAGES]; /* expert, first row, rows, tile of W, which is -1 behind the last
                                   */
    uint32_t suits[MOST_WIDTHS * NOTED_WORDS]; /* [width][word] */
    int end;                                   /* of all tiles */
} scheduler_state;

/* By all warps, before the block meets. */
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

/* Where the search for the next tile begins, which is never one before: a word, and the tiles
 * before it. */
typedef struct {
    int word, before;
} tile_search;

/* Word `at` of all widths; of more tiles than are noted it is made. */
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

/* The tile that comes `number`-th, by a warp. */
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

/* ---- claims ---- */

/* Adds 1. Of an addition ptxas makes one for all lanes, whose answer it waits for at once. */
static __device__ __forceinline__ int count_up(int32_t *counter) {
    int before;
    asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

/* By one warp. */
static __device__ __forceinline__ void publish_tile(scheduler_state *b, uint32_t posted,
                                                    pipeline_state *at, const place *p) {
    mbarrier_wait(posted + 8u * (SCHEDULER_STAGES + at->index), at->parity ^ 1);
    if (threadIdx.x % 32 == 0) {
        b->place[at->index] = make_int4(p->rows.expert, p->rows.first, p->rows.rows, p->along);
        mbarrier_arrive(posted + 8u * at->index);
    }
    advance(at, SCHEDULER_STAGES);
}

/* What a warp that reads claims has of the tile that is its next. */
typedef struct {
    const scheduler_state *state;
    uint32_t posted; /* barriers, and behind them those of claims that all have seen */
    pipeline_state at;
    place now; /* along is -1 behind the last */
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

} // namespace moq::moe_prefill

#endif
