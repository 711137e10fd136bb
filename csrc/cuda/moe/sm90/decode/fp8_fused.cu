/* FP8 experts for decode on Hopper with fused up and down, for one to four tokens: one kernel from
 * x to W2, behind which slot_sum.cu adds partial sums and slots. up_down.h has the formulas,
 * fp8_format.h the layouts.
 *
 * The scale of g is known before g is, or is one of 128 columns. A block has some tiles of one slot
 * and needs nothing of other blocks, except, with a scale of 128 columns, of the one with the
 * neighbouring tiles. Two tokens with one expert read its weights twice, once from L2. Sixteen
 * warps, one block a multiprocessor. In the first product a warp has 128 columns of K, whose codes
 * of x stay in registers, and a pipeline of its own of boxes of 16 rows. In the second a warp has
 * 128 rows of H, which its lanes copy 16 bytes at a time while the last stages of the first are
 * under way, to memory of their own: they arrive while sums of the first meet in shared memory,
 * once a tile. Boxes of 64 bytes are slow.
 *
 * Bound: the weights of experts that have a slot. Measured: docs/lab/experts-decode.md. */
#include "cuda/moe/sm90/decode/fp8_format.h"
#include "cuda/moe/sm90/decode/fused.h"

namespace moq::moe_decode {

#define OWN_SLABS    MOQ_MOE_FP8_FUSED_DOWN_SLABS /* slabs of a warp in the second product */
#define OWN_ROWS     (OWN_SLABS * SLAB)
#define GROUPS       4 /* groups of loads of W2 */
#define GROUP_SLABS  (OWN_SLABS / GROUPS)
#define RING         MOQ_MOE_FP8_FUSED_STAGES /* stages of a warp */
#define PITCH        MOQ_MOE_FP8_FUSED_PITCH
#define WARP_COLUMNS (FUSED_COLUMNS / FUSED_WARPS) /* columns of g that a warp makes */
static_assert(OWN_ROWS == BLOCK, "rows of a warp have one scale for 128 columns");
static_assert(OWN_ROWS == GROUPS * 32 && FUSED_SLABS == 4, "a lane has a piece of each quarter");

typedef struct {
    fused_args tile; /* by_fused_tiles divides by the blocks of a slot */
    int tiles;       /* tiles of a slot */
    int ask;         /* stages of a tile after which W2 is loaded */
    int down_at;
} fused_fp8_args;

/* A block's share of a slot: every `step`th tile from the first on. */
typedef struct {
    int slot, expert, first, step, tiles;
    uint32_t down, sums, g, most; /* W2's columns of the warp, and memory that all warps share */
} fp8_share;

/* The format in the fused kernel. With a scale for 128 columns, two blocks of a cluster have the
 * two tiles of such a group. */
template <moq_dtype DT, moq_input_mode MODE, bool CODED>
struct fp8_fused : fp8<1, DT, MODE, CODED> {
    static constexpr bool grouped = MODE == MOQ_INPUT_E4M3_GROUP;
};
static_assert(2 * FUSED_COLUMNS == BLOCK, "two tiles have a scale");

static __device__ __forceinline__ int fused_tile_of(const fp8_share *s, int index) {
    return s->first + index * s->step;
}

/* ---- copies ---- */

/* Fills the buffer of stage `number` of the warp, if there are so many. The whole warp calls. */
static __device__ __forceinline__ void fill_rows(const fused_fp8_args *a, const warp_state *p,
                                                 const fp8_share *s, int number, int place) {
    const stack *w = &a->tile.common.w;
    int index = divide(number, &a->tile.common.by_stages);
    if (index >= s->tiles || p->warp >= w->blocks)
        return;
    int i = number - index * a->tile.common.by_stages.by, up = i >= FUSED_SLABS;
    int row = up * a->tile.common.pairs * SLAB + fused_tile_of(s, index) * FUSED_COLUMNS +
              (i - up * FUSED_SLABS) * SLAB;
    if (is_elected()) {
        uint32_t bar = p->full + 8u * place;
        mbarrier_expect(bar, BOX);
        copy_box_2d(p->pipeline + (uint32_t)place * BOX, &a->tile.common.map, p->warp * BLOCK,
                    s->expert * w->rows + row, bar, p->policy);
    }
}

/* Copies 16 bytes asynchronously, and the 128 around them to L2 for other blocks. */
static __device__ __forceinline__ void copy_piece_async(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}

/* Loads a group of the warp's rows of W2. */
static __device__ __forceinline__ void copy_group_async(const fused_fp8_args *a,
                                                        const warp_state *p, const fp8_share *s,
                                                        int index, int group) {
    const stack *w = &a->tile.down;
    const uint8_t *from =
        w->weight + s->expert * w->expert_bytes + fused_tile_of(s, index) * FUSED_COLUMNS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int piece = (group * 4 + i) * 32 + p->lane, n = p->warp * OWN_ROWS + piece / 4;
        copy_piece_async(s->down + (uint32_t)piece * 16,
                         from + (int64_t)min(n, w->rows - 1) * w->columns + piece % 4 * 16,
                         n < w->rows ? 16 : 0);
    }
    copy_async_commit();
}

