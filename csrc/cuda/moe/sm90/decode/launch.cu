/* Launches of the decode kernels of experts on Hopper: arguments that all formats share, and the
 * entries of decode.c, which choose between fused up and down and one kernel for each. */
#include "cuda/moe/sm90/decode/fused.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_decode {

static routing routing_of(const moq_moe_call *call, const moq_moe_decode_half *half) {
    routing r = {};
    r.ids = moe::slot_tensor_of(call->ids);
    r.weights = moe::slot_tensor_of(call->weights);
    r.map = call->expert_map;
    r.global_experts = call->spec->global_experts;
    r.experts = call->spec->experts;
    r.top_k = call->spec->top_k;
    r.slots = (int)(call->tokens * call->spec->top_k);
    r.at = half->tables;
    return r;
}

static common_args common_of(const moq_moe_call *call, const moq_moe_decode_half *half,
                             const moq_linear_spec *layer, const moq_moe_weight *w) {
    common_args c = {};
    c.route = routing_of(call, half);
    c.w.weight = w->weight;
    c.w.weight_scale = w->weight_scale;
    c.w.output_scale = w->output_scale;
    c.w.bias = w->bias;
    c.w.input_scale = w->input_scale;
    c.w.rows = (int)layer->out_features;
    c.w.columns = (int)layer->in_features;
    c.w.partition_count = layer->partition_count;
    c.w.partition_blocks = (int)((layer->partition[0] + 127) / 128);
    c.pairs = (int)(call->spec->w2.in_features / SLAB);
    c.maxima = (float *)((uint8_t *)call->workspace +
                         moq_moe_decode_inner_bytes(call->spec, call->tokens));
    c.stages = half->stages;
    c.log_splits = half->log_splits;
    c.flight = half->flight;
    c.staged_at = half->staged_at;
    c.scales_at = half->scales_at;
    c.weights_at = half->weights_at;
    c.weights_on_input = call->weights_on_input;
    return c;
}

/* Fills the arguments of a kernel that reads x. */
static common_args common_of_x(const moq_moe_call *call, const moq_moe_decode_half *half) {
    common_args c = common_of(call, half, &call->spec->w13, &call->w13);
    c.x = call->x->data;
    c.x_stride = call->x->stride[0];
    if (call->x_scale)
        c.x_scale = moe::slot_tensor_of(call->x_scale);
    c.weighted = call->weights_on_input;
    return c;
}

up_args up_of(const moq_moe_call *call, const moq_moe_decode_share *share) {
    up_args a = {};
    a.common = common_of_x(call, &share->up);
    a.activation = moe::activation_of(call->spec);
    a.g = call->workspace;
    a.inner = (int)call->spec->w2.in_features;
    return a;
}

down_args down_of(const moq_moe_call *call, const moq_moe_decode_share *share) {
    down_args a = {};
    a.common = common_of(call, &share->down, &call->spec->w2, &call->w2);
    a.common.x = call->workspace;
    a.common.x_stride = call->spec->w2.in_features;
    a.y = call->y->data;
    a.y_stride = call->y->stride[0];
    a.tokens = (int)call->tokens;
    a.slabs = (a.common.w.rows + SLAB - 1) / SLAB;
    while (1 << a.log_cluster < share->down.cluster)
        a.log_cluster++;
    a.sums_at = share->down.sums_at;
    a.common.weighted = !call->weights_on_input;
    a.accumulate = call->accumulate;
    a.d = (float *)((uint8_t *)call->workspace + moq_moe_decode_sums_at(call->spec, call->tokens));
    return a;
}

