/* Decode kernels of experts on Hopper with split-K fixed at compile time (up_down.h has formulas
 * and layouts). Tile: 1 or 2 slabs of 16 rows by up to 8 slots; eight warps are one, two or four
 * groups that split K.
 *
 * Bound: from two tokens on, weights are read at three quarters to nine tenths of the memory's
 * speed. The rest is latency from the ids to the first products and from kernel to kernel
 * (docs/lab/experts-decode.md). So:
 *
 * - A warp's K range has BLOCKS blocks and its products no branch. If K is no multiple of the
 *   ranges, the last ones overlap, with zeros of x. A stage is a slab by a range or by a part of
 *   it.
 * - Lanes find what stages are filled with, 32 stages at once, one a lane. The lane then issues its
 *   copy: filling the pipeline takes a few instructions a stage.
 * - Copies that are in flight together arrive together, the first as late as the last. So a fresh
 *   pipeline starts with `flight` stages, and issues another one whenever one has come.
 * - The x of a warp, slots of a chunk by its K range, stays in registers for all items of a chunk.
 *   Partial sums of an item meet in shared memory, where each warp of the group adds some slots
 *   while the next item is multiplied, in the order of the K ranges.
 * - Up to 32 slots, every warp groups them for itself and none waits for another.
 *
 * `down` works like `up`: items of two slabs leave d, float32 [slots, H], and a third kernel adds
 * the slots of a token, so that g is read once a block, not once a slab. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_SPLIT_K_H
#define MOQ_CUDA_MOE_SM90_DECODE_SPLIT_K_H

#include "cuda/moe/sm90/decode/up_down.h"

namespace moq::moe_decode {

#define LOG_WARPS  3
#define MAX_GROUPS WARPS
#define STAGED     MOQ_MOE_DECODE_STAGED
static_assert(1 << LOG_WARPS == WARPS, "a power of two");
static_assert(STAGED == 3, "as multiply_splits has it");

typedef struct {
    uint64_t full[WARPS * MAX_STAGES];
    uint64_t staged[MAX_GROUPS][STAGED];
} split_barriers;

/* ---- shares of warps ---- */

/* A warp's share: a K range, and every `step`th item from the first on. */
typedef struct {
    int splits, rank; /* warps that split an item's K, and the number of this one */
    int nominal;      /* first block of K of the warp alone */
    int begin;        /* first block of its K range, which may overlap the one before */
    int first, step, items;
    int row_slabs;        /* distance of the first slabs of consecutive items */
    uint32_t stage_bytes; /* bytes of a pipeline stage */
    uint32_t sums;        /* partial sums of the group: [STAGED][splits][slabs][32 lanes] float4 */
    uint32_t staged;      /* barriers of the partial sums */
} split_share;

/* An item: a row of slabs, and the chunk. */
typedef struct {
    int row, chunk;
} item_place;

static __device__ __forceinline__ item_place place_of_item(const warp_state *p, int item) {
    item_place at;
    at.chunk = divide(item, &p->a->by_items);
    at.row = item - at.chunk * p->a->by_items.by;
    return at;
}

static __device__ __forceinline__ void next_item(const warp_state *p, const split_share *s,
                                                 item_place *at) {
    at->row += s->step;
    while (at->row >= p->a->by_items.by) {
        at->row -= p->a->by_items.by;
        at->chunk++;
    }
}

/* Initializes a warp's barriers and finds its place in the block. */
template <class F>
static __device__ __forceinline__ void open_split(const common_args *a, uint8_t *shared,
                                                  split_barriers *bar, warp_state *p,
                                                  split_share *s) {
    p->a = a;
    p->warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    p->lane = (int)threadIdx.x % 32;
    p->t = tables_of(&a->route, shared, p->warp);
    s->stage_bytes = F::stage_blocks * F::block_bytes;
    p->pipeline = shared_address(shared) + (uint32_t)(p->warp * a->stages) * s->stage_bytes;
    p->full = shared_address(bar->full + p->warp * MAX_STAGES);
    p->policy = policy_evict_first();
    p->scale = (float *)(shared + a->scales_at);
    p->weight = (float *)(shared + a->weights_at);
    p->slabs = F::slabs;
    s->splits = 1 << a->log_splits;
    s->rank = p->warp & (s->splits - 1);
    s->nominal = s->rank * F::blocks;
    s->begin = min(s->nominal, a->w.blocks - F::blocks);
    int group = p->warp >> a->log_splits;
    s->sums = shared_address(shared + a->staged_at) +
              (uint32_t)(group * STAGED * s->splits * F::slabs * 512);
    s->staged = shared_address(bar->staged[group]);
    if (p->lane < a->stages)
        mbarrier_init(p->full + 8u * p->lane, 1);
    if (s->rank == 0 && p->lane < STAGED)
        mbarrier_init(s->staged + 8u * p->lane, (uint32_t)(WARP_ARRIVALS * s->splits));
    mbarrier_init_fence();
}

