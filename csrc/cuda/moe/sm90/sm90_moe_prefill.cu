/* Experts of many tokens on Hopper:
 *
 *   1. slots sorted by expert                               group.cu
 *   2. x as w13 takes it: as it is, and the product gathers
 *      its tokens; or one row of codes a slot               sm90_moe_prefill_rows.cu,
 *      where router or weights have factors for x           expert_rows.cu
 *   3. g = rounded(act(rows W13^T + b13)), or its codes     sm90_moe_prefill_fp8.cu,
 *                                                           sm90_moe_prefill_nvfp4.cu
 *   4. g as w2 takes it, where that is another thing        as 2
 *   5. d = rows W2^T + b2, float32, or bfloat16 as y is
 *      (docs/numerics.md)                                   as 3
 *   6. y = the sum of d over the slots of a token           expert_sum.cu
 *
 * u stays in registers: a block has gate and up of the same columns (sm90_moe_prefill_tile.h). Long
 * inputs go in chunks of tokens whose rows fit MEMORY bytes. */
#include "cuda/moe/sm90/sm90_moe_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_rows.h"

#include "core/invariant.h"
#include "core/sizes.h"
#include "cuda/choice/moe_prefill.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/sm90/cuda_moe_sm90.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_prefill {

using namespace moe;

#define MEMORY ((int64_t)1 << 30)

typedef moq_status (*multiplication)(const prefill_product *p, moq_err *err);

/* Offsets in the workspace. The rows of x are read no more when d is written, but where the
 * products are linked. */
typedef struct {
    int64_t groups, written, g, codes, code_scales;
    int64_t x, x_scales;
    int64_t d;
    int64_t end;
} layout;

static row_format form_of(const moq_linear_spec *spec) {
    if (spec->weight == MOQ_WEIGHT_E2M1_PACKED)
        return ROWS_VALUES;
    return spec->input == MOQ_INPUT_E4M3_GROUP   ? ROWS_GROUP
           : spec->input == MOQ_INPUT_E4M3_TOKEN ? ROWS_TOKEN
                                                 : ROWS_TENSOR;
}

/* What becomes of g in the first product. */
static g_format g_format_of(const moq_moe_spec *spec) {
    row_format form = form_of(&spec->w2);
    if (form == ROWS_TENSOR)
        return G_TENSOR;
    return form == ROWS_GROUP && spec->gated ? G_GROUP : G_VALUES;
}

/* Whether g is multiplied as it comes out. */
static bool takes_g(const moq_moe_call *call) {
    if (form_of(&call->spec->w2) == ROWS_VALUES)
        return !call->w2.pre_quant_scale;
    return g_format_of(call->spec) != G_VALUES;
}

/* What rows are to the first product. */
typedef enum { X_AS_IS, X_CODES, X_ROWS } x_format;

static x_format x_format_of(const moq_moe_call *call) {
    bool values = form_of(&call->spec->w13) == ROWS_VALUES;
    if (call->weights_on_input || call->w13.pre_quant_scale)
        return X_ROWS;
    if (values && moq_moe_prefill_tile_rows(call->spec, call->path) > 64)
        return X_ROWS; /* large tiles would wait for rows that are gathered
                          (docs/lab/experts-prefill.md) */
    return values ? X_AS_IS : X_CODES;
}

/* Large tiles of FP8 come in pairs that share their weights, but for those with scales of groups
 * (docs/lab/experts-prefill.md). */
static slot_chunk chunk_of(const moq_moe_call *call, int64_t first, int64_t tokens) {
    row_format form = form_of(&call->spec->w13);
    int rows = moq_moe_prefill_tile_rows(call->spec, call->path);
    bool pairs = rows > 64 && (form == ROWS_TENSOR || form == ROWS_TOKEN);
    int align = form == ROWS_GROUP    ? MOQ_MOE_PREFILL_ALIGN
                : form == ROWS_VALUES ? MOQ_MOE_PREFILL_ROWS_OF_D
                                      : 1;
    return {call, first, tokens, rows, align, pairs};
}

/* Scales of a column of groups, which are copied for whole tiles from multiples of
 * MOQ_MOE_PREFILL_ALIGN on. */
