/* Decode kernels of experts on Hopper, general form: one kernel for W13 and one for W2, any K, any
 * weight format. split_k.h has the form with split-K fixed at compile time, fused.h the form with
 * both products in one kernel. For each slot s of a token t, e its expert:
 *
 *   up    g[s] = rounded(act(W13[e] x[t] + b13[e]))
 *   down  y[t] = rounded(out[t] + sum_s w[s] (W2[e] g[s] + b2[e]))
 *
 * Layouts: x [tokens, H], g [slots, I] and y [tokens, H], bfloat16 or float16, x of a coded format
 * in codes with their scales; W13 and W2 as a format F has them, in slabs of 16 rows by blocks of
 * K. Tile: 1 or 2 slabs by up to 8 slots of an expert, 2 in `down`; eight warps, two blocks a
 * multiprocessor.
 *
 * Bound: reading the weights of experts that have a slot, once for up to 8 slots. At one token the
 * bound is latency: kernel start, from ids to the first weight, from one kernel to the next. So:
 *
 * - Every block finds experts and slots from the ids (scheduler.h). No kernel groups them, and the
 *   host needs no number of chunks.
 * - One warp multiplies gate and up rows of the same numbers, so a lane has both sums of an output
 *   and activates it at once. In `down` a block or a cluster has some slabs of all experts; the
 *   slots of a token meet in shared memory and are added in their order. No sum depends on timing.
 * - A warp fills its own pipeline with bulk copies and waits for nothing else. x or g comes from
 *   the caches into registers, a stage ahead.
 * - `down` starts by PDL when `up` has waited for the ids. It fills its pipelines with weights
 *   while `up` still works, and waits only before it reads g.
 *
 * A format F defines the weights of a stage, a lane's columns of x in a stage, and the products:
 * fp8_format.h and nvfp4_format.h have one each. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_UP_DOWN_H
#define MOQ_CUDA_MOE_SM90_DECODE_UP_DOWN_H

#include "cuda/device/divide.h"
#include "cuda/moe/expert_activation.h"
#include "cuda/moe/sm90/decode/scheduler.h"

namespace moq::moe_decode {

#define SLAB 16 /* rows */

/* The stack of a weight. */
typedef struct {
    const uint8_t *weight;
    const void *weight_scale;         /* FP8 block scales [experts, block rows, blocks of K] */
    const float *output_scale, *bias; /* [experts, rows], or NULL */
    const float *input_scale;         /* [experts, partitions], or NULL */
    int64_t expert_bytes;
    int rows, columns, blocks;             /* sizes of an expert; blocks of K */
    int slab_bytes;                        /* bytes of a packed slab */
    int partition_count, partition_blocks; /* partitions, and block rows of each */
} stack;

/* Arguments that both kernels share. */
typedef struct {
    CUtensorMap map; /* map of the weight, if a format copies boxes */
    routing route;
    stack w;
    const void *x; /* up: [tokens, H] values or codes; down: g, [slots, I] */
    int64_t x_stride;
    float *maxima; /* [slots, pairs]: maxima of |g|, if a format needs them */
    int pairs;     /* slabs of I */
    int stages, staged_at, scales_at, weights_at;
    /* Split-K: log2 of the warps that share K, and stages in flight at the start. Divisors: blocks
     * of the grid, items of a chunk, stages of an item. */
    int log_splits, flight;
    divisor by_blocks, by_items, by_stages;
    bool weighted;            /* the kernel needs the router's weights, */
    bool weights_on_input;    /* which the first kernel does if they are on the input */
    moe::slot_tensor x_scale; /* up: scales of x beside its codes, if it has any */
} common_args;

typedef struct {
    common_args common;
    moe::activation activation;
    void *g; /* [slots, inner] */
    int inner;
} up_args;

typedef struct {
    common_args common;
    void *y; /* [tokens, H] */
    int64_t y_stride;
    int tokens, slabs, log_cluster;
    int sums_at;
    bool accumulate;
    float *d; /* [slots, H], if a third kernel adds the slots of a token */
} down_args;

