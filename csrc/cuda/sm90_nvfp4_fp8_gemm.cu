/* NVFP4 linear for up to some hundreds of tokens with FP8 products on Hopper (compute "fp8"):
 * y[m, n] = round(sum_k X[m, k] W[n, k] * scales + bias[n]).
 *
 * X are e4m3 codes with a scale a token, which the quantization before makes in the workspace, the
 * columns of each 16 in the order that operands have them (moq_cuda_quantize). W gives the 64 rows
 * of a warpgroup's products, from registers, where a warp folds its packed codes into e4m3
 * (nvfp4_fold.h) while the products before are under way. Otherwise this is the GEMM of exact
 * products (sm90_nvfp4_gemm.h): a ring of steps of 128 columns, K divided among the blocks of a
 * cluster and the warpgroups with the same rows.
 *
 * What bounds it (H200, docs/lab.md): folding, 140 cycles of a scheduler for 16 rows by 64 columns,
 * half of them conversions to e4m3; and products, which hardly run beside it. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/nvfp4_fold.h"
#include "cuda/quantize.h"
#include "cuda/sm90_grid.h"
#include "cuda/sm90_nvfp4_gemm.h"
#include "cuda/tensor_map.h"

#include <math.h>

#define BARRIERS (3 * MAX_STAGES + 2)

/* A block's tile, as those of exact products (sm90_nvfp4_gemm.h): 64 rows of W for each of
 * ROW_GROUPS, by T tokens; of K_GROUPS warpgroups, one or two, with the same rows each takes every
 * so many steps. PARTS: the blocks of a cluster share K too. */
template <int T_, int ROW_GROUPS, int K_GROUPS, bool PARTS> struct folded_tile {
    typedef gemm_args args;
    static constexpr int T = T_, row_groups = ROW_GROUPS, k_groups = K_GROUPS;
    static constexpr bool parts = PARTS, pair = false;
    static constexpr int consumers = 128 * ROW_GROUPS * K_GROUPS;
    /* Parts of the tokens that are multiplied one after the other, and sums of one of a thread. */
    static constexpr int parts_of_tokens = T == 256 ? 2 : 1, sums = T / 2 / parts_of_tokens;
    static constexpr bool uneven = consumers >= 384 || T >= 128;
    static constexpr int registers = T >= 128 ? 232 : consumers == 512 ? 112 : 152;
    static constexpr int copier_registers = T >= 128 ? 40 : consumers == 512 ? 32 : 56;
    static constexpr int threads = consumers + (uneven ? 128 : 64);
    static constexpr int weight_rows = 64 * ROW_GROUPS, tokens = T;
    static constexpr int weight_bytes = weight_rows / 16 * 2 * UNIT;
    static constexpr int token_size = 1, token_bytes = T * STEP;
    static constexpr int stage = (token_bytes + weight_bytes + 1023) / 1024 * 1024;
    static constexpr bool own_room = T < 128;
    static constexpr bool tokens_first = false, row_factors = true, token_factors = true;
    static constexpr float unit = 1.0f;
};

/* ---- products ---- */

/* The operand of a unit. */
typedef struct {
    uint32_t part[2][4];
} operand_unit;

/* A unit as a lane has it in memory. */
typedef struct {
    uint4 codes;
    uint2 scales;
} packed_unit;

static __device__ __forceinline__ packed_unit load_unit(const taps *t, const spot *s, int unit) {
    uint32_t at = s->at + (uint32_t)unit * UNIT;
    return {*(const uint4 *)(t->codes + at), *(const uint2 *)(t->scales + at)};
}

static __device__ __forceinline__ void fold(const packed_unit *u, uint32_t folds, operand_unit *o) {
    moq_fold_unit(u->codes, u->scales, folds, o->part);
}

/* c = or += products of a unit with a part of the tokens, as many as c has. */
template <class S>
static __device__ __forceinline__ void multiply_unit(const taps *t, const spot *s, int unit,
                                                     int part, const operand_unit *o,
                                                     float (&c)[S::sums]) {
    uint64_t x = t->tokens + s->at / 16 + (uint32_t)(part * (S::sums * 2 * STEP / 16) + unit * 4);
    wgmma_fence();
    wgmma_e4m3(c, o->part[0], x, unit);
    wgmma_e4m3(c, o->part[1], x + 2, 1);
    wgmma_commit();
}

/* Its products have ended: until here it stays in its registers. */
static __device__ __forceinline__ void give_up_unit(operand_unit *o) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("" : "+r"(o->part[i / 4][i % 4])::"memory");
}

