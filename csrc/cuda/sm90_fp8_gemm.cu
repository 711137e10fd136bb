/* FP8 linear for more than a few tokens on Hopper: y[m, n] = round(sum_k X[m, k] W[n, k] * scales +
 * bias[n]).
 *
 * W is e4m3 [N, K] as the checkpoint has it, X e4m3 codes [M, K] that the quantization before makes
 * in the workspace, with group scales [K / 128][tokens]. The rows of W are the 64 rows of wgmma,
 * tokens its columns, so that a tile may have few of them. A block has two warpgroups that multiply
 * and a warp that copies.
 *
 * - A tile is 128 * WAVES rows of W and T tokens, a step 128 columns of both, in the 128-byte
 *   swizzle: rows of W, then tokens; the tokens' group scales lie apart.
 * - A warpgroup has 64 * WAVES rows of a tile. It multiplies 64 rows by a step's 128 columns in one
 *   go and adds that to float32 sums, since FP8 wgmma keeps about 14 bits of its own; block scales
 *   are applied there.
 * - Tiles never cross from one partition to the next, so that 64 rows have one block scale a step.
 * - A pair of blocks may share rows of W: each copies half of them to both.
 * - W is constant, so the ring is filled with it before X is complete (dependent launch).
 *
 * A step takes 0.2 to 0.85 us by the shape of the tile (H200): about 200 cycles more than its
 * products, in which both warpgroups add and the tensor cores wait. Few tokens leave most blocks
 * without a tile. docs/lab.md has the times. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/load.h"
#include "cuda/ptx.h"
#include "cuda/quantize.h"
#include "cuda/tensor_map.h"
#include "cuda/wgmma.h"

#include <math.h>

#define CONSUMERS   256
#define STEP        128
#define MAX_STAGES  16
#define BAND_TOKENS 2048     /* tokens that are done together, for the sake of L2 */
#define CHUNK       32       /* tokens that are turned around at a time */
#define PITCH       (64 + 4) /* floats, free of bank conflicts */

typedef enum { ALONE, SHARE_WEIGHTS } sharing;

typedef struct {
    int m, n, k;
    int steps;     /* of 128 columns */
    int row_tiles; /* of a block */
    int columns;   /* tiles along the tokens, of a block or pair of blocks */
    int band;      /* columns that are done together, for the sake of L2 */
    int stages;
    bool few;       /* weights are read once */
    bool per_token; /* scale of x */
    moq_output out;
    const float *x_scale;      /* one, [M], or by groups [steps][x_scale_stride] */
    int64_t x_scale_stride;    /* a multiple of 4 */
    const float *output_scale; /* [N] */
    const float *block_scale;  /* [block rows, steps] */
    moq_partitions partitions;
} gemm_args;

/* Shape of a block's tile. */
template <int T, int WAVES, sharing SHARE> struct tile_of {
    enum {
        rows = 128 * WAVES,
        blocks = SHARE == ALONE ? 1 : 2,
        pair_tokens = T * (SHARE == SHARE_WEIGHTS ? 2 : 1),
        weight_bytes = rows * STEP,
        token_bytes = T * STEP,
        stage = weight_bytes + token_bytes,
        wide = WAVES * T > 128, /* sums need more registers than 168 */
        threads = CONSUMERS + (wide ? 128 : 32),
    };
};

/* ---- the order of work ---- */

/* What a block (or pair) does next: step `step` of tile `tile`, `left` steps in all. */
typedef struct {
    int tile, step, left, stride;
} cursor;

static __device__ __forceinline__ cursor start(const gemm_args *a, int worker, int workers) {
    int tiles = (a->row_tiles * a->columns - worker + workers - 1) / workers;
    return {worker, 0, tiles * a->steps, workers};
}

/* Where a tile is: rows from `row` to `end` at most, tokens from `token` on. */
typedef struct {
    int row, end, partition, token;
} place;

template <int T, int WAVES, sharing SHARE>
static __device__ place place_of(const gemm_args *a, int tile, int rank) {
    typedef tile_of<T, WAVES, SHARE> shape;
    int band = tile / (a->row_tiles * a->band), within = tile % (a->row_tiles * a->band);
    int width = min(a->band, a->columns - band * a->band);
    int row_tile = within / width, begin = 0;
    place p = {0, 0, 0, (band * a->band + within % width) * shape::pair_tokens};
    for (;; p.partition++) {
        p.end = a->partitions.end[p.partition];
        int tiles = (p.end - begin + shape::rows - 1) / shape::rows;
        if (row_tile < tiles)
            break;
        row_tile -= tiles;
        begin = p.end;
    }
    p.row = begin + row_tile * shape::rows;
    if (SHARE == SHARE_WEIGHTS)
        p.token += rank * T;
    return p;
}