/* Barriers of a block. */
typedef struct {
    uint64_t full[WARPS * MAX_STAGES];
    uint64_t staged[WARPS];
} barriers;

/* A warp's view of a kernel. Its stages have the slabs `slab` + i * `slab_step` + the walk's row, i
 * < slabs. */
typedef struct {
    const common_args *a;
    tables t;
    work own;
    int warp, lane;
    int slab, slab_step, slabs;
    int slab_pitch; /* bytes from slab to slab of packed weights */
    uint32_t pipeline, full;
    uint64_t policy;
    float *scale;  /* token scales of x, by place among the sorted slots */
    float *weight; /* router weights of slots, if the kernel needs them */
} warp_state;

/* A row of x for the lane: the slot that is its column of the products. Columns without a slot
 * repeat one whose sums nobody reads. */
typedef struct {
    const uint8_t *row;
    uint32_t chunk;      /* packed by chunk_word */
    int place;           /* place among the sorted slots */
    float weight;        /* router weight, if it is on the input */
    float scale;         /* scale that quantizes x, if an expert has one and it was loaded early */
    const float *scales; /* scales beside codes of x, of 128 columns each */
} column;

/* A stage to multiply where K is split at compile time: its offset, its barrier, and its number. */
typedef struct {
    uint32_t at, bar;
    int parity, number;
} split_stage;

/* The next stage to fill; the format defines the target. */
template <class F> struct feed {
    walk at;
    typename F::target target;
};

template <class F> using sums = float[F::slabs][1][4];

/* Factors of the lane's rows g and g + 8 of each slab. */
template <class F> struct row_scales {
    float factor[F::slabs][2];
};

/* ---- a warp ---- */

template <class F> static __device__ __forceinline__ void aim(const warp_state *p, feed<F> *f) {
    if (f->at.piece > 0)
        F::aim(p, f->at, expert_of_chunk(p->t.chunk[f->at.chunk]), &f->target);
}

/* Fills a stage if work is left. */
template <class F>
static __device__ __forceinline__ void fill_stage(const warp_state *p, feed<F> *f, int stage) {
    if (f->at.piece == 0)
        return;
    int blocks = min(F::stage_blocks, f->at.piece);
    F::fill(p, f->at, &f->target, blocks, p->pipeline + (uint32_t)(stage * F::stage_bytes),
            p->full + 8u * stage);
    f->at.block += blocks;
    f->at.piece -= blocks;
    if (f->at.piece == 0) {
        walk_on(&p->own, &f->at);
        aim(p, f);
    }
}

template <class F>
static __device__ __forceinline__ void fill_pipeline(const warp_state *p, feed<F> *f) {
    f->at = walk_of(&p->own, p->warp);
    f->target = {};
    aim(p, f);
#pragma unroll 1
    for (int stage = 0; stage < p->a->stages; stage++)
        fill_stage(p, f, stage);
}

/* Returns the first scale beside the codes of a token. */
static __device__ __forceinline__ const float *scales_of_token(const common_args *a, int token) {
    return (const float *)a->x_scale.data + moe::slot_offset(&a->x_scale, token, 0);
}

/* Finds the row of the lane's slot. */
template <class F, bool UP>
static __device__ __forceinline__ void find_row(const warp_state *p, int slot, column *c) {
    int64_t row = UP ? slot / p->a->route.top_k : slot;
    c->row = (const uint8_t *)p->a->x + (UP && F::coded ? 1 : 2) * row * p->a->x_stride;
    if (UP && F::coded && F::scaled_groups)
        c->scales = scales_of_token(p->a, (int)row);
    if (UP && !F::coded && p->a->weights_on_input)
        c->weight = p->weight[slot];
}

