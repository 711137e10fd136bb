/* Experts on any chip, in six steps, each a launch (the first up to three):
 *
 *   1. slots sorted by expert                               group.cu
 *   2. rows of x, one a slot, as w13 takes them             expert_rows.cu
 *   3. u = rows W13^T + b13, float32                        a product of linears
 *   4. rows of act(u) as w2 takes them                      expert_rows.cu
 *   5. d = rows W2^T + b2, float32                          a product of linears
 *   6. y = the sum of d over the slots of a token           expert_sum.cu
 *
 * The kernels of products are those of linears, with an expert in the schedule; there is one set of
 * steps for all of them. Long inputs go in chunks of tokens whose rows fit MEMORY bytes. What lies
 * between the steps is written and read once each: with many tokens this takes as long as some
 * tenths of the products do, with few it is six launches that bound the time. */
#include "core/invariant.h"
#include "core/sizes.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/expert_product.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define MEMORY ((int64_t)1 << 30)

/* Offsets in the workspace. The rows of x and u are read no more when d is written. */
typedef struct {
    int64_t groups, g, g_scales;
    int64_t x, x_scales, u;
    int64_t d;
    int64_t end;
} layout;

static slot_chunk chunk_of(const moq_moe_call *call, const product_kind *kind, int64_t first,
                           int64_t tokens) {
    const moq_moe_spec *spec = call->spec;
    double rows = (double)tokens * spec->top_k / spec->global_experts; /* also of a share of them */
    return {call, first, tokens, kind->tile_rows(rows), 1};
}

static layout workspace_layout(const slot_chunk *chunk, const product_kind *kind) {
    const moq_moe_spec *spec = chunk->call->spec;
    const moq_linear_spec *w13 = &spec->w13, *w2 = &spec->w2;
    int64_t rows = most_rows(chunk), h = w13->in_features, i = w2->in_features;
    row_format form13 = kind->form(w13), form2 = kind->form(w2);
    layout l = {};
    l.groups = take_part(&l.end, groups_bytes(chunk));
    l.g = take_part(&l.end, rows * row_bytes(form2, w2->dtype, i));
    l.g_scales = take_part(&l.end, scale_bytes(form2, rows, i));
    l.x = l.d = l.end;
    l.x = take_part(&l.end, rows * row_bytes(form13, w13->dtype, h));
    l.x_scales = take_part(&l.end, scale_bytes(form13, rows, h));
    l.u = take_part(&l.end, rows * w13->out_features * (int64_t)sizeof(float));
    int64_t after_d = l.d;
    take_part(&after_d, rows * w2->out_features * (int64_t)sizeof(float));
    l.end = l.end > after_d ? l.end : after_d;
    return l;
}

/* Tokens of a chunk: all, or as many as MEMORY has room for. */
static int64_t chunk_tokens(const moq_moe_call *call, const product_kind *kind) {
    slot_chunk all = chunk_of(call, kind, 0, call->tokens), one = chunk_of(call, kind, 0, 1);
    if (call->tokens * call->spec->top_k <= INT32_MAX && workspace_layout(&all, kind).end <= MEMORY)
        return call->tokens;
    int64_t most = MEMORY / workspace_layout(&one, kind).end; /* whose parts are rounded up */
    most = most < 1 ? 1 : most;
    int64_t chunks = (call->tokens + most - 1) / most;
    return (call->tokens + chunks - 1) / chunks;
}

static moq_status run_chunk(const slot_chunk *chunk, const product_kind *kind, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    layout l = workspace_layout(chunk, kind);
    uint8_t *memory = (uint8_t *)call->workspace;
    slot_groups groups = groups_at(chunk, memory + l.groups);
    int64_t rows = most_rows(chunk);
    expert_rows x = {kind->form(&spec->w13), memory + l.x, memory + l.x_scales, rows};
    expert_rows g = {kind->form(&spec->w2), memory + l.g, memory + l.g_scales, rows};
    float *u = (float *)(memory + l.u), *d = (float *)(memory + l.d);
    expert_product first = {&spec->w13,        &call->w13,       &x, rows,        &groups,
                            most_tiles(chunk), chunk->tile_rows, u,  call->stream};
    expert_product second = first;
    second.spec = &spec->w2;
    second.weight = &call->w2;
    second.rows = &g;
    second.out = d;
    MOQ_TRY(group_slots(chunk, memory + l.groups, err));
    MOQ_TRY(make_rows_of_x(chunk, &groups, &x, err));
    MOQ_TRY(kind->multiply(&first, err));
    MOQ_TRY(make_rows_of_u(chunk, &groups, u, &g, err));
    MOQ_TRY(kind->multiply(&second, err));
    return combine_rows(chunk, &groups, {d, MOQ_DT_F32, false}, err);
}

static moq_status run(const moq_moe_call *call, const product_kind *kind, moq_err *err) {
    int64_t each = chunk_tokens(call, kind);
    MOQ_ASSERT(call->tokens > 0 && call->spec->experts <= MOQ_CUDA_MOE_EXPERTS);
    for (int64_t first = 0; first < call->tokens; first += each) {
        int64_t left = call->tokens - first;
        slot_chunk chunk = chunk_of(call, kind, first, left < each ? left : each);
        MOQ_TRY(run_chunk(&chunk, kind, err));
    }
    return MOQ_OK;
}

/* The first chunk is the largest, but for one that ends in smaller tiles. */
static int64_t workspace(const moq_moe_call *call, const product_kind *kind) {
    int64_t each = chunk_tokens(call, kind), last = call->tokens % each;
    slot_chunk chunk = chunk_of(call, kind, 0, each);
    int64_t most = workspace_layout(&chunk, kind).end;
    if (last == 0)
        return most;
    chunk = chunk_of(call, kind, 0, last);
    int64_t other = workspace_layout(&chunk, kind).end;
    return most > other ? most : other;
}

moq_status launch_product(const expert_product *p, const void *kernel, int64_t weight_tiles,
                          int threads, int shared, void *args, moq_err *err) {
    if (p->tiles > INT32_MAX / weight_tiles)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)p->most_rows);
    moq_launch launch = {.what = "product of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)(p->tiles * weight_tiles)),
                         .block = dim3((unsigned)threads),
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)p->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

#define KERNEL(name, kind)                                                                         \
    extern "C" moq_status moq_cuda_moe_##name(const moq_moe_call *call, moq_err *err) {            \
        return run(call, &kind, err);                                                              \
    }                                                                                              \
    extern "C" int64_t moq_cuda_moe_##name##_workspace(const moq_moe_call *call) {                 \
        return workspace(call, &kind);                                                             \
    }

KERNEL(simt, SIMT_PRODUCT)
KERNEL(mma_nvfp4, NVFP4_PRODUCT)
KERNEL(mma_nvfp4_folded, NVFP4_FOLDED_PRODUCT)
KERNEL(mma_fp8_as_f16, FP8_AS_F16_PRODUCT)
KERNEL(mma_fp8_as_e4m3, FP8_AS_E4M3_PRODUCT)

} // namespace moq::moe
