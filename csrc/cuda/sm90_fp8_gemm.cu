/* FP8 linear for more than a few tokens on Hopper: y[m, n] = round(sum_k X[m, k] W[n, k] * scales +
 * bias[n]).
 *
 * W is e4m3 [N, K] as the checkpoint has it, X e4m3 codes [M, K] that the quantization before makes
 * in the workspace, with group scales [K / 128][tokens]. A block has two warpgroups that multiply
 * and a warp that copies; what it copies goes round in a ring of steps of 128 columns.
 *
 * - Few tokens: W gives the rows of the products, so that a tile has as few tokens as there are. K
 *   is divided among the blocks of a cluster, and where that is not enough among their warpgroups,
 *   since a layer has but 16 to 64 tiles for 132 multiprocessors. W is constant, so the ring is
 *   filled with it before X is complete (dependent launch). Where one scale is given x may be
 *   quantized here instead, by two more warpgroups (sm90_gemm_quantize.h).
 * - Many tokens: the tokens give the rows, 256 to a tile, so that scales of groups are one number a
 *   row. Pairs of blocks have one operand in common, which each copies half of to both.
 * - Tiles never cross from one partition to the next, so that 64 rows have one block scale a step.
 *
 * What bounds it (H200, docs/lab.md): up to 64 tokens the weights, from 0.6 us after a block's
 * start, and a microsecond for sums of parts and the end; with more what the second-level cache
 * delivers, 7 to 8 TB/s, and the tensor cores. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/quantize.h"
#include "cuda/sm90_gemm_outputs.h"
#include "cuda/sm90_gemm_products.h"
#include "cuda/sm90_gemm_quantize.h"
#include "cuda/sm90_gemm_tile.h"
#include "cuda/sm90_grid.h"
#include "cuda/tensor_map.h"

#include <math.h>

#define BAND_TOKENS 2048 /* tokens that are done together, for the sake of L2 */

/* The block scales of the rows of a warpgroup, held from step `first` on. */
template <class S>
static __device__ __forceinline__ block_scales<S> find_blocks(const gemm_args *a, const place *at,
                                                              int group, int first) {
    block_scales<S> block = {};
    block.steps = a->steps;
#pragma unroll
    for (int i = 0; S::groups && i < block.ROWS; i++) {
        int row = at->row + (S::tokens_first || S::by_steps ? 0 : (group * S::WAVES + i) * 64);
        int line = moq_block_row(&a->partitions, at->partition, min(row, at->end - 1));
        block.row[i] = a->block_scale + (int64_t)line * a->steps;
    }
    if (S::groups)
        hold_scales(&block, first);
    return block;
}