template <class F, bool UP>
static __device__ __forceinline__ column column_of(const warp_state *p, const walk *at) {
    column c = {};
    if (at->piece == 0)
        return c;
    c.chunk = p->t.chunk[at->chunk];
    c.place = first_of_chunk(c.chunk) + min(p->lane / 4, slots_of_chunk(c.chunk) - 1);
    find_row<F, UP>(p, p->t.sorted[c.place], &c);
    return c;
}

/* Finds the lane's column of a chunk, with the scale that quantizes it. */
template <class F, bool UP>
static __device__ __forceinline__ column column_of_chunk(const warp_state *p, uint32_t chunk) {
    column c = {};
    c.chunk = chunk;
    c.place = first_of_chunk(chunk) + min(p->lane / 4, slots_of_chunk(chunk) - 1);
    find_row<F, UP>(p, p->t.sorted[c.place], &c);
    c.scale = F::scale_of_column(p, &c);
    return c;
}

/* Loads 16 bytes of x or g. */
static __device__ __forceinline__ uint4 load_vector(const uint8_t *from) {
    uint4 v;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

/* Multiplies x by a router weight and rounds, two values at a time. */
template <int WORDS>
static __device__ __forceinline__ void weigh(uint4 *x, moq_dtype dtype, float weight) {
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) {
        uint32_t &pair = (&x[i / 4].x)[i % 4];
        float2 v = moq_widen_pair(pair, dtype);
        pair = moq_narrow_pair(dtype, __fmul_rn(v.x, weight), __fmul_rn(v.y, weight));
    }
}

/* A stage of a warp: its operands, with x in registers, and the next stage's x. */
typedef struct {
    int blocks, next_blocks; /* blocks of K */
    int next_block, next_row;
    column own, next;
    uint32_t stage, bar;
    int parity;
} stage_view;

/* Multiplies a warp's share, from filled stages on. At the start of an item `begin` loads the
 * operands of its epilogue; `finish` gets these, the item's row, chunk and sums. */
template <class F, bool UP, class BEGIN, class FINISH>
static __device__ __forceinline__ void multiply_items(const warp_state *p, feed<F> *f,
                                                      float *staged, uint32_t staged_bar,
                                                      BEGIN begin, FINISH finish) {
    walk at = walk_of(&p->own, p->warp);
    if (at.piece == 0)
        return;
    typename F::places places = F::places_of(p);
    pipeline_state place = {0, 0};
    column own = column_of<F, UP>(p, &at);
    typename F::columns x = {};
    F::load(p, &own, at.row, at.block, min(F::stage_blocks, at.piece), &x);
#pragma unroll 1
    while (true) {
        walk ahead = at;
        walk_on(&p->own, &ahead);
        column next = own;
        if (ahead.chunk != at.chunk)
            next = column_of<F, UP>(p, &ahead);
        const bool whole = at.block == 0;
        row_scales<F> found = begin(at.row, own.chunk);
        sums<F> sum = {};
        int done = at.block;
#pragma unroll 1
        while (at.piece > 0) {
            stage_view v;
            v.blocks = min(F::stage_blocks, at.piece);
            at.piece -= v.blocks;
            done += v.blocks;
            const bool ends = at.piece == 0;
            v.own = own;
            v.next = ends ? next : own;
            v.next_block = ends ? 0 : done;
            v.next_row = ends ? ahead.row : at.row;
            v.next_blocks = min(F::stage_blocks, ends ? ahead.piece : at.piece);
            v.stage = (uint32_t)(place.index * F::stage_bytes);
            v.bar = p->full + 8u * place.index;
            v.parity = place.parity;
            F::template multiply<UP>(p, places, v, &x, sum);
            warp_meets();
            fill_stage(p, f, place.index);
            advance(&place, p->a->stages);
        }
        if (!whole) {
            stage_partial_sums<4 * F::slabs>(staged + p->warp * (4 * F::slabs * 32), &sum[0][0][0],
                                             p->lane);
            warp_releases<false>(staged_bar + 8u * p->warp);
        } else {
            add_partial_sums<4 * F::slabs>(&p->own, staged, staged_bar, p->warp,
                                           p->own.blocks - done, &sum[0][0][0], p->lane);
            finish(at.row, own.chunk, sum, found);
        }
        if (ahead.piece == 0)
            return;
        at = ahead;
        own = next;
    }
}

