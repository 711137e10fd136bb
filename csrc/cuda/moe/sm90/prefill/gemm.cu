/* Arguments and launches of the grouped GEMMs of experts on Hopper for prefill: see gemm.h. */
#include "cuda/moe/sm90/prefill/gemm.h"

#include "cuda/runtime/launch.h"

namespace moq::moe_prefill {

gemm_args args_of(const moe::expert_product *p, int64_t steps, int64_t height, int warpgroups) {
    const moq_moe_call *call = p->call;
    const moq_linear_spec *spec = p->spec;
    const moq_moe_weight *w = p->weight;
    int64_t i = call->spec->w2.in_features;
    int columns = warpgroups * WAVE_ROWS;
    gemm_args a = {};
    a.tiles = p->groups->tile;
    a.count = p->groups->count;
    a.steps = (int)steps;
    a.n = (int)spec->out_features;
    a.height = (int)height;
    a.half = (int)i;
    a.row_tiles = use_of(p) == OF_GATE_AND_UP ? (int)((i + columns - 1) / columns)
                                              : (a.n + 2 * columns - 1) / (2 * columns);
    a.act = moe::activation_of(call->spec);
    if (p->first)
        a.out = {p->out, (i + 15) / 16 * 16, spec->dtype, MOQ_DT_NONE, NULL};
    else if (p->d_dtype == MOQ_DT_BF16)
        a.out = {p->out, a.n, MOQ_DT_BF16, MOQ_DT_NONE, NULL};
    else
        a.d = (float *)p->out;
    a.output_scale = w->output_scale;
    a.bias = w->bias;
    a.partition_count = spec->partition_count;
    a.early = p->early;
    a.acquired = p->groups->count + (p->first ? 2 : 3);
    a.written = p->written;
    a.linked = p->written && !p->first;
    if (p->gathered) {
        a.slot = p->groups->slot;
        a.top_k = call->spec->top_k;
        a.x = (const uint8_t *)p->rows->data;
        a.x_stride = call->x->stride[0] * (int64_t)moq_dtype_size(call->x->dtype);
        a.bytes = moe::row_bytes(p->rows->format, spec->dtype, spec->in_features);
    }
    return a;
}

gemm_args fp8_args_of(const moe::expert_product *p) {
    int64_t steps = (p->spec->in_features + 127) / 128;
    gemm_args a = args_of(p, steps, p->spec->out_features, 2);
    if (p->first) {
        bool by_expert = p->g->format == moe::ROWS_TENSOR;
        a.format = g_format_of(p->call->spec);
        a.codes = (uint8_t *)p->g->data;
        a.code_stride = p->call->spec->w2.in_features;
        a.g_scale = (float *)(by_expert ? p->call->w2.input_scale : p->g->scales);
        a.g_scale_stride = p->g->scale_stride;
    }
    a.x_scale = p->rows->format == moe::ROWS_TENSOR ? NULL : (const float *)p->rows->scales;
    a.x_scale_stride = p->rows->scale_stride;
    a.input_scale = p->weight->input_scale;
    a.block_scale = (const float *)p->weight->weight_scale;
    a.block_step = moq_linear_block_rows(p->spec) * steps;
    a.partitions = moq_partitions_of(p->spec);
    return a;
}

moq_status find_shared_limit(const moe::expert_product *p, int *limit, moq_err *err) {
    moq_cuda_device device;
    MOQ_TRY(moq_cuda_query_device(p->spec->device.index, &device, err));
    *limit = (int)device.shared_per_block;
    return MOQ_OK;
}

/* Fails if tiles cannot be counted in 32 bits. */
static moq_status check_tiles(const moe::expert_product *p, int64_t tiles, moq_err *err) {
    if (tiles > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)p->most_rows);
    return MOQ_OK;
}

moq_status launch(const moe::expert_product *p, const void *kernel, gemm_args *a, int shared,
                  CUtensorMap *weights, CUtensorMap *rows, int warpgroups, bool pair, moq_err *err,
                  CUtensorMap *more) {
    int64_t tiles = p->tiles * a->row_tiles, blocks = p->spec->target.sm_count;
    if (pair) /* tiles come in pairs */
        blocks -= blocks % 2;
    MOQ_TRY(check_tiles(p, tiles, err));
    moq_launch launch = {.what = "product of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)(tiles < blocks ? tiles : blocks)),
                         .block = dim3(128 * (unsigned)(warpgroups + 1)),
                         .cluster = pair ? 2u : 0u,
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)p->call->stream,
                         .pdl = true};
    void *parameters[] = {weights, rows, a, more, more ? more + 1 : NULL};
    return moq_cuda_launch(&launch, parameters, err);
}

moq_status launch_pairs(const moe::expert_product *p, const void *kernel, int64_t tiles,
                        int threads, int shared, void **parameters, moq_err *err) {
    int64_t pairs = p->spec->target.sm_count / 2;
    MOQ_TRY(check_tiles(p, tiles, err));
    moq_launch launch = {.what = "product of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)(2 * (tiles < pairs ? tiles : pairs))),
                         .block = dim3((unsigned)threads),
                         .cluster = 2,
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)p->call->stream,
                         .pdl = true};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::moe_prefill