template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const taps *t, uint8_t *shared,
                                               board<S> *b, const meeting *meet, int rank) {
    int group =
        __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
    int row = group / S::k_groups * (64 * S::WAVES);
    uint32_t turn = shared_address(shared + a->turn) + group * a->turn_step;
    ring_place slot = {0, 0};
    for (cursor c = start<S>(a); c.left > 0; c.left -= c.end - c.first, c.tile += c.stride) {
        place at = place_of<S>(a, c.tile, rank);
        float sum[S::WAVES][S::T / 2] = {};
        block_scales<S> block = find_blocks<S>(a, &at, group, c.first);
        edges<S> edge = {};
        fetch_early<S>(a, &at, row, &edge);
        wait_for_predecessor(); /* at once from the second tile on */
        if (S::parts && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks run */
        fetch_late<S>(a, &at, row, &edge);
        multiply<S>(t, &block, c.first, c.end, group, &slot, sum);
        if constexpr (S::parts) {
            bring_together<S>(a, shared, b + group, meet, &edge, &at, sum[0]);
            return;
        }
        if (S::tokens_first || S::token_factors)
            post_columns<S>(&edge, b + group);
        if (S::tokens_first)
            barrier_sync(2 + group, 128);
#pragma unroll
        for (int i = 0; i < S::WAVES; i++)
            if constexpr (S::tokens_first)
                write_rows<S>(a, b + group, &at, row + 64 * i, &edge.row[i], sum[i]);
            else
                write_columns<S>(a, b + group, turn, &at, row + 64 * i, &edge.row[i], sum[i]);
        if (S::tokens_first)
            barrier_sync(2 + group, 128); /* what was posted has been read */
    }
}

template <class S>
static __global__ void __launch_bounds__(S::threads, 1)
    fp8_gemm(const __grid_constant__ CUtensorMap weights,
             const __grid_constant__ CUtensorMap tokens, const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ board<S> edge[CONSUMERS / 128];
    static_assert(sizeof edge <= BOARD_BYTES, "what lay_out counts on");
    uint32_t first = fixed_shared_address(barrier), ring = fixed_shared_address(smem);
    gates gate = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    meeting meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    int scales = args.stages * S::stage; /* of tokens, behind the ring */
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    pipes p = {&weights, &tokens, ring, ring + scales, gate, args.few ? once : keep, keep, rank};
    feed f = {};
    launch_dependents();
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < CONSUMERS) {
        if (S::uneven)
            more_registers<S::registers>();
        uint32_t row = S::by_steps ? 0 : threadIdx.x / 128 * 64 * S::WAVES;
        taps t = {gate, wgmma_operand(ring + row * STEP), wgmma_operand(ring + S::rows * STEP),
                  (const float *)(smem + scales), args.stages};
        if (S::parts && threadIdx.x == 0)
            mbarrier_expect(meet.posted, bytes_to_come<S>());
        consume<S>(&args, &t, smem, edge, &meet, rank);
    } else if (threadIdx.x < S::copier) {
        sink s = {ring + S::token_at, gate, 0.0f};
        if (S::fused && S::uneven)
            fewer_registers<S::quantizer_registers>();
        if constexpr (S::fused)
            quantize_x<S>(&args, &s);
    } else {
        if (S::uneven)
            fewer_registers<S::copier_registers>();
        if (threadIdx.x == S::copier)
            produce_weights<S>(&args, &p, f);
        if (!S::fused && threadIdx.x == S::copier + 32)
            produce_tokens<S>(&args, &p);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

typedef struct {
    int tokens, weight_rows;
    orientation first;
    sharing share;
    bool fused;
    int threads, stage;
    double step[2];        /* microseconds of a step, fitted; by groups */
    const void *kernel[2]; /* one scale a token or less; by groups */
} variant;

template <orientation FIRST, int T, int WAVES, sharing SHARE, bool FUSED = false>
static variant variant_of(double step, double group_step) {
    typedef tile<FIRST, T, WAVES, SHARE, false, FUSED> plain;
    typedef tile<FIRST, T, WAVES, SHARE, !FUSED, FUSED> groups; /* FUSED: unused */
    return {plain::tokens,
            plain::weight_rows,
            FIRST,
            SHARE,
            FUSED,
            plain::threads,
            plain::stage,
            {step, group_step},
            {(const void *)fp8_gemm<plain>, (const void *)fp8_gemm<groups>}};
}

static const variant VARIANTS[] = {
    variant_of<WEIGHTS_FIRST, 32, 1, ALONE>(0.248, 0.289),
    variant_of<WEIGHTS_FIRST, 32, 1, PARTS>(0.306, 0.265),
    variant_of<WEIGHTS_FIRST, 32, 1, FINE_PARTS>(0.226, 0.190),
    variant_of<WEIGHTS_FIRST, 32, 2, ALONE>(0.291, 0.430),
    variant_of<WEIGHTS_FIRST, 64, 1, ALONE>(0.234, 0.363),
    variant_of<WEIGHTS_FIRST, 64, 1, PARTS>(0.270, 0.468),
    variant_of<WEIGHTS_FIRST, 64, 1, FINE_PARTS>(0.185, 0.235),
    variant_of<WEIGHTS_FIRST, 64, 2, SHARE_TOKENS>(0.503, 0.687),
    variant_of<WEIGHTS_FIRST, 128, 1, PARTS>(0.363, 0.503),
    variant_of<WEIGHTS_FIRST, 128, 1, SHARE_WEIGHTS>(0.354, 0.538),
    variant_of<WEIGHTS_FIRST, 128, 1, SHARE_TOKENS>(0.390, 0.655),
    variant_of<TOKENS_FIRST, 128, 1, PARTS>(0.401, 0.428),
    variant_of<TOKENS_FIRST, 128, 1, SHARE_WEIGHTS>(0.391, 0.483),
    variant_of<TOKENS_FIRST, 128, 2, SHARE_WEIGHTS>(0.750, 0.832),
    variant_of<TOKENS_FIRST, 128, 2, SHARE_TOKENS>(0.666, 0.835),
    variant_of<WEIGHTS_FIRST, 32, 1, PARTS, true>(0.264, 0),
    variant_of<WEIGHTS_FIRST, 32, 1, FINE_PARTS, true>(0.283, 0),
    variant_of<WEIGHTS_FIRST, 64, 1, PARTS, true>(0.386, 0),
    variant_of<WEIGHTS_FIRST, 64, 1, FINE_PARTS, true>(0.302, 0),
};

enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };
static_assert(VARIANT_COUNT < 64,
              "tune() measures 64 variants of a kernel, the first is the choice");

static bool has_parts(const variant *v) {
    return v->share == PARTS || v->share == FINE_PARTS;
}

static bool has_pairs(const variant *v) {
    return v->share == SHARE_WEIGHTS || v->share == SHARE_TOKENS;
}

/* How a call is done: a shape of tiles and how many there are, by blocks or pairs of them. */
typedef struct {
    const variant *shape;
    int cluster; /* blocks that share */
    int64_t row_tiles, columns, workers;
    double seconds;
} method;

static int rows_of(const variant *v) {
    return v->weight_rows * (v->share == SHARE_TOKENS ? 2 : 1);
}

static int tokens_of(const variant *v) {
    return v->tokens * (v->share == SHARE_WEIGHTS ? 2 : 1);
}

/* What an estimate is made of: seconds and rates a second. */
typedef struct {
    double start;         /* of every call */
    double quantize[3];   /* the kernel that does: one scale, by token, by group, */
    double values[3];     /* and how many it does */
    double cache, memory; /* bytes */
    double busy;          /* blocks, one a multiprocessor, that keep the memory busy */
    double output;        /* of a block's tile */
    double sum, sharing;  /* of a token's parts, and more for each block that has one */
    double power;         /* the higher, the less do copies and products get in each other's way */
} rates;

/* Tiles of 32 and 64 tokens where x is quantized in it or before, and of more. Fitted with the
 * other kernels' estimates to what tune() measured of sixteen layers with 1 to 512 tokens on an
 * H200, so that the choice loses least: 0.4 % beside the best of all shapes and kernels, 1.2 % with
 * the estimates before (docs/lab.md). That of more tokens again to 867 times of sixteen layers
 * with 64 to 512, since outputs are written as 16 bits. */
static const rates FUSED = {
    1.19e-6, {0, 0, 0}, {1e30, 1e30, 1e30}, 8.41e12, 4.5e12, 104, 1.3e-10, 7.88e-9, 5.7e-9, 8};
static const rates FEW = {1.39e-6,
                          {3.37e-7, 4.52e-7, 9.79e-7},
                          {2.16e12, 2.62e12, 2.62e12},
                          5.97e12,
                          4.38e12,
                          50,
                          1.7e-10,
                          5.93e-9,
                          0,
                          8};
static const rates MANY = {2.2e-7,
                           {1.51e-6, 1.82e-6, 1.76e-6},
                           {2.78e12, 2.31e12, 2.31e12},
                           7.39e12,
                           4.49e12,
                           0,
                           1.16e-10,
                           1.46e-8,
                           0,
                           4};

/* Seconds to read the weights where blocks have some tiles each, the last turn some of the blocks.
 */
static double weight_seconds(const method *way, double bytes, const rates *r) {
    int64_t tiles = way->row_tiles * way->columns;
    int64_t last = (tiles - 1) % way->workers + 1, rest = tiles - last;
    double all = fmin(1, (double)(way->workers * way->cluster) / r->busy);
    double few = fmin(1, (double)(last * way->cluster) / r->busy);
    return bytes / (double)tiles * ((double)rest / all + (double)last / few) / r->memory;
}

/* Seconds of a call: x quantized, then the products, W from memory and all tiles from the
 * second-level cache at the same time, then outputs, and sums of parts. Outputs of all tiles of a
 * block but the last are written while more is copied. */
static double estimate(const moq_linear_spec *spec, const method *way, int64_t m) {
    const variant *v = way->shape;
    int scaling = spec->input - MOQ_INPUT_E4M3_TENSOR;
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP, parts = has_parts(v);
    bool few = v->first == WEIGHTS_FIRST && v->tokens <= 64 && !has_pairs(v);
    const rates *r = v->fused ? &FUSED : few ? &FEW : &MANY;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double tiles = (double)(way->row_tiles * way->columns) * (has_pairs(v) ? 2 : 1);
    double steps = (double)divide_up(spec->in_features, STEP);
    double turns = parts ? 1.0 : (double)divide_up(way->row_tiles * way->columns, way->workers);
    double rows = v->weight_rows * (v->share == SHARE_WEIGHTS ? 0.5 : 1.0);
    double columns = v->tokens * (v->share == SHARE_TOKENS ? 0.5 : 1.0) * (v->fused ? 2 : 1);
    double quantize = r->quantize[scaling] + (double)m * k / r->values[scaling];
    double output = v->weight_rows * v->tokens * r->output;
    double products =
        turns * steps / (parts ? way->cluster : 1) * v->step[groups] * 1e-6 + (turns - 1) * output;
    double copies = tiles * steps * STEP * (rows + columns) / r->cache;
    double memory = few ? weight_seconds(way, n * k, r) : n * k / r->memory;
    double sums = parts ? (r->sum + r->sharing * way->cluster) * v->tokens : 0.0;
    double together =
        pow(pow(products, r->power) + pow(memory, r->power) + pow(copies, r->power), 1 / r->power);
    double all = r->start + quantize + together + output + sums;
    if (v->fused && m < v->tokens) /* a tile that is not full is read sooner */
        all -= 1.9e-8 * (double)(v->tokens - m);
    return all;
}

static method method_of(const moq_linear_spec *spec, int64_t m, const variant *v, int cluster) {
    method way = {v, cluster, 0, divide_up(m, tokens_of(v))};
    for (int i = 0; i < spec->partition_count; i++)
        way.row_tiles += divide_up(spec->partition[i], rows_of(v));
    int64_t tiles = way.row_tiles * way.columns;
    int64_t most = clusters_that_fit(spec->target.sm_count, cluster);
    way.workers = has_parts(v) || tiles < most ? tiles : most;
    way.seconds = estimate(spec, &way, m);
    if (has_parts(v) && /* all tiles at once, and steps for every block */
        (tiles > most || cluster > divide_up(spec->in_features, STEP)))
        way.seconds = INFINITY;
    return way;
}

static method best_of_variant(const moq_linear_spec *spec, int64_t m, const variant *v) {
    int least = has_pairs(v) || v->share == PARTS ? 2 : 1;
    int most = has_parts(v) ? MAX_CLUSTER : least;
    method best = method_of(spec, m, v, least);
    for (int cluster = least + 1; cluster <= most; cluster++) {
        method way = method_of(spec, m, v, cluster);
        if (way.seconds < best.seconds)
            best = way;
    }
    return best;
}

/* Whether tiles of a shape are neither far too wide for the tokens nor too narrow. */
static bool suits(const variant *v, int64_t m) {
    if (v->first == TOKENS_FIRST)
        return m > (has_parts(v) ? 64 : 128);
    return v->tokens >= 128 ? m > 64 : v->tokens == 64 ? m > 32 && m <= 128 : m <= 64;
}

/* Where x is quantized as it is multiplied, a cluster sees no more than rows of it: one scale for
 * all of x has to be `given`. */
static bool can_run(const moq_linear_spec *spec, bool given, const variant *v) {
    return !v->fused || (spec->input == MOQ_INPUT_E4M3_TENSOR && given);
}

/* Variant 0 is the choice among the shapes, the others are one shape each; the choice again where
 * that shape cannot do the call. */
static method method_for(const moq_linear_spec *spec, int64_t m, int32_t which, bool given) {
    method best = {.seconds = INFINITY};
    if (which > 0 && which <= VARIANT_COUNT && can_run(spec, given, &VARIANTS[which - 1]))
        best = best_of_variant(spec, m, &VARIANTS[which - 1]);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < VARIANT_COUNT; i++) {
        if (!suits(&VARIANTS[i], m) || !can_run(spec, given, &VARIANTS[i]))
            continue;
        method way = best_of_variant(spec, m, &VARIANTS[i]);
        if (way.seconds < best.seconds)
            best = way;
    }
    return best;
}