/* ---- codes ---- */

/* Quantizes pairs of values to codes as float16. */
template <class F, int PAIRS>
static __device__ __forceinline__ void quantize_own(uint32_t (&pair)[PAIRS], float scale) {
    float value[2 * PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        float2 two = moq_widen_pair(pair[i], F::dtype);
        value[2 * i] = F::grouped ? two.x : __fmul_rn(two.x, scale);
        value[2 * i + 1] = F::grouped ? two.y : __fmul_rn(two.y, scale);
    }
    if (F::grouped)
        moq_divide(value, scale, scale > 1e-12f && scale < 1e30f);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        pair[i] = widen_codes(moq_e4m3_pair(value[2 * i], value[2 * i + 1]), false);
}

/* Returns the scale of values whose maxima the lanes of a warp have, as bits of their dtype. */
template <class F> static __device__ __forceinline__ float scale_of_maxima(uint32_t most) {
    return moq_group_scale(moq_widen_pair(moq_max_of_lanes(most, 32), F::dtype).x);
}

template <class F>
static __device__ __forceinline__ uint32_t weigh_pair(uint32_t pair, float weight) {
    float2 v = moq_widen_pair(pair, F::dtype);
    return moq_narrow_pair(F::dtype, __fmul_rn(v.x, weight), __fmul_rn(v.y, weight));
}

/* ---- scales ---- */

/* Scales of a tile, loaded before they are needed. */
typedef struct {
    float rows[2];      /* block scales of the warp's columns of gate, and of up */
    float input;        /* per-tensor scale */
    float output, bias; /* lane's column of gate, or of up in the upper half of the lanes */
    float down, g;      /* block scale of the warp's rows; per-tensor scale of g */
} fused_scales;

static __device__ __forceinline__ int lane_column(const warp_state *p) {
    return p->warp * WARP_COLUMNS + min(p->lane % 16, WARP_COLUMNS - 1);
}

/* Returns the scale of the warp's columns and the tile's rows of gate or of up. */
static __device__ __forceinline__ float scale_of_rows(const fused_fp8_args *a, const warp_state *p,
                                                      const fp8_share *s, int first, int up) {
    const stack *w = &a->tile.common.w;
    int partition = w->partition_count == 2 && up,
        slab = first / SLAB + (up - partition) * a->tile.common.pairs;
    int row =
        (s->expert * w->partition_count + partition) * w->partition_blocks + slab / (BLOCK / SLAB);
    return load_early((const float *)w->weight_scale + (int64_t)row * w->blocks +
                      min(p->warp, w->blocks - 1));
}