/* Initializes a warp's barriers and finds its place in the block. */
template <class F>
static __device__ __forceinline__ void open_warp(const common_args *a, uint8_t *shared,
                                                 barriers *bar, warp_state *p) {
    p->a = a;
    p->t = tables_of(&a->route, shared, 0);
    p->warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    p->lane = (int)threadIdx.x % 32;
    p->pipeline = shared_address(shared) + (uint32_t)(p->warp * a->stages * F::stage_bytes);
    p->full = shared_address(bar->full + p->warp * MAX_STAGES);
    p->policy = policy_evict_first();
    p->scale = (float *)(shared + a->scales_at);
    p->weight = (float *)(shared + a->weights_at);
    if (p->lane < a->stages)
        mbarrier_init(p->full + 8u * p->lane, 1);
    if (p->lane == 0)
        mbarrier_init(shared_address(&bar->staged[p->warp]), WARP_ARRIVALS);
    mbarrier_init_fence();
}

/* Loads the router's weights, which all threads see after group_slots. */
static __device__ __forceinline__ void load_weights(const warp_state *p) {
    for (int i = (int)threadIdx.x; p->a->weighted && i < p->a->route.slots; i += (int)blockDim.x)
        p->weight[i] = weight_of_slot(&p->a->route, i);
}

/* Aligns dynamic shared memory as the format's boxes need it. */
template <class F> static __device__ __forceinline__ uint8_t *aligned(uint8_t *shared) {
    return shared + (-shared_address(shared) & (F::alignment - 1));
}

/* ---- outputs ---- */

/* Applies the activation; rare ones are out of line. */
static __device__ __noinline__ float activate_rarely(const moe::activation *a, float gate,
                                                     float up) {
    return moe::activate(a, gate, up);
}

static __device__ __forceinline__ float activate_inline(const moe::activation *a, float gate,
                                                        float up) {
    if (a->kind != MOQ_MOE_SILU)
        return activate_rarely(a, gate, up);
    moe::activation silu = *a;
    silu.kind = MOQ_MOE_SILU;
    return moe::activate(&silu, gate, up);
}

/* Returns the lane's row g + 8 h of slab i, in an item's row. */
template <class F>
static __device__ __forceinline__ int row_of(const warp_state *p, int row, int i, int h) {
    return (p->slab + i * p->slab_step + row) * SLAB + p->lane / 4 + 8 * h;
}

template <class F>
static __device__ __forceinline__ row_scales<F> scales_of_rows(const warp_state *p, int row,
                                                               uint32_t chunk) {
    const stack *w = &p->a->w;
    row_scales<F> s = {};
    int expert = expert_of_chunk(chunk);
    float common = F::factor_of_expert(w, expert);
#pragma unroll
    for (int i = 0; i < 2 * F::slabs; i++) {
        int n = row_of<F>(p, row, i / 2, i % 2);
        if (i / 2 < p->slabs && n < w->rows)
            s.factor[i / 2][i % 2] =
                w->output_scale
                    ? common * load_early(w->output_scale + (int64_t)expert * w->rows + n)
                    : common;
    }
    return s;
}

/* Returns the linear's output of a lane's sum: row g + 8 h of slab i, column 2 t + c of the
 * chunk. */
template <class F>
static __device__ __forceinline__ float output_of(const warp_state *p, const row_scales<F> &s,
                                                  const sums<F> &sum, int row, int i, int h, int c,
                                                  uint32_t chunk) {
    const stack *w = &p->a->w;
    float factor = s.factor[i][h];
    if (F::scaled_tokens)
        factor *= p->scale[min(first_of_chunk(chunk) + p->lane % 4 * 2 + c, p->a->route.slots - 1)];
    float value = __fmul_rn(sum[i][0][2 * h + c], factor);
    int n = row_of<F>(p, row, i, h);
    if (w->bias && n < w->rows)
        value = __fadd_rn(value, w->bias[(int64_t)expert_of_chunk(chunk) * w->rows + n]);
    return value;
}

