/* Experts with NVFP4 weights for few tokens on Hopper, exact products, in two kernels:
 *
 *   up    g[s] = rounded(act(W13[e] x[t] + b13[e]))        for each slot s of a token t, e its
 * expert down  y[t] = rounded(out[t] + sum_j w (W2[e] g[s] + b2[e]))
 *
 * Weights are in the packed layout (core/nvfp4_packed.h), x and y bfloat16 or float16; products are
 * exact, sums float32. What bounds it is the weights of the experts that have a slot, 0.5625 bytes
 * a weight, each read once for up to 8 slots; the decoder takes nearly as long
 * (docs/lab/nvfp4-few.md). At one token it is the start of a kernel, the way from the router's ids
 * to the first weight, and the way from one kernel to the next. So:
 *
 * - Every block finds the experts and their slots by itself from the ids (sm90_moe_few.h): there is
 *   no kernel that groups, and no number of chunks that the host would have to know.
 * - Gate and up rows of the same numbers are multiplied by the same warp, so that a lane has both
 *   sums of an output and activates it at once. In the second kernel a block, or a cluster of them,
 *   has some slabs of all experts: what becomes of the slots of a token meets in shared memory and
 * is added in the order of slots. No sum depends on timing.
 * - A warp has a ring of stages that it fills itself by bulk copies, 2 blocks of K of its slabs,
 * and waits for nothing else; x, or g, comes from the caches into registers, a stage ahead.
 * - A block takes half of a multiprocessor. The second kernel starts when the first has read the
 * ids (programmatic launch): that these are there is known then, so that it fills its rings with
 *   weights while the first still works, and waits only before it reads g.
 *
 * Measured: see docs/lab/moe.md. */
#include "core/nvfp4_packed.h"
#include "cuda/choice/moe_few.h"
#include "cuda/device/expert_activation.h"
#include "cuda/device/nvfp4_products.h"
#include "cuda/moe/sm90/cuda_moe_sm90.h"
#include "cuda/moe/sm90/sm90_moe_few.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_few {

#define STAGE_BLOCKS MOQ_MOE_FEW_STAGE_BLOCKS
#define X_BLOCK      (2 * MOQ_PACK_K)

/* What is known when a kernel is compiled: slabs of a stage and the type of x. */
template <int SLABS, moq_nvfp4_type TYPE> struct shape {
    static constexpr int slabs = SLABS, tiles = 1, blocks = STAGE_BLOCKS;
    static constexpr int stage = SLABS * STAGE_BLOCKS * MOQ_PACK_BYTES;
    static constexpr moq_nvfp4_type type = TYPE;
    static constexpr moq_dtype dtype = TYPE == MOQ_NVFP4_F16 ? MOQ_DT_F16 : MOQ_DT_BF16;
};

/* A weight, by its slabs and blocks of K. */
typedef struct {
    const uint8_t *weight;
    const float *output_scale, *bias; /* [experts, rows]; bias NULL where there is none */
    int64_t expert_bytes;
    int rows, blocks;
} stack;

/* What both kernels need. */
typedef struct {
    routing route;
    stack w;
    const void *x; /* up: [tokens, H]; down: g, [slots, I] */
    int64_t x_stride;
    int stages, parked_at;
} common_args;

typedef struct {
    common_args common;
    moq_expert_activation activation;
    void *g;          /* [slots, inner] */
    int inner, pairs; /* I, and slabs of it */
    bool weights_on_input;
} up_args;

typedef struct {
    common_args common;
    void *y; /* [tokens, H] */
    int64_t y_stride;
    int tokens, slabs, log_cluster;
    int weights_at, sums_at;
    bool weighted, accumulate;
} down_args;

/* Barriers of a block. */
typedef struct {
    uint64_t full[WARPS * MAX_STAGES];
    uint64_t parked[WARPS];
} barriers;

/* ---- a warp: its ring, x, and products ---- */

/* What a warp has of a kernel. Lane l < slabs copies slab `slab` + l * `slab_step` + the walk's
 * row.
 */
template <class S> struct warp_parts {
    const common_args *a;
    const tables *t;
    work own;
    int warp, lane;
    int slab, slab_step, slabs;
    uint32_t ring, full;
    uint64_t policy;
};

/* The stage that is filled next: `from` is of the lane's slab. */
typedef struct {
    walk at;
    const uint8_t *from;
} feed;