template <class F>
static __device__ __forceinline__ fused_scales load_tile_scales(const fused_fp8_args *a,
                                                                const warp_state *p,
                                                                const fp8_share *s, int index) {
    const stack *w = &a->tile.common.w, *down = &a->tile.down;
    int first = fused_tile_of(s, index) * FUSED_COLUMNS;
    int n = p->lane / 16 * a->tile.common.pairs * SLAB + first + lane_column(p);
    int64_t at = (int64_t)s->expert * w->rows + n;
    fused_scales own = {{1, 1}, F::factor_of_expert(w, s->expert), 1, 0, 1, 1};
    if (n < w->rows && w->output_scale)
        own.output = load_early(w->output_scale + at);
    if (n < w->rows && w->bias)
        own.bias = load_early(w->bias + at);
    if constexpr (F::grouped) {
        int row = s->expert * down->partition_blocks + min(p->warp, down->partition_blocks - 1);
        own.down = load_early((const float *)down->weight_scale + (int64_t)row * down->blocks +
                              first / BLOCK);
        own.rows[0] = scale_of_rows(a, p, s, first, 0);
        own.rows[1] = scale_of_rows(a, p, s, first, a->tile.up_slabs > FUSED_SLABS);
    } else {
        own.g = load_early(down->input_scale + s->expert * down->partition_count);
    }
    return own;
}

/* ---- the first product ---- */

/* A token of x: its first column, and the first of the scales beside its codes. */
typedef struct {
    const uint8_t *row;
    const float *scales;
} fused_row;

/* The lane's four columns of x: values, or in the first word codes, and the scale beside them. */
typedef struct {
    uint32_t word[2];
    float scale;
} raw_x;

/* The warp's columns of x: codes as float16, and their scale if they have their own. */
typedef struct {
    uint32_t code[2][8];
    float scale;
} fused_x;

template <class F>
static __device__ __forceinline__ fused_row row_of_slot(const common_args *common, int slot) {
    int token = slot / common->route.top_k;
    fused_row r = {(const uint8_t *)common->x + (F::coded ? 1 : 2) * token * common->x_stride,
                   NULL};
    if (F::coded && F::grouped)
        r.scales = scales_of_token(common, token);
    return r;
}

/* Loads the lane's four columns of the warp's. */
template <class F>
static __device__ __forceinline__ raw_x load_x(const fused_fp8_args *a, const warp_state *p,
                                               const fused_row *r) {
    const common_args *common = &a->tile.common;
    int first = p->warp * BLOCK + p->lane * 4;
    raw_x x = {};
    if (first >= common->w.columns)
        return x;
    if constexpr (F::coded)
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(x.word[0]) : "l"(r->row + first));
    else
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                     : "=r"(x.word[0]), "=r"(x.word[1])
                     : "l"(r->row + 2 * first));
    if (F::coded && F::grouped)
        x.scale = __ldcg(r->scales + p->warp * common->x_scale.step);
    return x;
}

/* Quantizes the lane's columns of x to codes as float16. */
template <class F>
static __device__ __forceinline__ void quantize_x(const fused_fp8_args *a, const fp8_share *s,
                                                  const fused_scales *scales, uint32_t (&own)[2],
                                                  fused_x *x) {
    const common_args *common = &a->tile.common;
    if (common->weights_on_input) {
        float weight = weight_of_slot(&common->route, s->slot);
        own[0] = weigh_pair<F>(own[0], weight);
        own[1] = weigh_pair<F>(own[1], weight);
    }
    if constexpr (F::grouped) {
        uint32_t most = __vmaxu2(own[0] & 0x7fff7fffu, own[1] & 0x7fff7fffu);
        x->scale = scale_of_maxima<F>(max(most & 0xffff, most >> 16));
    } else {
        x->scale = __frcp_rn(scales->input);
    }
    quantize_own<F>(own, x->scale);
}

