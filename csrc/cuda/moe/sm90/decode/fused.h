/* Decode kernels of experts on Hopper with fused up and down: one kernel from x to W2, and one that
 * adds partial sums and slots (up_down.h has the formulas).
 *
 * Tile: 64 columns of I, so 64 rows of gate, 64 of up, and 64 columns of W2. A block makes the g of
 * its tile, multiplies W2's columns by it, and leaves a partial sum of d. No block waits for
 * another between first and last weight, weights of both products come as one stream, x is read by
 * the blocks of its expert alone, and g never leaves the multiprocessor. Blocks have equal shares
 * of the tiles of all chunks, the last ones less. Consecutive tiles of a chunk are added in
 * registers.
 *
 * Layouts: weights and x as in up_down.h; d float32 [blocks + chunks, columns of a chunk, H].
 * Sixteen warps, one block a multiprocessor. In the first product they are two groups of eight: a
 * group has half of the rows, a warp of it one range of K, whose x stays in registers for all tiles
 * of a chunk. Sums meet in shared memory, and all warps find g of the columns that there are. In
 * the second product a warp has some slabs of H and all 64 columns. All warps share one pipeline,
 * whose stages are what a group multiplies next: a slab by all of K, or some slabs by the tile. It
 * is long enough that weights come while warps meet.
 *
 * Bound: the weights of experts that have a slot. With fewer tiles than multiprocessors, as at one
 * token, a block has one tile.
 *
 * The second kernel adds partial sums in the order of blocks, and slots in their order: no sum
 * depends on timing. Its bound is latency: the start behind the first kernel, and one round of
 * reads. With few tokens a warp has a slot, whose partial sums its lanes share; it finds what it
 * can of a slot before it waits for d. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_FUSED_H
#define MOQ_CUDA_MOE_SM90_DECODE_FUSED_H

#include "cuda/moe/sm90/decode/split_k.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_decode {

#define FUSED_WARPS   MOQ_MOE_FUSED_WARPS
#define FUSED_THREADS (32 * FUSED_WARPS)
#define FUSED_SPLITS  MOQ_MOE_FUSED_SPLITS /* warps that split K in the first product */
#define FUSED_COLUMNS MOQ_MOE_FUSED_COLUMNS
#define FUSED_SLABS   (FUSED_COLUMNS / SLAB)   /* slabs of gate, and as many of up */
#define DOWN_SLABS    MOQ_MOE_FUSED_DOWN_SLABS /* slabs of a warp in the second product */
#define G_PITCH       MOQ_MOE_FUSED_G_PITCH
#define FUSED_GROUPS  (FUSED_WARPS / FUSED_SPLITS)
#define STAGE_SLABS   MOQ_MOE_FUSED_STAGE_SLABS /* slabs of a warp in a stage of W2 */
#define DOWN_STAGES   (DOWN_SLABS / STAGE_SLABS)

typedef struct {
    common_args common; /* arguments of the first product */
    moe::activation activation;
    CUtensorMap down_map;
    stack down;
    int g_at, up_slabs; /* up_slabs: slabs of a warp in the first product */
    bool alone;         /* one token, whose slots are chunks: the grid has a block for each tile */
    divisor by_fused_tiles; /* tiles of I; common: stages of a tile, blocks of the grid */
    float *d;               /* [blocks + chunks][columns of a chunk][H] */
    uint32_t *places;       /* [slots]: chunk and column in it; then how many chunks there are */
} fused_args;

/* Arguments of the kernel that adds partial sums and slots. */
typedef struct {
    routing route;
    stack down;
    const float *d;
    const uint32_t *places;
    void *y;
    int64_t y_stride;
    bool alone, weighted, accumulate;
    float factor; /* factor of all sums */
    divisor by_blocks;
    int tiles;
} fused_sum_args;

/* A warp's place in a block. */
typedef struct {
    split_share k;    /* number and K range of the warp in the first product */
    int group;        /* group of rows in the first product */
    int first, tiles; /* tiles of the block */
    int columns;      /* columns of d in a chunk */
    uint32_t empty;   /* barriers of consumed stages */
} fused_share;

/* Returns the first slab of the second product in a stage of a group. */
static __device__ __forceinline__ int first_down_slab(int group, int stage) {
    return (stage * FUSED_GROUPS + group) * FUSED_SPLITS * STAGE_SLABS;
}