template <class S> static __device__ __forceinline__ void aim(const warp_parts<S> *p, feed *f) {
    const stack *w = &p->a->w;
    int expert = f->at.left > 0 ? expert_of_chunk(p->t->chunk[f->at.chunk]) : 0;
    int slab = p->slab + p->lane * p->slab_step + f->at.row;
    f->from = w->weight + expert * w->expert_bytes +
              ((int64_t)slab * w->blocks + f->at.block) * MOQ_PACK_BYTES;
}

template <class S>
static __device__ __forceinline__ void fill_stage(const warp_parts<S> *p, feed *f, int stage) {
    int blocks = stage_of(&p->own, &f->at, STAGE_BLOCKS);
    uint32_t bytes = (uint32_t)(blocks * MOQ_PACK_BYTES), bar = p->full + 8u * stage;
    uint32_t to = p->ring + (uint32_t)(stage * S::stage);
    if (p->lane == 0)
        mbarrier_expect(bar, p->slabs * bytes);
    if (p->lane < p->slabs)
        copy_bytes_once(to + p->lane * (STAGE_BLOCKS * MOQ_PACK_BYTES), f->from, bytes, bar,
                        p->policy);
    f->from += bytes;
    if (walk_on(&p->own, &f->at, blocks))
        aim(p, f);
}

/* A row of x for the lane: of the slot that is its column of the products. Columns without a slot
 * have one that there is; what comes of them nobody reads. */
typedef struct {
    const uint8_t *row; /* at the lane's columns of block 0 */
    float weight;       /* up, weights on input */
    uint32_t chunk;     /* the word */
} column;

template <class S, bool UP>
static __device__ __forceinline__ column column_of(const warp_parts<S> *p, const walk *at,
                                                   bool weights_on_input) {
    column c = {};
    if (at->left <= 0)
        return c;
    c.chunk = p->t->chunk[at->chunk];
    int i = min(p->lane / 4, slots_of_chunk(c.chunk) - 1);
    int slot = p->t->sorted[first_of_chunk(c.chunk) + i];
    int64_t row = UP ? slot / p->a->route.top_k : slot;
    c.row = (const uint8_t *)p->a->x + 2 * row * p->a->x_stride + 32 * (p->lane % 4);
    if (UP && weights_on_input)
        c.weight = weight_of_slot(&p->a->route, slot);
    return c;
}

/* rounded(x * w), two at a time. */
template <class S> static __device__ __forceinline__ void weigh(uint4 (&x)[1][2], float weight) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t &pair = (&x[0][i / 4].x)[i % 4];
        float2 v = moq_widen_pair(pair, S::dtype);
        pair = moq_narrow_pair(S::dtype, __fmul_rn(v.x, weight), __fmul_rn(v.y, weight));
    }
}

/* The lane's columns of a stage. */
typedef struct {
    uint4 part[STAGE_BLOCKS][1][2];
} stage_of_x;

static __device__ __forceinline__ void load_stage(const column *c, const walk *at, int blocks,
                                                  stage_of_x *x) {
    const uint4 *from = (const uint4 *)(c->row + at->block * X_BLOCK);
#pragma unroll
    for (int i = 0; i < STAGE_BLOCKS; i++) {
        if (i < blocks) {
            x->part[i][0][0] = from[i * (X_BLOCK / 16)];
            x->part[i][0][1] = from[i * (X_BLOCK / 16) + 1];
        }
    }
}

template <class S> using sums = float[S::slabs][1][4];

/* COUNT slabs by a block of K. */
template <class S>
static __device__ __forceinline__ void multiply_block(const moq_unit_places &places, uint32_t at,
                                                      const uint4 (&x)[1][2], sums<S> &sum) {
    if constexpr (S::slabs == 1) {
        moq_multiply_units<S, 1>(places, at, x, sum);
    } else {
#pragma unroll
        for (int slab = 0; slab < S::slabs; slab += 2)
            moq_multiply_units<S, 2>(places, at + slab * STAGE_BLOCKS * MOQ_PACK_BYTES, x,
                                     (float (&)[2][1][4])sum[slab]);
    }
}

/* The way of a warp through its part, from filled stages on. At the end of an item: `finish`, which
 * gets the item's row, chunk and sums and what `begin` found when it began. */