/* Makes codes of x as float16: each lane of its own columns; then lane t of four gets the 32
 * columns from 32 t on. */
template <class F>
static __device__ __forceinline__ fused_x codes_of_x(const fused_fp8_args *a, const warp_state *p,
                                                     const fp8_share *s, const fused_scales *scales,
                                                     const raw_x *raw) {
    uint32_t own[2] = {raw->word[0], raw->word[1]};
    fused_x x;
    if constexpr (F::coded) {
        own[1] = widen_codes(own[0], true);
        own[0] = widen_codes(own[0], false);
        x.scale = __shfl_sync(ALL_LANES, raw->scale, 0); /* later lanes may be beyond the end */
    } else {
        quantize_x<F>(a, s, scales, own, &x);
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        x.code[i / 8][i % 8] = __shfl_sync(ALL_LANES, own[i % 2], p->lane % 4 * 8 + i / 2);
    return x;
}

/* Stages the warp's partial sums of slab i. All columns of the product are equal. */
static __device__ __forceinline__ void stage_rows(const fused_fp8_args *a, const warp_state *p,
                                                  const fp8_share *s, int i, float upper,
                                                  float lower) {
    uint32_t to = s->sums + (uint32_t)(p->warp * PITCH + i * SLAB + p->lane / 4) * 4;
    if (p->lane % 4 == 0) {
        store_shared_word(to, __float_as_uint(upper));
        store_shared_word(to + 32, __float_as_uint(lower));
    }
}

/* Multiplies one slab after the other, and starts the loads of W2 meanwhile. */
template <class F>
static __device__ __forceinline__ void multiply_rows(const fused_fp8_args *a, const warp_state *p,
                                                     const fp8_share *s, int index, uint32_t places,
                                                     const fused_x *x, const fused_scales *scales,
                                                     pipeline_state *place, int *number) {
    const common_args *common = &a->tile.common;
    int group = 0;
#pragma unroll 1
    for (int i = 0; i < a->tile.up_slabs; i++) {
        float two[2][4] = {};
        if (p->warp < common->w.blocks) {
            mbarrier_wait(p->full + 8u * place->index, (uint32_t)place->parity);
            int next = *number + common->flight;
            if (next < RING)
                fill_rows(a, p, s, next, next);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t from = (places + (uint32_t)place->index * BOX) ^ half * 16;
                F::multiply_half(load_shared(from), load_shared(from + BOX / 2), x->code[half],
                                 two[half]);
            }
        }
        warp_meets();
        fill_rows(a, p, s, *number + RING, place->index);
        if (i >= a->ask && group < GROUPS)
            copy_group_async(a, p, s, index, group++);
        float upper = __fadd_rn(two[0][0], two[1][0]), lower = __fadd_rn(two[0][2], two[1][2]);
        if (F::grouped) {
            float scale = x->scale * (i < FUSED_SLABS ? scales->rows[0] : scales->rows[1]);
            upper = __fmul_rn(upper, scale);
            lower = __fmul_rn(lower, scale);
        }
        stage_rows(a, p, s, i, upper, lower);
        advance(place, RING);
        ++*number;
    }
#pragma unroll 1
    while (group < GROUPS)
        copy_group_async(a, p, s, index, group++);
}

/* ---- g ---- */

/* Returns the lane's column of the first product: the sum over split-K. */
static __device__ __forceinline__ float sum_of_lane(const fused_fp8_args *a, const warp_state *p,
                                                    const fp8_share *s, bool gated) {
    int up = p->lane / 16, rank = p->lane % 16;
    uint32_t from =
        s->sums + (uint32_t)(rank * PITCH + up * FUSED_COLUMNS + p->warp * WARP_COLUMNS) * 4;
    float value[WARP_COLUMNS], own = 0;
#pragma unroll
    for (int i = 0; i < WARP_COLUMNS; i++)
        value[i] = up && !gated ? 0 : __uint_as_float(load_shared_word(from + 4 * i));
#pragma unroll
    for (int other = 1; other < 16; other *= 2)
#pragma unroll
        for (int i = 0; i < WARP_COLUMNS; i++)
            value[i] = __fadd_rn(value[i], __shfl_xor_sync(ALL_LANES, value[i], other));
#pragma unroll
    for (int i = 0; i < WARP_COLUMNS; i++)
        own = rank == i ? value[i] : own;
    return own;
}