/* ---- the producer ---- */

/* Where operands come from and go to. */
typedef struct {
    const CUtensorMap *weights, *tokens;
    uint32_t ring, scales, full, empty;
    uint64_t weight_policy, token_policy;
    int rank;
} pipes;

/* The next step to copy. One thread does all of it, one instruction after the other, so that what
 * a step costs here limits the whole kernel. */
typedef struct {
    cursor at;
    place where;
    ring_place slot;
} feed;

template <int T, int WAVES, sharing SHARE>
static __device__ __forceinline__ void find_tile(const gemm_args *a, const pipes *p, feed *f) {
    f->where = place_of<T, WAVES, SHARE>(a, f->at.tile, p->rank);
}

template <int T, int WAVES, sharing SHARE>
static __device__ __forceinline__ void next_feed(const gemm_args *a, const pipes *p, feed *f) {
    advance(&f->slot, a->stages);
    f->at.left--;
    if (++f->at.step == a->steps) {
        f->at.step = 0;
        f->at.tile += f->at.stride;
        if (f->at.left > 0)
            find_tile<T, WAVES, SHARE>(a, p, f);
    }
}

template <int T, int WAVES, sharing SHARE, bool GROUPS>
static __device__ __forceinline__ void copy_weights(const pipes *p, const feed *f) {
    typedef tile_of<T, WAVES, SHARE> shape;
    uint32_t to = p->ring + (uint32_t)(f->slot.index * shape::stage);
    uint32_t bar = p->full + 8u * f->slot.index;
    mbarrier_wait(p->empty + 8u * f->slot.index, f->slot.parity ^ 1);
    mbarrier_expect(bar, shape::stage + (GROUPS ? T * 4 : 0));
    if (SHARE == SHARE_WEIGHTS) {
        int half = p->rank * (shape::rows / 2);
        copy_box_2d_to(to + half * STEP, p->weights, f->at.step * STEP, f->where.row + half, bar,
                       p->weight_policy, 3);
    } else {
        copy_box_2d(to, p->weights, f->at.step * STEP, f->where.row, bar, p->weight_policy);
    }
}

template <int T, int WAVES, sharing SHARE, bool GROUPS>
static __device__ __forceinline__ void copy_tokens(const gemm_args *a, const pipes *p,
                                                   const feed *f) {
    typedef tile_of<T, WAVES, SHARE> shape;
    uint32_t to = p->ring + (uint32_t)(f->slot.index * shape::stage + shape::weight_bytes);
    uint32_t bar = p->full + 8u * f->slot.index;
    copy_box_2d(to, p->tokens, f->at.step * STEP, f->where.token, bar, p->token_policy);
    if (GROUPS)
        copy_bytes(p->scales + (uint32_t)f->slot.index * (T * 4),
                   a->x_scale + f->at.step * a->x_scale_stride + f->where.token, T * 4, bar);
}

template <int T, int WAVES, sharing SHARE, bool GROUPS>
static __device__ __forceinline__ void produce(const gemm_args *a, const pipes *p, int worker,
                                               int workers) {
    feed f = {start(a, worker, workers)};
    int first = min(a->stages, f.at.left);
    find_tile<T, WAVES, SHARE>(a, p, &f);
    feed again = f;
    for (int i = 0; i < first; i++) { /* weights do not depend on the kernel before */
        copy_weights<T, WAVES, SHARE, GROUPS>(p, &f);
        next_feed<T, WAVES, SHARE>(a, p, &f);
    }
    wait_for_predecessor();
    for (int i = 0; i < first; i++) {
        copy_tokens<T, WAVES, SHARE, GROUPS>(a, p, &again);
        next_feed<T, WAVES, SHARE>(a, p, &again);
    }
    while (f.at.left > 0) {
        copy_weights<T, WAVES, SHARE, GROUPS>(p, &f);
        copy_tokens<T, WAVES, SHARE, GROUPS>(a, p, &f);
        next_feed<T, WAVES, SHARE>(a, p, &f);
    }
}

