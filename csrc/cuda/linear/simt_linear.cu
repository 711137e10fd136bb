/* The linear of every shape, weight and chip: y[m, n] = round(fx[m] fw[n] sum_k X[m, k] W[n, k] +
 * bias[n]), on plain CUDA cores with float32 sums.
 *
 * W is e4m3 [N, K], e2m1 [N, K / 2] with swizzled block scales, or units of core/nvfp4_packed.h,
 * whose scales are folded into e4m3 where the layer asks for it; X are rows of x, quantized here as
 * the layer prescribes (cpu/cpu_quantize.h has the formulas), or as they are. It is what runs where
 * no kernel of a chip does, and what kernels of chips are compared with on the device.
 *
 * - A block has TOKENS rows of x and ROWS rows of W for each of its warps. It goes through K in
 *   steps of 512 columns, of which a lane has 16: a block scale of NVFP4 belongs to one lane, and
 *   one of 128 columns to eight.
 * - Of each step, warp i quantizes row i of x into shared memory, as float32, in the order in which
 *   lanes read it without conflicts. Every warp then multiplies the 16 values of each lane with
 *   its rows of W, which it decodes once for all rows of x.
 * - A product of 16 columns is scaled and added to its sum; the lanes' sums meet at the end. The
 *   order is the same for every launch.
 * - Scales that need all of a row, or all of x, come from a pass before (amax), in the workspace.
 *
 * Few rows of x are bound by latency, a step after the other; many by the fused multiply-adds, of
 * which a step has 64 for four 16-byte reads from shared memory, beside the decoding (one in eight)
 * and the quantization. */
#include "core/formats.h"
#include "core/nvfp4_packed.h"
#include "core/swizzle.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/runtime/launch.h"

