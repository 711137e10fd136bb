/* The pipeline of experts, for every kernel family (pipeline.h). Each step is a launch, the first
 * one up to three:
 *
 *   1. slots sorted by expert                                            group.cu
 *   2. rows of x, one a slot, in the format that W13's kernels take      load_x
 *   3. u = rows W13^T + b13, or g = rounded(act(u)) in one kernel        multiply
 *   4. rows of g in the format that W2's kernels take                    load_g, if 3 made u
 *   5. d = rows W2^T + b2, float32 or rounded (docs/numerics.md)         multiply
 *   6. y = the sum of w d over the slots of a token, in their order      expert_sum.cu
 *
 * A long input is cut into chunks of tokens whose workspace fits MEMORY bytes. Tiles are chosen for
 * the whole call, so that no bit of y depends on the cut. Workspace: the groups and g for all
 * steps; x and u share their memory with d, which is written after both have been read. */
#include "cuda/choice/grid.h"
#include "cuda/moe/pipeline.h"

#include "core/invariant.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define MEMORY ((int64_t)1 << 30)

/* The workspace layout: offsets of its parts. */
typedef struct {
    int64_t groups, written, g, g_scales, x, x_scales, u, d, end;
} workspace_layout;

static slot_chunk chunk_of(const moq_moe_call *call, const expert_kernels *k, int64_t first,
                           int64_t tokens) {
    const moq_moe_spec *spec = call->spec;
    double rows = (double)call->tokens * spec->top_k / spec->global_experts; /* a share, too */
    row_tiling t = k->tiling(call, rows);
    return {call, first, tokens, t.rows, t.align, t.pairs};
}

/* Returns the rows of one column of group scales. */
static int64_t scale_stride(const slot_chunk *chunk) {
    return (most_rows(chunk) + chunk->align - 1) / chunk->align * chunk->align;
}

/* Returns the bytes of scales, with room to copy a whole tile from the last row on. */
static int64_t all_scales(const slot_chunk *chunk, row_format format, int64_t columns) {
    return scale_bytes(format, scale_stride(chunk), columns) +
           chunk->tile_rows * (int64_t)sizeof(float);
}

static moq_dtype dtype_of_d(const moq_moe_call *call, const expert_kernels *k) {
    return k->rounds_d && call->spec->w2.dtype == MOQ_DT_BF16 ? MOQ_DT_BF16 : MOQ_DT_F32;
}

static int64_t bytes_of_u(const moq_moe_call *call, const expert_kernels *k) {
    return k->u_bytes ? k->u_bytes(call) : call->spec->w13.out_features * (int64_t)sizeof(float);
}

/* True if products are linked. Kernels have to overlap: otherwise counting costs up to 2.5 %
 * (docs/lab/experts-prefill.md). */
static bool is_linked(const slot_chunk *chunk, const expert_kernels *k) {
    return k->links && k->links(chunk) && moq_cuda_overlaps();
}

static workspace_layout layout_of(const slot_chunk *chunk, const expert_kernels *k) {
    const moq_linear_spec *w13 = &chunk->call->spec->w13, *w2 = &chunk->call->spec->w2;
    row_format of_x = k->format(w13), of_g = k->format(w2);
    int64_t rows = most_rows(chunk), h = w13->in_features, i = w2->in_features;
    int64_t d_bytes = w2->out_features * (int64_t)moq_dtype_size(dtype_of_d(chunk->call, k));
    bool linked = is_linked(chunk, k);
    workspace_layout l = {};
    l.groups = take_bytes(&l.end, groups_bytes(chunk));
    l.written = take_bytes(&l.end, linked ? rows * (int64_t)sizeof(int32_t) : 0);
    l.g = take_bytes(&l.end, rows * row_bytes(of_g, w2->dtype, i));
    l.g_scales = take_bytes(&l.end, all_scales(chunk, of_g, i));
    l.d = l.end;
    l.x = take_bytes(&l.end, rows * row_bytes(of_x, w13->dtype, h));
    l.x_scales = take_bytes(&l.end, all_scales(chunk, of_x, h));
    l.u = take_bytes(&l.end, rows * bytes_of_u(chunk->call, k));
    if (linked) /* d is written while the first product still reads x */
        l.d = l.end;
    int64_t after_d = l.d;
    take_bytes(&after_d, rows * d_bytes);
    l.end = l.end > after_d ? l.end : after_d;
    return l;
}