/* Products of a part of the tokens have ended, and are added to the sums. */
template <class S>
static __device__ __forceinline__ void promote(float (&c)[S::sums], int part,
                                               float (&sum)[S::T / 2]) {
    stay_here(c);
#pragma unroll
    for (int i = 0; i < S::sums; i++)
        sum[part * S::sums + i] += c[i];
}

/* Adds `steps` steps of this warpgroup from `s` on to the sums: while a unit is multiplied the next
 * is folded. The tensor cores keep about 14 bits of their sums, which are added to float32 ones
 * every step; of 256 tokens by halves. */
template <class S>
static __device__ __forceinline__ void multiply_folded(const taps *t, uint32_t folds, int steps,
                                                       spot *s, float (&sum)[S::T / 2]) {
    operand_unit even, odd;
    packed_unit first, second;
    float c[S::sums];
    if (steps <= 0)
        return;
    mbarrier_wait(t->gate.weights + s->gate, s->parity);
    first = load_unit(t, s, 0);
    second = load_unit(t, s, 1);
    fold(&first, folds, &even);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        spot now = *s;
        mbarrier_wait(t->gate.tokens + now.gate, now.parity);
        multiply_unit<S>(t, &now, 0, 0, &even, c);
        advance_own<S>(s, t->stages);
        if (left > 1) {
            mbarrier_wait(t->gate.weights + s->gate, s->parity);
            first = load_unit(t, s, 0);
        }
        fold(&second, folds, &odd);
        multiply_unit<S>(t, &now, 1, 0, &odd, c);
        if (S::parts_of_tokens == 2) {
            wgmma_wait<0>();
            promote<S>(c, 0, sum);
            multiply_unit<S>(t, &now, 0, 1, &even, c);
            multiply_unit<S>(t, &now, 1, 1, &odd, c);
        }
        if (left > 1)
            second = load_unit(t, s, 1);
        wgmma_wait<1>();
        give_up_unit(&even);
        if (left > 1)
            fold(&first, folds, &even);
        wgmma_wait<0>();
        give_up_unit(&odd);
        release<S>(t, &now);
        promote<S>(c, S::parts_of_tokens - 1, sum);
        stay_here(sum);
    }
}

/* The powers of two of a thread's rows. */
static __device__ __forceinline__ uint32_t fetch_folds(const gemm_args *a, int row) {
    return moq_pack_folds(a->fold_scale[min(row, a->n - 1)], a->fold_scale[min(row + 8, a->n - 1)]);
}

/* What outputs of a row are multiplied by beside its scale. */
static __device__ __forceinline__ float rest_of_fold(float fold) {
    return fold / moq_used_fold(fold);
}

