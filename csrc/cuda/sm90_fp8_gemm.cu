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
 *   filled with it before X is complete (dependent launch).
 * - Many tokens: the tokens give the rows, 256 to a tile, so that scales of groups are one number a
 *   row. Pairs of blocks have one operand in common, which each copies half of to both.
 * - Tiles never cross from one partition to the next, so that 64 rows have one block scale a step.
 *
 * What bounds it (H200, docs/lab.md): up to 64 tokens the wait for X, 2.5 us behind the end of the
 * kernel before, then the weights that are still to come, then 1.3 us to bring parts together; with
 * more what the second-level cache delivers, 7 to 8 TB/s, and the tensor cores. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/quantize.h"
#include "cuda/sm90_gemm_outputs.h"
#include "cuda/sm90_gemm_products.h"
#include "cuda/sm90_gemm_tile.h"
#include "cuda/tensor_map.h"

#include <math.h>

#define BAND_TOKENS 2048 /* tokens that are done together, for the sake of L2 */
#define EARLY       6    /* stages of weights before X where many blocks would keep it waiting */
#define MAX_CLUSTER 8

template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const taps *t, uint8_t *shared,
                                               board *b, int rank) {
    int group =
        __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
    float *turn = (float *)(shared + a->turn) + group * (CHUNK * PITCH);
    ring_place slot = {0, 0};
    for (cursor c = start<S>(a); c.left > 0; c.left -= c.end - c.first, c.tile += c.stride) {
        place at = place_of<S>(a, c.tile, rank);
        float sum[S::WAVES][S::T / 2] = {};
        const float *block[S::WAVES];
#pragma unroll
        for (int i = 0; i < S::WAVES; i++) {
            int row = at.row + (S::tokens_first || S::by_steps ? 0 : (group * S::WAVES + i) * 64);
            block[i] = a->block_scale +
                       (int64_t)moq_block_row(&a->partitions, at.partition, min(row, at.end - 1)) *
                           a->steps;
            for (int step = c.first + threadIdx.x % 32 * 32; S::groups && step < c.end;
                 step += 1024)
                prefetch_l2(block[i] + step);
        }
        wait_for_predecessor(); /* at once from the second tile on */
        margin edge = fetch_margin<S>(a, &at);
        multiply<S>(t, block, c.first, c.end, group, &slot, sum);
        if constexpr (S::parts) {
            bring_together<S>(a, shared, b, &edge, &at, sum[0]);
            return;
        }
        barrier_sync(1, CONSUMERS); /* the tile before is written */
        post_margin<S>(&edge, b);
        barrier_sync(1, CONSUMERS);
#pragma unroll
        for (int i = 0; i < S::WAVES; i++) {
            int row = (group * S::WAVES + i) * 64;
            if constexpr (S::tokens_first)
                write_rows<S>(a, b, &at, row, sum[i]);
            else
                write_columns<S>(a, b, turn, &at, row, sum[i]);
        }
    }
}

/* Barriers of the ring; the blocks of a cluster know of each other's. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, uint32_t full, uint32_t empty) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < a->stages; i++) {
            mbarrier_init(full + 8u * i, 1);
            mbarrier_init(empty + 8u * i,
                          CONSUMERS / 32 / (S::by_steps ? 2 : 1) * (S::pair ? 2 : 1));
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair) {
        cluster_sync();
        return;
    }
    __syncthreads();
    if (S::own_room)
        cluster_arrive(); /* for whoever waits to store sums here */
}

template <class S>
static __global__ void __launch_bounds__(S::threads, 1)
    fp8_gemm(const __grid_constant__ CUtensorMap weights,
             const __grid_constant__ CUtensorMap tokens, const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[2 * MAX_STAGES];
    __shared__ board edge;
    uint32_t full = fixed_shared_address(barrier), empty = full + 8 * MAX_STAGES;
    uint32_t ring = fixed_shared_address(smem);
    int rank = S::pair || S::parts ? (int)rank_in_cluster() : 0;
    int scales = args.stages * S::stage; /* of tokens, behind the ring */
    launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        prefetch_map(&weights);
        prefetch_map(&tokens);
    }
    set_up<S>(&args, full, empty);
    if (threadIdx.x < CONSUMERS) {
        if (S::wide)
            more_registers<232>();
        uint32_t row = S::by_steps ? 0 : threadIdx.x / 128 * 64 * S::WAVES;
        taps t = {full,
                  empty,
                  wgmma_operand(ring + row * STEP),
                  wgmma_operand(ring + S::rows * STEP),
                  (const float *)(smem + scales),
                  args.stages};
        consume<S>(&args, &t, smem, &edge, rank);
        if (S::parts)
            return;
    } else {
        if (S::wide)
            fewer_registers<40>();
        if (threadIdx.x / 32 == CONSUMERS / 32 && is_elected()) {
            uint64_t keep = policy_evict_normal();
            pipes p = {&weights,
                       &tokens,
                       ring,
                       ring + scales,
                       full,
                       empty,
                       args.few ? policy_evict_first() : keep,
                       keep,
                       rank};
            produce<S>(&args, &p);
        }
        if (S::parts && blocks_in_cluster() == 1)
            return;
        if (S::parts) { /* as the others, in bring_together */
            __syncwarp();
            if (S::own_room)
                cluster_wait();
            else
                cluster_sync();
        }
    }
    if (S::pair || S::parts) {
        __syncwarp();
        cluster_sync(); /* other blocks may still copy to this one */
    }
}

