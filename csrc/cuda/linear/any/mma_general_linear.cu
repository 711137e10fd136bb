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
 * pipeline in shared memory (row_copies): lane (g, t) reads the same columns of a token.
 *
 * What bounds it: with few tokens reading W, with many the tensor cores. */
#include "core/invariant.h"
#include "cuda/choice/grid.h"
#include "cuda/linear/any/mma_general_config.h"
#include "cuda/linear/any/mma_general_tile.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_round.h"

namespace moq::mma_general {

#define WHAT "linear of codes of 8 or 4 bits"

typedef struct {
    general_args tile;
    const uint8_t *x; /* 16-bit values [m, K], of each partition from next_x on */
    int64_t x_stride; /* bytes */
    int64_t next_x;   /* bytes to the values of the next partition, or 0 */
    int64_t m;
    const uint8_t *weight;
    const void *weight_scale;
    const float *output_scale; /* [N], or NULL */
    const float *row_scale;    /* of x, [m], of each partition from next_scale on, or NULL */
    int64_t next_scale;        /* to the scales of the next partition, or 0 */
    moq_output out;
    int64_t token_tiles, weight_tiles;
} linear_args;

template <int KIND, moq_nvfp4_type TYPE, int TN, int WM, int WK, int WR>
static __global__ void __launch_bounds__(32 * WM * WK)
    mma_general_linear(const __grid_constant__ linear_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    mma_place p = place_of(blockIdx.x, a.token_tiles, a.weight_tiles);
    moq_tile rows =
        moq_find_tile(&a.tile.partitions, a.tile.partition_count, p.weight, 16 * WR * WM);
    int64_t first = p.token * TN;
    const float *row_scale =
        a.row_scale ? a.row_scale + rows.partition * a.next_scale + first : NULL;
    general_tile<KIND, TYPE, TN, WM, WK, WR>(
        a.tile,
        {a.x + rows.partition * a.next_x + first * a.x_stride, a.x_stride, a.weight, a.weight_scale,
         a.output_scale, row_scale, 1, a.out, rows, first, (int)min(a.m - first, (int64_t)TN)},
        memory);
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
    a.tile.k = spec->in_features;
    if (spec->weight == MOQ_WEIGHT_INT4_GROUP)
        a.tile.group = divisor_of(spec->group_size / HALF_STEP);
    a.weight = call->weight;
    a.weight_scale = call->weight_scale;
    a.output_scale = call->output_scale;
    a.out = moq_output_of(call);
    a.token_tiles = divide_up(call->m, s->tokens);
    a.weight_tiles = moq_tile_count(spec, s->rows);
    a.tile.partition_count = spec->partition_count;
    a.tile.partitions = moq_partitions_of(spec);
    if (!rounds(call))
        return a;
    moq_cuda_round r = rounding(call);
    moq_rounded first = moq_cuda_rounded(&r, 0), second = moq_cuda_rounded(&r, 1);
    a.x = first.values;
    a.x_stride = a.tile.k * 2;
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