/* ---- shares of tiles ---- */

/* Returns the tiles of a block; the last ones have fewer, or none. If a chunk has as many, each
 * block has one chunk: x is loaded once, and d of a slot has one partial sum. */
static __device__ __forceinline__ int fused_tiles_each(int tiles, const divisor *blocks) {
    return divide(tiles + blocks->by - 1, blocks);
}

/* Makes the tables of a block whose slot is its chunk; false if the slot does not count. */
static __device__ __forceinline__ bool table_of_slot(const routing *r, const tables *t, int slot,
                                                     int64_t place) {
    int expert = expert_at(r, place);
    if (expert < 0)
        return false;
    t->chunk[slot] = chunk_word(expert, slot, 1);
    t->sorted[slot] = (uint16_t)slot;
    __syncwarp();
    return true;
}

/* Stores the places of slots for the next kernel, by one block. */
static __device__ __forceinline__ void store_places(const fused_args *a, const tables *t) {
    int chunks = *t->chunks;
    if (threadIdx.x == 0)
        a->places[a->common.route.slots] = (uint32_t)chunks;
    for (int c = (int)threadIdx.x; c < chunks; c += FUSED_THREADS) {
        int first = first_of_chunk(t->chunk[c]), slots = slots_of_chunk(t->chunk[c]);
        for (int i = 0; i < slots; i++)
            a->places[t->sorted[first + i]] = (uint32_t)(c * CHUNK + i);
    }
}

/* ---- the pipeline ---- */

/* Stages have the order of the products, the two groups in turn. Of each tile come a group's slabs
 * of the first product, one at a time. STAGE_SLABS slabs of the second for each of its warps
 * follow. */

/* Fills stage `number` of the block, if there are so many, at a place of the pipeline. The whole
 * warp calls. */
template <class F>
static __device__ __forceinline__ void fill_fused(const fused_args *a, const warp_state *p,
                                                  const fused_share *s, int number, int place) {
    int index = divide(number, &a->common.by_stages), tile = s->first + index;
    if (index >= s->tiles)
        return;
    int rest = number - index * a->common.by_stages.by, group = rest % FUSED_GROUPS;
    int chunk = divide(tile, &a->by_fused_tiles), column = tile - chunk * a->by_fused_tiles.by;
    int expert = expert_of_chunk(p->t.chunk[chunk]), i = rest / FUSED_GROUPS;
    uint32_t to = p->pipeline + (uint32_t)(place * F::stage_bytes), bar = p->full + 8u * place;
    if (!is_elected())
        return;
    if (i < a->up_slabs)
        F::fill_up(a, expert, i / 2 * a->common.pairs + column * FUSED_SLABS + group * 2 + i % 2,
                   to, bar);
    else
        F::fill_down(a, expert, first_down_slab(group, i - a->up_slabs), column, to, bar);
}

/* A warp's position among the stages of its group. */
typedef struct {
    pipeline_state place, before;
    int number; /* index among the block's stages */
} stage_walk;

/* Waits for the group's next stage. Copies in flight together arrive together; so with one tile the
 * pipeline is first filled stage by stage, another when one has come. */
template <class F, bool ALONE>
static __device__ __forceinline__ split_stage await_next(const fused_args *a, const warp_state *p,
                                                         const fused_share *s,
                                                         const stage_walk *walk) {
    split_stage stage = {(uint32_t)(walk->place.index * F::stage_bytes),
                         p->full + 8u * walk->place.index, walk->place.parity, walk->number};
    int next = walk->number + a->common.flight;
    mbarrier_wait(stage.bar, (uint32_t)stage.parity);
    if (ALONE && next < a->common.stages &&
        walk->number / FUSED_GROUPS % FUSED_SPLITS == s->k.rank) {
        fill_fused<F>(a, p, s, next, next);
        __syncwarp();
    }
    return stage;
}

/* Releases a consumed stage. Warps of the group take turns to refill the place of the one before,
 * which the others have most likely left by now. A warp that fills a stage has waited for earlier
 * ones alone, so none waits for itself. */