static method method_of_call(const moq_linear_call *call) {
    return method_for(call->spec, call->m, call->variant, call->input_scale != NULL);
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
                           .code_columns = call->spec->in_features,
                           .scale_row = 1,
                           .stream = call->stream,
                           .next_is_busy = true};
    return q;
}

static areas areas_of(const moq_linear_call *call, const method *way) {
    const moq_linear_spec *spec = call->spec;
    moq_cuda_quantize q = quantize_of(call);
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP;
    areas w = {.tokens = way->columns * tokens_of(way->shape)};
    if (way->shape->fused)
        return w;
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
                   .part_steps = (int)(divide_up(spec->in_features, STEP) / way->cluster),
                   .more_parts = (int)(divide_up(spec->in_features, STEP) % way->cluster),
                   .few = way->columns == 1,
                   .per_token = spec->input == MOQ_INPUT_E4M3_TOKEN,
                   .x = moq_rows_of(call->x),
                   .out = moq_output_of(call),
                   .x_scale = given ? call->input_scale : found,
                   .x_scale_stride = w->tokens,
                   .output_scale = call->output_scale,
                   .block_scale = (const float *)call->weight_scale,
                   .partitions = moq_partitions_of(spec)};
    return a;
}

/* Shared memory of a block: as many stages as fit, the tokens' scales, where outputs turn around
 * and where sums come to. Sums of many tokens come to where the ring was, and outputs of parts turn
 * around there, behind those. */
