/* One kernel from x to W2 for experts with few tokens on Hopper, and one that adds up slots
 * (sm90_moe_decode_kernels.h says what is computed).
 *
 * A strip is 64 columns of I: so many rows of gate and of up, and so many columns of W2. A block
 * that has a strip makes its g by itself, and needs nothing of other blocks to multiply W2's
 * columns by it: what it leaves is a part of d. So no block waits for another between the first
 * weight and the last one, weights of both products come as one stream, x is read by the blocks of
 * its expert alone, and g never leaves the multiprocessor. Blocks have equal shares of the strips
 * of all chunks, the last ones less; strips of a chunk that follow each other are added up in
 * registers.
 *
 * Sixteen warps, alone on a multiprocessor. In the first product they are two groups of eight: a
 * group has half of the rows, a warp of it a slice of K whose x stays in registers for all strips
 * of a chunk. Sums meet in shared memory, and all warps find g of the columns that there are. In
 * the second a warp has some slabs of H and all 64 columns. All share a ring, whose stages are what
 * a group multiplies next, a slab by all of K or some slabs by the strip; it is long enough that
 * weights come while warps meet.
 *
 * What bounds it: the weights of experts that have a slot. Where strips are fewer than
 * multiprocessors, as at one token, a block has one of them.
 *
 * The second kernel adds the parts of d in the order of blocks, and slots in their order: no sum
 * depends on timing. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_FUSED_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_DECODE_FUSED_H

#include "cuda/moe/sm90/sm90_moe_decode_split_k.h"

namespace moq::moe_decode {

#define FUSED_WARPS   MOQ_MOE_FUSED_WARPS
#define FUSED_THREADS (32 * FUSED_WARPS)
#define FUSED_SPLITS  MOQ_MOE_FUSED_SPLITS /* of K, in the first product */
#define FUSED_COLUMNS MOQ_MOE_FUSED_COLUMNS
#define FUSED_SLABS   (FUSED_COLUMNS / SLAB)   /* of gate, and of up */
#define DOWN_SLABS    MOQ_MOE_FUSED_DOWN_SLABS /* of a warp, in the second */
#define G_PITCH       MOQ_MOE_FUSED_G_PITCH
#define FUSED_GROUPS  (FUSED_WARPS / FUSED_SPLITS)
#define STAGE_SLABS   MOQ_MOE_FUSED_STAGE_SLABS /* of a warp, in a stage of the second product */
#define DOWN_STAGES   (DOWN_SLABS / STAGE_SLABS)

typedef struct {
    common_args common; /* of the first product */
    moe::activation activation;
    CUtensorMap down_map;
    stack down;
    int g_at, up_slabs; /* slabs of a warp in the first product */
    bool alone;         /* a token whose slots are chunks: the kernel has a block for each strip */
    divisor
        by_fused_tiles; /* of I; common.by_stages are those of a strip, by_blocks of the kernel */
    float *d;           /* [blocks + chunks][columns of a chunk][H] */
    uint32_t *places;   /* [slots]: chunk and column in it; then how many chunks there are */
} fused_args;

/* What the kernel that adds up needs. */
typedef struct {
    routing route;
    stack down;
    const float *d;
    const uint32_t *places;
    void *y;
    int64_t y_stride;
    bool alone, weighted, accumulate;
    float factor; /* of all sums */
    divisor by_blocks;
    int tiles;
} fused_sum_args;

/* A warp in a block. */
typedef struct {
    split k;          /* of the first product: its part, and the slice */
    int group;        /* of rows there */
    int first, tiles; /* the block's */
    int columns;      /* of d in a chunk */
    uint32_t empty;   /* barriers of stages that have been multiplied */
} fused_share;

/* The first slab of the second product in a stage of a group. */
static __device__ __forceinline__ int first_down_slab(int group, int stage) {
    return (stage * FUSED_GROUPS + group) * FUSED_SPLITS * STAGE_SLABS;
}

/* ---- which strips ---- */

/* How many strips a block has; who comes last has fewer, or none. Where that is what a chunk has,
 * each block has one chunk: x comes once, and d of a slot is one part. */
static __device__ __forceinline__ int fused_tiles_each(int tiles, const divisor *blocks) {
    return divide(tiles + blocks->by - 1, blocks);
}

/* The tables of a block whose slot is its chunk; false where that does not count. */
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