template <class S, bool UP, class BEGIN, class FINISH>
static __device__ __forceinline__ void
multiply_items(const warp_parts<S> *p, feed *f, float *parked, uint32_t parked_bar,
               bool weights_on_input, BEGIN begin, FINISH finish) {
    walk at = walk_of(&p->own, p->warp);
    if (at.left == 0)
        return;
    moq_unit_places places = moq_unit_places_of(p->ring, p->lane);
    ring_place place = {0, 0};
    column own = column_of<S, UP>(p, &at, weights_on_input), next = own;
    stage_of_x x = {}, x_next = {};
    int blocks = stage_of(&p->own, &at, STAGE_BLOCKS), first = at.block;
    load_stage(&own, &at, blocks, &x);
    auto found = begin(at.row, own.chunk);
    sums<S> sum = {};
#pragma unroll 1
    while (true) {
        walk ahead = at;
        if (walk_on(&p->own, &ahead, blocks))
            next = column_of<S, UP>(p, &ahead, weights_on_input);
        int more = ahead.left > 0 ? stage_of(&p->own, &ahead, STAGE_BLOCKS) : 0;
        load_stage(&next, &ahead, more, &x_next);
        mbarrier_wait(p->full + 8u * place.index, place.parity);
        uint32_t stage = (uint32_t)(place.index * S::stage);
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS; i++) {
            if (i >= blocks)
                break;
            if (UP && weights_on_input)
                weigh<S>(x.part[i], own.weight);
            multiply_block<S>(places, stage + i * MOQ_PACK_BYTES, x.part[i], sum);
        }
        warp_meets();
        if (f->at.left > 0)
            fill_stage(p, f, place.index);
        advance(&place, p->a->stages);
        if (ahead.block == 0 || ahead.left == 0) {
            if (first > 0) {
                leave_sums<4 * S::slabs>(parked + p->warp * (4 * S::slabs * 32), &sum[0][0][0],
                                         p->lane);
                warp_releases<false>(parked_bar + 8u * p->warp);
            } else {
                int missing = p->own.blocks - at.block - blocks;
                collect_sums<4 * S::slabs>(&p->own, parked, parked_bar, p->warp, missing,
                                           &sum[0][0][0], p->lane);
                finish(at.row, own.chunk, sum, found);
            }
            if (ahead.left == 0)
                return;
#pragma unroll
            for (int i = 0; i < 4 * S::slabs; i++)
                (&sum[0][0][0])[i] = 0;
            first = 0;
            found = begin(ahead.row, next.chunk);
        }
        at = ahead;
        own = next;
        blocks = more;
        x = x_next;
    }
}

/* Fills the ring. */
template <class S>
static __device__ __forceinline__ void fill_ring(const warp_parts<S> *p, feed *f) {
    f->at = walk_of(&p->own, p->warp);
    aim(p, f);
#pragma unroll 1
    for (int stage = 0; stage < p->a->stages && f->at.left > 0; stage++)
        fill_stage(p, f, stage);
}

template <class S>
static __device__ __forceinline__ warp_parts<S> parts_of(const common_args *a, const tables *t,
                                                         uint8_t *shared, barriers *bar) {
    warp_parts<S> p;
    p.a = a;
    p.t = t;
    p.warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
    p.lane = (int)threadIdx.x % 32;
    p.ring = shared_address(shared) + (uint32_t)(p.warp * a->stages * S::stage);
    p.full = shared_address(bar->full + p.warp * MAX_STAGES);
    p.policy = policy_evict_first();
    if (p.lane < a->stages)
        mbarrier_init(p.full + 8u * p.lane, 1);
    if (p.lane == 0)
        mbarrier_init(shared_address(&bar->parked[p.warp]), WARP_ARRIVALS);
    mbarrier_init_fence();
    return p;
}

/* ---- up ---- */

/* Factors and biases of the lane's rows: g and g + 8 of gate, then of up. */
typedef struct {
    float factor[2][2], bias[2][2];
} pair_scales;

template <class S>
static __device__ __forceinline__ pair_scales scales_of_pair(const up_args *a, int lane, int row,
                                                             uint32_t chunk) {
    const stack *w = &a->common.w;
    pair_scales s = {};
    int64_t at = (int64_t)expert_of_chunk(chunk) * w->rows + row * MOQ_PACK_ROWS + lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * S::slabs; i++) {
        int64_t n = at + i / 2 * a->inner + i % 2 * 8;
        s.factor[i / 2][i % 2] = load_early(w->output_scale + n);
        if (w->bias)
            s.bias[i / 2][i % 2] = load_early(w->bias + n);
    }
    return s;
}

template <class S>
static __device__ __forceinline__ float value_of(float sum, float factor, bool biased, float bias) {
    float value = __fmul_rn(sum, factor * MOQ_NVFP4_FACTOR);
    return biased ? __fadd_rn(value, bias) : value;
}

