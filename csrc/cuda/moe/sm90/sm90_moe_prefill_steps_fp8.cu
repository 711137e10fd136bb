/* NVFP4 experts of many tokens with FP8 products on Hopper (compute "fp8"):
 *
 *   1. slots sorted by expert                            group.cu
 *   2. rows of codes of x, one a slot, and their scales  sm90_moe_prefill_rows.cu
 *   3. g = rounded(act(rows W13^T + b13))                sm90_moe_prefill_nvfp4_fp8.cu
 *   4. rows of codes of g and their scales               as 2
 *   5. d = rows W2^T + b2, float32, or bfloat16 as y is  as 3
 *   6. y = the sum of d over the slots of a token        expert_sum.cu
 *
 * A scale of g is that of a whole row, of which no block has all columns, so that g is written.
 * Long inputs go in chunks of tokens whose rows fit MEMORY bytes. */
#include "core/invariant.h"
#include "core/sizes.h"
#include "cuda/choice/moe_folded.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/sm90/cuda_moe_sm90.h"
#include "cuda/moe/sm90/sm90_moe_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_rows.h"

namespace moq::moe_prefill {

using namespace moe;

#define MEMORY ((int64_t)1 << 30)

/* Offsets in the workspace. The rows of x are read no more when d is written. */
typedef struct {
    int64_t groups, g, codes, code_scales;
    int64_t x, x_scales;
    int64_t d;
    int64_t end;
} folded_layout;

static slot_chunk chunk_of(const moq_moe_call *call, int64_t first, int64_t tokens) {
    return {call, first, tokens, moq_moe_folded_tile_rows(call->path), 1, false};
}

/* Of d. Sums of FP8 products are no more exact than its rounding; float16 has not their range. */
static moq_dtype dtype_of_d(const moq_moe_spec *spec) {
    return spec->w2.dtype == MOQ_DT_BF16 ? MOQ_DT_BF16 : MOQ_DT_F32;
}

static folded_layout smem_layout(const slot_chunk *chunk) {
    const moq_moe_spec *spec = chunk->call->spec;
    int64_t rows = most_rows(chunk), h = spec->w2.out_features, i = spec->w2.in_features;
    folded_layout l = {};
    l.groups = take_part(&l.end, groups_bytes(chunk));
    l.g = take_part(&l.end, rows * row_bytes(ROWS_VALUES, spec->w2.dtype, i));
    l.codes = take_part(&l.end, rows * i);
    l.code_scales = take_part(&l.end, rows * (int64_t)sizeof(float));
    l.x = l.d = l.end;
    l.x = take_part(&l.end, rows * h);
    l.x_scales = take_part(&l.end, rows * (int64_t)sizeof(float));
    int64_t after_d = l.d;
    take_part(&after_d, rows * h * (int64_t)moq_dtype_size(dtype_of_d(spec)));
    l.end = l.end > after_d ? l.end : after_d;
    return l;
}

/* Tokens of a chunk: all, or as many as MEMORY has room for. */
static int64_t chunk_tokens(const moq_moe_call *call) {
    slot_chunk all = chunk_of(call, 0, call->tokens), one = chunk_of(call, 0, 1);
    if (call->tokens * call->spec->top_k <= INT32_MAX / 2 && smem_layout(&all).end <= MEMORY)
        return call->tokens;
    int64_t most = MEMORY / smem_layout(&one).end; /* whose parts are rounded up */
    most = most < 1 ? 1 : most;
    int64_t chunks = (call->tokens + most - 1) / most;
    return (call->tokens + chunks - 1) / chunks;
}

static moq_status run_chunk(const slot_chunk *chunk, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    folded_layout l = smem_layout(chunk);
    uint8_t *memory = (uint8_t *)call->workspace;
    slot_groups groups = groups_at(chunk, memory + l.groups);
    expert_rows x = {ROWS_TOKEN, memory + l.x, memory + l.x_scales};
    expert_rows g = {ROWS_TOKEN, memory + l.codes, memory + l.code_scales};
    prefill_product first = {}, second = {};
    first.product = {&spec->w13,        &call->w13,       &x,   most_rows(chunk), &groups,
                     most_tiles(chunk), chunk->tile_rows, NULL, call->stream};
    first.moe = second.moe = spec;
    first.first = true;
    first.g = memory + l.g;
    second.product = first.product;
    second.product.spec = &spec->w2;
    second.product.weight = &call->w2;
    second.product.rows = &g;
    second.product.out = (float *)(memory + l.d);
    second.early = true; /* the first product has waited for the grouping */
    second.rounds_d = dtype_of_d(spec) != MOQ_DT_F32;
    MOQ_TRY(group_slots(chunk, memory + l.groups, err));
    MOQ_TRY(make_paired_rows_of_x(chunk, &groups, &x, err));
    MOQ_TRY(multiply_nvfp4_fp8(&first, err));
    MOQ_TRY(make_paired_rows_of_g(chunk, &groups, first.g, &g, err));
    MOQ_TRY(multiply_nvfp4_fp8(&second, err));
    return combine_rows(chunk, &groups, {memory + l.d, dtype_of_d(spec), true}, err);
}

extern "C" moq_status moq_cuda_moe_nvfp4_fp8_prefill(const moq_moe_call *call, moq_err *err) {
    int64_t each = chunk_tokens(call);
    MOQ_ASSERT(call->tokens > 0 && call->spec->experts <= MOQ_CUDA_MOE_EXPERTS);
    for (int64_t first = 0; first < call->tokens; first += each) {
        int64_t left = call->tokens - first;
        slot_chunk chunk = chunk_of(call, first, left < each ? left : each);
        MOQ_TRY(run_chunk(&chunk, err));
    }
    return MOQ_OK;
}

extern "C" int64_t moq_cuda_moe_nvfp4_fp8_prefill_workspace(const moq_moe_call *call) {
    slot_chunk chunk = chunk_of(call, 0, chunk_tokens(call));
    return smem_layout(&chunk).end;
}

} // namespace moq::moe_prefill