/* ---- products ---- */

/* sum += c, times the scales of the tokens and of the rows. */
template <int T, bool GROUPS>
static __device__ __forceinline__ void promote(float (&sum)[T / 2], const float (&c)[T / 2],
                                               const float *x, float w) {
#pragma unroll
    for (int j = 0; j < T / 8; j++) {
        if (GROUPS) {
            float2 s = *(const float2 *)(x + 8 * j + threadIdx.x % 4 * 2);
            s.x *= w;
            s.y *= w;
            sum[4 * j] += c[4 * j] * s.x;
            sum[4 * j + 1] += c[4 * j + 1] * s.y;
            sum[4 * j + 2] += c[4 * j + 2] * s.x;
            sum[4 * j + 3] += c[4 * j + 3] * s.y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[4 * j + i] += c[4 * j + i];
        }
    }
}

/* Adds `steps` steps of a tile from `first` on to the sums of this warpgroup. */
template <int T, int WAVES, sharing SHARE, bool GROUPS>
static __device__ __forceinline__ void
multiply(const gemm_args *a, uint32_t ring, const float *scales, uint32_t full, uint32_t empty,
         const place *at, int first, int steps, ring_place *slot, float (&sum)[WAVES][T / 2]) {
    typedef tile_of<T, WAVES, SHARE> shape;
    int group = threadIdx.x / 128, row = group * 64 * WAVES;
    const float *block[WAVES];
    float w[WAVES];
    if (GROUPS) {
#pragma unroll
        for (int i = 0; i < WAVES; i++) {
            block[i] =
                a->block_scale + (int64_t)moq_block_row(&a->partitions, at->partition,
                                                        min(at->row + row + 64 * i, at->end - 1)) *
                                     a->steps;
            w[i] = block[i][first];
        }
    }
    uint64_t left = wgmma_operand(ring + (uint32_t)row * STEP);
    uint64_t right = wgmma_operand(ring + shape::weight_bytes);
    for (int step = first; step < first + steps; step++, advance(slot, a->stages)) {
        uint32_t stage = (uint32_t)(slot->index * (shape::stage / 16));
        float next[WAVES];
        if (GROUPS) {
#pragma unroll
            for (int i = 0; i < WAVES; i++)
                next[i] = block[i][min(step + 1, a->steps - 1)];
        }
        mbarrier_wait(full + 8u * slot->index, slot->parity);
#pragma unroll
        for (int i = 0; i < WAVES; i++) {
            float c[T / 2];
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; j++)
                wgmma_e4m3(c, left + stage + i * (64 * STEP / 16) + 2 * j, right + stage + 2 * j,
                           j);
            wgmma_commit();
            wgmma_wait<0>();
            promote<T, GROUPS>(sum[i], c, scales + slot->index * T, w[i]);
        }
        __syncwarp();
        if (threadIdx.x % 32 < shape::blocks) {
            if (SHARE == ALONE)
                mbarrier_arrive(empty + 8u * slot->index);
            else
                mbarrier_arrive_at(empty + 8u * slot->index, threadIdx.x % 32);
        }
#pragma unroll
        for (int i = 0; i < WAVES; i++)
            w[i] = next[i];
    }
}

/* ---- outputs ---- */

/* Stores values of `count` outputs, at most 8, of token m from n on; in one go where it can. */
static __device__ __forceinline__ void store_eight(const moq_output *out, int64_t m, int n,
                                                   int count, const float (&value)[8]) {
    int64_t at = m * out->stride + n;
    uint16_t *to = (uint16_t *)out->data + at;
    if (count == 8 && (uintptr_t)to % 16 == 0) {
        uint4 word;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (out->dtype == MOQ_DT_BF16) {
                __nv_bfloat162 pair = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
                memcpy(&(&word.x)[i], &pair, 4);
            } else {
                __half2 pair = __floats2half2_rn(value[2 * i], value[2 * i + 1]);
                memcpy(&(&word.x)[i], &pair, 4);
            }
        }
        *(uint4 *)to = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i >= count)
            return;
        if (out->dtype == MOQ_DT_BF16)
            ((__nv_bfloat16 *)to)[i] = __float2bfloat16_rn(value[i]);
        else
            ((__half *)to)[i] = __float2half_rn(value[i]);
    }
}