/* Shares the items: equally among blocks, then among the groups of a block. */
static __device__ __forceinline__ void share_items(warp_state *p, split_share *s) {
    const divisor *blocks = &p->a->by_blocks;
    int items = *p->t.chunks * p->a->by_items.by, each = divide(items, blocks);
    int block = (int)blockIdx.x, more = items - each * blocks->by;
    int begin = block * each + min(block, more), count = each + (block < more);
    p->own = {begin, count * p->a->w.blocks, p->a->by_items.by, p->a->w.blocks};
    int group = p->warp >> p->a->log_splits, log_groups = LOG_WARPS - p->a->log_splits;
    s->step = 1 << log_groups;
    s->first = begin + group;
    s->items = max(count - group + s->step - 1, 0) >> log_groups;
}

/* ---- the pipeline ---- */

/* The next stage that the lane fills: stage `number` of the warp's, if there are so many. */
template <class F> struct lane_feed {
    int number, all;
    typename F::split_target target;
};

/* Finds the target of the lane's stage. */
template <class F>
static __device__ __forceinline__ void aim_lane(const warp_state *p, const split_share *s,
                                                lane_feed<F> *f) {
    if (f->number >= f->all)
        return;
    constexpr int stages = F::blocks / F::stage_blocks; /* stages of a K range */
    int index = divide(f->number, &p->a->by_stages);
    int rest = f->number - index * p->a->by_stages.by, piece = rest / stages;
    item_place at = place_of_item(p, s->first + index * s->step);
    int slab = at.row * s->row_slabs + piece * p->slab_step;
    F::aim_split(p, expert_of_chunk(p->t.chunk[at.chunk]), slab,
                 s->begin + (rest - piece * stages) * F::stage_blocks, &f->target);
}

template <class F>
static __device__ __forceinline__ void fill_place(const warp_state *p, const split_share *s,
                                                  const lane_feed<F> *f, int place) {
    F::fill_split_stage(p, &f->target, p->pipeline + (uint32_t)place * s->stage_bytes,
                        p->full + 8u * place);
}

/* Fills the first `flight` stages of a fresh pipeline. */
template <class F>
static __device__ __forceinline__ lane_feed<F> fill_split(const warp_state *p,
                                                          const split_share *s) {
    lane_feed<F> f = {p->lane, s->items * p->a->by_stages.by, {}};
    aim_lane(p, s, &f);
    if (p->lane < min(p->a->flight, f.all))
        fill_place(p, s, &f, p->lane);
    __syncwarp();
    return f;
}

/* Waits for a stage, and fills another one while the pipeline is fresh. */
template <class F>
static __device__ __forceinline__ void await_stage(const warp_state *p, const split_share *s,
                                                   const lane_feed<F> *f,
                                                   const split_stage *stage) {
    mbarrier_wait(stage->bar, stage->parity);
    int next = stage->number + p->a->flight;
    if (next < p->a->stages) {
        if (p->lane == next && next < f->all)
            fill_place(p, s, f, next);
        __syncwarp();
    }
}

/* Refills the place of the consumed stage `number`. Lanes advance half of them at a time: there are
 * never more stages than that. */
template <class F>
static __device__ __forceinline__ void refill(const warp_state *p, const split_share *s,
                                              lane_feed<F> *f, int number, int place) {
    int next = number + p->a->stages;
    warp_meets();
    if (p->lane == next % 32 && next < f->all)
        fill_place(p, s, f, place);
    if (number % 16 == 15 && p->lane / 16 == (number / 16) % 2) {
        f->number += 32;
        aim_lane(p, s, f);
    }
    __syncwarp();
}
static_assert(MAX_STAGES <= 16, "a half of the lanes has more stages than the pipeline");

/* Multiplies a slab by the warp's K range into `sum`, and advances the pipeline. */
template <class F>
static __device__ __forceinline__ void
multiply_slab(const warp_state *p, const split_share *s, lane_feed<F> *f,
              const typename F::places &places, const typename F::split_columns &x,
              pipeline_state *place, int *number, float (&sum)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        sum[j] = 0;
#pragma unroll
    for (int i = 0; i < F::blocks; i += F::stage_blocks) {
        split_stage stage = {(uint32_t)place->index * s->stage_bytes, p->full + 8u * place->index,
                             place->parity, *number};
        await_stage(p, s, f, &stage);
        F::multiply_stage(places, &stage, x, i, f->target, sum);
        refill(p, s, f, *number, place->index);
        advance(place, p->a->stages);
        ++*number;
    }
}