template <class F>
static __device__ __forceinline__ void release_stage(const fused_args *a, const warp_state *p,
                                                     const fused_share *s, stage_walk *walk) {
    int before = walk->number - FUSED_GROUPS;
    warp_releases<false>(s->empty + 8u * walk->place.index);
    if (before >= 0 && before / FUSED_GROUPS % FUSED_SPLITS == s->k.rank) {
        mbarrier_wait(s->empty + 8u * walk->before.index, (uint32_t)walk->before.parity);
        fill_fused<F>(a, p, s, before + a->common.stages, walk->before.index);
        __syncwarp();
    }
    walk->before = walk->place;
    walk->number += FUSED_GROUPS;
    walk->place.index += FUSED_GROUPS;
    if (walk->place.index >= a->common.stages) {
        walk->place.index -= a->common.stages;
        walk->place.parity ^= 1;
    }
}

/* ---- the first product ---- */

/* Loads the warp's K range of x of a chunk. */
template <class F>
static __device__ __forceinline__ void load_columns(const warp_state *p, const fused_share *s,
                                                    uint32_t chunk, typename F::raw_columns *raw) {
    column c = column_of_chunk<F, true>(p, chunk);
    F::load_raw(p, &c, s->k.begin, s->k.nominal, raw);
}

/* Returns the K range of x as mma takes it. */
template <class F>
static __device__ __forceinline__ typename F::split_columns
columns_of_raw(const warp_state *p, uint32_t chunk, const typename F::raw_columns *raw) {
    column c = column_of_chunk<F, true>(p, chunk);
    typename F::split_columns x;
    F::template make_columns<true>(p, &c, raw, &x);
    return x;
}

/* Returns where the partial sums of a slab are staged; lanes and columns change places as in
 * stage_sums. */
static __device__ __forceinline__ uint32_t staged_slab(const fused_share *s, int rank, int slab) {
    return s->k.sums + (uint32_t)((rank * 2 * FUSED_SLABS + slab) * 512);
}

static __device__ __forceinline__ void stage_slab(const warp_state *p, uint32_t to, bool odd,
                                                  const float (&sum)[4]) {
    uint4 word = make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                            __float_as_uint(sum[2]), __float_as_uint(sum[3]));
    if (odd)
        word = make_uint4(word.y, word.x, word.w, word.z);
    store_shared(to + (uint32_t)((p->lane ^ p->lane / 8) * 16), word);
}

/* Returns the sum over split-K in a column: lane i has row i % 16 of slab `first` + i / 16. */
static __device__ __forceinline__ float sum_of_splits(const warp_state *p, const fused_share *s,
                                                      int first, int c) {
    int g = p->lane % 8, odd = p->lane / 16;
    uint32_t from = staged_slab(s, 0, first + odd) + (uint32_t)(((4 * g + c / 2) ^ g / 2) * 16) +
                    (uint32_t)(p->lane / 8 % 2 * 8 + (c % 2 ^ odd) * 4);
    float value[FUSED_SPLITS];
#pragma unroll
    for (int i = 0; i < FUSED_SPLITS; i++)
        value[i] = __uint_as_float(load_shared_word(from + (uint32_t)(i * 2 * FUSED_SLABS * 512)));
#pragma unroll
    for (int half = FUSED_SPLITS / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; i++)
            value[i] = __fadd_rn(value[i], value[i + half]);
    return value[0];
}

/* Factors and biases of the lane's rows of gate and up, loaded early. */
typedef struct {
    float factor[2], bias[2];
} gate_rows;

template <class F>
static __device__ __forceinline__ gate_rows rows_of_gate(const fused_args *a, const warp_state *p,
                                                         int column, int expert) {
    const stack *w = &a->common.w;
    gate_rows rows = {};
    float common = F::factor_of_expert(w, expert);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int n = i * a->common.pairs * SLAB + column * FUSED_COLUMNS + p->warp % 2 * 32 + p->lane;
        bool meant = i == 0 || a->up_slabs > 2;
        int64_t at = (int64_t)expert * w->rows + n;
        rows.factor[i] = common;
        if (meant && w->output_scale)
            rows.factor[i] *= load_early(w->output_scale + at);
        if (meant && w->bias)
            rows.bias[i] = load_early(w->bias + at);
    }
    return rows;
}

