/* FP8 linear on mma.sync, for every chip from Ampere on: y[m, n] = round(sum over groups g of 128
 * columns of s(m, n, g) sum_k X[m, k] W[n, k], times sx[m] sw[n], + bias[n]).
 *
 * X is x quantized to e4m3 [M, K] in the workspace, as the layer prescribes
 * (cuda/tensor/cuda_quantize.h); partitions with input scales of their own have a matrix of codes
 * each. W is e4m3 [N, K] as prepared. s is the scale of x of a group times that of the 128 x 128
 * block of W, 1 for layers without blocks; sx and sw are the scales of tensors, tokens and rows.
 *
 * Two kinds of products, from the same registers:
 * - f16 (sm_80): each code becomes fp16, exactly but for 2^-8: its 7 bits are exponent and
 *   significand of a half, moved by the difference of the biases. Products and their float32 sums
 *   are exact to float32's rounding, so that float32 outputs use them, too. The columns of X and W
 *   may be permuted alike: of the four codes of a register, the odd ones go to one half of it and
 *   the even ones to the other.
 * - e4m3 (sm_89): the codes as they are. Their sums keep about 14 bits on some chips. Every 128
 *   columns either kind is added to float32 sums outside of the tensor cores.
 *
 * A block has a tile of TM rows of x and TN of W, of one partition and one row of block scales:
 * tiles begin anew with each partition. It goes through K in steps of 128 columns, copied by
 * cp.async, 16 bytes a thread, to a pipeline of STAGES stages. Rows are 128 bytes with their
 * 16-byte parts in the order part ^ (row % 8), so that ldmatrix has no bank conflicts, and zeros
 * beyond the ends. WM x WN warps share a tile, and WK of them split K of each step.
 *
 * What bounds it: reading W, with few rows; more warps in K read faster. With many rows the tensor
 * cores and, as f16, decoding: 5.5 instructions for a register of two values, of which a warp of 64
 * x 32 needs 24 for 16 products. Chips that it ran on: docs/results/README.md. */
#include "core/formats.h"
#include "core/invariant.h"
#include "cuda/choice/grid.h"
#include "cuda/linear/any/mma_fp8_tile.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize.h"

