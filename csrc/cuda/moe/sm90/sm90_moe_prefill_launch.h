/* Launching the grouped GEMMs of experts on Hopper: what both kinds of weights have in common. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_LAUNCH_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_LAUNCH_H

#include "core/invariant.h"
#include "cuda/moe/sm90/sm90_moe_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_tile.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::moe_prefill {

static product_use use_of(const prefill_product *p) {
    if (!p->first)
        return OF_D;
    return p->moe->gated ? OF_GATE_AND_UP : OF_ONE;
}

static gemm_args args_of(const prefill_product *p, int64_t steps, int64_t height, int warpgroups) {
    const moe::expert_product *e = &p->product;
    const moq_linear_spec *spec = e->spec;
    const moq_moe_weight *w = e->weight;
    int64_t i = p->moe->w2.in_features;
    int columns = warpgroups * WAVE_ROWS;
    gemm_args a = {};
    a.tiles = e->groups->tile;
    a.count = e->groups->count;
    a.steps = (int)steps;
    a.n = (int)spec->out_features;
    a.height = (int)height;
    a.half = (int)i;
    a.row_tiles = use_of(p) == OF_GATE_AND_UP ? (int)((i + columns - 1) / columns)
                                              : (a.n + 2 * columns - 1) / (2 * columns);
    a.act = moe::activation_of(p->moe);
    a.out = {p->g, (i + 15) / 16 * 16, spec->dtype, MOQ_DT_NONE, NULL};
    a.form = p->codes.form;
    a.codes = (uint8_t *)p->codes.data;
    a.code_stride = i;
    a.g_scale = p->codes.scales;
    a.g_scale_stride = p->codes.scale_stride;
    if (p->rounds_d)
        a.out = {e->out, a.n, MOQ_DT_BF16, MOQ_DT_NONE, NULL};
    else
        a.d = e->out;
    a.output_scale = w->output_scale;
    a.bias = w->bias;
    a.parts = spec->partition_count;
    a.early = p->early;
    a.acquired = e->groups->count + (p->first ? 2 : 3);
    a.written = p->written;
    a.linked = p->written && !p->first;
    if (p->gathered) {
        a.slot = e->groups->slot;
        a.top_k = p->moe->top_k;
        a.x = (const uint8_t *)e->rows->data;
        a.x_stride = p->row_stride;
        a.bytes = moe::row_bytes(e->rows->form, spec->dtype, spec->in_features);
    }
    return a;
}

/* Of FP8 products. */
static gemm_args fp8_args_of(const prefill_product *p) {
    const moe::expert_product *e = &p->product;
    int64_t steps = (e->spec->in_features + 127) / 128;
    gemm_args a = args_of(p, steps, e->spec->out_features, 2);
    a.x_scale = e->rows->form == moe::ROWS_TENSOR ? NULL : (const float *)e->rows->scales;
    a.x_scale_stride = e->rows->scale_stride;
    a.input_scale = e->weight->input_scale;
    a.block_scale = (const float *)e->weight->weight_scale;
    a.block_step = moq_linear_block_rows(e->spec) * steps;
    a.partitions = moq_partitions_of(e->spec);
    return a;
}

/* `more` are two maps of kernels that take them behind their arguments. */
static moq_status launch(const prefill_product *p, const void *kernel, gemm_args *a, int shared,
                         CUtensorMap *weights, CUtensorMap *rows, int warpgroups, bool pair,
                         moq_err *err, CUtensorMap *more = NULL) {
    int64_t tiles = p->product.tiles * a->row_tiles, blocks = p->product.spec->target.sm_count;
    if (pair) /* tiles come in twos */
        blocks -= blocks % 2;
    if (tiles > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)p->product.most_rows);
    moq_launch launch = {.what = "product of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)(tiles < blocks ? tiles : blocks)),
                         .block = dim3(128 * (unsigned)(warpgroups + 1)),
                         .cluster = pair ? 2u : 0u,
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)p->product.stream,
                         .pdl = true};
    void *parameters[] = {weights, rows, a, more, more ? more + 1 : NULL};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::moe_prefill

#endif
