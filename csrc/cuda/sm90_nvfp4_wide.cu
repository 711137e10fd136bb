/* NVFP4 linear of many tokens on Hopper: y[m, n] = round(sum_k x[m, k] W[n, k] + bias[n]) of 16-bit
 * activations and the exact weights, which stay packed in memory.
 *
 * A block has a tile at a time, 128 rows of W by up to 256 tokens, and two warpgroups that turn
 * codes into operands in registers and multiply them; two warps copy. What they copy goes round in
 * a ring of steps of 64 columns. The tiles of a block follow each other without a barrier among its
 * warpgroups, so that the outputs of one are written under the products of the other.
 *
 * What bounds it (H200, docs/lab.md): the tensor cores and the power they take. A step of 256
 * tokens is 1024 cycles of products; its 8192 weights take 17 instructions for 8, a seventh of what
 * can be issued meanwhile. */
#include "cuda/launch.h"
#include "cuda/linear.h"
#include "cuda/sm90_nvfp4_products.h"
#include "cuda/sm90_nvfp4_tile.h"
#include "cuda/tensor_map.h"

#include <math.h>

#define THREADS     384
#define BAND_TOKENS 2048 /* tokens that are done together, for the sake of L2 */

template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const taps *t, board<S> *b,
                                               uint32_t turn, int group, int rank) {
    ring_place slot = {0, 0};
    wait_for_predecessor();
    for (course c = start<S>(a); c.index < c.count; c.index += c.stride) {
        place at = place_of<S>(a, c.index, rank);
        float sum[S::T / 2] = {};
        fetch_board<S>(a, b, &at, group);
        multiply<S>(t, a->steps, &slot, sum);
        write_outputs<S>(a, b, turn, &at, group, sum);
    }
}

template <class S>
static __global__ void __launch_bounds__(THREADS, 1)
    nvfp4_wide(const __grid_constant__ CUtensorMap tokens, const __grid_constant__ gemm_args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[2 * MAX_STAGES];
    __shared__ __align__(16) board<S> boards[2];
    uint32_t first = fixed_shared_address(barrier), x = fixed_shared_address(smem);
    uint32_t weights = x + args.stages * S::token_bytes;
    uint32_t turn = weights + args.stages * S::weight_bytes;
    int rank = S::pair ? (int)rank_in_cluster() : 0;
    uint32_t full = first, empty = first + 8 * MAX_STAGES;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.stages; i++) {
            mbarrier_init(full + 8u * i, 2);
            mbarrier_init(empty + 8u * i, CONSUMERS / 32 * (S::pair ? 2 : 1) * WARP_ARRIVALS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    if (S::pair)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        more_registers<240>();
        int group =
            __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
        uint32_t own = weights + threadIdx.x / 32 * MOQ_PACK_BYTES;
        taps t = {full, empty, wgmma_operand(x), own, args.stages};
        consume<S>(&args, &t, &boards[group], turn + group * S::turn_bytes, group, rank);
    } else {
        fewer_registers<24>();
        pipe of_weights = {full, empty, weights, args.stages, rank};
        pipe of_tokens = {full, empty, x, args.stages, rank};
        if (threadIdx.x < CONSUMERS + 32)
            produce_weights<S>(&args, &of_weights);
        else if (threadIdx.x == CONSUMERS + 32)
            produce_tokens<S>(&args, &of_tokens, &tokens);
    }
    if (S::pair) {
        __syncwarp();
        cluster_sync(); /* the other block may still copy to this one */
    }
}

/* ---- shapes ---- */

typedef struct {
    int tokens, blocks; /* of a tile; that share its tokens */
    int token_bytes, weight_bytes;
    int boards;            /* bytes of static shared memory */
    double step;           /* microseconds, where all multiprocessors are busy */
    const void *kernel[2]; /* of bfloat16 and of float16 */
} variant;

template <int T, sharing SHARE> static variant variant_of(double step) {
    typedef tile<AS_BF16, T, SHARE, false> bf16;
    typedef tile<AS_F16, T, SHARE, false> f16;
    return {T,
            bf16::pair ? 2 : 1,
            bf16::token_bytes,
            bf16::weight_bytes,
            2 * (int)sizeof(board<bf16>),
            step,
            {(const void *)nvfp4_wide<bf16>, (const void *)nvfp4_wide<f16>}};
}

