/* NVFP4 experts for decode on Hopper with fused up and down: one kernel from x to W2, behind which
 * slot_sum.cu adds partial sums and slots (up_down.h has the formulas, nvfp4_format.h the weights).
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
 * token, a block has one tile. */
#include "cuda/moe/sm90/decode/fused.h"
#include "cuda/moe/sm90/decode/nvfp4_format.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_decode {

#define FUSED_SPLITS MOQ_MOE_FUSED_SPLITS     /* warps that split K in the first product */
#define DOWN_SLABS   MOQ_MOE_FUSED_DOWN_SLABS /* slabs of a warp in the second product */
#define G_PITCH      MOQ_MOE_FUSED_G_PITCH
#define FUSED_GROUPS (FUSED_WARPS / FUSED_SPLITS)
#define STAGE_SLABS  MOQ_MOE_FUSED_STAGE_SLABS /* slabs of a warp in a stage of W2 */
#define DOWN_STAGES  (DOWN_SLABS / STAGE_SLABS)

/* A warp's place in a block. */
typedef struct {
    /* The first product: the warp among those that split K, the first block of K of the warp alone
     * and of its range, which may overlap the one before, and partial sums. */
    int rank, nominal, begin;
    uint32_t sums;
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
    if (ALONE && next < a->common.stages && walk->number / FUSED_GROUPS % FUSED_SPLITS == s->rank) {
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
    if (before >= 0 && before / FUSED_GROUPS % FUSED_SPLITS == s->rank) {
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
    F::load_raw(p, &c, s->begin, s->nominal, raw);
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
    return s->sums + (uint32_t)((rank * 2 * FUSED_SLABS + slab) * 512);
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
            int slab = first_down_slab(s->group, i / 2 / STAGE_SLABS) + s->rank * STAGE_SLABS +
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
    s->rank = p->warp % FUSED_SPLITS;
    s->group = p->warp / FUSED_SPLITS;
    s->nominal = s->rank * F::blocks;
    s->begin = min(s->nominal, common->w.blocks - F::blocks);
    s->sums = shared_address(shared + common->staged_at);
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
            stage_slab(p, staged_slab(s, s->rank, i / 2 * FUSED_SLABS + s->group * 2 + i % 2),
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
        F::load_raw(&p, &c, s.begin, s.nominal, &raw);
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

/* ---- the format ---- */

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)

/* The format in the fused kernel: a warp has BLOCKS blocks of K in the first product. */
template <int BLOCKS, moq_nvfp4_type TYPE> struct nvfp4_fused : nvfp4_split_k<1, BLOCKS, TYPE> {
    typedef nvfp4_split_k<1, BLOCKS, TYPE> base;
    static constexpr int stage_bytes = MOQ_MOE_NVFP4_FUSED_STAGE;
    static_assert(FUSED_SPLITS * BLOCKS * MOQ_PACK_BYTES <= stage_bytes &&
                      FUSED_SPLITS * STAGE_SLABS * MOQ_PACK_BYTES <= stage_bytes,
                  "a stage has both");

    typedef struct {
        uint4 vector[1][2];
    } fused_columns;

    /* Parameters of moq_multiply_units for a stage of the second product. */
    struct down_units {
        static constexpr int blocks = 1, tiles = 1;
        static constexpr moq_nvfp4_type type = TYPE;
    };

    static __device__ __forceinline__ void fill_up(const fused_args *a, int expert, int slab,
                                                   uint32_t to, uint32_t bar) {
        const stack *w = &a->common.w;
        uint32_t bytes = (uint32_t)(w->blocks * MOQ_PACK_BYTES);
        mbarrier_expect(bar, bytes);
        copy_bytes_once(to, w->weight + expert * w->expert_bytes + (int64_t)slab * bytes, bytes,
                        bar, policy_evict_first());
    }

    static __device__ __forceinline__ void fill_down(const fused_args *a, int expert, int slab,
                                                     int column, uint32_t to, uint32_t bar) {
        mbarrier_expect(bar, FUSED_SPLITS * STAGE_SLABS * MOQ_PACK_BYTES);
        copy_box_2d(to, &a->down_map, column * UNIT_WORDS,
                    expert * (int)moq_pack_slabs(a->down.rows) + slab, bar, policy_evict_first());
    }

    static __device__ __forceinline__ void
    multiply_up(const fused_share *s, const typename base::places &at, const split_stage *stage,
                const typename base::split_columns &x, float (&sum)[4]) {
        multiply_units<TYPE, BLOCKS>(at, stage->at + (uint32_t)(s->begin * MOQ_PACK_BYTES),
                                     x.vector, sum);
    }

    static __device__ __forceinline__ void load_g(const warp_state *p, uint32_t g,
                                                  fused_columns *x) {
        uint32_t from = g + (uint32_t)(p->lane / 4 * G_PITCH + p->lane % 4 * 32);
        x->vector[0][0] = load_shared(from);
        x->vector[0][1] = load_shared(from + 16);
    }

    static __device__ __forceinline__ void multiply_down(const fused_share *s,
                                                         const typename base::places &at,
                                                         const split_stage *stage,
                                                         const fused_columns &x, float (*sum)[4]) {
        uint32_t unit = stage->at + (uint32_t)(s->rank * STAGE_SLABS * MOQ_PACK_BYTES);
#pragma unroll
        for (int i = 0; i < STAGE_SLABS; i += 2) {
            float two[2][1][4];
#pragma unroll
            for (int j = 0; j < 8; j++)
                two[j / 4][0][j % 4] = sum[i + j / 4][j % 4];
            moq_multiply_units<down_units, 2>(at, unit + i * MOQ_PACK_BYTES, x.vector, two);
#pragma unroll
            for (int j = 0; j < 8; j++)
                sum[i + j / 4][j % 4] = two[j / 4][0][j % 4];
        }
    }
};

/* Returns the kernel for the K range of a warp, one of MOQ_MOE_NVFP4_FUSED_SPLIT_K
 * (decode.h). */
template <moq_nvfp4_type TYPE, bool ALONE> static const void *fused_kernel(int split) {
#define BLOCKS(count)                                                                              \
    if (split == count)                                                                            \
        return (const void *)moe_decode_fused<nvfp4_fused<count, TYPE>, ALONE>;
    MOQ_MOE_NVFP4_FUSED_SPLIT_K(BLOCKS)
#undef BLOCKS
    return NULL;
}

template <moq_nvfp4_type TYPE> static const void *fused_kernel_of(const moq_moe_fused *share) {
    return share->alone ? fused_kernel<TYPE, true>(share->split)
                        : fused_kernel<TYPE, false>(share->split);
}

moq_status launch_fused_nvfp4(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    fused_args a = fused_tiles_of(call, share);
    describe_packed(&a.common.w);
    describe_packed(&a.down);
    int64_t slabs = spec->experts * moq_pack_slabs(a.down.rows);
    MOQ_TRY(moq_tensor_map_words(&a.down_map, a.down.weight, slabs, a.down.blocks * UNIT_WORDS,
                                 FUSED_SPLITS * STAGE_SLABS, UNIT_WORDS, err));
    bool half = spec->w13.dtype == MOQ_DT_F16;
    const void *kernel =
        half ? fused_kernel_of<MOQ_NVFP4_F16>(share) : fused_kernel_of<MOQ_NVFP4_BF16>(share);
    fused_sum_args sum = sum_of(call, &a);
    sum.factor = MOQ_NVFP4_FACTOR;
    sum.down.input_scale = NULL;
    return launch_fused(call, share, "NVFP4 experts", kernel, &a, &sum, err);
}

} // namespace moq::moe_decode