namespace moq::simt {

#define WARPS     8
#define THREADS   (32 * WARPS)
#define TOKENS    WARPS /* rows of x of a block: a warp quantizes one */
#define LANE_K    16    /* columns of a lane */
#define STEP      (32 * LANE_K)
#define PARTIALS  256 /* amax of a whole x: at most so many parts */
#define MANY_ROWS 4   /* rows of W of a warp */
#define FEW_TILES 512 /* with fewer blocks than this, a warp takes one row */

typedef struct {
    moq_rows x;
    moq_output out;
    int64_t m, k, token_tiles;
    const uint8_t *weight;
    const void *weight_scale;
    const float *output_scale; /* [N], or NULL for blocks */
    const float *fold_scale;   /* [N] of FOLDED */
    const float *input_scale;  /* one a partition, or NULL */
    const float *amax;         /* [m] for tokens, or [parts] of x without an input_scale */
    int parts;
    int partition_count;
    moq_partitions partitions;
} simt_args;

/* ---- rounding ---- */

/* The nearest value of a format with `fraction` bits of significand, ties to even, `lowest` being
 * the exponent of its smallest normal number; beyond `most` it is that. NaN stays. */
static __device__ __forceinline__ float round_to_format(float value, int fraction, int lowest,
                                                        float most) {
    float magnitude = fabsf(value);
    if (!(magnitude <= most))
        return value != value ? value : copysignf(most, value);
    uint32_t exponent =
        max(__float_as_uint(magnitude) & 0x7f800000u, (uint32_t)(127 + lowest) << 23);
    float grid = __uint_as_float(exponent + ((uint32_t)(23 - fraction) << 23));
    return copysignf(__fsub_rn(__fadd_rn(magnitude, grid), grid), value);
}

static __device__ __forceinline__ float round_e4m3(float value) {
    return round_to_format(value, 3, -6, MOQ_E4M3_MAX);
}

static __device__ __forceinline__ float round_e2m1(float value) {
    return round_to_format(value, 1, 0, MOQ_E2M1_MAX);
}

/* ---- x ---- */

/* Columns column to column + 15 of a row, zeros from k on. */
static __device__ __forceinline__ void load_values(const moq_rows *x, int64_t row, int64_t column,
                                                   int64_t k, float (&value)[LANE_K]) {
    if (column + LANE_K <= k) {
        moq_chunk chunk = moq_load_chunk(x, row, (int)column);
        moq_widen(x, &chunk, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < LANE_K; i++)
        value[i] =
            column + i < k ? moq_load_one(x->data, row * x->stride + column + i, x->dtype) : 0.0f;
}

static __device__ __forceinline__ uint32_t max_of_block(uint32_t bits, uint32_t *shared) {
    bits = moq_max_of_lanes(bits, 32);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        bits = max(bits, shared[i]);
    return bits;
}

/* amax[i] of the rows i, i + blocks, ...; of bits, so that NaN is above all. */
static __global__ void __launch_bounds__(THREADS)
    find_amax(const __grid_constant__ moq_rows x, int64_t m, int64_t k, float *amax) {
    __shared__ uint32_t shared[WARPS];
    uint32_t most = 0;
    launch_dependents();
    wait_for_predecessor();
    for (int64_t row = blockIdx.x; row < m; row += gridDim.x) {
        for (int64_t column = threadIdx.x * LANE_K; column < k; column += THREADS * LANE_K) {
            float value[LANE_K];
            load_values(&x, row, column, k, value);
            most = max(most, moq_amax_bits(value));
        }
    }
    most = max_of_block(most, shared);
    if (threadIdx.x == 0)
        amax[blockIdx.x] = __uint_as_float(most);
}

/* The one scale of x in this partition: given, or of the amax of all of it. */
template <int MODE>
static __device__ __forceinline__ float tensor_scale(const simt_args *a, int partition,
                                                     uint32_t *shared) {
    if (a->input_scale)
        return a->input_scale[partition];
    uint32_t bits = (int)threadIdx.x < a->parts ? __float_as_uint(a->amax[threadIdx.x]) : 0;
    float amax = __uint_as_float(max_of_block(bits, shared));
    if (MODE == MOQ_INPUT_E4M3_TENSOR)
        return moq_tensor_scale(amax);
    float scale = __fdiv_rn(amax, MOQ_NVFP4_MAX);
    return scale == 0.0f ? 1.0f : scale;
}

static __device__ __forceinline__ void quantize_nvfp4(float (&value)[LANE_K], float scale) {
    float amax = __uint_as_float(moq_amax_bits(value));
    float block = round_e4m3(__fdiv_rn(amax, __fmul_rn(MOQ_E2M1_MAX, scale)));
    float step = __fmul_rn(block, scale);
#pragma unroll
    for (int i = 0; i < LANE_K; i++)
        value[i] = step == 0.0f ? 0.0f : __fmul_rn(round_e2m1(__fdiv_rn(value[i], step)), block);
}

/* What the codes of a lane's values mean, without the scale of the row. By groups, the lanes of a
 * group get its scale in *scale. */
template <int MODE>
static __device__ __forceinline__ void quantize(float (&value)[LANE_K], float *scale) {
    if (MODE == MOQ_INPUT_AS_IS)
        return;
    if (MODE == MOQ_INPUT_NVFP4) {
        quantize_nvfp4(value, *scale);
        return;
    }
    if (MODE == MOQ_INPUT_E4M3_GROUP)
        *scale = moq_group_scale(__uint_as_float(moq_max_of_lanes(moq_amax_bits(value), 8)));
    float inverse = MODE == MOQ_INPUT_E4M3_TENSOR ? __frcp_rn(*scale) : 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_K; i++)
        value[i] = round_e4m3(MODE == MOQ_INPUT_E4M3_TENSOR ? __fmul_rn(value[i], inverse)
                                                            : __fdiv_rn(value[i], *scale));
}

/* ---- W ---- */

/* How it is stored. FOLDED is PACKED with scales to be folded. */
enum { E4M3_ROW, E4M3_BLOCK, E2M1, PACKED, FOLDED };

/* Powers of two that the decoding leaves out: the biases of fp16 and of the format differ. */
#define E4M3_UNIT 256.0f
#define E2M1_UNIT 16384.0f

typedef struct {
    uint4 codes; /* of e2m1 the first half */
    float scale; /* e2m1: of the lane's columns; blocks: of the lane's 128 */
} weights;

static __device__ __forceinline__ float2 halves(uint32_t pair) {
    __half2 h;
    memcpy(&h, &pair, sizeof h);
    return __half22float2(h);
}

/* Bits as fp16: sign, then exponent and significand in its places. */
static __device__ __forceinline__ void decode_e4m3(uint4 codes, float (&w)[LANE_K]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t spread = __byte_perm((&codes.x)[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
        float2 pair = halves((spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7);
        w[2 * i] = pair.x;
        w[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ void decode_e2m1(uint4 codes, float (&w)[LANE_K]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t byte = (&codes.x)[i / 4] >> (i % 4 * 8);
        float2 pair = halves((byte & 0x07u) << 9 | (byte & 0x08u) << 12 | (byte & 0x70u) << 21 |
                             (byte & 0x80u) << 24);
        w[2 * i] = pair.x;
        w[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ float decode_scale(uint8_t code) {
    return E4M3_UNIT * halves((code & 0x80u) << 8 | (code & 0x7fu) << 7).x;
}

static __device__ __forceinline__ uint4 load_e4m3(const uint8_t *row, int64_t column, int64_t k) {
    uint4 codes = make_uint4(0, 0, 0, 0);
    if (k % LANE_K == 0)
        return *(const uint4 *)(row + column);
#pragma unroll
    for (int i = 0; i < LANE_K; i++) {
        if (column + i < k)
            (&codes.x)[i / 4] |= (uint32_t)row[column + i] << (i % 4 * 8);
    }
    return codes;
}

/* The lane's group of row n from its unit. */
static __device__ __forceinline__ weights load_packed(const simt_args *a, int64_t n,
                                                      int64_t column) {
    int r = n % MOQ_PACK_ROWS, g = r % 8, h = r / 8;
    int s = column % MOQ_PACK_K / LANE_K;
    int64_t unit = n / MOQ_PACK_ROWS * moq_pack_blocks(a->k) + column / MOQ_PACK_K;
    const uint8_t *from = a->weight + unit * MOQ_PACK_BYTES;
    weights w = {make_uint4(0, 0, 0, 0), decode_scale(from[moq_pack_scale_at(r, s)])};
#pragma unroll
    for (int t = 0; t < 4; t++) {
        uint32_t word = *(const uint32_t *)(from + moq_pack_word_at(g, t, s));
        w.codes.x |= moq_unpack_pair(word, h) << 8 * t;
        w.codes.y |= moq_unpack_pair(word, 2 + h) << 8 * t;
    }
    return w;
}

/* The lane's columns of row n of W, zeros from k on. */
template <int WEIGHT>
static __device__ __forceinline__ weights load_weights(const simt_args *a, int64_t n,
                                                       int64_t padded_row, int64_t column) {
    weights w = {make_uint4(0, 0, 0, 0), 0.0f};
    if (column >= a->k)
        return w;
    if (WEIGHT == PACKED || WEIGHT == FOLDED) {
        w = load_packed(a, n, column);
        if (WEIGHT == FOLDED)
            w.scale *= a->fold_scale[n];
        return w;
    }
    if (WEIGHT == E2M1) {
        uint2 codes = *(const uint2 *)(a->weight + (n * a->k + column) / 2);
        w.codes = make_uint4(codes.x, codes.y, 0, 0);
        int64_t across = moq_swizzle_across(a->k / LANE_K);
        int64_t at = moq_swizzle_at(padded_row, column / LANE_K, across);
        w.scale = decode_scale(((const uint8_t *)a->weight_scale)[at]);
        return w;
    }
    w.codes = load_e4m3(a->weight + n * a->k, column, a->k);
    if (WEIGHT == E4M3_BLOCK)
        w.scale = ((const float *)
                       a->weight_scale)[padded_row / 128 * ((a->k + 127) / 128) + column / 128];
    return w;
}

/* The values of codes without the unit of their format, which sums get at the end; folded weights
 * have none. */
template <int WEIGHT>
static __device__ __forceinline__ void decode(const weights &in, float (&w)[LANE_K]) {
    if (WEIGHT == E4M3_ROW || WEIGHT == E4M3_BLOCK) {
        decode_e4m3(in.codes, w);
        return;
    }
    decode_e2m1(in.codes, w);
#pragma unroll
    for (int i = 0; i < LANE_K && WEIGHT == FOLDED; i++)
        w[i] = round_e4m3(w[i] * E2M1_UNIT * in.scale);
}

/* What of the unit sums get, and what goes to the factor of the row: of e2m1 as much as the kernels
 * of tensor cores leave out of their products, so that sums overflow where theirs do. */
template <int WEIGHT> static __device__ __forceinline__ float unit_of_sums(void) {
    if (WEIGHT == E2M1 || WEIGHT == PACKED)
        return E2M1_UNIT / MOQ_NVFP4_FACTOR;
    return WEIGHT == FOLDED ? 1.0f : E4M3_UNIT;
}

template <int WEIGHT> static __device__ __forceinline__ float unit_of_factors(void) {
    return WEIGHT == E2M1 || WEIGHT == PACKED ? MOQ_NVFP4_FACTOR : 1.0f;
}

/* ---- the kernel ---- */

template <int MODE, int WEIGHT, int ROWS>
static __global__ void __launch_bounds__(THREADS)
    simt_linear(const __grid_constant__ simt_args args) {
    __shared__ float4 values[TOKENS][LANE_K / 4][32];
    __shared__ float group_scale[TOKENS][STEP / 128], token_scale[TOKENS];
    __shared__ uint32_t shared[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    moq_tile t = moq_find_tile(&args.partitions, args.partition_count,
                               blockIdx.x / args.token_tiles, WARPS * ROWS);
    int64_t first = blockIdx.x % args.token_tiles * TOKENS;
    int tokens = (int)min(args.m - first, (int64_t)TOKENS), row = t.begin + warp * ROWS;
    launch_dependents();
    wait_for_predecessor();
    float scale = 1.0f;
    if (MODE == MOQ_INPUT_E4M3_TENSOR || MODE == MOQ_INPUT_NVFP4)
        scale = tensor_scale<MODE>(&args, t.partition, shared);
    if (MODE == MOQ_INPUT_E4M3_TOKEN && warp < tokens)
        scale = moq_token_scale(args.amax[first + warp]);
    if (lane == 0)
        token_scale[warp] = scale;
    float sum[ROWS][TOKENS] = {};
    for (int64_t base = 0; base < args.k; base += STEP) {
        int64_t column = base + lane * LANE_K;
        weights w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int n = min(row + r, t.end - 1);
            w[r] = load_weights<WEIGHT>(&args, n, moq_padded_row(&args.partitions, t.partition, n),
                                        column);
        }
        __syncthreads(); /* the values of the step before have been read */
        if (warp < tokens) {
            float value[LANE_K];
            load_values(&args.x, first + warp, column, args.k, value);
            quantize<MODE>(value, &scale);
            if (MODE == MOQ_INPUT_E4M3_GROUP && lane % 8 == 0)
                group_scale[warp][lane / 8] = scale;
#pragma unroll
            for (int i = 0; i < LANE_K / 4; i++)
                values[warp][i][lane] =
                    make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
        }
        __syncthreads();
        float decoded[ROWS][LANE_K];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            decode<WEIGHT>(w[r], decoded[r]);
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            if (m >= tokens)
                continue;
            float4 x[LANE_K / 4];
#pragma unroll
            for (int i = 0; i < LANE_K / 4; i++)
                x[i] = values[m][i][lane];
            float of_x = MODE == MOQ_INPUT_E4M3_GROUP ? group_scale[m][lane / 8] : 1.0f;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float product = 0.0f;
#pragma unroll
                for (int i = 0; i < LANE_K; i++)
                    product = __fmaf_rn((&x[i / 4].x)[i % 4], decoded[r][i], product);
                if (MODE == MOQ_INPUT_E4M3_GROUP)
                    product = __fmul_rn(product, __fmul_rn(of_x, w[r].scale));
                else if (WEIGHT == E2M1 || WEIGHT == PACKED)
                    product = __fmul_rn(product, w[r].scale);
                sum[r][m] = __fadd_rn(sum[r][m], product);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            float total = sum[r][m];
#pragma unroll
            for (int i = 16; i > 0; i /= 2)
                total += __shfl_xor_sync(0xffffffffu, total, i);
            if (lane != r * TOKENS + m || m >= tokens || row + r >= t.end)
                continue;
            total *= unit_of_sums<WEIGHT>();
            if (args.output_scale) {
                float factor = args.output_scale[row + r] * unit_of_factors<WEIGHT>();
                if (WEIGHT == FOLDED)
                    factor *= __frcp_rn(args.fold_scale[row + r]);
                total = __fmul_rn(total, __fmul_rn(token_scale[m], factor));
            }
            moq_store_output(&args.out, first + m, row + r, total,
                             moq_load_bias(&args.out, row + r));
        }
    }
}

/* ---- launch ---- */

/* How x is read: a layer that leaves the choice to the library is computed exactly. */
static moq_input_mode input_of(const moq_linear_spec *spec) {
    return moq_linear_has_choice(spec) ? MOQ_INPUT_AS_IS : spec->input;
}

static bool needs_amax(const moq_linear_call *call) {
    moq_input_mode mode = input_of(call->spec);
    return mode == MOQ_INPUT_E4M3_TOKEN ||
           (!call->input_scale && (mode == MOQ_INPUT_E4M3_TENSOR || mode == MOQ_INPUT_NVFP4));
}

static int64_t amax_count(const moq_linear_call *call) {
    if (input_of(call->spec) == MOQ_INPUT_E4M3_TOKEN || call->m < PARTIALS)
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
                         .overlap = true};
    void *parameters[] = {&x, &m, &k, &amax};
    return moq_cuda_launch(&launch, parameters, err);
}

template <int MODE, int WEIGHT> static const void *kernel_with(bool few) {
    return few ? (const void *)simt_linear<MODE, WEIGHT, 1>
               : (const void *)simt_linear<MODE, WEIGHT, MANY_ROWS>;
}

static const void *kernel_for(const moq_linear_spec *spec, bool few) {
    bool packed = spec->weight == MOQ_WEIGHT_E2M1_PACKED;
    switch (input_of(spec)) {
    case MOQ_INPUT_AS_IS:
        return kernel_with<MOQ_INPUT_AS_IS, PACKED>(few);
    case MOQ_INPUT_E4M3_TENSOR:
        return !packed                  ? kernel_with<MOQ_INPUT_E4M3_TENSOR, E4M3_ROW>(few)
               : moq_linear_folds(spec) ? kernel_with<MOQ_INPUT_E4M3_TENSOR, FOLDED>(few)
                                        : kernel_with<MOQ_INPUT_E4M3_TENSOR, PACKED>(few);
    case MOQ_INPUT_E4M3_TOKEN:
        return packed ? kernel_with<MOQ_INPUT_E4M3_TOKEN, FOLDED>(few)
                      : kernel_with<MOQ_INPUT_E4M3_TOKEN, E4M3_ROW>(few);
    case MOQ_INPUT_E4M3_GROUP:
        return kernel_with<MOQ_INPUT_E4M3_GROUP, E4M3_BLOCK>(few);
    default:
        return kernel_with<MOQ_INPUT_NVFP4, E2M1>(few);
    }
}

extern "C" moq_status moq_cuda_simt_linear(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    simt_args args = {.x = moq_rows_of(call->x),
                      .out = moq_output_of(call),
                      .m = call->m,
                      .k = spec->in_features,
                      .token_tiles = (call->m + TOKENS - 1) / TOKENS,
                      .weight = call->weight,
                      .weight_scale = call->weight_scale,
                      .output_scale = call->output_scale,
                      .fold_scale = call->fold_scale,
                      .input_scale = call->input_scale,
                      .amax = (const float *)call->workspace,
                      .parts = (int)amax_count(call),
                      .partition_count = spec->partition_count,
                      .partitions = moq_partitions_of(spec)};
    int64_t blocks = moq_tile_count(spec, WARPS * MANY_ROWS) * args.token_tiles;
    bool few = blocks < FEW_TILES;
    if (few)
        blocks = moq_tile_count(spec, WARPS) * args.token_tiles;
    if (blocks > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    if (needs_amax(call))
        MOQ_TRY(launch_amax(call, err));
    moq_launch launch = {.what = "linear",
                         .kernel = kernel_for(spec, few),
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::simt
