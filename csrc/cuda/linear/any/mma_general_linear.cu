/* Linear of 8- and 4-bit weights that general kernels read, on mma.sync, for every chip from Ampere
 * on: y[m, n] = round(fx[m] fw[n] sum over groups of s(n, group) sum_k X[m, k] C[n, k] + bias[n]).
 *
 * C is e4m3 with an E8M0 scale s for 32 columns, int8, or int4 in pairs of rows with a float32
 * scale for `group` columns. X has the 16-bit type of x: x itself, or the values of its e4m3 or
 * int8 codes, which that type holds, made before the product (cuda_round.h). Codes become 16-bit
 * numbers exactly; sums are float32.
 *
 * A block has WM warps of 16 WR rows of W, of one partition, by TN tokens; WK warps split K, 64
 * columns each in turn. W goes from memory to registers, two steps ahead: lane (g, t) of a warp has
 * columns 8t to 8t + 7 of each 32, of rows g and g + 8, or of int4 of the pair g. X goes through a
 * pipeline in shared memory (row_copies): lane (g, t) reads the same columns of token g.
 *
 * What bounds it: with few tokens reading W; with many the reads of X from shared memory, which
 * two lanes at a time ask the same banks for, at half of the tensor cores' rate. */
#include "core/invariant.h"
#include "cuda/choice/grid.h"
#include "cuda/device/general_codes.h"
#include "cuda/device/load.h"
#include "cuda/device/mma_tile.h"
#include "cuda/device/round.h"
#include "cuda/linear/any/mma_general_config.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_round.h"

namespace moq::mma_general {

#define WHAT      "linear of codes of 8 or 4 bits"
#define STEP      64 /* columns of a warp's step */
#define HALF_STEP 32 /* columns of two products, and of a scale of e4m3 */
#define STAGES    3

typedef struct {
    const uint8_t *x; /* 16-bit values [m, K], of each partition from next_x on */
    int64_t x_stride; /* bytes */
    int64_t next_x;   /* bytes to the values of the next partition, or 0 */
    int64_t m, k;
    const uint8_t *weight;
    const void *weight_scale;
    int group;                 /* columns of a scale of int4 */
    const float *output_scale; /* [N], or NULL */
    const float *row_scale;    /* of x, [m], of each partition from next_scale on, or NULL */
    int64_t next_scale;        /* to the scales of the next partition, or 0 */
    moq_output out;
    int64_t token_tiles, weight_tiles;
    int partition_count;
    moq_partitions partitions;
} linear_args;

/* ---- W ---- */

/* Codes of a lane in 32 columns: eight of row g and of row g + 8; of int4 both in `low`. */
typedef struct {
    uint2 low, high;
} codes;

template <int KIND>
static __device__ __forceinline__ codes load_codes(const linear_args &a, int first, int last,
                                                   int64_t column) {
    codes c = {make_uint2(0, 0), make_uint2(0, 0)};
    if (column >= a.k)
        return c;
    int g = threadIdx.x % 32 / 4;
    if (KIND == INT4) {
        int pair = min(first / 2 + g, last / 2);
        c.low = *(const uint2 *)(a.weight + (int64_t)pair * a.k + column);
        return c;
    }
    c.low = *(const uint2 *)(a.weight + (int64_t)min(first + g, last) * a.k + column);
    c.high = *(const uint2 *)(a.weight + (int64_t)min(first + g + 8, last) * a.k + column);
    return c;
}

/* Returns the row of the lane's sums: the first or the second of two. */
template <int KIND> static __device__ __forceinline__ int row_of_lane(int first, int second) {
    int g = threadIdx.x % 32 / 4;
    return KIND == INT4 ? first + 2 * g + second : first + g + 8 * second;
}

/* Returns the scale of a row in the 32 columns from `column` on. */
template <int KIND>
static __device__ __forceinline__ float scale_of(const linear_args &a, int row, int64_t column) {
    if (KIND == INT8 || column >= a.k)
        return 1.0f;
    if (KIND == INT4)
        return ((const float *)a.weight_scale)[(row * a.k + column) / a.group];
    uint8_t code = ((const uint8_t *)a.weight_scale)[(row * a.k + column) / HALF_STEP];
    return __uint_as_float(code ? (uint32_t)code << 23 : 0x00400000u); /* 2^(code - 127) */
}

/* ---- the tile ---- */

template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&w)[4],
                                                uint32_t x0, uint32_t x1) {
    const uint32_t x[2] = {x0, x1};
    if (TYPE == MOQ_NVFP4_F16)
        mma_f16(sum, w, x);
    else
        mma_bf16(sum, w, x);
}

