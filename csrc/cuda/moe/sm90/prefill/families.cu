/* Families of the prefill kernels of experts on Hopper, as the pipeline of experts runs them: rows
 * of tiles, makers of rows, and hooks (moe/pipeline.h). gemm.h has their products. */
#include "cuda/moe/sm90/prefill/gemm.h"
#include "cuda/moe/sm90/prefill/prefill.h"
#include "cuda/moe/sm90/prefill/prefill_config.h"

namespace moq::moe_prefill {

/* ---- FP8 ---- */

/* Returns the tiles. Large ones come in pairs that share weights, unless rows have scales of groups
 * (docs/lab/experts-prefill.md). */
static moe::row_tiling fp8_tiling_of(const moq_moe_call *call, double) {
    bool groups = fp8_format(&call->spec->w13) == moe::ROWS_GROUP;
    int rows = moq_moe_fp8_tile_rows(call->spec, moq_tiling_row(call->config.tiling));
    return {rows, groups ? MOQ_MOE_PREFILL_ALIGN : 1, rows > 64 && !groups};
}

/* True if a slot's weight or expert changes its x before it is quantized. */
static bool fp8_has_own_x(const moq_moe_call *call) {
    return call->weights_on_input || call->w13.pre_quant_scale;
}

static moq_status fp8_load_x(const moe::slot_chunk *chunk, moe::expert_product *p,
                             moe::expert_rows *x, moq_err *err) {
    if (fp8_has_own_x(chunk->call))
        return moe::make_rows_of_x(chunk, p->groups, x, err);
    p->early = true;
    return make_rows_of_tokens(chunk, p->groups, x, p->written, err);
}

static int64_t fp8_u_bytes(const moq_moe_call *call) {
    const moq_linear_spec *w2 = &call->spec->w2;
    if (g_format_of(call->spec) != G_VALUES)
        return 0;
    return moe::row_bytes(moe::ROWS_VALUES, w2->dtype, w2->in_features);
}

static moq_status fp8_load_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                             const void *u, const moe::expert_rows *g, moq_err *err) {
    return chunk->call->w2.pre_quant_scale ? moe::make_rows_of_g(chunk, groups, u, g, err)
                                           : make_codes_of_g(chunk, groups, u, g, err);
}

/* True if the second product may start while the first one runs (fp8.cu). Tiles have to be small,
 * as memory then bounds both products and the first one ends unevenly. No kernel may make codes of
 * g between them. There have to be more tiles of rows than go together, as those end together and
 * leave nothing to start beside. */
static bool fp8_links(const moe::slot_chunk *chunk) {
    const moq_moe_call *call = chunk->call;
    return chunk->tile_rows == 64 && !fp8_has_own_x(call) && fp8_u_bytes(call) == 0 &&
           moe::most_tiles(chunk) > MOQ_MOE_PREFILL_TOGETHER;
}

static const moe::expert_kernels FP8_PREFILL = {fp8_format, fp8_tiling_of, multiply_fp8,
                                                fp8_load_x, fp8_u_bytes,   fp8_load_g,
                                                fp8_links,  true,          true};

MOQ_EXPERTS_ENTRY(fp8_prefill, FP8_PREFILL)

/* ---- NVFP4, exact ---- */

static moe::row_format nvfp4_format_of(const moq_linear_spec *) {
    return moe::ROWS_VALUES;
}

static moe::row_tiling nvfp4_tiling_of(const moq_moe_call *call, double) {
    return {moq_moe_nvfp4_tile_rows(moq_tiling_row(call->config.tiling)), MOQ_MOE_PREFILL_ROWS_OF_D,
            false};
}

/* True if a slot's weight or expert changes its x. */
static bool nvfp4_has_own_x(const moq_moe_call *call) {
    return call->weights_on_input || call->w13.pre_quant_scale;
}

/* Loads x. Small tiles gather their rows; large ones would wait for them
 * (docs/lab/experts-prefill.md). */
static moq_status nvfp4_load_x(const moe::slot_chunk *chunk, moe::expert_product *p,
                               moe::expert_rows *x, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    if (nvfp4_has_own_x(call))
        return moe::make_rows_of_x(chunk, p->groups, x, err);
    if (chunk->tile_rows > 64) {
        p->early = true;
        return make_rows_of_tokens(chunk, p->groups, x, NULL, err);
    }
    int64_t stride = call->x->stride[0] * (int64_t)moq_dtype_size(call->x->dtype);
    x->data = (uint8_t *)call->x->data + chunk->first * stride;
    p->gathered = true;
    return MOQ_OK;
}

static int64_t nvfp4_u_bytes(const moq_moe_call *call) {
    const moq_linear_spec *w2 = &call->spec->w2;
    return call->w2.pre_quant_scale ? moe::row_bytes(moe::ROWS_VALUES, w2->dtype, w2->in_features)
                                    : 0;
}

static const moe::expert_kernels NVFP4_PREFILL = {nvfp4_format_of,
                                                  nvfp4_tiling_of,
                                                  multiply_nvfp4,
                                                  nvfp4_load_x,
                                                  nvfp4_u_bytes,
                                                  moe::make_rows_of_g,
                                                  NULL,
                                                  true,
                                                  true};

MOQ_EXPERTS_ENTRY(nvfp4_prefill, NVFP4_PREFILL)

/* ---- NVFP4 with FP8 products ---- */

static moe::row_format folded_format_of(const moq_linear_spec *) {
    return moe::ROWS_TOKEN;
}

static moe::row_tiling folded_tiling_of(const moq_moe_call *call, double) {
    return {moq_moe_folded_tile_rows(call->config), 1, false};
}

static moq_status folded_load_x(const moe::slot_chunk *chunk, moe::expert_product *p,
                                moe::expert_rows *x, moq_err *err) {
    p->early = !nvfp4_has_own_x(chunk->call);
    return make_paired_rows_of_x(chunk, p->groups, x, err);
}

/* Returns bytes of a row of values of g: their scale is of a whole row, of which no block has all
 * columns. */
static int64_t folded_u_bytes(const moq_moe_call *call) {
    const moq_linear_spec *w2 = &call->spec->w2;
    return moe::row_bytes(moe::ROWS_VALUES, w2->dtype, w2->in_features);
}

static const moe::expert_kernels NVFP4_FP8_PREFILL = {folded_format_of,
                                                      folded_tiling_of,
                                                      multiply_nvfp4_fp8,
                                                      folded_load_x,
                                                      folded_u_bytes,
                                                      make_paired_rows_of_g,
                                                      NULL,
                                                      true,
                                                      true};

MOQ_EXPERTS_ENTRY(nvfp4_fp8_prefill, NVFP4_FP8_PREFILL)

} // namespace moq::moe_prefill
