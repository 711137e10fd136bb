/* NVFP4 linear for some dozens of tokens on Hopper: y[m, n] = round(sum_k x[m, k] W[n, k] +
 * bias[n]) of 16-bit activations and exact weights.
 *
 * W gives the 64 rows of a warpgroup's products, from registers, where a warp decodes its packed
 * codes while the products before are under way; the tokens come in as they are. A block has two to
 * four warpgroups that multiply and a warp each that copies weights and tokens, which go round in a
 * ring of steps of 128 columns. W is constant, so the ring is filled with it before x is complete
 * (dependent launch). Where a layer has fewer tiles than the chip multiprocessors, K is divided
 * among the blocks of a cluster and the warpgroups with the same rows; sums come together as
 * sm90_gemm_outputs.h has it, always in the same order.
 *
 * What bounds it (H200, docs/lab.md): 127 instructions of a warp for 16 rows by 64 columns, of
 * which 105 decode, so 160 to 220 cycles of a scheduler; with 128 tokens the tensor cores, which
 * share the register file with the decoding; what the second-level cache delivers, of x too, which
 * every tile of rows reads again. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/sm90_grid.h"
#include "cuda/sm90_nvfp4_gemm.h"
#include "cuda/tensor_map.h"

#include <math.h>

#define BARRIERS (3 * MAX_STAGES + 2)

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
        wait_for_predecessor(); /* at once from the second tile on */
        if (S::parts && !S::pair && blocks_in_cluster() > 1)
            cluster_wait(); /* all blocks run */
        edge = fetch_margin<S>(a, &at);
        if (S::k_groups == 1 || group % S::k_groups == 0) {
            multiply<S>(t, (c.end - c.first + S::k_groups - 1) / S::k_groups, &step, sum);
        } else {
            spot second = {S::stage, 8, 0};
            multiply<S>(t, (c.end - c.first) / S::k_groups, &second, sum);
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
            mbarrier_init(p->gate.empty + 8u * i,
                          S::row_groups * (S::pair ? 8 : 4) * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair) {
        cluster_sync();
        return;
    }
    __syncthreads();
    if (S::parts && blocks_in_cluster() > 1)
        cluster_arrive(); /* for whoever waits to send sums here */
}

template <class S>
static __global__ void __launch_bounds__(S::threads, 1)
    nvfp4_gemm(const __grid_constant__ CUtensorMap weights,
               const __grid_constant__ CUtensorMap tokens, const __grid_constant__ gemm_args args) {
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
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

typedef struct {
    int tokens, row_groups, k_groups;
    bool parts, pair;
    int threads, stage;
    double step;           /* microseconds, fitted */
    const void *kernel[2]; /* of bfloat16, of float16 */
} variant;

template <int T, int ROW_GROUPS, int K_GROUPS, bool PARTS, bool PAIR = false>
static variant variant_of(double step) {
    typedef tile<MOQ_NVFP4_BF16, T, ROW_GROUPS, K_GROUPS, PARTS, PAIR> bf16;
    typedef tile<MOQ_NVFP4_F16, T, ROW_GROUPS, K_GROUPS, PARTS, PAIR> f16;
    return {
        T,           ROW_GROUPS, K_GROUPS,
        PARTS,       PAIR,       bf16::threads,
        bf16::stage, step,       {(const void *)nvfp4_gemm<bf16>, (const void *)nvfp4_gemm<f16>}};
}

static const variant VARIANTS[] = {
    variant_of<16, 2, 1, false>(0.406),        variant_of<16, 3, 1, false>(0.505),
    variant_of<16, 4, 1, false>(0.598),        variant_of<16, 2, 1, true>(0.404),
    variant_of<16, 3, 1, true>(0.485),         variant_of<16, 2, 2, true>(0.619),
    variant_of<16, 1, 2, true>(0.431),         variant_of<32, 2, 1, false>(0.454),
    variant_of<32, 4, 1, false>(0.690),        variant_of<32, 3, 1, false>(0.619),
    variant_of<32, 2, 1, true>(0.406),         variant_of<32, 3, 1, true>(0.496),
    variant_of<32, 4, 1, true>(0.631),         variant_of<32, 2, 2, true>(0.653),
    variant_of<32, 1, 2, true>(0.412),         variant_of<64, 2, 1, false>(0.511),
    variant_of<64, 4, 1, false>(0.870),        variant_of<64, 3, 1, false>(0.733),
    variant_of<64, 2, 1, true>(0.413),         variant_of<64, 3, 1, true>(0.561),
    variant_of<64, 4, 1, true>(0.774),         variant_of<64, 2, 2, true>(0.788),
    variant_of<64, 1, 2, true>(0.407),         variant_of<128, 2, 1, false>(0.690),
    variant_of<128, 4, 1, false>(1.360),       variant_of<128, 3, 1, false>(1.005),
    variant_of<128, 2, 1, true>(0.585),        variant_of<128, 3, 1, true>(0.838),
    variant_of<128, 4, 1, true>(1.270),        variant_of<128, 2, 2, true>(1.140),
    variant_of<128, 2, 1, false, true>(0.747),
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
    int64_t unit = way->shape->pair ? 16 : way->columns == 1 ? 1 : 8;
    return divide_up(divide_up(m, way->columns), unit) * unit;
}

/* Seconds of a call: the products, W from memory and all tiles from the second-level cache at the
 * same time, then sums and outputs; of x more than 1.5 MB comes slower. Fitted to 503 times of 14
 * layers with 16 to 256 tokens on an H200, then to 461 of 16 layers with 32 to 256 (docs/lab.md):
 * 6.5 % root mean square, and the choice costs 0.3 %. */
static double estimate(const moq_linear_spec *spec, const method *way, int64_t m) {
    const variant *v = way->shape;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double steps = (double)divide_up(spec->in_features, STEP),
           tokens = fmax(16, (double)tokens_of(m, way));
    double tiles = (double)(way->row_tiles * way->columns) * (v->pair ? 2 : 1);
    double turns = (double)divide_up(way->row_tiles * way->columns, way->workers);
    double blocks = (double)way->workers * way->cluster * (v->pair ? 2 : 1);
    double share = v->row_groups * 64 * 72 + tokens * (STEP * 2) * (v->pair ? 0.5 : 1.0);
    double products = turns * steps / way->cluster / v->k_groups * v->step * 1e-6;
    double far = 1 + 4.5e-8 * fmax(0, (double)m * k * 2 - 1.5e6);
    double copies = tiles * steps * share * far / (v->tokens < 128 ? 14.5e12 : 11.4e12);
    double memory = n * k * 0.5625 / 4.6e12 / fmin(1, blocks / 80);
    double sums =
        v->parts ? 5.56e-8 * fmin(tokens, 64) + 3.8e-8 * fmax(0, tokens - 64) : 2.1e-8 * tokens;
    double outputs = turns * (3.9e-7 * v->row_groups + sums);
    return 0.5e-6 + outputs +
           cbrt(products * products * products + memory * memory * memory +
                copies * copies * copies);
}

static method method_of(const moq_linear_spec *spec, int64_t m, const variant *v, int cluster) {
    int pair = v->pair ? 2 : 1;
    method way = {v, cluster, divide_up(spec->out_features, 64 * v->row_groups * pair),
                  divide_up(m, v->tokens)};
    int64_t tiles = way.row_tiles * way.columns, steps = divide_up(spec->in_features, STEP);
    int64_t most = clusters_that_fit(spec->target.sm_count, cluster * pair);
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
    int most = v->parts ? MAX_CLUSTER / (v->pair ? 2 : 1) : 1;
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
    return (v->tokens == 16 || m > v->tokens / 2) && (v->tokens == 128 || m <= 4 * v->tokens);
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
                   .box = (int)tokens_of(call->m, way) / (way->shape->pair ? 2 : 1),
                   .stages = l.stages,
                   .flight = flight > 1 ? flight : 1,
                   .part_steps = (int)(steps / way->cluster),
                   .more_parts = (int)(steps % way->cluster),
                   .room = after,
                   .side = l.side,
                   .turn = after,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale};
    return a;
}