template <class S>
static __device__ __forceinline__ void store_pair(const up_args *a, const tables *t, int lane,
                                                  int row, uint32_t chunk, const sums<S> &sum,
                                                  const pair_scales &s) {
    const bool biased = a->common.w.bias != NULL;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        int i = lane % 4 * 2 + c;
        if (i >= slots_of_chunk(chunk))
            continue;
        int64_t slot = t->sorted[first_of_chunk(chunk) + i];
        uint16_t *to = (uint16_t *)a->g + slot * a->inner + row * MOQ_PACK_ROWS + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float gate = value_of<S>(sum[0][0][2 * h + c], s.factor[0][h], biased, s.bias[0][h]);
            float up = 0;
            if (S::slabs == 2)
                up = value_of<S>(sum[S::slabs - 1][0][2 * h + c], s.factor[1][h], biased,
                                 s.bias[1][h]);
            to[8 * h] =
                (uint16_t)moq_narrow_pair(S::dtype, moq_activate(&a->activation, gate, up), 0);
        }
    }
}

template <class S>
static __global__ void __launch_bounds__(THREADS, 2)
    moe_nvfp4_up(const __grid_constant__ up_args args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ barriers bar;
    const up_args *a = &args;
    const common_args *common = &args.common;
    tables t = tables_of(&common->route, shared);
    warp_parts<S> p = parts_of<S>(common, &t, shared, &bar);
    clear_counts(&common->route, &t);
    wait_for_predecessor();
    launch_dependents(); /* not before: who comes next counts on the ids */
    group_slots(&common->route, &t);
    uint32_t items = (uint32_t)(*t.chunks * a->pairs);
    uint32_t begin = (uint32_t)((uint64_t)items * blockIdx.x / gridDim.x);
    uint32_t end = (uint32_t)((uint64_t)items * (blockIdx.x + 1) / gridDim.x);
    p.own = {(int)begin, (int)(end - begin) * common->w.blocks, a->pairs, common->w.blocks};
    p.slab = 0;
    p.slab_step = a->pairs;
    p.slabs = S::slabs;
    feed f;
    fill_ring(&p, &f);
    float *parked = (float *)(shared + common->parked_at);
    multiply_items<S, true>(
        &p, &f, parked, shared_address(bar.parked), a->weights_on_input,
        [&](int row, uint32_t chunk) { return scales_of_pair<S>(a, p.lane, row, chunk); },
        [&](int row, uint32_t chunk, const sums<S> &sum, const pair_scales &s) {
            store_pair<S>(a, &t, p.lane, row, chunk, sum, s);
        });
}

/* ---- down ---- */

/* Of the lane's rows of a slab, g and g + 8. */
template <class S> struct slab_scales {
    float factor[S::slabs][2], bias[S::slabs][2];
};

template <class S>
static __device__ __forceinline__ slab_scales<S> scales_of_slabs(const warp_parts<S> *p,
                                                                 uint32_t chunk) {
    const stack *w = &p->a->w;
    slab_scales<S> s = {};
#pragma unroll
    for (int i = 0; i < S::slabs; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int n = (p->slab + i) * MOQ_PACK_ROWS + p->lane / 4 + 8 * h;
            if (i >= p->slabs || n >= w->rows)
                continue;
            int64_t at = (int64_t)expert_of_chunk(chunk) * w->rows + n;
            s.factor[i][h] = load_early(w->output_scale + at);
            if (w->bias)
                s.bias[i][h] = load_early(w->bias + at);
        }
    }
    return s;
}

/* Gives what experts make of slots to the blocks that add up their rows: [slots][rows of a block].
 */
template <class S>
static __device__ __forceinline__ void give_sums(const down_args *a, const warp_parts<S> *p,
                                                 uint32_t to, uint32_t chunk, const sums<S> &sum,
                                                 const slab_scales<S> &s) {
    const int rows = S::slabs * MOQ_PACK_ROWS >> a->log_cluster;
    const bool biased = p->a->w.bias != NULL;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        int i = p->lane % 4 * 2 + c;
        if (i >= slots_of_chunk(chunk))
            continue;
        int slot = p->t->sorted[first_of_chunk(chunk) + i];
#pragma unroll
        for (int j = 0; j < 2 * S::slabs; j++) {
            int row = j / 2 * MOQ_PACK_ROWS + p->lane / 4 + j % 2 * 8;
            float value = value_of<S>(sum[j / 2][0][j % 2 * 2 + c], s.factor[j / 2][j % 2], biased,
                                      s.bias[j / 2][j % 2]);
            int owner = row / rows;
            uint32_t at = to + 4u * (uint32_t)(slot * rows + row - owner * rows);
            if (a->log_cluster)
                store_remote(address_in((uint32_t)owner, at), value);
            else
                store_shared_word(at, __float_as_uint(value));
        }
    }
}