/* Writes the outputs of 64 rows of W; they pass through shared memory, where rows become columns.
 */
template <int T, bool GROUPS>
static __device__ void write_outputs(const gemm_args *a, float *turn, const place *at, int row,
                                     const float (&sum)[T / 2]) {
    int thread = threadIdx.x % 128, group = threadIdx.x / 128, lane = thread % 32;
    int n = at->row + row + thread % 8 * 8, count = min(8, at->end - n);
    float factor[8], bias[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        factor[i] = !GROUPS && i < count ? a->output_scale[n + i] : 1.0f;
        bias[i] =
            a->out.bias && i < count ? moq_load_one(a->out.bias, n + i, a->out.bias_dtype) : 0.0f;
    }
#pragma unroll
    for (int chunk = 0; chunk < T / CHUNK; chunk++) {
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                turn[(8 * j + lane % 4 * 2 + i % 2) * PITCH + thread / 32 * 16 + lane / 4 +
                     i / 2 * 8] = sum[(chunk * (CHUNK / 8) + j) * 4 + i];
        }
        barrier_sync(2 + group, 128);
#pragma unroll
        for (int pass = 0; pass < CHUNK / 16; pass++) {
            int token = pass * 16 + thread / 8, m = at->token + chunk * CHUNK + token;
            const float4 *from = (const float4 *)(turn + token * PITCH + thread % 8 * 8);
            float4 low = from[0], high = from[1];
            float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            if (m >= a->m || count <= 0)
                continue;
            float scale = GROUPS ? 1.0f : a->x_scale[a->per_token ? m : 0];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (!GROUPS)
                    value[i] *= scale * factor[i];
                if (a->out.bias)
                    value[i] = __fadd_rn(value[i], bias[i]);
            }
            store_eight(&a->out, m, n, count, value);
        }
        barrier_sync(2 + group, 128);
    }
}

template <int T, int WAVES, sharing SHARE, bool GROUPS>
static __device__ void consume(const gemm_args *a, uint32_t ring, const float *scales, float *turn,
                               uint32_t full, uint32_t empty, int rank, int worker, int workers) {
    typedef tile_of<T, WAVES, SHARE> shape;
    int group = threadIdx.x / 128;
    ring_place slot = {0, 0};
    wait_for_predecessor();
    for (cursor c = start(a, worker, workers); c.left > 0;) {
        place at = place_of<T, WAVES, SHARE>(a, c.tile, rank);
        int steps = min(c.left, a->steps - c.step);
        float sum[WAVES][T / 2] = {};
        multiply<T, WAVES, SHARE, GROUPS>(a, ring, scales, full, empty, &at, c.step, steps, &slot,
                                          sum);
#pragma unroll
        for (int i = 0; i < WAVES; i++)
            write_outputs<T, GROUPS>(a, turn + group * (CHUNK * PITCH), &at,
                                     (group * WAVES + i) * 64, sum[i]);
        c.left -= steps;
        c.tile += c.stride;
        c.step = 0;
    }
}

template <int T, int WAVES, sharing SHARE, bool GROUPS>
static __global__ void __launch_bounds__(tile_of<T, WAVES, SHARE>::threads, 1)
    fp8_gemm(const __grid_constant__ CUtensorMap weights,
             const __grid_constant__ CUtensorMap tokens, const __grid_constant__ gemm_args args) {
    typedef tile_of<T, WAVES, SHARE> shape;
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[2 * MAX_STAGES];
    uint32_t full = fixed_shared_address(barrier), empty = full + 8 * MAX_STAGES;
    uint32_t ring = fixed_shared_address(smem);
    int rank = SHARE == ALONE ? 0 : (int)rank_in_cluster();
    int worker = blockIdx.x / shape::blocks, workers = gridDim.x / shape::blocks;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; i++) {
            mbarrier_init(full + 8u * i, 1);
            mbarrier_init(empty + 8u * i, CONSUMERS / 32 * shape::blocks);
        }
        mbarrier_init_fence();
    }
    if (SHARE == ALONE)
        __syncthreads();
    else
        cluster_sync();
    float *turn = (float *)(smem + args.stages * shape::stage), *scales = turn + 2 * CHUNK * PITCH;
    if (threadIdx.x < CONSUMERS) {
        if (shape::wide)
            more_registers<232>();
        consume<T, WAVES, SHARE, GROUPS>(&args, ring, scales, turn, full, empty, rank, worker,
                                         workers);
    } else {
        if (shape::wide)
            fewer_registers<40>();
        if (threadIdx.x / 32 == CONSUMERS / 32 && is_elected()) {
            uint64_t keep = policy_evict_normal();
            pipes p = {&weights,
                       &tokens,
                       ring,
                       fixed_shared_address(scales),
                       full,
                       empty,
                       args.few ? policy_evict_first() : keep,
                       keep,
                       rank};
            produce<T, WAVES, SHARE, GROUPS>(&args, &p, worker, workers);
        }
    }
    if (SHARE != ALONE) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