static int64_t scale_stride(const slot_chunk *chunk) {
    return (most_rows(chunk) + MOQ_MOE_PREFILL_ALIGN - 1) / MOQ_MOE_PREFILL_ALIGN *
           MOQ_MOE_PREFILL_ALIGN;
}

static int64_t all_scales(const slot_chunk *chunk, row_format form, int64_t columns) {
    return scale_bytes(form, scale_stride(chunk), columns) +
           chunk->tile_rows * (int64_t)sizeof(float);
}

/* Of d, which is as large as all that is between the products, and is written and read again.
 * Float16 has not the range of sums. */
static moq_dtype dtype_of_d(const moq_moe_spec *spec) {
    return spec->w2.dtype == MOQ_DT_BF16 ? MOQ_DT_BF16 : MOQ_DT_F32;
}

/* Whether the second product begins as the first one leaves multiprocessors
 * (sm90_moe_prefill_fp8.cu): with small tiles of FP8, where the memory bounds both and the first
 * one ends unevenly; where no kernel makes codes of g between them; where there can be more tiles
 * of rows than go together, as those that do end together, when there is nothing left to begin
 * beside; and where kernels overlap, as counting costs up to 2.5 % where they do not
 * (docs/lab/experts-prefill.md). */
static bool links_products(const slot_chunk *chunk) {
    const moq_moe_call *call = chunk->call;
    return chunk->tile_rows == 64 && x_format_of(call) == X_CODES &&
           g_format_of(call->spec) != G_VALUES && most_tiles(chunk) > MOQ_MOE_PREFILL_TOGETHER &&
           moq_cuda_overlaps();
}

static layout smem_layout(const slot_chunk *chunk) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    int64_t rows = most_rows(chunk), h = w13->in_features, i = w2->in_features;
    x_format x = x_format_of(call);
    bool codes = form_of(w2) != ROWS_VALUES;
    layout l = {};
    l.groups = take_part(&l.end, groups_bytes(chunk));
    l.written = take_part(&l.end, links_products(chunk) ? rows * (int64_t)sizeof(int32_t) : 0);
    l.g = l.codes = l.code_scales = l.end;
    if (g_format_of(spec) == G_VALUES)
        l.g = take_part(&l.end, rows * row_bytes(ROWS_VALUES, w2->dtype, i));
    if (codes || !takes_g(call)) {
        l.codes = take_part(&l.end, rows * row_bytes(form_of(w2), w2->dtype, i));
        l.code_scales = take_part(&l.end, all_scales(chunk, form_of(w2), i));
    } else {
        l.codes = l.g;
    }
    l.x = l.d = l.end;
    if (x != X_AS_IS) {
        l.x = take_part(&l.end, rows * row_bytes(form_of(w13), w13->dtype, h));
        l.x_scales = take_part(&l.end, all_scales(chunk, form_of(w13), h));
    }
    if (links_products(chunk))
        l.d = l.end;
    int64_t after_d = l.d;
    take_part(&after_d, rows * w2->out_features * (int64_t)moq_dtype_size(dtype_of_d(spec)));
    l.end = l.end > after_d ? l.end : after_d;
    return l;
}

/* Tokens of a chunk: of so few chunks of one size that MEMORY has room for each. */
static int64_t chunk_tokens(const moq_moe_call *call) {
    slot_chunk all = chunk_of(call, 0, call->tokens);
    int64_t by_slots = call->tokens * call->spec->top_k / (INT32_MAX / 2) + 1;
    int64_t chunks = smem_layout(&all).end / MEMORY + 1;
    for (chunks = chunks > by_slots ? chunks : by_slots;; chunks++) {
        int64_t each = (call->tokens + chunks - 1) / chunks;
        slot_chunk chunk = chunk_of(call, 0, each);
        if (each == 1 || smem_layout(&chunk).end <= MEMORY)
            return each;
    }
}

/* g as the second product takes it, where that is another thing. */
static moq_status load_g(const slot_chunk *chunk, const slot_groups *groups, const void *values,
                         const expert_rows *g, moq_err *err) {
    bool codes = g->form != ROWS_VALUES && !chunk->call->w2.pre_quant_scale;
    return codes ? make_codes_of_g(chunk, groups, values, g, err)
                 : make_rows_of_g(chunk, groups, values, g, err);
}