static moq_status run(const moq_linear_call *call, const method *way, moq_err *err) {
    const variant *v = way->shape;
    const moq_linear_spec *spec = call->spec;
    CUtensorMap weights, tokens;
    if (!v || way->seconds == INFINITY)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "NVFP4 linear: %lld rows are too many",
                        (long long)call->m);
    layout l = lay_out(v, way->cluster);
    gemm_args a = args_of(call, way, l);
    MOQ_TRY(moq_tensor_map_words(&weights, call->weight, moq_pack_slabs(spec->out_features),
                                 moq_pack_blocks(spec->in_features) * (MOQ_PACK_BYTES / 8),
                                 (uint32_t)v->row_groups * 4, 2 * MOQ_PACK_BYTES / 8, err));
    MOQ_TRY(moq_tensor_map_rows(&tokens, call->x->data, call->m, spec->in_features * 2,
                                call->x->stride[0] * 2, (uint32_t)a.box, err));
    int blocks = way->cluster * (v->pair ? 2 : 1); /* of a cluster */
    moq_launch launch = {
        .what = "NVFP4 linear",
        .kernel = v->kernel[spec->dtype == MOQ_DT_F16],
        .grid = v->parts ? dim3((unsigned)blocks, (unsigned)way->row_tiles, (unsigned)way->columns)
                         : dim3((unsigned)(way->workers * blocks)),
        .block = dim3((unsigned)v->threads),
        .cluster = blocks > 1 ? (unsigned)blocks : 0,
        .shared = (size_t)(l.stages * v->stage + l.behind),
        .stream = (cudaStream_t)call->stream,
        .overlap = true};
    void *parameters[] = {&weights, &tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" double moq_cuda_nvfp4_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(spec, m, 0).seconds;
}

extern "C" int32_t moq_cuda_nvfp4_gemm_choose(const moq_linear_spec *spec, int64_t m) {
    return (int32_t)(method_for(spec, m, 0).shape - VARIANTS) + 1;
}

/* The choice, and the shapes that are not expected to take half as long again. */
extern "C" uint32_t moq_cuda_nvfp4_gemm_variants(const moq_linear_call *call) {
    double best = method_for(call->spec, call->m, 0).seconds;
    uint32_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (suits(&VARIANTS[i], call->m) &&
            best_of_variant(call->spec, call->m, &VARIANTS[i]).seconds < 1.5 * best)
            some |= 2u << i;
    return some;
}

extern "C" moq_status moq_cuda_nvfp4_gemm(const moq_linear_call *call, moq_err *err) {
    method way = method_for(call->spec, call->m, call->variant);
    return run(call, &way, err);
}