template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const taps *t, uint8_t *shared,
                                               board *b, const meeting *meet) {
    int group =
        __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
    float *turn = (float *)(shared + a->turn) + group * (CHUNK * PITCH);
    spot step = {};
    for (cursor c = start<S>(a); c.left > 0; c.left--, c.tile += c.stride) {
        place at = place_of<S>(a, c.tile);
        float sum[S::T / 2] = {};
        margin edge = {};
        int row = at.row + group / S::k_groups * 64 + threadIdx.x % 128 / 32 * 16;
        uint32_t folds = fetch_folds(a, row + threadIdx.x % 32 / 4);
        wait_for_predecessor(); /* at once from the second tile on */
        if (S::parts && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks run */
        edge = fetch_margin<S>(a, &at);
        if (threadIdx.x < S::weight_rows && at.row + threadIdx.x < at.end)
            edge.factor *= rest_of_fold(a->fold_scale[at.row + threadIdx.x]);
        if (S::k_groups == 1 || group % S::k_groups == 0) {
            multiply_folded<S>(t, folds, (c.end - c.first + S::k_groups - 1) / S::k_groups, &step,
                               sum);
        } else {
            spot second = {S::stage, 8, 0};
            multiply_folded<S>(t, folds, (c.end - c.first) / S::k_groups, &second, sum);
        }
        if constexpr (S::parts) {
            bring_together<S>(a, shared, b, meet, &edge, &at, sum);
            return;
        }
        barrier_sync(1, S::consumers); /* the tile before is written */
        post_margin<S>(&edge, b);
        barrier_sync(1, S::consumers);
        write_columns<S>(a, b, turn, &at, group * 64, sum);
    }
}

/* Barriers of the ring and of the cluster, some by every warp: they take 30 ns each. The blocks of
 * a cluster know of each other's. */
template <class S>
static __device__ __forceinline__ void set_up(const gemm_args *a, const pipes *p,
                                              const meeting *meet, feed *f) {
    constexpr int WARPS = S::consumers / 32;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == S::consumers) {
        prefetch_map(p->weights);
        *f = begin_feed<S>(a);
        copy_first<S>(a, p, f);
    } else if (threadIdx.x == S::consumers + 32) {
        prefetch_map(p->tokens);
    } else if (warp < WARPS && threadIdx.x % 32 == 0) {
        if (S::parts && warp == 0) {
            mbarrier_init(meet->posted, 1);
            mbarrier_init(meet->ready, WARPS * WARP_ARRIVALS * blocks_in_cluster());
        }
#pragma unroll 1
        for (int i = warp + FIRST_COPIES; i < a->stages; i += WARPS)
            mbarrier_init(p->gate.weights + 8u * i, 1); /* the first are the copying thread's */
#pragma unroll 1
        for (int i = warp; i < a->stages; i += WARPS) {
            mbarrier_init(p->gate.tokens + 8u * i, 1);
            mbarrier_init(p->gate.empty + 8u * i, S::row_groups * 4 * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    __syncthreads();
    if (S::parts && blocks_in_cluster() > 1)
        cluster_arrive(); /* for whoever waits to send sums here */
}

template <class S>
static __global__ void __launch_bounds__(S::threads, 1)
    nvfp4_fp8_gemm(const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap tokens,
                   const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ board edge;
    uint32_t first = fixed_shared_address(barrier), ring = fixed_shared_address(smem);
    gates gate = {first, first + 8 * MAX_STAGES, first + 16 * MAX_STAGES};
    meeting meet = {first + 24 * MAX_STAGES, first + 24 * MAX_STAGES + 8};
    uint64_t keep = policy_evict_normal(), once = policy_evict_first();
    pipes p = {&weights, &tokens, ring, gate, args.columns == 1 ? once : keep, keep};
    feed f = {};
    launch_dependents();
    set_up<S>(&args, &p, &meet, &f);
    if (threadIdx.x < S::consumers) {
        if (S::uneven)
            more_registers<S::registers>();
        int slab = threadIdx.x / (128 * S::k_groups) * 4 + threadIdx.x % 128 / 32;
        int lane = threadIdx.x % 32;
        const uint8_t *unit = smem + S::token_bytes + slab * (2 * UNIT);
        taps t = {gate, unit + 16 * (lane ^ (lane >> 3)), unit + MOQ_PACK_SCALES + 8 * (lane / 4),
                  wgmma_operand(ring), (uint32_t)args.stages};
        if (S::parts && threadIdx.x == 0)
            mbarrier_expect(meet.posted, bytes_to_come<S>());
        consume<S>(&args, &t, smem, &edge, &meet);
    } else {
        if (S::uneven)
            fewer_registers<S::copier_registers>();
        if (threadIdx.x == S::consumers)
            produce_weights<S>(&args, &p, f);
        else if (threadIdx.x == S::consumers + 32)
            produce_tokens<S>(&args, &p);
    }
}

/* ---- shapes ---- */

typedef struct {
    int tokens, row_groups, k_groups;
    bool parts;
    int threads, stage;
    double step; /* microseconds, fitted */
    const void *kernel;
} variant;

template <int T, int ROW_GROUPS, int K_GROUPS, bool PARTS> static variant variant_of(double step) {
    typedef folded_tile<T, ROW_GROUPS, K_GROUPS, PARTS> shape;
    return {T,
            ROW_GROUPS,
            K_GROUPS,
            PARTS,
            shape::threads,
            shape::stage,
            step,
            (const void *)nvfp4_fp8_gemm<shape>};
}

static const variant VARIANTS[] = {
    variant_of<32, 4, 1, false>(0.710),  variant_of<32, 2, 1, true>(0.480),
    variant_of<32, 2, 2, true>(0.817),   variant_of<32, 1, 2, true>(0.486),
    variant_of<64, 4, 1, false>(0.904),  variant_of<64, 2, 1, true>(0.503),
    variant_of<64, 2, 2, true>(0.953),   variant_of<64, 1, 2, true>(0.512),
    variant_of<128, 2, 1, false>(0.634), variant_of<128, 2, 1, true>(0.635),
    variant_of<128, 1, 2, true>(0.548),  variant_of<256, 2, 1, false>(0.961),
    variant_of<256, 2, 1, true>(0.942),  variant_of<256, 1, 2, true>(0.721),
};

enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };
static_assert(VARIANT_COUNT < 32,
              "tune() measures 32 variants of a kernel, the first is the choice");

/* How a call is done: a shape of tiles and how many there are. */
typedef struct {
    const variant *shape;
    int cluster; /* blocks that share K */
    int64_t row_tiles, columns, workers;
    double seconds;
} method;

/* Shared memory of a block: as many stages as fit, and where sums come to or outputs turn around;
 * sums of many tokens come to where the ring was. A warpgroup needs its next step before it gives
 * up one; no stages where that cannot be. */
typedef struct {
    int stages, side, behind; /* float4 of a share of sums; bytes behind the ring */
} layout;

static layout lay_out(const variant *v, int cluster) {
    layout l = {0, 0, v->row_groups * TURN_BYTES};
    int sums = 0;
    if (v->parts) {
        int parts = cluster * v->k_groups;
        l.side = (v->tokens / 8 + parts - 1) / parts * parts * 128;
        sums = v->row_groups * v->k_groups * l.side * 16;
        l.behind = v->tokens < 128 ? sums : 0;
    }
    int most = BLOCK_SHARED - 1024 - BARRIERS * 8 - (int)sizeof(board) - l.behind;
    l.stages = most / v->stage < MAX_STAGES ? most / v->stage : MAX_STAGES;
    l.stages -= l.stages % v->k_groups;
    if (l.stages < FIRST_COPIES || l.stages < 2 * v->k_groups ||
        (l.behind == 0 && sums > l.stages * v->stage))
        l.stages = 0;
    return l;
}

/* Tokens of a tile: as few as give as many tiles, whole eights where there are several. */
static int64_t tokens_of(int64_t m, const method *way) {
    int64_t unit = way->columns == 1 ? 1 : 8;
    return divide_up(divide_up(m, way->columns), unit) * unit;
}

/* Seconds of a call: x quantized; then the products, W from memory and all tiles from the
 * second-level cache at the same time; then sums and outputs. Fitted to 344 times of ten layers and
 * 16 to 256 tokens on an H200 (docs/lab.md): 4.3 % off, and the choice costs 0.5 %. */
static double estimate(const moq_linear_spec *spec, const method *way, int64_t m) {
    const variant *v = way->shape;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double steps = (double)divide_up(spec->in_features, STEP),
           tokens = fmax(32, (double)tokens_of(m, way));
    double tiles = (double)(way->row_tiles * way->columns);
    double turns = (double)divide_up(way->row_tiles * way->columns, way->workers);
    double blocks = (double)way->workers * way->cluster;
    double share = v->row_groups * 64 * 72 + tokens * STEP;
    double products = turns * steps / way->cluster / v->k_groups * v->step * 1e-6;
    double copies = tiles * steps * share / 8.63e12;
    double memory = n * k * 0.5625 / 5e12 / fmin(1, blocks / 80);
    double outputs = turns * (8e-7 * v->row_groups + (v->parts ? 3.47e-8 : 1.92e-8) * tokens);
    return 1.18e-6 + (double)m * k / 5.5e11 + outputs +
           cbrt(products * products * products + memory * memory * memory +
                copies * copies * copies);
}

static method method_of(const moq_linear_spec *spec, int64_t m, const variant *v, int cluster) {
    method way = {v, cluster, divide_up(spec->out_features, 64 * v->row_groups),
                  divide_up(m, v->tokens)};
    int64_t tiles = way.row_tiles * way.columns, steps = divide_up(spec->in_features, STEP);
    int64_t most = clusters_that_fit(spec->target.sm_count, cluster);
    way.workers = tiles < most ? tiles : most;
    bool can = tiles < INT32_MAX / 2 && lay_out(v, cluster).stages > 0;
    if (v->parts && (way.columns > 65535 || way.row_tiles > 65535))
        can = false;
    if (cluster > 1 && (tiles > most || cluster > steps)) /* all at once, a step for each */
        can = false;
    way.seconds = can ? estimate(spec, &way, m) : INFINITY;
    return way;
}

static method best_of_variant(const moq_linear_spec *spec, int64_t m, const variant *v) {
    int least = v->parts && v->k_groups == 1 ? 2 : 1;
    int most = v->parts ? MAX_CLUSTER : 1;
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
    return (v->tokens == 32 || m > v->tokens / 2) && (v->tokens == 256 || m <= 4 * v->tokens);
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

/* What a call works in, as offsets; codes are first. */
typedef struct {
    int64_t scales, bytes;
} areas;

static areas areas_of(const moq_linear_call *call) {
    areas w = {.scales = divide_up(call->m * call->spec->in_features, 256) * 256};
    w.bytes = w.scales + call->m * 4;
    return w;
}

static moq_status quantize(const moq_linear_call *call, const areas *w, moq_err *err) {
    uint8_t *workspace = (uint8_t *)call->workspace;
    moq_cuda_quantize q = {.x = call->x,
                           .mode = MOQ_INPUT_E4M3_TOKEN,
                           .codes = workspace,
                           .code_stride = call->spec->in_features,
                           .code_columns = call->spec->in_features,
                           .scales = workspace + w->scales,
                           .scale_row = 1,
                           .stream = call->stream,
                           .next_is_busy = true,
                           .paired = true};
    return moq_cuda_quantize_rows(&q, err);
}

/* Weights on their way at once at the start of a block, so that x is not queued behind all. */
#define FLIGHT_BYTES 49152

static gemm_args args_of(const moq_linear_call *call, const method *way, layout l) {
    const moq_linear_spec *spec = call->spec;
    int flight = FLIGHT_BYTES / (way->shape->row_groups * 64 * 72);
    int after = l.behind ? l.stages * way->shape->stage : 0;
    int64_t steps = divide_up(spec->in_features, STEP);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .steps = (int)steps,
                   .row_tiles = (int)way->row_tiles,
                   .columns = (int)way->columns,
                   .tokens = (int)tokens_of(call->m, way),
                   .box = (int)tokens_of(call->m, way),
                   .stages = l.stages,
                   .flight = flight > 1 ? flight : 1,
                   .part_steps = (int)(steps / way->cluster),
                   .more_parts = (int)(steps % way->cluster),
                   .room = after,
                   .side = l.side,
                   .turn = after,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale,
                   .fold_scale = call->fold_scale,
                   .x_scale = (const float *)((uint8_t *)call->workspace + areas_of(call).scales),
                   .per_token = true};
    return a;
}

static moq_status run(const moq_linear_call *call, const method *way, moq_err *err) {
    const variant *v = way->shape;
    const moq_linear_spec *spec = call->spec;
    CUtensorMap weights, tokens;
    if (!v || way->seconds == INFINITY)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "NVFP4 linear: %lld rows are too many",
                        (long long)call->m);
    areas w = areas_of(call);
    MOQ_TRY(quantize(call, &w, err));
    layout l = lay_out(v, way->cluster);
    gemm_args a = args_of(call, way, l);
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, moq_pack_slabs(spec->out_features),
                                 moq_pack_blocks(spec->in_features) * (MOQ_PACK_BYTES / 8),
                                 (uint32_t)v->row_groups * 4, 2 * MOQ_PACK_BYTES / 8, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, call->workspace, call->m, spec->in_features,
                                spec->in_features, (uint32_t)a.box, err));
    moq_launch launch = {.what = "NVFP4 linear",
                         .kernel = v->kernel,
                         .grid = v->parts ? dim3((unsigned)way->cluster, (unsigned)way->row_tiles,
                                                 (unsigned)way->columns)
                                          : dim3((unsigned)(way->workers * way->cluster)),
                         .block = dim3((unsigned)v->threads),
                         .cluster = way->cluster > 1 ? (unsigned)way->cluster : 0,
                         .shared = (size_t)(l.stages * v->stage + l.behind),
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" double moq_cuda_nvfp4_fp8_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(spec, m, 0).seconds;
}

extern "C" int32_t moq_cuda_nvfp4_fp8_gemm_choose(const moq_linear_spec *spec, int64_t m) {
    return (int32_t)(method_for(spec, m, 0).shape - VARIANTS) + 1;
}

/* The choice, and the shapes that are not expected to take half as long again. */
extern "C" uint32_t moq_cuda_nvfp4_fp8_gemm_variants(const moq_linear_call *call) {
    double best = method_for(call->spec, call->m, 0).seconds;
    uint32_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (suits(&VARIANTS[i], call->m) &&
            best_of_variant(call->spec, call->m, &VARIANTS[i]).seconds < 1.5 * best)
            some |= 2u << i;
    return some;
}

extern "C" int64_t moq_cuda_nvfp4_fp8_gemm_workspace(const moq_linear_call *call) {
    return areas_of(call).bytes;
}

extern "C" moq_status moq_cuda_nvfp4_fp8_gemm(const moq_linear_call *call, moq_err *err) {
    method way = method_for(call->spec, call->m, call->variant);
    return run(call, &way, err);
}