static size_t lay_out(gemm_args *a, const method *way, bool groups, int limit) {
    const variant *v = way->shape;
    int stage = v->stage + (groups ? v->tokens * 4 : 0), rest = 0, turn = 0;
    if (has_parts(v)) {
        int columns = v->first == TOKENS_FIRST ? v->weight_rows : v->tokens;
        parts_room room =
            room_of_parts(columns, way->cluster * (v->share == FINE_PARTS ? 2 : 1), 2);
        a->side = room.side;
        a->turn_step = room.turn_step;
        rest = v->tokens < 128 ? room.sums : 0;
        turn = room.sums - rest;
    } else if (v->first == WEIGHTS_FIRST) {
        a->turn_step = TURNED_AT_ONCE(v->tokens) * 128;
        rest = 2 * a->turn_step;
    }
    int most = limit - 1024 - BARRIERS * 8 - BOARD_BYTES - rest;
    a->stages = most / stage;
    if (a->stages > MAX_STAGES)
        a->stages = MAX_STAGES;
    if (v->share == FINE_PARTS)
        a->stages -= a->stages % 2;
    bool fits = has_parts(v) && a->part_steps < a->stages;
    a->flight = (fits ? 32768 : 49152) / (v->weight_rows * STEP);
    a->turn = has_parts(v) ? turn : a->stages * stage;
    a->room = rest ? a->stages * stage : 0;
    return (size_t)(a->stages * stage + rest);
}