/* ---- partial sums of a group ---- */

/* Stages a lane's partial sums of a slab. Lanes change places, and in every other slab neighbouring
 * columns, so that 16 rows of two slabs in one column meet no bank twice. */
template <class F>
static __device__ __forceinline__ void stage_sums(const warp_state *p, const split_share *s,
                                                  int index, const float (&sum)[F::slabs][4]) {
    uint32_t to = s->sums + (uint32_t)((index % STAGED * s->splits + s->rank) * F::slabs * 512 +
                                       (p->lane ^ p->lane / 8) * 16);
#pragma unroll
    for (int i = 0; i < F::slabs; i++)
        store_shared(to + 512 * i,
                     make_uint4(__float_as_uint(sum[i][i]), __float_as_uint(sum[i][1 - i]),
                                __float_as_uint(sum[i][2 + i]), __float_as_uint(sum[i][3 - i])));
    warp_releases<false>(s->staged + 8u * (index % STAGED));
}

/* Returns the sum over split-K in a column: lane i has row i % 16 of slab i / 16, if there are
 * two. */
template <class F>
static __device__ __forceinline__ float sum_of_column(const warp_state *p, const split_share *s,
                                                      int index, int c) {
    int g = p->lane % 8, slab = p->lane / 16 * (F::slabs - 1);
    uint32_t from = s->sums + (uint32_t)((index % STAGED * s->splits * F::slabs + slab) * 512 +
                                         ((4 * g + c / 2) ^ g / 2) * 16 + p->lane / 8 % 2 * 8 +
                                         (c % 2 ^ slab) * 4);
    float value[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        value[i] = i < s->splits
                       ? __uint_as_float(load_shared_word(from + (uint32_t)(i * F::slabs * 512)))
                       : 0;
#pragma unroll
    for (int half = WARPS / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++)
            value[i] = __fadd_rn(value[i], value[i + half]);
    return value[0];
}

/* Returns the lane's row of an item. */
template <class F>
static __device__ __forceinline__ int row_of_lane(const warp_state *p, const split_share *s,
                                                  const item_place *at) {
    int slab = at->row * s->row_slabs + p->lane / 16 * (F::slabs - 1) * p->slab_step;
    return slab * SLAB + p->lane % 16;
}

/* Factors of the lane's row, loaded early. */
typedef struct {
    float row, expert;
} lane_factor;

template <class F>
static __device__ __forceinline__ lane_factor factor_of_lane(const warp_state *p,
                                                             const split_share *s,
                                                             const item_place *at, int expert) {
    const stack *w = &p->a->w;
    int n = row_of_lane<F>(p, s, at);
    lane_factor f = {1, F::factor_of_expert(w, expert)};
    if (w->output_scale && n < w->rows)
        f.row = load_early(w->output_scale + (int64_t)expert * w->rows + n);
    return f;
}

/* ---- items with split-K ---- */

/* Waits for the sums of all warps of the group. */
static __device__ __forceinline__ void await_sums(const split_share *s, int index) {
    mbarrier_wait(s->staged + 8u * (index % STAGED), index / STAGED & 1);
}

/* Adds the warp's slots of the group's item `index` over split-K. `finish` gets the column of the
 * chunk, and of each lane its row and the linear's output. */
template <class F, class FINISH>
static __device__ __forceinline__ void reduce_sums(const warp_state *p, const split_share *s,
                                                   int index, const item_place *at, uint32_t chunk,
                                                   const lane_factor &found, FINISH finish) {
    const stack *w = &p->a->w;
    int slots = slots_of_chunk(chunk), c = (s->rank - index) & (s->splits - 1);
    if (c < slots)
        await_sums(s, index);
#pragma unroll 1
    for (; c < slots; c += s->splits) {
        int n = row_of_lane<F>(p, s, at), expert = expert_of_chunk(chunk);
        float factor = found.expert * found.row;
        if (F::scaled_tokens)
            factor *= p->scale[first_of_chunk(chunk) + c];
        float value = __fmul_rn(sum_of_column<F>(p, s, index, c), factor);
        if (w->bias && n < w->rows)
            value = __fadd_rn(value, w->bias[(int64_t)expert * w->rows + n]);
        finish(at, first_of_chunk(chunk) + c, n, value);
    }
}

/* Multiplies all items, from filled stages on. A warp stages its sums of an item after it has read
 * its share of the item before. So when all sums of an item are there, the one before has been
 * read; its place, of three, is free for the next item. */
template <class F, bool UP, class FINISH>
static __device__ __forceinline__ void multiply_splits(const warp_state *p, const split_share *s,
                                                       lane_feed<F> *f, FINISH finish) {
    if (s->items == 0)
        return;
    item_place at = place_of_item(p, s->first), before = at;
    typename F::places places = F::places_of(p);
    pipeline_state place = {0, 0};
    typename F::split_columns x = {};
    uint32_t chunk = 0, chunk_before = 0;
    lane_factor found = {}, found_before = {};
    int loaded = -1, number = 0;
#pragma unroll 1
    for (int i = 0; i < s->items; i++) {
        if (at.chunk != loaded) {
            loaded = at.chunk;
            chunk = p->t.chunk[loaded];
            column c = column_of_chunk<F, UP>(p, chunk);
            typename F::raw_columns raw;
            F::load_raw(p, &c, s->begin, s->nominal, &raw);
            F::template make_columns<UP>(p, &c, &raw, &x);
        }
        found = factor_of_lane<F>(p, s, &at, expert_of_chunk(chunk));
        float sum[F::slabs][4];
#pragma unroll 1
        for (int slab = 0; slab < F::slabs; slab++) { /* one copy of the code for both */
#pragma unroll
            for (int j = 0; j < 4 && F::slabs == 2; j++)
                sum[0][j] = slab ? sum[F::slabs - 1][j] : 0;
            multiply_slab<F>(p, s, f, places, x, &place, &number, sum[F::slabs - 1]);
        }
        if (i > 1)
            await_sums(s, i - 2);
        if (i > 0)
            reduce_sums<F>(p, s, i - 1, &before, chunk_before, found_before, finish);
        stage_sums<F>(p, s, i, sum);
        before = at;
        chunk_before = chunk;
        found_before = found;
        next_item(p, s, &at);
    }
    reduce_sums<F>(p, s, s->items - 1, &before, chunk_before, found_before, finish);
}

template <class F>
static __device__ __forceinline__ void store_g(const up_args *a, const warp_state *p,
                                               const item_place *at, int place, float value) {
    float up = F::slabs == 2 ? __shfl_down_sync(ALL_LANES, value, 16) : 1;
    int64_t slot = p->t.sorted[place];
    uint32_t g = moq_narrow_pair(F::dtype, activate_inline(&a->activation, value, up), 0) & 0xffff;
    if (p->lane < SLAB)
        ((uint16_t *)a->g)[slot * a->inner + at->row * SLAB + p->lane] = (uint16_t)g;
    if (F::scaled_tokens) {
        uint32_t most = moq_max_of_lanes(g & 0x7fff, SLAB);
        if (p->lane == 0)
            p->a->maxima[slot * p->a->pairs + at->row] = moq_widen_pair(most, F::dtype).x;
    }
}

template <class F>
static __global__ void __launch_bounds__(THREADS, 2)
    moe_decode_up_split_k(const __grid_constant__ up_args args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ split_barriers bar;
    uint8_t *shared = aligned<F>(dynamic);
    const up_args *a = &args;
    const common_args *common = &args.common;
    warp_state p;
    split_share s;
    open_split<F>(common, shared, &bar, &p, &s);
    p.slab_step = common->pairs;
    s.row_slabs = 1;
    touch_parameter(args);
    int64_t place = open_tables<true>(&common->route, &p.t);
    wait_for_predecessor();
    launch_dependents(); /* not before: the next kernel relies on the ids */
    load_weights(&p);
    group_slots<true>(&common->route, &p.t, place);
    share_items(&p, &s);
    lane_feed<F> f = fill_split<F>(&p, &s);
    if (common->weights_on_input)
        __syncthreads();
    if (F::scaled_tokens)
        find_token_scales<F>(&p);
    multiply_splits<F, true>(&p, &s, &f, [&](const item_place *at, int of, int, float value) {
        store_g<F>(a, &p, at, of, value);
    });
}

template <class F>
static __global__ void __launch_bounds__(THREADS, 2)
    moe_decode_down_split_k(const __grid_constant__ down_args args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ split_barriers bar;
    uint8_t *shared = aligned<F>(dynamic);
    const down_args *a = &args;
    const common_args *common = &args.common;
    launch_dependents();
    warp_state p;
    split_share s;
    open_split<F>(common, shared, &bar, &p, &s);
    p.slab_step = 1;
    s.row_slabs = F::slabs;
    int64_t place = open_tables<true>(&common->route, &p.t);
    group_slots<true>(&common->route, &p.t, place); /* the kernel before has waited for the ids */
    share_items(&p, &s);
    lane_feed<F> f = fill_split<F>(&p, &s);
    wait_for_predecessor();
    if (F::scaled_tokens)
        find_slot_scales(&p);
    multiply_splits<F, false>(&p, &s, &f, [&](const item_place *, int of, int n, float value) {
        if (n < common->w.rows)
            a->d[(int64_t)p.t.sorted[of] * common->w.rows + n] = value;
    });
}

} // namespace moq::moe_decode

#endif