/* Makes g of a column of the chunk, half of the tile, in shared memory. */
template <class F>
static __device__ __forceinline__ void make_tile_of_g(const fused_args *a, const warp_state *p,
                                                      const fused_share *s, uint32_t g,
                                                      const gate_rows *rows) {
    int c = p->warp / 2, first = p->warp % 2 * 2;
    float value[2] = {0, 1};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i == 1 && a->up_slabs == 2)
            break;
        value[i] = __fmul_rn(sum_of_splits(p, s, i * FUSED_SLABS + first, c), rows->factor[i]);
        if (a->common.w.bias)
            value[i] = __fadd_rn(value[i], rows->bias[i]);
    }
    float act = activate_inline(&a->activation, value[0], value[1]);
    uint16_t narrow = (uint16_t)moq_narrow_pair(F::dtype, act, 0);
    uint32_t to = g + (uint32_t)(c * G_PITCH + (p->warp % 2 * 32 + p->lane) * 2);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(narrow) : "memory");
}

/* ---- d ---- */

/* Stores the block's partial sums of a chunk. */
static __device__ __forceinline__ void store_partial_d(const fused_args *a, const warp_state *p,
                                                       const fused_share *s, int chunk, int slots,
                                                       const float (&sum)[DOWN_SLABS][4]) {
    int rows = a->down.rows, g = p->lane / 4;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        int column = p->lane % 4 * 2 + c;
        if (column >= slots)
            break;
        float *d = a->d + ((int64_t)((int)blockIdx.x + chunk) * s->columns + column) * rows;
#pragma unroll
        for (int i = 0; i < 2 * DOWN_SLABS; i++) {
            int slab = first_down_slab(s->group, i / 2 / STAGE_SLABS) + s->k.rank * STAGE_SLABS +
                       i / 2 % STAGE_SLABS;
            int n = slab * SLAB + i % 2 * 8 + g;
            if (n < rows)
                d[n] = sum[i / 2][i % 2 * 2 + c];
        }
    }
}

/* ---- the kernel ---- */

template <class F>
static __device__ __forceinline__ void open_fused(const fused_args *a, uint8_t *shared,
                                                  uint64_t *full, warp_state *p, fused_share *s) {
    const common_args *common = &a->common;
    p->a = common;
    p->warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    p->lane = (int)threadIdx.x % 32;
    p->t = tables_of(&common->route, shared, p->warp);
    p->pipeline = shared_address(shared);
    p->full = shared_address(full);
    p->policy = policy_evict_first();
    p->weight = (float *)(shared + common->weights_at);
    s->empty = p->full + 8u * MOQ_MOE_FUSED_STAGES;
    s->k.rank = p->warp % FUSED_SPLITS;
    s->group = p->warp / FUSED_SPLITS;
    s->k.nominal = s->k.rank * F::blocks;
    s->k.begin = min(s->k.nominal, common->w.blocks - F::blocks);
    s->k.sums = shared_address(shared + common->staged_at);
    s->columns = a->alone ? 1 : CHUNK;
    if ((int)threadIdx.x < common->stages) {
        mbarrier_init(p->full + 8u * p->lane, 1);
        mbarrier_init(s->empty + 8u * p->lane, (uint32_t)(WARP_ARRIVALS * FUSED_SPLITS));
        mbarrier_init_fence();
    }
    if (threadIdx.x == 0)
        prefetch_map(&a->down_map);
}