static moq_status multiply_codes(const moq_linear_call *call, const method *way, const areas *w,
                                 moq_err *err) {
    const variant *v = way->shape;
    moq_cuda_device device;
    CUtensorMap weights, tokens;
    MOQ_TRY(moq_cuda_query_device(call->spec->device.index, &device, err));
    gemm_args a = args_of(call, way, w);
    bool groups = call->spec->input == MOQ_INPUT_E4M3_GROUP;
    size_t shared = lay_out(&a, way, groups, device.shared_per_block);
    uint32_t weight_box = (uint32_t)v->weight_rows / (v->share == SHARE_WEIGHTS ? 2 : 1);
    uint32_t token_box = (uint32_t)v->tokens / (v->share == SHARE_TOKENS ? 2 : 1);
    MOQ_TRY(moq_tensor_map_rows(&weights, call->weight, a.n, a.k, a.k, weight_box, err));
    if (v->fused)
        tokens = weights; /* it is not looked at */
    else
        MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, w->tokens, a.k, a.k, token_box, err));
    moq_launch launch = {
        .what = "FP8 linear",
        .kernel = v->kernel[groups],
        .grid = has_parts(v)
                    ? dim3((unsigned)way->cluster, (unsigned)way->row_tiles, (unsigned)way->columns)
                    : dim3((unsigned)(way->workers * way->cluster)),
        .block = dim3((unsigned)v->threads),
        .cluster = way->cluster > 1 ? (unsigned)way->cluster : 0,
        .shared = shared,
        .stream = (cudaStream_t)call->stream,
        .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" double moq_cuda_fp8_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(spec, m, 0, true).seconds;
}

extern "C" int32_t moq_cuda_fp8_gemm_choose(const moq_linear_spec *spec, int64_t m) {
    return (int32_t)(method_for(spec, m, 0, true).shape - VARIANTS) + 1;
}

/* The choice, and the shapes that are not expected to take half as long again. */
extern "C" uint64_t moq_cuda_fp8_gemm_variants(const moq_linear_call *call) {
    bool given = call->input_scale != NULL;
    double best = method_for(call->spec, call->m, 0, given).seconds;
    uint64_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (suits(&VARIANTS[i], call->m) && can_run(call->spec, given, &VARIANTS[i]) &&
            best_of_variant(call->spec, call->m, &VARIANTS[i]).seconds < 1.5 * best)
            some |= 2ull << i;
    return some;
}

extern "C" int64_t moq_cuda_fp8_gemm_workspace(const moq_linear_call *call) {
    method way = method_of_call(call);
    return areas_of(call, &way).bytes;
}

extern "C" moq_status moq_cuda_fp8_gemm(const moq_linear_call *call, moq_err *err) {
    method way = method_of_call(call);
    areas w = areas_of(call, &way);
    if (!way.shape->fused)
        MOQ_TRY(quantize(call, &w, err));
    return multiply_codes(call, &way, &w, err);
}