/* Multiplies the lane's codes of 32 columns by TN tokens, and adds the products to sums. */
template <int KIND, moq_nvfp4_type TYPE, int TN>
static __device__ __forceinline__ void multiply_half(const codes &c, const float (&scale)[2],
                                                     uint32_t x, int half,
                                                     float (&sum)[TN / 8][4]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t w[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t low = i / 2 ? c.low.y : c.low.x, high = i / 2 ? c.high.y : c.high.x;
        w[i / 2][i % 2 * 2] = widen<KIND, TYPE>(spread<KIND>(low, i % 2), 0);
        w[i / 2][i % 2 * 2 + 1] =
            widen<KIND, TYPE>(spread<KIND>(KIND == INT4 ? low : high, i % 2), 1);
    }
#pragma unroll
    for (int j = 0; j < TN / 8; j++) {
        uint4 v = load_shared(x + (uint32_t)(8 * j + g) * MMA_ROW + part_at(4 * half + t, g));
        float part[4] = {};
        float (&to)[4] = KIND == INT8 ? sum[j] : part;
        multiply<TYPE>(to, w[0], v.x, v.y);
        multiply<TYPE>(to, w[1], v.z, v.w);
#pragma unroll
        for (int i = 0; i < 4 && KIND != INT8; i++)
            sum[j][i] = __fmaf_rn(part[i], scale[i / 2], sum[j][i]);
    }
}

template <int KIND, moq_nvfp4_type TYPE, int TN, int WM, int WK, int WR>
static __global__ void __launch_bounds__(32 * WM * WK)
    mma_general_linear(const __grid_constant__ linear_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr int THREADS = 32 * WM * WK, STAGE = WK * TN * MMA_ROW;
    int warp = threadIdx.x / 32, share = warp / WM, t = threadIdx.x % 4;
    mma_place p = place_of(blockIdx.x, a.token_tiles, a.weight_tiles);
    moq_tile rows = moq_find_tile(&a.partitions, a.partition_count, p.weight, 16 * WR * WM);
    int64_t token = p.token * TN;
    int tokens = (int)min(a.m - token, (int64_t)TN), first = rows.begin + warp % WM * 16 * WR;
    int last = rows.end - 1, steps = (int)((a.k + STEP * WK - 1) / (STEP * WK));
    codes ahead[2][WR][2];
    float sum[WR][TN / 8][4] = {};
    auto column_of = [&](int step, int half) {
        return ((int64_t)step * WK + share) * STEP + half * HALF_STEP;
    };
    auto load_step = [&](int step, codes(&to)[WR][2]) {
#pragma unroll
        for (int i = 0; i < 2 * WR; i++)
            to[i / 2][i % 2] =
                load_codes<KIND>(a, first + i / 2 * 16, last, column_of(step, i % 2) + 8 * t);
    };
    load_step(0, ahead[0]);
    load_step(1, ahead[1]);
    launch_dependents();
    wait_for_predecessor();
    row_copies<TN, WK, THREADS> x(a.x + rows.partition * a.next_x + token * a.x_stride, a.x_stride,
                                  2 * a.k, tokens, 0);
    uint32_t pipeline = shared_address(memory);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        x.copy(pipeline + i * STAGE);
        copy_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        x.copy(pipeline + (step + STAGES - 1) % STAGES * STAGE);
        copy_async_commit();
        codes own[WR][2];
#pragma unroll
        for (int i = 0; i < 2 * WR; i++) {
            own[i / 2][i % 2] = ahead[0][i / 2][i % 2];
            ahead[0][i / 2][i % 2] = ahead[1][i / 2][i % 2];
        }
        load_step(step + 2, ahead[1]);
        uint32_t from = pipeline + step % STAGES * STAGE + share * TN * MMA_ROW;
#pragma unroll
        for (int i = 0; i < 2 * WR; i++) {
            float scale[2];
#pragma unroll
            for (int second = 0; second < 2; second++)
                scale[second] =
                    scale_of<KIND>(a, min(row_of_lane<KIND>(first + i / 2 * 16, second), last),
                                   column_of(step, i % 2));
            multiply_half<KIND, TYPE, TN>(own[i / 2][i % 2], scale, from, i % 2, sum[i / 2]);
        }
    }
    copy_async_wait<0>();
    if (WK > 1)
        add_shares<WR * TN / 2, 32 * WM, WK>(&sum[0][0][0], (float *)memory, share);
    if (share > 0)
        return;
    constexpr float UNIT = KIND == E4M3_MX && TYPE == MOQ_NVFP4_F16 ? 256.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < WR * TN / 2; i++) {
        int n = row_of_lane<KIND>(first + i / (TN / 2) * 16, i / 2 % 2);
        int m = i % (TN / 2) / 4 * 8 + 2 * t + i % 2;
        if (n > last || m >= tokens)
            continue;
        float total = (&sum[0][0][0])[i] * UNIT;
        float factor = a.output_scale ? a.output_scale[n] : 1.0f;
        if (a.row_scale)
            factor = __fmul_rn(factor, a.row_scale[rows.partition * a.next_scale + token + m]);
        moq_store_output(&a.out, token + m, n, __fmul_rn(total, factor), moq_load_bias(&a.out, n));
    }
}