/* Makes some columns of g by a warp, and their maximum if tiles have a scale. */
template <class F>
static __device__ __forceinline__ void make_rows_of_g(const fused_fp8_args *a, const warp_state *p,
                                                      const fp8_share *s,
                                                      const fused_scales *scales, int index) {
    bool gated = a->tile.up_slabs > FUSED_SLABS;
    const stack *w = &a->tile.common.w;
    float own = __fmul_rn(sum_of_lane(a, p, s, gated), scales->input * scales->output);
    if (w->bias)
        own = __fadd_rn(own, scales->bias);
    float up = __shfl_down_sync(ALL_LANES, own, 16);
    float act = activate_inline(&a->tile.activation, own, gated ? up : 1);
    uint32_t g = moq_narrow_pair(F::dtype, act, 0) & 0xffff;
    if (p->lane < WARP_COLUMNS)
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(s->g + 2u * (uint32_t)lane_column(p)),
                     "h"((uint16_t)g)
                     : "memory");
    if constexpr (F::grouped) {
        uint32_t most = moq_max_of_lanes(g & 0x7fff, WARP_COLUMNS);
        uint32_t rank = blockIdx.x % 2,
                 at = s->most + (index % 2 * 2 + rank) * FUSED_WARPS * 4 + (uint32_t)p->warp * 4;
        if (p->lane < 2)
            store_remote(address_in((uint32_t)p->lane, at), __uint_as_float(most));
    }
}

/* ---- the second product ---- */

/* Factors of the second product: g's (the inverse of a scale, or a block scale) and that of
 * sums. */
typedef struct {
    float g, factor;
} down_scales;

/* Finds the factors once the maxima are staged. */
template <class F>
static __device__ __forceinline__ down_scales scales_of_down(const warp_state *p,
                                                             const fp8_share *s, int index,
                                                             const fused_scales *scales) {
    if constexpr (F::grouped) {
        float g = scale_of_maxima<F>(
            load_shared_word(s->most + (uint32_t)(index % 2 * 2 * FUSED_WARPS + p->lane) * 4));
        return {g, scales->down * g};
    }
    return {__frcp_rn(scales->g), 1};
}

/* Waits until group GROUP has arrived: as many copies may be in flight as were issued behind it. */
template <int GROUP> static __device__ __forceinline__ void await_group(void) {
    copy_async_wait<GROUPS - 1 - GROUP>();
    warp_meets();
}

/* Multiplies two slabs by the tile. Lane t of four has the 16 columns from 16 t on, and gets the
 * sums of rows of quarter t. */
template <class F>
static __device__ __forceinline__ float multiply_group(uint32_t from, const uint32_t (&g)[8],
                                                       int t) {
    float d[GROUP_SLABS][4] = {};
    const uint32_t half = SLAB / 2 * FUSED_COLUMNS;
#pragma unroll
    for (int i = 0; i < GROUP_SLABS; i++) {
        F::multiply_half(load_shared(from + 2 * i * half), load_shared(from + (2 * i + 1) * half),
                         g, d[i]);
    }
    return t == 0 ? d[0][0] : t == 1 ? d[0][2] : t == 2 ? d[1][0] : d[1][2];
}

/* Adds the products of the warp's rows and the tile: of each group lane t of four has one row of
 * quarter t. */