/* Launches a kernel on the grid of a moq_moe_decode_half or moq_moe_fused. */
template <class GEOMETRY>
static moq_status launch_kernel(const moq_moe_call *call, const GEOMETRY *g, int threads,
                                const char *what, const void *kernel, void *args, moq_err *err) {
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = dim3((unsigned)g->grid),
                         .block = dim3((unsigned)threads),
                         .cluster = g->cluster > 1 ? (unsigned)g->cluster : 0,
                         .shared = (size_t)g->shared,
                         .stream = (cudaStream_t)call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

moq_status launch_all(const moq_moe_call *call, const moq_moe_decode_share *share, const char *what,
                      const void *up_kernel, up_args *up, const void *down_kernel, down_args *down,
                      moq_err *err) {
    up->common.by_blocks = divisor_of(share->up.grid);
    up->common.by_items = divisor_of(up->common.pairs);
    down->common.by_blocks = divisor_of(share->down.grid);
    down->common.by_items = divisor_of((down->slabs + share->down.slabs - 1) / share->down.slabs);
    up->common.by_stages = divisor_of(share->up.pieces);
    down->common.by_stages = divisor_of(share->down.pieces);
    MOQ_TRY(launch_kernel(call, &share->up, THREADS, what, up_kernel, up, err));
    MOQ_TRY(launch_kernel(call, &share->down, THREADS, what, down_kernel, down, err));
    return share->down.split ? launch_sum(call, down, err) : MOQ_OK;
}

/* ---- fused up and down ---- */

fused_args fused_tiles_of(const moq_moe_call *call, const moq_moe_fused *share) {
    const moq_moe_spec *spec = call->spec;
    moq_moe_decode_half half = {};
    half.stages = share->stages;
    half.flight = share->flight;
    half.staged_at = share->staged_at;
    half.weights_at = share->weights_at;
    half.tables = share->tables;
    fused_args a = {};
    a.common = common_of_x(call, &half);
    a.common.by_blocks = divisor_of(share->grid);
    a.activation = moe::activation_of(spec);
    a.down = common_of(call, &half, &spec->w2, &call->w2).w;
    a.g_at = share->g_at;
    a.up_slabs = spec->gated ? FUSED_SLABS : FUSED_SLABS / 2;
    a.common.by_stages = divisor_of(share->fused_stages);
    a.alone = share->alone;
    a.by_fused_tiles = divisor_of((int)(spec->w2.in_features / FUSED_COLUMNS));
    a.places = (uint32_t *)call->workspace;
    a.d = (float *)((uint8_t *)call->workspace + share->d_at);
    return a;
}

fused_sum_args sum_of(const moq_moe_call *call, const fused_args *a) {
    fused_sum_args sum = {};
    sum.route = a->common.route;
    sum.down = a->down;
    sum.d = a->d;
    sum.places = a->places;
    sum.y = call->y->data;
    sum.y_stride = call->y->stride[0];
    sum.alone = a->alone;
    sum.weighted = !call->weights_on_input;
    sum.accumulate = call->accumulate;
    sum.by_blocks = a->common.by_blocks;
    sum.tiles = a->by_fused_tiles.by;
    return sum;
}

moq_status launch_fused(const moq_moe_call *call, const moq_moe_fused *share, const char *what,
                        const void *kernel, void *args, const fused_sum_args *sum, moq_err *err) {
    MOQ_TRY(launch_kernel(call, share, FUSED_THREADS, what, kernel, args, err));
    return launch_fused_sum(call, share, sum, err);
}

/* ---- entries ---- */

extern "C" moq_status moq_cuda_moe_fp8_decode(const moq_moe_call *call, moq_err *err) {
    moq_moe_decode_share share;
    moq_moe_decode_partition(call->spec, call->tokens, call->config, &share);
    return share.tiles.grid ? launch_fused_fp8(call, &share.tiles, err)
                            : launch_fp8(call, &share, err);
}

extern "C" int64_t moq_cuda_moe_fp8_decode_workspace(const moq_moe_call *call) {
    return moq_moe_decode_workspace(call->spec, call->tokens, call->config);
}

extern "C" moq_status moq_cuda_moe_nvfp4_decode(const moq_moe_call *call, moq_err *err) {
    moq_moe_decode_share share;
    moq_moe_decode_partition(call->spec, call->tokens, call->config, &share);
    return share.tiles.grid ? launch_fused_nvfp4(call, &share.tiles, err)
                            : launch_nvfp4(call, &share, err);
}

extern "C" int64_t moq_cuda_moe_nvfp4_decode_workspace(const moq_moe_call *call) {
    return moq_moe_decode_workspace(call->spec, call->tokens, call->config);
}

} // namespace moq::moe_decode