template <class F>
static __device__ __forceinline__ void store_pair(const up_args *a, const warp_state *p, int row,
                                                  uint32_t chunk, const sums<F> &sum,
                                                  const row_scales<F> &s) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
        if (c >= slots_of_chunk(chunk))
            break; /* no lane has such a column */
        int i = p->lane % 4 * 2 + c;
        bool meant = i < slots_of_chunk(chunk);
        int64_t slot = meant ? p->t.sorted[first_of_chunk(chunk) + i] : 0;
        uint16_t *to = (uint16_t *)a->g + slot * a->inner + row * SLAB + p->lane / 4;
        uint32_t most = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float gate = output_of<F>(p, s, sum, row, 0, h, c, chunk);
            float up = F::slabs == 2 ? output_of<F>(p, s, sum, row, F::slabs - 1, h, c, chunk) : 1;
            uint32_t value =
                moq_narrow_pair(F::dtype, activate_inline(&a->activation, gate, up), 0) & 0xffff;
            if (meant)
                to[8 * h] = (uint16_t)value;
            most = max(most, value & 0x7fff);
        }
        if (F::scaled_tokens) { /* maximum over the lanes that have the column */
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2)
                most = max(most, __shfl_xor_sync(ALL_LANES, most, lanes));
            if (meant && p->lane < 4)
                p->a->maxima[slot * p->a->pairs + row] = moq_widen_pair(most, F::dtype).x;
        }
    }
}

/* Sends the outputs of slots to the blocks that add their rows: [slots][rows of a block]. */
template <class F>
static __device__ __forceinline__ void give_sums(const down_args *a, const warp_state *p,
                                                 uint32_t to, uint32_t chunk, const sums<F> &sum,
                                                 const row_scales<F> &s) {
    const int rows = F::slabs * SLAB >> a->log_cluster;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        int i = p->lane % 4 * 2 + c;
        if (i >= slots_of_chunk(chunk))
            continue;
        int slot = p->t.sorted[first_of_chunk(chunk) + i];
#pragma unroll
        for (int j = 0; j < 2 * F::slabs; j++) {
            int row = j / 2 * SLAB + p->lane / 4 + j % 2 * 8, owner = row / rows;
            float value = output_of<F>(p, s, sum, 0, j / 2, j % 2, c, chunk);
            uint32_t at = to + 4u * (uint32_t)(slot * rows + row - owner * rows);
            if (a->log_cluster)
                store_remote(address_in((uint32_t)owner, at), value);
            else
                store_shared_word(at, __float_as_uint(value));
        }
    }
}

/* Writes y of the block's rows from `first` on, added in the order of slots. */
template <class F>
static __device__ __forceinline__ void combine(const down_args *a, const warp_state *p,
                                               const float *sums, int first) {
    const int rows = F::slabs * SLAB >> a->log_cluster, top_k = a->common.route.top_k;
    for (int i = (int)threadIdx.x; i < a->tokens * rows; i += THREADS) {
        int token = i / rows, row = i - token * rows;
        if (first + row >= a->common.w.rows)
            continue;
        int64_t at = token * a->y_stride + first + row;
        float sum = a->accumulate ? moq_load_one(a->y, at, F::dtype) : 0;
#pragma unroll 4
        for (int slot = token * top_k; slot < (token + 1) * top_k; slot++) {
            float d = sums[slot * rows + row], weight = p->weight[slot];
            float more = __fadd_rn(sum, a->common.weighted ? __fmul_rn(weight, d) : d);
            sum = p->t.expert[slot] < 0 ? sum : more;
        }
        ((uint16_t *)a->y)[at] = (uint16_t)moq_narrow_pair(F::dtype, sum, 0);
    }
}

/* ---- scales of tokens ---- */