/* Tells the next kernel where slots are; one block does. */
static __device__ __forceinline__ void leave_places(const fused_args *a, const tables *t) {
    int chunks = *t->chunks;
    if (threadIdx.x == 0)
        a->places[a->common.route.slots] = (uint32_t)chunks;
    for (int c = (int)threadIdx.x; c < chunks; c += FUSED_THREADS) {
        int first = first_of_chunk(t->chunk[c]), slots = slots_of_chunk(t->chunk[c]);
        for (int i = 0; i < slots; i++)
            a->places[t->sorted[first + i]] = (uint32_t)(c * CHUNK + i);
    }
}

/* ---- the ring ---- */

/* Stages are filled in the order in which they are multiplied, which the two groups do in turn: of
 * each strip the slabs of the first product that a group has, one at a time, and then of the second
 * STAGE_SLABS slabs of each of its warps. */

/* Fills stage `number` of the block, if there are so many, at a place of the ring. The whole warp
 * calls. */
template <class F>
static __device__ __forceinline__ void fill_fused(const fused_args *a, const warp_parts *p,
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

/* A warp's way through the stages of its group. */
typedef struct {
    pipeline_state place, before;
    int number; /* of the block's stages */
} stage_walk;

/* Waits for the group's next stage. Copies that are on their way together come together; so where
 * there is one strip the ring is filled stage by stage at first, another when one has come. */
template <class F, bool ALONE>
static __device__ __forceinline__ split_stage await_next(const fused_args *a, const warp_parts *p,
                                                         const fused_share *s,
                                                         const stage_walk *walk) {
    split_stage stage = {(uint32_t)(walk->place.index * F::stage_bytes),
                         p->full + 8u * walk->place.index, walk->place.parity, walk->number};
    int next = walk->number + a->common.flight;
    mbarrier_wait(stage.bar, (uint32_t)stage.parity);
    if (ALONE && next < a->common.stages &&
        walk->number / FUSED_GROUPS % FUSED_SPLITS == s->k.part) {
        fill_fused<F>(a, p, s, next, next);
        __syncwarp();
    }
    return stage;
}

/* A stage has been multiplied. Warps of the group take turns to fill the place of the one before,
 * which the others have most likely left by now. Whoever fills a stage has waited for such as come
 * before it alone, so that no warp waits for itself. */
template <class F>
static __device__ __forceinline__ void leave_stage(const fused_args *a, const warp_parts *p,
                                                   const fused_share *s, stage_walk *walk) {
    int before = walk->number - FUSED_GROUPS;
    warp_releases<false>(s->empty + 8u * walk->place.index);
    if (before >= 0 && before / FUSED_GROUPS % FUSED_SPLITS == s->k.part) {
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

/* The warp's slice of x of a chunk is asked for. */
template <class F>
static __device__ __forceinline__ void ask_columns(const warp_parts *p, const fused_share *s,
                                                   uint32_t chunk, typename F::raw_columns *raw) {
    column c = column_of_chunk<F, true>(p, chunk);
    F::load_raw(p, &c, s->k.begin, s->k.nominal, raw);
}

/* The slice as it is multiplied. */
template <class F>
static __device__ __forceinline__ typename F::split_columns
columns_of_raw(const warp_parts *p, uint32_t chunk, const typename F::raw_columns *raw) {
    column c = column_of_chunk<F, true>(p, chunk);
    typename F::split_columns x;
    F::template make_columns<true>(p, &c, raw, &x);
    return x;
}

/* Where the sums of a slab's part lie; lanes and columns change places as in stage_sums. */
static __device__ __forceinline__ uint32_t staged_slab(const fused_share *s, int part, int slab) {
    return s->k.sums + (uint32_t)((part * 2 * FUSED_SLABS + slab) * 512);
}

static __device__ __forceinline__ void stage_slab(const warp_parts *p, uint32_t to, bool odd,
                                                  const float (&sum)[4]) {
    uint4 word = make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                            __float_as_uint(sum[2]), __float_as_uint(sum[3]));
    if (odd)
        word = make_uint4(word.y, word.x, word.w, word.z);
    store_shared(to + (uint32_t)((p->lane ^ p->lane / 8) * 16), word);
}

/* The sum of all parts in a column: lane i has row i % 16 of slab `first` + i / 16. */
static __device__ __forceinline__ float sum_of_parts(const warp_parts *p, const fused_share *s,
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

/* Factors and biases of the lane's rows of gate and up, asked for early. */
typedef struct {
    float factor[2], bias[2];
} gate_rows;

template <class F>
static __device__ __forceinline__ gate_rows rows_of_gate(const fused_args *a, const warp_parts *p,
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

/* g of a column of the chunk, half of the strip, to shared memory. */
template <class F>
static __device__ __forceinline__ void meet_fused_tile(const fused_args *a, const warp_parts *p,
                                                       const fused_share *s, uint32_t g,
                                                       const gate_rows *rows) {
    int c = p->warp / 2, first = p->warp % 2 * 2;
    float value[2] = {0, 1};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (i == 1 && a->up_slabs == 2)
            break;
        value[i] = __fmul_rn(sum_of_parts(p, s, i * FUSED_SLABS + first, c), rows->factor[i]);
        if (a->common.w.bias)
            value[i] = __fadd_rn(value[i], rows->bias[i]);
    }
    float act = activate_inline(&a->activation, value[0], value[1]);
    uint16_t narrow = (uint16_t)moq_narrow_pair(F::dtype, act, 0);
    uint32_t to = g + (uint32_t)(c * G_PITCH + (p->warp % 2 * 32 + p->lane) * 2);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(narrow) : "memory");
}

/* ---- d ---- */

/* Leaves the block's part of a chunk. */
static __device__ __forceinline__ void leave_parts(const fused_args *a, const warp_parts *p,
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
            int slab = first_down_slab(s->group, i / 2 / STAGE_SLABS) + s->k.part * STAGE_SLABS +
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
                                                  uint64_t *full, warp_parts *p, fused_share *s) {
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
    s->k.part = p->warp % FUSED_SPLITS;
    s->group = p->warp / FUSED_SPLITS;
    s->k.nominal = s->k.part * F::blocks;
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

/* All strips of the block, one at least, from the slice of x of the first chunk on. */
template <class F, bool ALONE>
static __device__ __forceinline__ void multiply_fused(const fused_args *a, const warp_parts *p,
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
            ask_columns<F>(p, s, word, &raw);
            x = columns_of_raw<F>(p, word, &raw);
#pragma unroll
            for (int i = 0; i < 4 * DOWN_SLABS; i++)
                d[i / 4][i % 4] = 0;
        }
        bool meets = p->warp / 2 < slots_of_chunk(word);
        gate_rows rows = {};
        if (meets)
            rows = rows_of_gate<F>(a, p, within, expert_of_chunk(word));
#pragma unroll 1
        for (int i = 0; i < a->up_slabs; i++) {
            float sum[4] = {};
            split_stage stage = await_next<F, ALONE>(a, p, s, &walk);
            F::multiply_up(s, places, &stage, x, sum);
            leave_stage<F>(a, p, s, &walk);
            stage_slab(p, staged_slab(s, s->k.part, i / 2 * FUSED_SLABS + s->group * 2 + i % 2),
                       i % 2, sum);
        }
        __syncthreads();
        if (meets)
            meet_fused_tile<F>(a, p, s, g, &rows);
        __syncthreads();
        typename F::fused_columns of_g;
        F::load_g(p, g, &of_g);
#pragma unroll
        for (int i = 0; i < DOWN_STAGES; i++) {
            split_stage stage = await_next<F, ALONE>(a, p, s, &walk);
            F::multiply_down(s, places, &stage, of_g, d + i * STAGE_SLABS);
            leave_stage<F>(a, p, s, &walk);
        }
        if (ALONE || tile + 1 == s->tiles || within + 1 == a->by_fused_tiles.by)
            leave_parts(a, p, s, chunk, slots_of_chunk(word), d);
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
    warp_parts p;
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
    launch_dependents(); /* not before: who comes next counts on the ids */
    typename F::raw_columns raw;
    if (ALONE) { /* x is the same whatever the id */
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
            ask_columns<F>(&p, &s, p.t.chunk[divide(s.first, &a->by_fused_tiles)], &raw);
    }
    if (p.warp < a->common.flight)
        fill_fused<F>(a, &p, &s, p.warp, p.warp);
    __syncwarp();
    if (!ALONE && blockIdx.x == 0)
        leave_places(a, &p.t);
    if (a->common.weights_on_input)
        __syncthreads();
    if (s.tiles <= 0)
        return;
    multiply_fused<F, ALONE>(
        a, &p, &s, shared_address(shared + a->g_at),
        columns_of_raw<F>(&p, p.t.chunk[divide(s.first, &a->by_fused_tiles)], &raw));
}

} // namespace moq::moe_decode

#endif