static const variant VARIANTS[] = {
    variant_of<256, SHARE_TOKENS>(0.635),
    variant_of<256, ALONE>(0.65),
    variant_of<128, SHARE_TOKENS>(0.42),
    variant_of<128, ALONE>(0.43),
};

enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* How a call is done. Workers are blocks or pairs of them. */
typedef struct {
    const variant *shape;
    int64_t row_tiles, columns, workers;
    double seconds;
} method;

/* Clusters of two go to neighbours, of which every multiprocessor of an H200 has one. */
static method method_of(const moq_linear_spec *spec, int64_t m, const variant *v) {
    method way = {v, divide_up(spec->out_features, ROWS * v->blocks), divide_up(m, v->tokens)};
    int64_t tiles = way.row_tiles * way.columns, most = spec->target.sm_count / v->blocks;
    double steps = (double)divide_up(spec->in_features, MOQ_PACK_K);
    double turns = (double)divide_up(tiles, most);
    way.workers = tiles < most ? tiles : most;
    way.seconds = 3.0e-6 + turns * (steps * v->step + 0.004 * v->tokens) * 1e-6;
    return way;
}

/* Variant 0 is the choice among the shapes, the others are one shape each. */
static method method_for(const moq_linear_spec *spec, int64_t m, int32_t which) {
    method best = {.seconds = INFINITY};
    for (int i = 0; i < VARIANT_COUNT; i++) {
        method way = method_of(spec, m, &VARIANTS[i]);
        if (which == i + 1)
            return way;
        if (way.seconds < best.seconds)
            best = way;
    }
    return best;
}

/* ---- launch ---- */

static gemm_args args_of(const moq_linear_call *call, const method *way, int limit) {
    const moq_linear_spec *spec = call->spec;
    const variant *v = way->shape;
    int64_t band = BAND_TOKENS / v->tokens;
    int stages = (limit - 1024 - 16 * MAX_STAGES - v->boards - 4 * TURN_BYTES) /
                 (v->token_bytes + v->weight_bytes);
    gemm_args a = {.m = (int)call->m,
                   .n = (int)spec->out_features,
                   .slabs = (int)moq_pack_slabs(spec->out_features),
                   .blocks = (int)moq_pack_blocks(spec->in_features),
                   .steps = (int)moq_pack_blocks(spec->in_features),
                   .row_tiles = (int)way->row_tiles,
                   .columns = (int)way->columns,
                   .band = (int)(band < way->columns ? band : way->columns),
                   .stages = stages < MAX_STAGES ? stages : MAX_STAGES,
                   .weight = call->weight,
                   .out = moq_output_of(call),
                   .output_scale = call->output_scale};
    return a;
}

extern "C" double moq_cuda_nvfp4_wide_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(spec, m, 0).seconds;
}

/* The choice, and the shapes that are not expected to take half as long again. */
extern "C" uint32_t moq_cuda_nvfp4_wide_variants(const moq_linear_call *call) {
    double best = method_for(call->spec, call->m, 0).seconds;
    uint32_t some = 1;
    for (int i = 0; i < VARIANT_COUNT; i++)
        if (method_of(call->spec, call->m, &VARIANTS[i]).seconds < 1.5 * best)
            some |= 2u << i;
    return some;
}

extern "C" moq_status moq_cuda_nvfp4_wide(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    method way = method_for(spec, call->m, call->variant);
    const variant *v = way.shape;
    moq_cuda_device device;
    CUtensorMap tokens;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(call, &way, device.shared_per_block);
    const moq_tensor *x = call->x;
    MOQ_TRY(moq_tensor_map_rows(&tokens, x->data, call->m, spec->in_features * 2, x->stride[0] * 2,
                                (uint32_t)(v->tokens / v->blocks), err));
    moq_launch launch = {
        .what = "NVFP4 linear",
        .kernel = v->kernel[x->dtype == MOQ_DT_F16],
        .grid = dim3((unsigned)(way.workers * v->blocks)),
        .block = dim3(THREADS),
        .cluster = v->blocks > 1 ? (unsigned)v->blocks : 0,
        .shared = (size_t)(a.stages * (v->token_bytes + v->weight_bytes) + 4 * TURN_BYTES),
        .stream = (cudaStream_t)call->stream,
        .overlap = true};
    void *parameters[] = {&tokens, &a};
    return moq_cuda_launch(&launch, parameters, err);
}