/* Multiplies all tiles of the block, at least one, from the x of the first chunk on. */
template <class F, bool ALONE>
static __device__ __forceinline__ void multiply_fused(const fused_args *a, const warp_state *p,
                                                      const fused_share *s, uint32_t g,
                                                      typename F::split_columns x) {
    typename F::places places = F::places_of(p);
    float d[DOWN_SLABS][4] = {};
    stage_walk walk = {{s->group, 0}, {0, 0}, s->group};
    int chunk = divide(s->first, &a->by_fused_tiles), loaded = chunk;
    int within = s->first - chunk * a->by_fused_tiles.by;
    uint32_t word = p->t.chunk[chunk];
#pragma unroll 1
    for (int tile = 0; tile < (ALONE ? 1 : s->tiles); tile++) {
        if (!ALONE && chunk != loaded) {
            loaded = chunk;
            word = p->t.chunk[chunk];
            typename F::raw_columns raw;
            load_columns<F>(p, s, word, &raw);
            x = columns_of_raw<F>(p, word, &raw);
#pragma unroll
            for (int i = 0; i < 4 * DOWN_SLABS; i++)
                d[i / 4][i % 4] = 0;
        }
        bool makes_g = p->warp / 2 < slots_of_chunk(word);
        gate_rows rows = {};
        if (makes_g)
            rows = rows_of_gate<F>(a, p, within, expert_of_chunk(word));
#pragma unroll 1
        for (int i = 0; i < a->up_slabs; i++) {
            float sum[4] = {};
            split_stage stage = await_next<F, ALONE>(a, p, s, &walk);
            F::multiply_up(s, places, &stage, x, sum);
            release_stage<F>(a, p, s, &walk);
            stage_slab(p, staged_slab(s, s->k.rank, i / 2 * FUSED_SLABS + s->group * 2 + i % 2),
                       i % 2, sum);
        }
        __syncthreads();
        if (makes_g)
            make_tile_of_g<F>(a, p, s, g, &rows);
        __syncthreads();
        typename F::fused_columns of_g;
        F::load_g(p, g, &of_g);
#pragma unroll
        for (int i = 0; i < DOWN_STAGES; i++) {
            split_stage stage = await_next<F, ALONE>(a, p, s, &walk);
            F::multiply_down(s, places, &stage, of_g, d + i * STAGE_SLABS);
            release_stage<F>(a, p, s, &walk);
        }
        if (ALONE || tile + 1 == s->tiles || within + 1 == a->by_fused_tiles.by)
            store_partial_d(a, p, s, chunk, slots_of_chunk(word), d);
        if (++within == a->by_fused_tiles.by) {
            within = 0;
            chunk++;
        }
    }
}

template <class F, bool ALONE>
static __global__ void __launch_bounds__(FUSED_THREADS, 1)
    moe_decode_fused(const __grid_constant__ fused_args args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ uint64_t full[2 * MOQ_MOE_FUSED_STAGES];
    uint8_t *shared = aligned<F>(dynamic);
    const fused_args *a = &args;
    const routing *route = &args.common.route;
    warp_state p;
    fused_share s;
    open_fused<F>(a, shared, full, &p, &s);
    touch_parameter(args);
    int64_t place = 0;
    int slot = divide((int)blockIdx.x, &a->by_fused_tiles);
    if (ALONE) {
        place = place_of_id(route, slot);
        find_now(place);
        __syncthreads();
    } else {
        place = open_tables<true>(route, &p.t);
    }
    wait_for_predecessor();
    launch_dependents(); /* not before: the next kernel relies on the ids */
    typename F::raw_columns raw;
    if (ALONE) { /* x does not depend on the id */
        column c = {};
        c.row = (const uint8_t *)args.common.x;
        F::load_raw(&p, &c, s.k.begin, s.k.nominal, &raw);
    }
    load_weights(&p);
    if (ALONE) {
        if (!table_of_slot(route, &p.t, slot, place))
            return;
        s.first = (int)blockIdx.x;
        s.tiles = 1;
    } else {
        group_slots<true>(route, &p.t, place);
        int tiles = *p.t.chunks * a->by_fused_tiles.by;
        int each = fused_tiles_each(tiles, &a->common.by_blocks);
        s.first = (int)blockIdx.x * each;
        s.tiles = min(each, tiles - s.first);
        if (s.tiles > 0)
            load_columns<F>(&p, &s, p.t.chunk[divide(s.first, &a->by_fused_tiles)], &raw);
    }
    if (p.warp < a->common.flight)
        fill_fused<F>(a, &p, &s, p.warp, p.warp);
    __syncwarp();
    if (!ALONE && blockIdx.x == 0)
        store_places(a, &p.t);
    if (a->common.weights_on_input)
        __syncthreads();
    if (s.tiles <= 0)
        return;
    multiply_fused<F, ALONE>(
        a, &p, &s, shared_address(shared + a->g_at),
        columns_of_raw<F>(&p, p.t.chunk[divide(s.first, &a->by_fused_tiles)], &raw));
}

#define ADD_WARPS   8
#define ADD_THREADS (32 * ADD_WARPS)
#define ADD_SLOTS   8 /* a thread loads their partial sums at once */