/* ---- launch ---- */

typedef struct {
    int tokens, rows, threads, shared;
    const void *kernel[3][2]; /* by KIND and type of x */
} shape;

template <int TN, int WM, int WK, int WR> static constexpr shape shape_of(void) {
#define OF(kind)                                                                                   \
    {                                                                                              \
        (const void *)mma_general_linear<kind, MOQ_NVFP4_BF16, TN, WM, WK, WR>,                    \
            (const void *)mma_general_linear<kind, MOQ_NVFP4_F16, TN, WM, WK, WR>                  \
    }
    return {TN,
            16 * WR * WM,
            32 * WM * WK,
            STAGES * WK * TN * MMA_ROW,
            {OF(E4M3_MX), OF(INT8), OF(INT4)}};
#undef OF
}

#define SHAPE(tokens, wm, wk, wr) shape_of<tokens, wm, wk, wr>(),
static const shape SHAPES[] = {MOQ_MMA_GENERAL_SHAPES(SHAPE)};
#undef SHAPE

static bool rounds(const moq_linear_call *call) {
    return call->spec->input != MOQ_INPUT_AS_IS;
}

static moq_cuda_round rounding(const moq_linear_call *call) {
    moq_cuda_round r = {call, call->x->dtype, (uint8_t *)call->workspace};
    return r;
}

extern "C" int64_t moq_cuda_mma_general_workspace(const moq_linear_call *call) {
    moq_cuda_round r = rounding(call);
    return rounds(call) ? moq_cuda_round_bytes(&r) : 0;
}

static moq_status launch(const moq_linear_call *call, const void *kernel, dim3 grid, int threads,
                         int shared, void *args, moq_err *err) {
    moq_launch launch = {.what = WHAT,
                         .kernel = kernel,
                         .grid = grid,
                         .block = dim3((unsigned)threads),
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

static linear_args args_of(const moq_linear_call *call, const shape *s) {
    const moq_linear_spec *spec = call->spec;
    moq_rows x = moq_rows_of(call->x);
    linear_args a = {};
    a.x = (const uint8_t *)x.data;
    a.x_stride = x.stride * 2;
    a.m = call->m;
    a.k = spec->in_features;
    a.weight = call->weight;
    a.weight_scale = call->weight_scale;
    a.group = spec->group_size;
    a.output_scale = call->output_scale;
    a.out = moq_output_of(call);
    a.token_tiles = divide_up(call->m, s->tokens);
    a.weight_tiles = moq_tile_count(spec, s->rows);
    a.partition_count = spec->partition_count;
    a.partitions = moq_partitions_of(spec);
    if (!rounds(call))
        return a;
    moq_cuda_round r = rounding(call);
    moq_rounded first = moq_cuda_rounded(&r, 0), second = moq_cuda_rounded(&r, 1);
    a.x = first.values;
    a.x_stride = a.k * 2;
    a.next_x = second.values - first.values;
    a.row_scale = first.scales;
    a.next_scale = second.scales - first.scales;
    return a;
}

extern "C" moq_status moq_cuda_mma_general(const moq_linear_call *call, moq_err *err) {
    int number = moq_mma_general_shape(call->spec, call->m);
    const shape *s = &SHAPES[number];
    int64_t tiles = moq_mma_general_tiles(call->spec, call->m, number);
    MOQ_ASSERT(s->shared <= 96 << 10);
    linear_args args = args_of(call, s);
    int kind = call->spec->weight == MOQ_WEIGHT_E4M3_GROUP ? E4M3_MX
               : call->spec->weight == MOQ_WEIGHT_INT8_ROW ? INT8
                                                           : INT4;
    if (tiles > INT32_MAX || call->m > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    moq_cuda_round r = rounding(call);
    if (rounds(call))
        MOQ_TRY(moq_cuda_round_rows(&r, WHAT, err));
    return launch(call, s->kernel[kind][call->x->dtype == MOQ_DT_F16], dim3((unsigned)tiles),
                  s->threads, s->shared, &args, err);
}

} // namespace moq::mma_general
