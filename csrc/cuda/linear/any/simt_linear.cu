/* Linear of every shape, weight and chip: y[m, n] = round(fx[m] fw[n] sum_k X[m, k] W[n, k] +
 * bias[n]), on plain CUDA cores with float32 sums.
 *
 * W is one of: e4m3 [N, K] with scales of rows, blocks or groups; int8 [N, K]; int4 in pairs of
 * rows; e2m1 [N, K / 2] with swizzled block scales; units of core/nvfp4_packed.h. Scales of groups
 * are folded into e4m3 if the layer asks for it. X is rows of x, quantized here as the layer
 * prescribes (cpu/cpu_quantize.h has the formulas), or as they are. This kernel runs if no kernel
 * of a chip does, and other kernels are compared with it on the device.
 *
 * - A block has TOKENS rows of x, and ROWS rows of W for each of its warps. It goes through K in
 *   steps of 512 columns, 16 of them a lane's: a block scale of NVFP4 belongs to one lane, and one
 *   of 128 columns to eight.
 * - Each step, warp i quantizes row i of x into shared memory, as float32, in the order in which
 *   lanes read it without conflicts. Every warp then multiplies the 16 values of each lane by its
 *   rows of W, which it decodes once for all rows of x.
 * - A product of 16 columns is scaled and added to its sum; the lanes' sums are added at the end.
 *   The order is the same for every launch.
 * - Scales that need all of a row, or all of x, come from an earlier pass (amax), in the workspace.
 *
 * What bounds it: latency, step after step, with few rows of x; with many the fused multiply-adds,
 * 64 of them for four 16-byte reads from shared memory, beside decoding (one in eight) and
 * quantization. */
#include "core/formats.h"
#include "cuda/choice/grid.h"
#include "cuda/linear/any/simt_tile.h"
#include "cuda/runtime/launch.h"

namespace moq::simt {

#define PARTIALS  256 /* most partial maxima of a whole x */
#define FEW_TILES 512 /* with fewer blocks than this, a warp has one row */

/* Computes amax[i] of the rows i, i + blocks, ..., as bits, so that NaN is above all. */
static __global__ void __launch_bounds__(THREADS)
    find_amax(const __grid_constant__ moq_rows x, int64_t m, int64_t k, float *amax) {
    __shared__ uint32_t shared[WARPS];
    uint32_t most = 0;
    launch_dependents();
    wait_for_predecessor();
    for (int64_t row = blockIdx.x; row < m; row += gridDim.x) {
        for (int64_t column = threadIdx.x * LANE_K; column < k; column += THREADS * LANE_K) {
            float value[LANE_K];
            moq_load_values(&x, row, column, k, value);
            most = max(most, moq_amax_bits(value));
        }
    }
    most = max_of_block(most, shared);
    if (threadIdx.x == 0)
        amax[blockIdx.x] = __uint_as_float(most);
}

/* ---- the kernel ---- */

typedef struct {
    simt_args tile;
    simt_weight w;
    moq_output out;
    int64_t m, token_tiles;
} linear_args;

template <int MODE, int WEIGHT, int ROWS>
static __global__ void __launch_bounds__(THREADS)
    simt_linear(const __grid_constant__ linear_args args) {
    moq_tile rows = moq_find_tile(&args.tile.partitions, args.tile.partition_count,
                                  blockIdx.x / args.token_tiles, WARPS * ROWS);
    int64_t first = blockIdx.x % args.token_tiles * TOKENS;
    int tokens = (int)min(args.m - first, (int64_t)TOKENS);
    launch_dependents();
    wait_for_predecessor();
    simt_tile<MODE, WEIGHT, ROWS>(args.tile, {args.w, args.out, rows, first, tokens});
}

/* ---- launch ---- */

static bool needs_amax(const moq_linear_call *call) {
    moq_input_mode mode = input_of(call->spec);
    return mode == MOQ_INPUT_E4M3_TOKEN || (!call->input_scale && moq_input_has_scale(mode));
}

static int64_t amax_count(const moq_linear_call *call) {
    moq_input_mode mode = input_of(call->spec);
    if (mode == MOQ_INPUT_E4M3_TOKEN || mode == MOQ_INPUT_INT8 || call->m < PARTIALS)
        return call->m;
    return PARTIALS;
}

extern "C" int64_t moq_cuda_simt_workspace(const moq_linear_call *call) {
    return needs_amax(call) ? amax_count(call) * (int64_t)sizeof(float) : 0;
}

static moq_status launch_amax(const moq_linear_call *call, moq_err *err) {
    moq_rows x = moq_rows_of(call->x);
    int64_t m = call->m, k = call->spec->in_features;
    float *amax = (float *)call->workspace;
    moq_launch launch = {.what = "amax of x",
                         .kernel = (const void *)find_amax,
                         .grid = dim3((unsigned)amax_count(call)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&x, &m, &k, &amax};
    return moq_cuda_launch(&launch, parameters, err);
}

template <int MODE, int WEIGHT> struct linear_kernel {
    static const void *of(bool few) {
        return few ? (const void *)simt_linear<MODE, WEIGHT, 1>
                   : (const void *)simt_linear<MODE, WEIGHT, PREFILL_ROWS>;
    }
};

extern "C" moq_status moq_cuda_simt_linear(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    linear_args args = {.tile = {.x = moq_rows_of(call->x),
                                 .k = spec->in_features,
                                 .amax = (const float *)call->workspace,
                                 .parts = (int)amax_count(call),
                                 .partition_count = spec->partition_count,
                                 .partitions = moq_partitions_of(spec)},
                        .w = {call->weight, call->weight_scale, call->output_scale,
                              call->fold_scale, call->input_scale, spec->group_size},
                        .out = moq_output_of(call),
                        .m = call->m,
                        .token_tiles = (call->m + TOKENS - 1) / TOKENS};
    int64_t blocks = moq_tile_count(spec, WARPS * PREFILL_ROWS) * args.token_tiles;
    bool few = blocks < FEW_TILES;
    if (few)
        blocks = moq_tile_count(spec, WARPS) * args.token_tiles;
    if (blocks > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    if (needs_amax(call))
        MOQ_TRY(launch_amax(call, err));
    moq_launch launch = {.what = "linear",
                         .kernel = kernel_for<linear_kernel>(spec, few),
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::simt