/* The slots of a token in shared memory. */
typedef struct {
    int expert[MOQ_MOE_TOP_K]; /* -1: the slot does not count */
    float weight[MOQ_MOE_TOP_K];
    int first[MOQ_MOE_TOP_K], splits[MOQ_MOE_TOP_K]; /* rows of d, in steps of a chunk's columns */
} added_slots;

/* Finds a slot's expert, weight and row of d before the wait. */
static __device__ __forceinline__ void open_slot(const fused_sum_args *a, added_slots *slots, int i,
                                                 int slot) {
    slots->expert[i] = expert_of_slot(&a->route, slot);
    slots->weight[i] = a->weighted ? weight_of_slot(&a->route, slot) : 1.0f;
    slots->first[i] = slot * a->tiles + slot;
    slots->splits[i] = slots->expert[i] < 0 ? 0 : a->tiles;
}

/* Finds a slot's row of d from the places that the kernel before stored. */
static __device__ __forceinline__ void find_slot(const fused_sum_args *a, added_slots *slots, int i,
                                                 int slot) {
    if (slots->expert[i] < 0)
        return;
    uint32_t place = __ldcg(a->places + slot);
    int all = (int)__ldcg(a->places + a->route.slots) * a->tiles, chunk = (int)place / CHUNK;
    int each = fused_tiles_each(all, &a->by_blocks);
    int first = chunk * a->tiles / each, last = (chunk * a->tiles + a->tiles - 1) / each;
    slots->first[i] = (first + chunk) * CHUNK + (int)place % CHUNK;
    slots->splits[i] = last - first + 1;
}

/* Factors and biases of a lane's four columns. */
typedef struct {
    float4 factor, bias;
} lane_rows;

static __device__ __forceinline__ lane_rows rows_of_slot(const fused_sum_args *a, int expert,
                                                         int n) {
    const stack *w = &a->down;
    lane_rows rows = {};
    if (expert < 0 || n >= w->rows)
        return rows;
    int64_t at = (int64_t)expert * w->rows + n;
    float common =
        w->input_scale ? load_early(w->input_scale + expert * w->partition_count) : a->factor;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        (&rows.factor.x)[i] =
            w->output_scale ? common * load_early(w->output_scale + at + i) : common;
        if (w->bias)
            (&rows.bias.x)[i] = load_early(w->bias + at + i);
    }
    return rows;
}

static __device__ __forceinline__ float4 load_partial(const fused_sum_args *a,
                                                      const added_slots *slots, int i, int split,
                                                      int n) {
    int row = slots->first[i] + split * (a->alone ? 1 : CHUNK);
    return __ldcg((const float4 *)(a->d + (int64_t)row * a->down.rows + n));
}

static __device__ __forceinline__ float4 add_four(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
}

/* Returns an output of the second product, with bias, times the router's weight, for a column of
 * the lane. */
static __device__ __forceinline__ float weighed(const fused_sum_args *a, const lane_rows *rows,
                                                float4 sum, float weight, int column) {
    float d = __fmul_rn((&sum.x)[column], (&rows->factor.x)[column]);
    if (a->down.bias)
        d = __fadd_rn(d, (&rows->bias.x)[column]);
    return __fmul_rn(weight, d);
}

/* Adds by slots, for few tokens and many partial sums. A block has 32 columns, a warp some slots,
 * whose partial sums its lanes share; then slots are added in their order. */