/* The range of sorted slots that the block's items have. */
typedef struct {
    int begin, end;
} places_of_block;

static __device__ __forceinline__ places_of_block block_places(const warp_state *p) {
    places_of_block b = {0, 0};
    int items = p->own.steps / p->own.blocks;
    if (items == 0)
        return b;
    uint32_t first = p->t.chunk[p->own.begin / p->own.per_chunk];
    uint32_t last = p->t.chunk[(p->own.begin + items - 1) / p->own.per_chunk];
    b.begin = first_of_chunk(first);
    b.end = first_of_chunk(last) + slots_of_chunk(last);
    return b;
}

/* Loads the token scales beside codes, a thread for a slot. */
static __device__ __forceinline__ void load_token_scales(const warp_state *p) {
    places_of_block b = block_places(p);
    for (int place = b.begin + (int)threadIdx.x; place < b.end; place += THREADS)
        p->scale[place] = __ldcg(scales_of_token(p->a, p->t.sorted[place] / p->a->route.top_k));
    __syncthreads();
}

/* Finds token scales from all of x, a warp for a slot; codes have them. */
template <class F> static __device__ __forceinline__ void find_token_scales(const warp_state *p) {
    if constexpr (F::coded) {
        load_token_scales(p);
        return;
    }
    places_of_block b = block_places(p);
    for (int place = b.begin + p->warp; place < b.end; place += WARPS) {
        int slot = p->t.sorted[place], token = slot / p->a->route.top_k;
        const uint4 *x = (const uint4 *)((const uint16_t *)p->a->x + token * p->a->x_stride);
        float weight = p->a->weights_on_input ? p->weight[slot] : 0;
        uint32_t most = 0;
        for (int i = p->lane; i < p->a->w.columns / 8; i += 32) {
            uint4 v = x[i];
            if (p->a->weights_on_input)
                weigh<1>(&v, F::dtype, weight);
#pragma unroll
            for (int j = 0; j < 4; j++)
                most = __vmaxu2(most, (&v.x)[j] & 0x7fff7fffu);
        }
        most = moq_max_of_lanes(max(most & 0xffff, most >> 16), 32);
        if (p->lane == 0)
            p->scale[place] = moq_token_scale(moq_widen_pair(most, F::dtype).x);
    }
    __syncthreads();
}

/* Finds token scales from the maxima of g that the first kernel stored. */
static __device__ __forceinline__ void find_slot_scales(const warp_state *p) {
    places_of_block b = block_places(p);
    for (int place = b.begin + p->warp; place < b.end; place += WARPS) {
        const float *from = p->a->maxima + p->t.sorted[place] * p->a->pairs;
        uint32_t most = 0;
        for (int i = p->lane; i < p->a->pairs; i += 32)
            most = max(most, __float_as_uint(from[i]));
        most = moq_max_of_lanes(most, 32);
        if (p->lane == 0)
            p->scale[place] = moq_token_scale(__uint_as_float(most));
    }
    __syncthreads();
}

/* ---- the kernels ---- */

template <class F>
static __global__ void __launch_bounds__(THREADS, 2)
    moe_decode_up(const __grid_constant__ up_args args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ barriers bar;
    uint8_t *shared = aligned<F>(dynamic);
    const up_args *a = &args;
    const common_args *common = &args.common;
    warp_state p;
    open_warp<F>(common, shared, &bar, &p);
    int64_t place = open_tables<false>(&common->route, &p.t);
    wait_for_predecessor();
    launch_dependents(); /* not before: the next kernel relies on the ids */
    load_weights(&p);
    group_slots<false>(&common->route, &p.t, place);
    uint32_t items = (uint32_t)(*p.t.chunks * common->pairs);
    uint32_t begin = (uint32_t)((uint64_t)items * blockIdx.x / gridDim.x);
    uint32_t end = (uint32_t)((uint64_t)items * (blockIdx.x + 1) / gridDim.x);
    p.own = {(int)begin, (int)(end - begin) * common->w.blocks, common->pairs, common->w.blocks};
    p.slab = 0;
    p.slab_step = common->pairs;
    p.slabs = F::slabs;
    p.slab_pitch = common->w.slab_bytes * p.slab_step;
    feed<F> f;
    fill_pipeline<F>(&p, &f);
    if (F::scaled_tokens)
        find_token_scales<F>(&p);
    multiply_items<F, true>(
        &p, &f, (float *)(shared + common->staged_at), shared_address(bar.staged),
        [&](int row, uint32_t chunk) { return scales_of_rows<F>(&p, row, chunk); },
        [&](int row, uint32_t chunk, const sums<F> &sum, const row_scales<F> &s) {
            store_pair<F>(a, &p, row, chunk, sum, s);
        });
}