/* ---- shapes ---- */

typedef struct {
    int tokens, weight_rows;
    orientation first;
    sharing share;
    int threads, stage;
    double step[2];        /* microseconds of a step, fitted; by groups */
    const void *kernel[2]; /* one scale a token or less; by groups */
} variant;

template <orientation FIRST, int T, int WAVES, sharing SHARE>
static variant variant_of(double step, double group_step) {
    typedef tile<FIRST, T, WAVES, SHARE, false> plain;
    typedef tile<FIRST, T, WAVES, SHARE, true> groups;
    return {plain::tokens,
            plain::weight_rows,
            FIRST,
            SHARE,
            plain::threads,
            plain::stage,
            {step, group_step},
            {(const void *)fp8_gemm<plain>, (const void *)fp8_gemm<groups>}};
}

static const variant VARIANTS[] = {
    variant_of<WEIGHTS_FIRST, 32, 1, ALONE>(0.117, 0.232),
    variant_of<WEIGHTS_FIRST, 32, 1, PARTS>(0.193, 0.334),
    variant_of<WEIGHTS_FIRST, 32, 1, FINE_PARTS>(0.145, 0.190),
    variant_of<WEIGHTS_FIRST, 32, 2, ALONE>(0.251, 0.401),
    variant_of<WEIGHTS_FIRST, 64, 1, ALONE>(0.169, 0.317),
    variant_of<WEIGHTS_FIRST, 64, 1, PARTS>(0.251, 0.400),
    variant_of<WEIGHTS_FIRST, 64, 1, FINE_PARTS>(0.142, 0.217),
    variant_of<WEIGHTS_FIRST, 64, 2, SHARE_TOKENS>(0.376, 0.650),
    variant_of<WEIGHTS_FIRST, 128, 1, PARTS>(0.403, 0.591),
    variant_of<WEIGHTS_FIRST, 128, 1, SHARE_WEIGHTS>(0.302, 0.554),
    variant_of<WEIGHTS_FIRST, 128, 1, SHARE_TOKENS>(0.309, 0.553),
    variant_of<TOKENS_FIRST, 128, 1, PARTS>(0.410, 0.537),
    variant_of<TOKENS_FIRST, 128, 1, SHARE_WEIGHTS>(0.298, 0.418),
    variant_of<TOKENS_FIRST, 128, 2, SHARE_WEIGHTS>(0.600, 0.750),
    variant_of<TOKENS_FIRST, 128, 2, SHARE_TOKENS>(0.680, 0.820),
};

enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };
static_assert(VARIANT_COUNT < 16,
              "tune() measures 16 variants of a kernel, the first is the choice");

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

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

/* Clusters of a block a multiprocessor that run at once: of 132 multiprocessors in groups of 16 and
 * 18 (H200), others in proportion. */
static int64_t clusters_that_fit(int64_t sm_count, int cluster) {
    static const uint8_t FIT[MAX_CLUSTER + 1] = {0, 132, 66, 39, 30, 22, 17, 15, 15};
    int64_t fit = sm_count * FIT[cluster] / 132;
    return fit > 1 ? fit : 1;
}

/* The longest of three that overlap, and something for the others. */
static double overlapped(double a, double b, double c) {
    a *= a;
    b *= b;
    c *= c;
    return sqrt(sqrt(a * a + b * b + c * c));
}

/* Seconds of a call, fitted to an H200 (ten layers, 17 to 4096 tokens, all shapes: within 6 % in
 * four of five): x quantized, then the products, W from memory and all tiles from the second-level
 * cache at the same time, then outputs, and sums of parts. */