/* y of the block's rows, in the order of slots. */
template <class S>
static __device__ __forceinline__ void combine(const down_args *a, const tables *t,
                                               const float *weight, const float *sums, int first) {
    const int rows = S::slabs * MOQ_PACK_ROWS >> a->log_cluster;
    const int top_k = a->common.route.top_k;
    for (int i = (int)threadIdx.x; i < a->tokens * rows; i += THREADS) {
        int token = i / rows, row = i - token * rows;
        if (first + row >= a->common.w.rows)
            continue;
        int64_t at = token * a->y_stride + first + row;
        uint16_t *to = (uint16_t *)a->y + at;
        float sum = a->accumulate ? moq_load_one(a->y, at, S::dtype) : 0;
        for (int slot = token * top_k; slot < (token + 1) * top_k; slot++) {
            if (t->expert[slot] < 0)
                continue;
            float d = sums[slot * rows + row];
            sum = __fadd_rn(sum, a->weighted ? __fmul_rn(weight[slot], d) : d);
        }
        *to = (uint16_t)moq_narrow_pair(S::dtype, sum, 0);
    }
}

template <class S>
static __global__ void __launch_bounds__(THREADS, 2)
    moe_nvfp4_down(const __grid_constant__ down_args args) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ barriers bar;
    const down_args *a = &args;
    const common_args *common = &args.common;
    launch_dependents();
    tables t = tables_of(&common->route, shared);
    warp_parts<S> p = parts_of<S>(common, &t, shared, &bar);
    clear_counts(&common->route, &t);
    if (a->log_cluster)
        cluster_arrive();
    /* The kernel before has waited for the ids before it let this one start. */
    float *weight = (float *)(shared + a->weights_at);
    for (int i = (int)threadIdx.x; a->weighted && i < common->route.slots; i += THREADS)
        weight[i] = weight_of_slot(&common->route, i);
    group_slots(&common->route, &t);
    int rank = (int)blockIdx.x & ((1 << a->log_cluster) - 1);
    int cluster = (int)blockIdx.x >> a->log_cluster;
    int begin = *t.chunks * rank >> a->log_cluster, end = *t.chunks * (rank + 1) >> a->log_cluster;
    p.own = {begin, (end - begin) * common->w.blocks, 1, common->w.blocks};
    p.slab = cluster * S::slabs;
    p.slab_step = 1;
    p.slabs = min(S::slabs, a->slabs - p.slab);
    feed f;
    fill_ring(&p, &f);
    if (a->log_cluster)
        cluster_wait();
    wait_for_predecessor();
    float *parked = (float *)(shared + common->parked_at),
          *sums_of = (float *)(shared + a->sums_at);
    multiply_items<S, false>(
        &p, &f, parked, shared_address(bar.parked), false,
        [&](int row, uint32_t chunk) { return scales_of_slabs<S>(&p, chunk); },
        [&](int row, uint32_t chunk, const sums<S> &sum, const slab_scales<S> &s) {
            give_sums<S>(a, &p, shared_address(sums_of), chunk, sum, s);
        });
    if (a->log_cluster)
        cluster_sync();
    else
        __syncthreads();
    combine<S>(a, &t, weight, sums_of,
               p.slab * MOQ_PACK_ROWS + rank * (S::slabs * MOQ_PACK_ROWS >> a->log_cluster));
}

/* ---- launch ---- */

static routing routing_of(const moq_moe_call *call, const moq_moe_few_half *half) {
    const moq_tensor *ids = call->ids, *weights = call->weights;
    routing r = {};
    r.ids = ids->data;
    r.id_token = ids->stride[0];
    r.id_slot = ids->stride[1];
    r.wide = ids->dtype == MOQ_DT_I64;
    r.weights = (const float *)weights->data;
    r.weight_token = weights->stride[0];
    r.weight_slot = weights->stride[1];
    r.map = call->expert_map;
    r.global_experts = call->spec->global_experts;
    r.experts = call->spec->experts;
    r.top_k = call->spec->top_k;
    r.slots = (int)(call->tokens * call->spec->top_k);
    r.at = half->tables;
    return r;
}