typedef struct {
    int tokens, waves;
    sharing share;
    int threads;
    double step;           /* seconds of a step, measured */
    const void *kernel[2]; /* one scale a token or less; by groups */
} variant;

#define VARIANT(T, WAVES, SHARE, STEP_SECONDS)                                                     \
    {                                                                                              \
        T, WAVES, SHARE, tile_of<T, WAVES, SHARE>::threads, STEP_SECONDS, {                        \
            (const void *)fp8_gemm<T, WAVES, SHARE, false>,                                        \
                (const void *)fp8_gemm<T, WAVES, SHARE, true>                                      \
        }                                                                                          \
    }

static const variant VARIANTS[] = {
    VARIANT(32, 1, ALONE, 0.21e-6),          VARIANT(64, 1, ALONE, 0.26e-6),
    VARIANT(64, 2, ALONE, 0.46e-6),          VARIANT(128, 1, ALONE, 0.48e-6),
    VARIANT(128, 1, SHARE_WEIGHTS, 0.46e-6), VARIANT(128, 2, ALONE, 0.85e-6),
    VARIANT(128, 2, SHARE_WEIGHTS, 0.84e-6),
};

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* How a call is done: a shape of tiles and how many there are, by blocks or pairs of them. */
typedef struct {
    const variant *shape;
    int pair; /* blocks that share */
    int64_t row_tiles, columns, workers;
    double seconds;
} method;

static int rows_of(const variant *v) {
    return 128 * v->waves;
}

static int tokens_of(const variant *v) {
    return v->tokens * (v->share == SHARE_WEIGHTS ? 2 : 1);
}

/* x quantized, the first and last steps, then the products or the memory. */
static double estimate(const moq_linear_spec *spec, const method *way, int64_t m) {
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double slow = spec->input == MOQ_INPUT_E4M3_GROUP ? 1.35 : 1.0;
    double turns = (double)divide_up(way->row_tiles * way->columns, way->workers);
    double products = turns * (double)divide_up(spec->in_features, STEP) * way->shape->step * slow;
    double memory = n * k / 3.8e12;
    return 4.5e-6 + 3 * (double)m * k / 4e12 + fmax(products, memory);
}

static method method_of(const moq_linear_spec *spec, int64_t m, const variant *v) {
    method way = {v, v->share == ALONE ? 1 : 2, 0, divide_up(m, tokens_of(v))};
    for (int i = 0; i < spec->partition_count; i++)
        way.row_tiles += divide_up(spec->partition[i], rows_of(v));
    int64_t tiles = way.row_tiles * way.columns, most = spec->target.sm_count / way.pair;
    way.workers = tiles < most ? tiles : most;
    way.seconds = estimate(spec, &way, m);
    return way;
}

static method best_method(const moq_linear_spec *spec, int64_t m) {
    method best = method_of(spec, m, &VARIANTS[0]);
    for (size_t i = 1; i < sizeof VARIANTS / sizeof *VARIANTS; i++) {
        method way = method_of(spec, m, &VARIANTS[i]);
        if (way.seconds < best.seconds)
            best = way;
    }
    return best;
}

/* ---- launch ---- */

/* What a call works in, as offsets; codes are first. Both codes and scales are for `tokens` tokens,
 * enough to fill the last tile: what is beyond m is never looked at. */
typedef struct {
    int64_t tokens, scales, quantize, bytes;
} areas;

static int64_t reserve(areas *w, int64_t bytes) {
    int64_t at = w->bytes;
    w->bytes += divide_up(bytes, 256) * 256;
    return at;
}

static moq_cuda_quantize quantize_of(const moq_linear_call *call) {
    moq_cuda_quantize q = {.x = call->x,
                           .mode = call->spec->input,
                           .given = call->input_scale,
                           .group = STEP,
                           .code_stride = call->spec->in_features,
                           .scale_row = 1,
                           .stream = call->stream};
    return q;
}