template <class F>
static __device__ __forceinline__ void multiply_down(const warp_state *p, const fp8_share *s,
                                                     const down_scales *scales,
                                                     float (&d)[GROUPS]) {
    int t = p->lane % 4;
    uint32_t from = s->down + (uint32_t)(p->lane / 4 * FUSED_COLUMNS + t * 16);
    uint32_t own[1] = {load_shared_word(s->g + (uint32_t)p->lane * 4)}, g[8];
    quantize_own<F>(own, scales->g);
#pragma unroll
    for (int i = 0; i < 8; i++)
        g[i] = __shfl_sync(ALL_LANES, own[0], t * 8 + i);
    const uint32_t group = GROUP_SLABS * SLAB * FUSED_COLUMNS;
    await_group<0>();
    d[0] = __fmaf_rn(multiply_group<F>(from, g, t), scales->factor, d[0]);
    await_group<1>();
    d[1] = __fmaf_rn(multiply_group<F>(from + group, g, t), scales->factor, d[1]);
    await_group<2>();
    d[2] = __fmaf_rn(multiply_group<F>(from + 2 * group, g, t), scales->factor, d[2]);
    await_group<3>();
    d[3] = __fmaf_rn(multiply_group<F>(from + 3 * group, g, t), scales->factor, d[3]);
}
static_assert(GROUPS == 4 && GROUP_SLABS == 2, "as multiply_down has them");

/* Stores the block's partial sums of the slot. */
static __device__ __forceinline__ void store_partial_rows(const fused_fp8_args *a,
                                                          const warp_state *p, const fp8_share *s,
                                                          const float (&d)[GROUPS]) {
    int rows = a->tile.down.rows;
    int n = p->warp * OWN_ROWS + p->lane % 4 * 8 + p->lane / 4;
    float *to = a->tile.d + (int64_t)((int)blockIdx.x + s->slot) * rows;
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        if (n + i * 32 < rows)
            to[n + i * 32] = d[i];
}

/* ---- the kernel ---- */

template <class F>
static __device__ __forceinline__ void open_fused_fp8(const fused_fp8_args *a, uint8_t *shared,
                                                      uint64_t *full, warp_state *p, fp8_share *s) {
    const common_args *common = &a->tile.common;
    p->a = common;
    p->warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    p->lane = (int)threadIdx.x % 32;
    p->pipeline = shared_address(shared) + (uint32_t)(p->warp * RING * BOX);
    p->full = shared_address(full + p->warp * RING);
    p->policy = policy_evict_first();
    s->down = shared_address(shared + a->down_at) + (uint32_t)(p->warp * OWN_ROWS * FUSED_COLUMNS);
    s->sums = shared_address(shared + common->staged_at);
    s->g = shared_address(shared + a->tile.g_at);
    s->most = s->g + 2 * FUSED_COLUMNS;
    s->slot = divide((int)blockIdx.x, &a->tile.by_fused_tiles);
    int own = (int)blockIdx.x - s->slot * a->tile.by_fused_tiles.by;
    s->first = own; /* neighbouring columns of W2 are read at once */
    s->step = a->tile.by_fused_tiles.by;
    s->tiles = (a->tiles - own + s->step - 1) / s->step;
    if (p->lane < RING)
        mbarrier_init(p->full + 8u * p->lane, 1);
    mbarrier_init_fence();
    if (threadIdx.x == 0)
        prefetch_map(&common->map);
}

/* Synchronizes the block's warps, and those of the other block of a group. */
template <class F> static __device__ __forceinline__ void synchronize_tiles(void) {
    if constexpr (F::grouped)
        cluster_sync();
    else
        __syncthreads();
}