template <moq_dtype DT>
static __device__ __forceinline__ void add_by_slots(const fused_sum_args *a, added_slots *slots) {
    __shared__ float value[MOQ_MOE_TOP_K][32]; /* weighted */
    const int lanes = 8, columns = 4 * lanes, top_k = a->route.top_k;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, own = lane % lanes * 4;
    int begin = (int)blockIdx.y * columns, n = begin + own;
    lane_rows rows = {};
    if (warp < top_k)
        rows = rows_of_slot(a, slots->expert[warp], n);
    wait_for_predecessor();
    if (!a->alone) {
        if (lane == 0) /* the warp's own slots */
            for (int i = warp; i < top_k; i += ADD_WARPS)
                find_slot(a, slots, i, (int)blockIdx.x * top_k + i);
        __syncwarp();
    }
    for (int i = warp; i < top_k; i += ADD_WARPS) {
        int splits = slots->splits[i];
        if (i != warp)
            rows = rows_of_slot(a, slots->expert[i], n);
        float4 sum = make_float4(0, 0, 0, 0);
        if (n < a->down.rows)
#pragma unroll 4
            for (int split = lane / lanes; split < splits; split += 32 / lanes)
                sum = add_four(sum, load_partial(a, slots, i, split, n));
#pragma unroll
        for (int other = lanes; other < 32; other *= 2) {
            float4 more;
#pragma unroll
            for (int j = 0; j < 4; j++)
                (&more.x)[j] = __shfl_xor_sync(ALL_LANES, (&sum.x)[j], other);
            sum = add_four(sum, more);
        }
        if (lane < lanes)
#pragma unroll
            for (int j = 0; j < 4; j++)
                value[i][own + j] = weighed(a, &rows, sum, slots->weight[i], j);
    }
    __syncthreads();
    if ((int)threadIdx.x >= columns || begin + lane >= a->down.rows)
        return;
    int64_t at = blockIdx.x * a->y_stride + begin + lane;
    float sum = a->accumulate ? moq_load_one(a->y, at, DT) : 0;
    for (int i = 0; i < top_k; i++)
        if (slots->splits[i])
            sum = __fadd_rn(sum, value[i][lane]);
    ((uint16_t *)a->y)[at] = (uint16_t)moq_narrow_pair(DT, sum, 0);
}

/* Adds by columns, for more tokens and few partial sums: a thread has four columns of all slots of
 * a token. */