static int64_t bytes_of(const moq_moe_call *call, const expert_kernels *k, int64_t tokens) {
    slot_chunk chunk = chunk_of(call, k, 0, tokens);
    return layout_of(&chunk, k).end;
}

/* Returns the tokens of a chunk: the fewest chunks of equal size whose workspaces fit MEMORY. */
static int64_t chunk_tokens(const moq_moe_call *call, const expert_kernels *k) {
    int64_t by_slots = call->tokens * call->spec->top_k / (INT32_MAX / 2) + 1;
    int64_t chunks = bytes_of(call, k, call->tokens) / MEMORY + 1;
    for (chunks = chunks > by_slots ? chunks : by_slots;; chunks++) {
        int64_t each = (call->tokens + chunks - 1) / chunks;
        if (each == 1 || bytes_of(call, k, each) <= MEMORY)
            return each;
    }
}

static moq_status run_chunk(const slot_chunk *chunk, const expert_kernels *k, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    workspace_layout l = layout_of(chunk, k);
    uint8_t *memory = (uint8_t *)call->workspace;
    slot_groups groups = groups_at(chunk, memory + l.groups);
    expert_rows x = {k->format(&spec->w13), memory + l.x, memory + l.x_scales, scale_stride(chunk)};
    expert_rows g = {k->format(&spec->w2), memory + l.g, memory + l.g_scales, scale_stride(chunk)};
    bool has_u = bytes_of_u(call, k) > 0;
    expert_product first = {.call = call,
                            .spec = &spec->w13,
                            .weight = &call->w13,
                            .rows = &x,
                            .g = &g,
                            .groups = &groups,
                            .most_rows = most_rows(chunk),
                            .tiles = most_tiles(chunk),
                            .tile_rows = chunk->tile_rows,
                            .first = true,
                            .out = has_u ? memory + l.u : g.data,
                            .written =
                                is_linked(chunk, k) ? (int32_t *)(memory + l.written) : NULL};
    expert_product second = first;
    second.spec = &spec->w2;
    second.weight = &call->w2;
    second.rows = &g;
    second.first = false;
    second.early = true; /* the first product has waited for the groups */
    second.out = memory + l.d;
    second.d_dtype = dtype_of_d(call, k);
    MOQ_TRY(group_slots(chunk, memory + l.groups, err));
    MOQ_TRY(k->load_x ? k->load_x(chunk, &first, &x, err)
                      : make_rows_of_x(chunk, &groups, &x, err));
    MOQ_TRY(k->multiply(&first, err));
    if (has_u)
        MOQ_TRY((k->load_g ? k->load_g : make_rows_of_u)(chunk, &groups, first.out, &g, err));
    MOQ_TRY(k->multiply(&second, err));
    return combine_rows(chunk, &groups, {second.out, second.d_dtype, k->early_d}, err);
}

moq_status run_experts(const moq_moe_call *call, const expert_kernels *kernels, moq_err *err) {
    int64_t each = chunk_tokens(call, kernels);
    MOQ_ASSERT(call->tokens > 0 && call->spec->experts <= MOQ_CUDA_MOE_EXPERTS);
    for (int64_t first = 0; first < call->tokens; first += each) {
        int64_t left = call->tokens - first;
        slot_chunk chunk = chunk_of(call, kernels, first, left < each ? left : each);
        MOQ_TRY(run_chunk(&chunk, kernels, err));
    }
    return MOQ_OK;
}

/* The last chunk is smaller, but may be sorted in more ranges. */
int64_t experts_workspace(const moq_moe_call *call, const expert_kernels *kernels) {
    int64_t each = chunk_tokens(call, kernels), last = call->tokens % each;
    int64_t most = bytes_of(call, kernels, each), other = last ? bytes_of(call, kernels, last) : 0;
    return most > other ? most : other;
}

} // namespace moq::moe