namespace moq::mma_fp8 {

/* ---- the kernel ---- */

typedef struct {
    fp8_args tile;
    fp8_weight w;
    moq_output out;
    int64_t token_tiles, weight_tiles;
} linear_args;

template <int TM, int TN, int WM, int WN, int WK, int STAGES, bool NATIVE>
static __global__ void __launch_bounds__(32 * WM * WN * WK, 1)
    mma_fp8_linear(const __grid_constant__ linear_args a) {
    extern __shared__ __align__(128) uint8_t memory[];
    mma_place p = place_of(blockIdx.x, a.token_tiles, a.weight_tiles);
    moq_tile rows = moq_find_tile(&a.tile.partitions, a.tile.partition_count, p.weight, TN);
    int64_t first = p.token * TM;
    int tokens = (int)min(a.tile.m - first, (int64_t)TM);
    fp8_tile<TM, TN, WM, WN, WK, STAGES, NATIVE>(a.tile, {a.w, a.out, rows, first, tokens}, memory);
}

/* ---- launch ---- */

typedef struct {
    int tm, tn, threads, stages;
    const void *kernel[2]; /* as f16, as e4m3 */
} shape;

#define SHAPE(tm, tn, wm, wn, wk, stages)                                                          \
    {                                                                                              \
        tm, tn, 32 * (wm) * (wn) * (wk), stages, {                                                 \
            (const void *)mma_fp8_linear<tm, tn, wm, wn, wk, stages, false>,                       \
                (const void *)mma_fp8_linear<tm, tn, wm, wn, wk, stages, true>                     \
        }                                                                                          \
    }

/* Shared memory is at most 96 KiB: every chip has 99 but for 8.0 and 9.0, which have more. */
static const shape DECODE = SHAPE(16, 32, 1, 1, 4, 8), MEDIUM = SHAPE(64, 64, 2, 2, 2, 4),
                   PREFILL = SHAPE(128, 128, 2, 4, 1, 3);

static int64_t block_count(const moq_linear_call *call, const shape *s) {
    return (call->m + s->tm - 1) / s->tm * moq_tile_count(call->spec, s->tn);
}

/* Shapes differ in how many warps split K. */
static const shape *shape_for(const moq_linear_call *call) {
    if (call->spec->batch_invariant)
        return &MEDIUM;
    if (call->m <= DECODE.tm)
        return &DECODE;
    return call->m <= MEDIUM.tm || block_count(call, &PREFILL) < call->spec->target.sm_count
               ? &MEDIUM
               : &PREFILL;
}

/* Workspace layout of a call. */
typedef struct {
    int64_t copies; /* copies of x as codes, one for each input scale */
    int64_t codes, scales, quantize, end;
} layout;

static moq_cuda_quantize quantization(const moq_linear_call *call, const layout *l) {
    uint8_t *memory = (uint8_t *)call->workspace;
    int64_t k = call->spec->in_features;
    moq_cuda_quantize q = {.x = call->x,
                           .mode = call->spec->input,
                           .given = call->input_scale,
                           .group = MOQ_FP8_BLOCK,
                           .codes = memory + l->codes,
                           .code_stride = k,
                           .code_columns = k,
                           .scales = memory + l->scales,
                           .scale_row = 1,
                           .scale_group = call->m,
                           .workspace = memory + l->quantize,
                           .stream = call->stream};
    return q;
}

static int64_t take(layout *l, int64_t bytes) {
    int64_t at = l->end;
    l->end += (bytes + 255) / 256 * 256;
    return at;
}

static layout workspace_layout(const moq_linear_call *call) {
    const moq_linear_spec *spec = call->spec;
    bool groups = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    layout l = {};
    l.copies = call->input_scale && !spec->quantized_input ? spec->partition_count : 1;
    if (spec->quantized_input)
        return l;
    l.codes = take(&l, l.copies * call->m * spec->in_features);
    l.scales = take(&l, call->m * (groups ? moq_linear_scale_columns(spec) : 1) * 4);
    moq_cuda_quantize q = quantization(call, &l);
    l.quantize = take(&l, moq_cuda_quantize_workspace(&q));
    MOQ_ASSERT((l.codes | l.scales | l.quantize) % 256 == 0 && l.quantize <= l.end);
    return l;
}

extern "C" int64_t moq_cuda_mma_fp8_workspace(const moq_linear_call *call) {
    return workspace_layout(call).end;
}

static moq_status quantize(const moq_linear_call *call, const layout *l, moq_err *err) {
    moq_cuda_quantize q = quantization(call, l);
    if (call->spec->quantized_input)
        return MOQ_OK;
    for (int64_t i = 0; i < l->copies; i++) {
        MOQ_TRY(moq_cuda_quantize_rows(&q, err));
        q.codes += call->m * call->spec->in_features;
        q.given += q.given ? 1 : 0;
    }
    return MOQ_OK;
}

static moq_status multiply(const moq_linear_call *call, const layout *l, bool native,
                           moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    const uint8_t *memory = (const uint8_t *)call->workspace;
    const shape *s = shape_for(call);
    bool groups = spec->weight == MOQ_WEIGHT_E4M3_BLOCK;
    linear_args args = {
        .tile = {.m = call->m,
                 .k = spec->in_features,
                 .codes =
                     spec->quantized_input ? (const uint8_t *)call->x->data : memory + l->codes,
                 .next_codes = l->copies > 1 ? call->m * spec->in_features : 0,
                 .next_row = spec->input == MOQ_INPUT_E4M3_TOKEN,
                 .next_partition = l->copies > 1,
                 .partition_count = spec->partition_count,
                 .partitions = moq_partitions_of(spec)},
        .w = {call->weight,
              call->input_scale ? call->input_scale : (const float *)(memory + l->scales),
              groups ? (const float *)call->weight_scale : NULL, call->output_scale},
        .out = moq_output_of(call),
        .token_tiles = (call->m + s->tm - 1) / s->tm,
        .weight_tiles = moq_tile_count(spec, s->tn)};
    int64_t blocks = block_count(call, s);
    if (blocks > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)call->m);
    moq_launch launch = {.what = "linear FP8",
                         .kernel = s->kernel[native],
                         .grid = dim3((unsigned)blocks),
                         .block = dim3((unsigned)s->threads),
                         .shared = (size_t)((s->tm + s->tn) * STEP * s->stages),
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}

static moq_status run(const moq_linear_call *call, bool native, moq_err *err) {
    layout l = workspace_layout(call);
    MOQ_TRY(quantize(call, &l, err));
    return multiply(call, &l, native, err);
}

extern "C" moq_status moq_cuda_mma_fp8_as_f16(const moq_linear_call *call, moq_err *err) {
    return run(call, false, err);
}

extern "C" moq_status moq_cuda_mma_fp8_as_e4m3(const moq_linear_call *call, moq_err *err) {
    return run(call, true, err);
}

} // namespace moq::mma_fp8