template <moq_dtype DT>
static __device__ __forceinline__ void add_by_columns(const fused_sum_args *a, added_slots *slots) {
    const int top_k = a->route.top_k;
    int n = ((int)blockIdx.y * ADD_THREADS + (int)threadIdx.x) * 4;
    lane_rows rows[ADD_SLOTS];
#pragma unroll
    for (int j = 0; j < ADD_SLOTS; j++)
        rows[j] = rows_of_slot(a, j < top_k ? slots->expert[j] : -1, n);
    wait_for_predecessor();
    if ((int)threadIdx.x < top_k)
        find_slot(a, slots, (int)threadIdx.x, (int)blockIdx.x * top_k + (int)threadIdx.x);
    __syncthreads();
    if (n >= a->down.rows)
        return;
    int64_t at = blockIdx.x * a->y_stride + n;
    float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (a->accumulate)
            (&y.x)[j] = moq_load_one(a->y, at + j, DT);
#pragma unroll 1
    for (int i = 0; i < top_k; i += ADD_SLOTS) {
        float4 sum[ADD_SLOTS], more[ADD_SLOTS];
#pragma unroll
        for (int j = 0; j < ADD_SLOTS; j++) {
            if (i > 0)
                rows[j] = rows_of_slot(a, i + j < top_k ? slots->expert[i + j] : -1, n);
            int splits = i + j < top_k ? slots->splits[i + j] : 0;
            sum[j] = more[j] = make_float4(0, 0, 0, 0);
            if (splits > 0)
                sum[j] = load_partial(a, slots, i + j, 0, n);
            if (splits > 1)
                more[j] = load_partial(a, slots, i + j, 1, n);
        }
#pragma unroll
        for (int j = 0; j < ADD_SLOTS; j++) {
            int splits = i + j < top_k ? slots->splits[i + j] : 0;
            if (splits == 0)
                continue;
            sum[j] = add_four(sum[j], more[j]);
#pragma unroll 1
            for (int split = 2; split < splits; split++)
                sum[j] = add_four(sum[j], load_partial(a, slots, i + j, split, n));
#pragma unroll
            for (int c = 0; c < 4; c++)
                (&y.x)[c] =
                    __fadd_rn((&y.x)[c], weighed(a, &rows[j], sum[j], slots->weight[i + j], c));
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        ((uint16_t *)a->y)[at + j] = (uint16_t)moq_narrow_pair(DT, (&y.x)[j], 0);
}

/* Finds the slots of the block's token. Ids, map and weights were complete before the first of the
 * two kernels started. */
static __device__ __forceinline__ void open_slots(const fused_sum_args *a, added_slots *slots) {
    int i = (int)threadIdx.x;
    launch_dependents();
    if (i < a->route.top_k)
        open_slot(a, slots, i, (int)blockIdx.x * a->route.top_k + i);
    __syncthreads();
}

/* Writes y of some columns of a token, added in the order of slots. */
template <moq_dtype DT>
static __global__ void __launch_bounds__(ADD_THREADS)
    moe_decode_add_slots(const __grid_constant__ fused_sum_args args) {
    __shared__ added_slots slots;
    open_slots(&args, &slots);
    add_by_slots<DT>(&args, &slots);
}

template <moq_dtype DT>
static __global__ void __launch_bounds__(ADD_THREADS)
    moe_decode_add_columns(const __grid_constant__ fused_sum_args args) {
    __shared__ added_slots slots;
    open_slots(&args, &slots);
    add_by_columns<DT>(&args, &slots);
}

template <moq_dtype DT> static inline const void *sum_kernel(bool by_slots) {
    return by_slots ? (const void *)moe_decode_add_slots<DT>
                    : (const void *)moe_decode_add_columns<DT>;
}

/* ---- launch ---- */

/* Fills the arguments, except blocks, bytes and maps of both stacks, which depend on the format. */
static inline fused_args fused_tiles_of(const moq_moe_call *call, const moq_moe_fused *share) {
    const moq_moe_spec *spec = call->spec;
    moq_moe_decode_half half = {};
    half.stages = share->stages;
    half.flight = share->flight;
    half.staged_at = share->staged_at;
    half.weights_at = share->weights_at;
    half.tables = share->tables;
    fused_args a = {};
    a.common = common_of(call, &half, &spec->w13, &call->w13);
    a.common.x = call->x->data;
    a.common.x_stride = call->x->stride[0];
    a.common.weighted = call->weights_on_input;
    a.common.by_blocks = divisor_of(share->grid);
    a.activation = moe::activation_of(spec);
    a.down = common_of(call, &half, &spec->w2, &call->w2).w;
    a.g_at = share->g_at;
    a.up_slabs = spec->gated ? FUSED_SLABS : FUSED_SLABS / 2;
    a.common.by_stages = divisor_of(share->fused_stages);
    a.alone = share->alone;
    a.by_fused_tiles = divisor_of((int)(spec->w2.in_features / FUSED_COLUMNS));
    a.places = (uint32_t *)call->workspace;
    a.d = (float *)((uint8_t *)call->workspace + share->d_at);
    return a;
}

/* Fills the arguments of the adding kernel from those of the first. */
static inline fused_sum_args sum_of(const moq_moe_call *call, const fused_args *a) {
    fused_sum_args sum = {};
    sum.route = a->common.route;
    sum.down = a->down;
    sum.d = a->d;
    sum.places = a->places;
    sum.y = call->y->data;
    sum.y_stride = call->y->stride[0];
    sum.alone = a->alone;
    sum.weighted = !call->weights_on_input;
    sum.accumulate = call->accumulate;
    sum.by_blocks = a->common.by_blocks;
    sum.tiles = a->by_fused_tiles.by;
    return sum;
}

static inline moq_status launch_fused_sum(const moq_moe_call *call, const moq_moe_fused *share,
                                          fused_sum_args *args, moq_err *err) {
    unsigned columns = share->by_slots ? 32 : 4 * ADD_THREADS;
    moq_launch add = {
        .what = "the sum over slots",
        .kernel = call->spec->w13.dtype == MOQ_DT_F16 ? sum_kernel<MOQ_DT_F16>(share->by_slots)
                                                      : sum_kernel<MOQ_DT_BF16>(share->by_slots),
        .grid = dim3((unsigned)call->tokens, ((unsigned)args->down.rows + columns - 1) / columns),
        .block = dim3(ADD_THREADS),
        .stream = (cudaStream_t)call->stream,
        .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&add, parameters, err);
}

/* Launches both kernels; sums of the second product are multiplied by `factor`. */
static inline moq_status launch_fused(const moq_moe_call *call, const moq_moe_fused *share,
                                      const char *what, const void *kernel, fused_args *a,
                                      float factor, moq_err *err) {
    MOQ_TRY(launch_kernel(call, share, FUSED_THREADS, what, kernel, a, err));
    fused_sum_args sum = sum_of(call, a);
    sum.factor = factor;
    sum.down.input_scale = NULL;
    return launch_fused_sum(call, share, &sum, err);
}

} // namespace moq::moe_decode

#endif