template <class F>
static __global__ void __launch_bounds__(THREADS, 2)
    moe_decode_down(const __grid_constant__ down_args args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ barriers bar;
    uint8_t *shared = aligned<F>(dynamic);
    const down_args *a = &args;
    const common_args *common = &args.common;
    launch_dependents();
    warp_state p;
    open_warp<F>(common, shared, &bar, &p);
    int64_t place = open_tables<false>(&common->route, &p.t);
    if (a->log_cluster)
        cluster_arrive();
    /* The kernel before waited for the ids before it let this one start. */
    load_weights(&p);
    group_slots<false>(&common->route, &p.t, place);
    int rank = (int)blockIdx.x & ((1 << a->log_cluster) - 1);
    int cluster = (int)blockIdx.x >> a->log_cluster, chunks = *p.t.chunks;
    int begin = chunks * rank >> a->log_cluster, end = chunks * (rank + 1) >> a->log_cluster;
    p.own = {begin, (end - begin) * common->w.blocks, 1, common->w.blocks};
    p.slab = cluster * F::slabs;
    p.slab_step = 1;
    p.slabs = min(F::slabs, a->slabs - p.slab);
    p.slab_pitch = common->w.slab_bytes;
    feed<F> f;
    fill_pipeline<F>(&p, &f);
    float *given = (float *)(shared + a->sums_at);
    if (a->log_cluster)
        cluster_wait();
    wait_for_predecessor();
    if (F::scaled_tokens)
        find_slot_scales(&p);
    multiply_items<F, false>(
        &p, &f, (float *)(shared + common->staged_at), shared_address(bar.staged),
        [&](int row, uint32_t chunk) { return scales_of_rows<F>(&p, row, chunk); },
        [&](int, uint32_t chunk, const sums<F> &sum, const row_scales<F> &s) {
            give_sums<F>(a, &p, shared_address(given), chunk, sum, s);
        });
    if (a->log_cluster)
        cluster_sync();
    else
        __syncthreads();
    combine<F>(a, &p, given, p.slab * SLAB + rank * (F::slabs * SLAB >> a->log_cluster));
}

/* ---- launch (launch.cu) ---- */

/* Fill the arguments, except blocks, bytes and maps, which depend on the format. */
up_args up_of(const moq_moe_call *call, const moq_moe_decode_share *share);
down_args down_of(const moq_moe_call *call, const moq_moe_decode_share *share);

/* Launches both kernels, or with split-K all three. */
moq_status launch_all(const moq_moe_call *call, const moq_moe_decode_share *share, const char *what,
                      const void *up_kernel, up_args *up, const void *down_kernel, down_args *down,
                      moq_err *err);

/* Launches the kernel that adds the slots of a token behind those with split-K (slot_sum.cu). */
moq_status launch_sum(const moq_moe_call *call, const down_args *down, moq_err *err);

/* Launch the kernels of a call without fused up and down (fp8.cu, nvfp4.cu). */
moq_status launch_fp8(const moq_moe_call *call, const moq_moe_decode_share *share, moq_err *err);
moq_status launch_nvfp4(const moq_moe_call *call, const moq_moe_decode_share *share, moq_err *err);

} // namespace moq::moe_decode

#endif