static areas areas_of(const moq_linear_call *call, const method *way) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_quantize q = quantize_of(call);
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP;
    areas w = {.tokens = way->columns * tokens_of(way->shape)};
    reserve(&w, w.tokens * spec->in_features);
    w.scales = reserve(&w, 4 * w.tokens * (groups ? divide_up(spec->in_features, STEP) : 1));
    w.quantize = reserve(&w, moq_cuda_quantize_workspace(&q));
    return w;
}

static moq_status quantize(const moq_linear_call *call, const areas *w, moq_err *err) {
    uint8_t *workspace = (uint8_t *)call->workspace;
    moq_cuda_quantize q = quantize_of(call);
    q.codes = workspace;
    q.scales = workspace + w->scales;
    q.scale_group = w->tokens;
    q.workspace = workspace + w->quantize;
    return moq_cuda_quantize_rows(&q, err);
}

static gemm_args args_of(const moq_linear_call *call, const method *way, const areas *w) {
    const moq_linear_spec *spec = call->spec;
    int64_t band = BAND_TOKENS / tokens_of(way->shape);
    bool given = spec->input == MOQ_INPUT_E4M3_TENSOR && call->input_scale;
    float *found = (float *)((uint8_t *)call->workspace + w->scales);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .k = (int)spec->in_features,
                   .steps = (int)divide_up(spec->in_features, STEP),
                   .row_tiles = (int)way->row_tiles,
                   .columns = (int)way->columns,
                   .band = (int)(band < way->columns ? band : way->columns),
                   .few = way->columns == 1,
                   .per_token = spec->input == MOQ_INPUT_E4M3_TOKEN,
                   .out = moq_output_of(call),
                   .x_scale = given ? call->input_scale : found,
                   .x_scale_stride = w->tokens,
                   .output_scale = call->output_scale,
                   .block_scale = (const float *)call->weight_scale,
                   .partitions = moq_partitions_of(spec)};
    return a;
}

/* Shared memory of a block: as many stages as fit. */
static size_t lay_out(gemm_args *a, const variant *v, bool groups, int limit) {
    int stage = (128 * v->waves + v->tokens) * STEP, scales = groups ? v->tokens * 4 : 0;
    int turn = 2 * CHUNK * PITCH * 4, most = limit - 1024 - MAX_STAGES * 16;
    a->stages = (most - turn) / (stage + scales);
    if (a->stages > MAX_STAGES)
        a->stages = MAX_STAGES;
    return (size_t)(a->stages * (stage + scales) + turn);
}

static moq_status multiply_codes(const moq_linear_call *call, const method *way, const areas *w,
                                 moq_err *err) {
    const variant *v = way->shape;
    moq_cuda_device device;
    CUtensorMap weights, tokens;
    MOQ_TRY(moq_cuda_query_device(call->spec->device.index, &device, err));
    gemm_args a = args_of(call, way, w);
    bool groups = call->spec->input == MOQ_INPUT_E4M3_GROUP;
    size_t shared = lay_out(&a, v, groups, device.shared_per_block);
    uint32_t rows = 128u * v->waves / (v->share == SHARE_WEIGHTS ? 2 : 1);
    MOQ_TRY(moq_tensor_map_rows(&weights, call->weight, a.n, a.k, a.k, rows, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, w->tokens, a.k, a.k, (uint32_t)v->tokens,
                                err));
    moq_launch launch = {.what = "FP8 linear",
                         .kernel = v->kernel[groups],
                         .grid = dim3((unsigned)(way->workers * way->pair)),
                         .block = dim3((unsigned)v->threads),
                         .cluster = way->pair > 1 ? (unsigned)way->pair : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" double moq_cuda_fp8_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return best_method(spec, m).seconds;
}

extern "C" int64_t moq_cuda_fp8_gemm_workspace(const moq_linear_call *call) {
    method way = best_method(call->spec, call->m);
    return areas_of(call, &way).bytes;
}

extern "C" moq_status moq_cuda_fp8_gemm(const moq_linear_call *call, moq_err *err) {
    method way = best_method(call->spec, call->m);
    areas w = areas_of(call, &way);
    MOQ_TRY(quantize(call, &w, err));
    return multiply_codes(call, &way, &w, err);
}