/* Rows of x where the first product finds them. */
static moq_status load_x(const slot_chunk *chunk, const slot_groups *groups, const expert_rows *x,
                         prefill_product *p, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    x_format form = x_format_of(call);
    if (form == X_ROWS && (call->weights_on_input || call->w13.pre_quant_scale))
        return make_rows_of_x(chunk, groups, x, err);
    if (form != X_AS_IS) {
        p->early = true;
        return make_rows_of_tokens(chunk, groups, x, p->written, err);
    }
    p->gathered = true;
    p->row_stride = call->x->stride[0] * (int64_t)moq_dtype_size(call->x->dtype);
    return MOQ_OK;
}

static moq_status run_chunk(const slot_chunk *chunk, multiplication multiply, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    layout l = smem_layout(chunk);
    uint8_t *memory = (uint8_t *)call->workspace;
    slot_groups groups = groups_at(chunk, memory + l.groups);
    int64_t stride = scale_stride(chunk);
    expert_rows x = {form_of(&spec->w13), memory + l.x, (float *)(memory + l.x_scales), stride};
    expert_rows g = {form_of(&spec->w2), memory + l.codes, (float *)(memory + l.code_scales),
                     stride};
    if (x_format_of(call) == X_AS_IS)
        x.data = (uint8_t *)call->x->data +
                 chunk->first * call->x->stride[0] * (int64_t)moq_dtype_size(call->x->dtype);
    prefill_product first = {};
    first.product = {&spec->w13,        &call->w13,       &x,   most_rows(chunk), &groups,
                     most_tiles(chunk), chunk->tile_rows, NULL, call->stream};
    first.moe = spec;
    first.first = true;
    first.deep = moq_moe_prefill_deep(spec, call->path);
    first.g = memory + l.g;
    first.codes = {g_format_of(spec), g.data,
                   g.form == ROWS_TENSOR ? (float *)call->w2.input_scale : (float *)g.scales,
                   stride};
    first.written = links_products(chunk) ? (int32_t *)(memory + l.written) : NULL;
    prefill_product second = {};
    second.written = first.written;
    second.product = first.product;
    second.moe = spec;
    second.product.spec = &spec->w2;
    second.product.weight = &call->w2;
    second.product.rows = &g;
    second.product.out = (float *)(memory + l.d);
    second.deep = first.deep;
    second.early = true; /* the first product has waited for the grouping */
    second.rounds_d = dtype_of_d(spec) != MOQ_DT_F32;
    MOQ_TRY(group_slots(chunk, memory + l.groups, err));
    MOQ_TRY(load_x(chunk, &groups, &x, &first, err));
    MOQ_TRY(multiply(&first, err));
    if (!takes_g(call))
        MOQ_TRY(load_g(chunk, &groups, first.g, &g, err));
    MOQ_TRY(multiply(&second, err));
    return combine_rows(chunk, &groups, {memory + l.d, dtype_of_d(spec), true}, err);
}

static moq_status run(const moq_moe_call *call, multiplication multiply, moq_err *err) {
    int64_t each = chunk_tokens(call);
    MOQ_ASSERT(call->tokens > 0 && call->spec->experts <= MOQ_CUDA_MOE_EXPERTS);
    for (int64_t first = 0; first < call->tokens; first += each) {
        int64_t left = call->tokens - first;
        slot_chunk chunk = chunk_of(call, first, left < each ? left : each);
        MOQ_TRY(run_chunk(&chunk, multiply, err));
    }
    return MOQ_OK;
}

static int64_t workspace(const moq_moe_call *call) {
    slot_chunk chunk = chunk_of(call, 0, chunk_tokens(call));
    return smem_layout(&chunk).end;
}

extern "C" int64_t moq_cuda_moe_fp8_prefill_workspace(const moq_moe_call *call) {
    return workspace(call);
}

extern "C" int64_t moq_cuda_moe_nvfp4_prefill_workspace(const moq_moe_call *call) {
    return workspace(call);
}

extern "C" moq_status moq_cuda_moe_fp8_prefill(const moq_moe_call *call, moq_err *err) {
    return run(call, multiply_fp8, err);
}

extern "C" moq_status moq_cuda_moe_nvfp4_prefill(const moq_moe_call *call, moq_err *err) {
    return run(call, multiply_nvfp4, err);
}

} // namespace moq::moe_prefill