static double estimate(const moq_linear_spec *spec, const method *way, int64_t m) {
    const variant *v = way->shape;
    bool groups = spec->input == MOQ_INPUT_E4M3_GROUP, parts = has_parts(v);
    bool simple = spec->input == MOQ_INPUT_E4M3_TENSOR;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double tiles = (double)(way->row_tiles * way->columns) * (has_pairs(v) ? 2 : 1);
    double steps = (double)divide_up(spec->in_features, STEP);
    double turns = parts ? 1.0 : (double)divide_up(way->row_tiles * way->columns, way->workers);
    double rows = v->weight_rows * (v->share == SHARE_WEIGHTS ? 0.5 : 1.0);
    double columns = v->tokens * (v->share == SHARE_TOKENS ? 0.5 : 1.0);
    double quantize = (simple ? 1.5e-6 : 1.9e-6) + 3 * (double)m * k / (simple ? 4.2e12 : 3.6e12);
    double products = turns * steps / (parts ? way->cluster : 1) * v->step[groups] * 1e-6;
    double copies = tiles * steps * STEP * (rows + columns) / 7.7e12;
    double memory = n * k / (v->share == ALONE && way->workers < 100 ? 4.05e12 : 4.27e12);
    double outputs = turns * v->weight_rows * v->tokens * 1.1e-10;
    double sums = parts ? 1.5e-8 * v->tokens : 0.0;
    /* 0.3 us less than was fitted: the quantization has become shorter since. */
    return 1.4e-6 + quantize + overlapped(products, memory, copies) + outputs + sums;
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

/* Variant 0 is the choice among the shapes, the others are one shape each; the choice again where
 * that shape cannot do the call. */
static method method_for(const moq_linear_spec *spec, int64_t m, int32_t which) {
    method best = {.seconds = INFINITY};
    if (which > 0 && which <= VARIANT_COUNT)
        best = best_of_variant(spec, m, &VARIANTS[which - 1]);
    if (best.seconds < INFINITY)
        return best;
    for (int i = 0; i < VARIANT_COUNT; i++) {
        if (!suits(&VARIANTS[i], m))
            continue;
        method way = best_of_variant(spec, m, &VARIANTS[i]);
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

/* Shared memory of a block: as many stages as fit, the tokens' scales, where outputs turn around
 * and where sums come to. The last two may lie where the ring was. */
static size_t lay_out(gemm_args *a, const method *way, bool groups, int limit) {
    const variant *v = way->shape;
    int stage = v->stage + (groups ? v->tokens * 4 : 0), rest = 0;
    if (v->first == WEIGHTS_FIRST)
        rest = TURN_BYTES;
    if (has_parts(v)) {
        int parts = way->cluster * (v->share == FINE_PARTS ? 2 : 1);
        int columns = v->first == TOKENS_FIRST ? v->weight_rows : v->tokens;
        rest += (int)divide_up(columns / 8, parts) * parts * CONSUMERS * 16;
    }
    bool behind = !has_parts(v) || v->tokens < 128; /* the ring */
    int most = limit - 1024 - MAX_STAGES * 16 - (int)sizeof(board) - (behind ? rest : 0);
    a->stages = most / stage;
    if (a->stages > MAX_STAGES)
        a->stages = MAX_STAGES;
    if (v->share == FINE_PARTS)
        a->stages -= a->stages % 2;
    a->early = has_parts(v) && way->cluster > 2 && a->stages > EARLY ? EARLY : a->stages;
    a->turn = behind ? a->stages * stage : 0;
    a->room = a->turn + TURN_BYTES;
    return (size_t)(a->stages * stage + (behind ? rest : 0));
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
    MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, w->tokens, a.k, a.k, token_box, err));
    moq_launch launch = {.what = "FP8 linear",
                         .kernel = v->kernel[groups],
                         .grid = dim3((unsigned)(way->workers * way->cluster)),
                         .block = dim3((unsigned)v->threads),
                         .cluster = way->cluster > 1 ? (unsigned)way->cluster : 0,
                         .shared = shared,
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" double moq_cuda_fp8_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(spec, m, 0).seconds;
}

/* The choice, and the shapes that are not expected to take half as long again. */
extern "C" uint32_t moq_cuda_fp8_gemm_variants(const moq_linear_call *call) {
    double best = method_for(call->spec, call->m, 0).seconds;
    uint32_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (suits(&VARIANTS[i], call->m) &&
            best_of_variant(call->spec, call->m, &VARIANTS[i]).seconds < 1.5 * best)
            some |= 2u << i;
    return some;
}

extern "C" int64_t moq_cuda_fp8_gemm_workspace(const moq_linear_call *call) {
    method way = method_for(call->spec, call->m, call->variant);
    return areas_of(call, &way).bytes;
}

extern "C" moq_status moq_cuda_fp8_gemm(const moq_linear_call *call, moq_err *err) {
    method way = method_for(call->spec, call->m, call->variant);
    areas w = areas_of(call, &way);
    MOQ_TRY(quantize(call, &w, err));
    return multiply_codes(call, &way, &w, err);
}