template <class F>
static __global__ void __launch_bounds__(FUSED_THREADS, 1)
    moe_decode_fused_fp8(const __grid_constant__ fused_fp8_args args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ uint64_t full[FUSED_WARPS * RING];
    uint8_t *shared = aligned<F>(dynamic);
    const fused_fp8_args *a = &args;
    const common_args *common = &args.tile.common;
    warp_state p;
    fp8_share s;
    open_fused_fp8<F>(a, shared, full, &p, &s);
    if (F::grouped)
        cluster_arrive();
    touch_parameter(args);
    int64_t place = place_of_id(&common->route, s.slot);
    fused_row row = row_of_slot<F>(common, s.slot);
    find_now(place);
    find_now(row.row);
    if (F::coded && F::grouped)
        find_now(row.scales);
    barriers_are_ready(0, FUSED_THREADS);
    if (F::grouped)
        cluster_wait();
    wait_for_predecessor();
    launch_dependents(); /* not before: the next kernel relies on the ids */
    int64_t id = id_at(&common->route, place);
    raw_x four = load_x<F>(a, &p, &row); /* x does not depend on the id */
    s.expert = expert_of_id(&common->route, id);
    if (s.expert < 0)
        return;
#pragma unroll 1
    for (int i = 0; i < common->flight; i++)
        fill_rows(a, &p, &s, i, i);
    fused_scales scales = load_tile_scales<F>(a, &p, &s, 0);
    fused_x x = codes_of_x<F>(a, &p, &s, &scales, &four);
    uint32_t places = F::places_of(&p);
    pipeline_state at = {0, 0};
    int number = 0;
    float d[GROUPS] = {};
#pragma unroll 1
    for (int i = 0; i < s.tiles; i++) {
        multiply_rows<F>(a, &p, &s, i, places, &x, &scales, &at, &number);
        __syncthreads();
        make_rows_of_g<F>(a, &p, &s, &scales, i);
        synchronize_tiles<F>();
        down_scales down = scales_of_down<F>(&p, &s, i, &scales);
        if (i + 1 < s.tiles)
            scales = load_tile_scales<F>(a, &p, &s, i + 1);
        multiply_down<F>(&p, &s, &down, d);
    }
    store_partial_rows(a, &p, &s, d);
}

template <moq_dtype DT, bool CODED> static const void *fused_kernel_with(moq_input_mode mode) {
    return mode == MOQ_INPUT_E4M3_GROUP
               ? (const void *)moe_decode_fused_fp8<fp8_fused<DT, MOQ_INPUT_E4M3_GROUP, CODED>>
               : (const void *)moe_decode_fused_fp8<fp8_fused<DT, MOQ_INPUT_E4M3_TENSOR, CODED>>;
}

template <moq_dtype DT> static const void *fused_kernel_of(moq_input_mode mode, bool coded) {
    return coded ? fused_kernel_with<DT, true>(mode) : fused_kernel_with<DT, false>(mode);
}

moq_status launch_fused_fp8(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    moq_input_mode mode = spec->w13.input;
    fused_fp8_args a = {};
    a.tile = fused_tiles_of(call, share);
    a.tile.up_slabs = share->fused_stages;
    a.tile.by_fused_tiles = divisor_of(share->slot_blocks);
    MOQ_TRY(describe_fp8(call, &a.tile.common, err));
    a.tile.down.expert_bytes = (int64_t)a.tile.down.rows * a.tile.down.columns;
    a.tile.down.blocks = (a.tile.down.columns + BLOCK - 1) / BLOCK;
    a.tiles = (int)spec->w2.in_features / FUSED_COLUMNS;
    a.ask = share->ask;
    a.down_at = share->down_at;
    bool coded = spec->w13.quantized_input;
    const void *kernel = spec->w13.dtype == MOQ_DT_F16 ? fused_kernel_of<MOQ_DT_F16>(mode, coded)
                                                       : fused_kernel_of<MOQ_DT_BF16>(mode, coded);
    fused_sum_args sum = sum_of(call, &a.tile);
    sum.factor = 1;
    if (mode != MOQ_INPUT_E4M3_TENSOR)
        sum.down.input_scale = NULL;
    return launch_fused(call, share, "FP8 experts", kernel, &a, &sum, err);
}

} // namespace moq::moe_decode