static stack stack_of(const moq_linear_spec *layer, const moq_moe_weight *w) {
    stack s = {};
    s.weight = w->weight;
    s.output_scale = w->output_scale;
    s.bias = w->bias;
    s.rows = (int)layer->out_features;
    s.blocks = (int)moq_pack_blocks(layer->in_features);
    s.expert_bytes = moq_pack_slabs(layer->out_features) * s.blocks * MOQ_PACK_BYTES;
    return s;
}

static common_args common_of(const moq_moe_call *call, const moq_moe_few_half *half,
                             const moq_linear_spec *layer, const moq_moe_weight *w) {
    common_args c = {};
    c.route = routing_of(call, half);
    c.w = stack_of(layer, w);
    c.stages = half->stages;
    c.parked_at = half->parked_at;
    return c;
}

static moq_launch launch_of(const moq_moe_call *call, const moq_moe_few_half *half,
                            const void *kernel) {
    moq_launch launch = {.what = "NVFP4 experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)half->grid),
                         .block = dim3(THREADS),
                         .cluster = half->cluster > 1 ? (unsigned)half->cluster : 0,
                         .shared = (size_t)half->shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    return launch;
}

static moq_status launch_up(const moq_moe_call *call, const moq_moe_few_share *share,
                            moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    bool half = spec->w13.dtype == MOQ_DT_F16;
    up_args a = {};
    a.common = common_of(call, &share->up, &spec->w13, &call->w13);
    a.common.x = call->x->data;
    a.common.x_stride = call->x->stride[0];
    a.activation = moq_expert_activation_of(spec);
    a.g = call->workspace;
    a.inner = (int)spec->w2.in_features;
    a.pairs = a.inner / MOQ_PACK_ROWS;
    a.weights_on_input = call->weights_on_input;
    const void *kernel = spec->gated ? half ? (const void *)moe_nvfp4_up<shape<2, MOQ_NVFP4_F16>>
                                            : (const void *)moe_nvfp4_up<shape<2, MOQ_NVFP4_BF16>>
                         : half      ? (const void *)moe_nvfp4_up<shape<1, MOQ_NVFP4_F16>>
                                     : (const void *)moe_nvfp4_up<shape<1, MOQ_NVFP4_BF16>>;
    moq_launch launch = launch_of(call, &share->up, kernel);
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

template <moq_nvfp4_type TYPE> static const void *down_kernel(int slabs) {
    return slabs == 1   ? (const void *)moe_nvfp4_down<shape<1, TYPE>>
           : slabs == 2 ? (const void *)moe_nvfp4_down<shape<2, TYPE>>
                        : (const void *)moe_nvfp4_down<shape<4, TYPE>>;
}

static moq_status launch_down(const moq_moe_call *call, const moq_moe_few_share *share,
                              moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    const moq_moe_few_half *half = &share->down;
    down_args a = {};
    a.common = common_of(call, half, &spec->w2, &call->w2);
    a.common.x = call->workspace;
    a.common.x_stride = spec->w2.in_features;
    a.y = call->y->data;
    a.y_stride = call->y->stride[0];
    a.tokens = (int)call->tokens;
    a.slabs = (a.common.w.rows + MOQ_PACK_ROWS - 1) / MOQ_PACK_ROWS;
    while (1 << a.log_cluster < half->cluster)
        a.log_cluster++;
    a.weights_at = half->weights_at;
    a.sums_at = half->sums_at;
    a.weighted = !call->weights_on_input;
    a.accumulate = call->accumulate;
    const void *kernel = spec->w2.dtype == MOQ_DT_F16 ? down_kernel<MOQ_NVFP4_F16>(half->slabs)
                                                      : down_kernel<MOQ_NVFP4_BF16>(half->slabs);
    moq_launch launch = launch_of(call, half, kernel);
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" moq_status moq_cuda_moe_nvfp4_few(const moq_moe_call *call, moq_err *err) {
    moq_moe_few_share share;
    moq_moe_nvfp4_few_share_out(call->spec, call->tokens, call->way, &share);
    MOQ_TRY(launch_up(call, &share, err));
    return launch_down(call, &share, err);
}

extern "C" int64_t moq_cuda_moe_nvfp4_few_workspace(const moq_moe_call *call) {
    return moq_moe_few_inner_bytes(call->spec, call->tokens);
}

} // namespace moq::moe_few
