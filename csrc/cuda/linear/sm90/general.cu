/* Linear of MXFP8, int8 and int4 weights on Hopper, up to 256 tokens: y[m, n] =
 * round(fw[n] sum over groups of s(n, group) sum_k x[m, k] C[n, k] + bias[n]).
 *
 * C is e4m3 with an E8M0 scale s for 32 columns, int8 with a factor fw a row, or int4 in pairs of
 * rows with a float32 scale for 128 columns, all as the checkpoint stores them. x and y are 16-bit
 * matrices of contiguous rows. Codes become 16-bit numbers exactly: e4m3 times its scale in
 * bfloat16, where scales from 2^-108 to 2^23 are exact, smaller ones lose bits and larger ones
 * become infinite; products of int4 are scaled in float32 every 128 columns.
 *
 * Tile, pipeline, split-K and stream-K tail are those of the NVFP4 kernels (nvfp4_medium.h), the
 * mainloops are in general.h; here are the MXFP8 kernels and the launch.
 *
 * What bounds it: reading W once; with 64 tokens and more widening, which shares the register
 * file's ports with products (docs/lab/any-chip.md). */
#include "cuda/linear/sm90/general.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::general {

#define BFLOAT16(...) GENERAL_VARIANT(E4M3_MX, MOQ_NVFP4_BF16, __VA_ARGS__)

static const variant E4M3_VARIANTS[] = {MOQ_GENERAL_SHAPES(BFLOAT16)
                                            MOQ_GENERAL_WIDE_SHAPES(BFLOAT16)};

static const variant *variants_of(const moq_linear_spec *spec) {
    switch (spec->weight) {
    case MOQ_WEIGHT_INT8_ROW:
        return int8_variants(spec->dtype);
    case MOQ_WEIGHT_INT4_GROUP:
        return int4_variants(spec->dtype);
    default:
        return E4M3_VARIANTS;
    }
}

/* Describes W as rows of codes, a byte a column. */
static moq_status map_rows(CUtensorMap *map, const moq_linear_call *call,
                           const moq_nvfp4_medium_config *config, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    int64_t box = moq_code_rows_of(spec->weight, config->rows);
    return moq_tensor_map_rows(map, call->weight,
                               moq_code_rows_of(spec->weight, spec->out_features),
                               spec->in_features, spec->in_features, (uint32_t)box, err);
}

extern "C" int64_t moq_cuda_general_workspace(const moq_linear_call *call) {
    moq_nvfp4_medium_config config = moq_general_expand_config(call);
    return config.shape ? room_of_sums(&config).bytes : 0;
}

extern "C" moq_status moq_cuda_general(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_medium_config config = moq_general_expand_config(call);
    if (!config.shape)
        return refuse(call, err);
    layout l = moq_nvfp4_medium_smem_layout(config.shape, config.cluster);
    gemm_args a = begin_args(call, &config, l, call->workspace);
    a.weight_scale = call->weight_scale;
    CUtensorMap weights;
    MOQ_TRY(map_rows(&weights, call, &config, err));
    return launch_tiles(call, &config, l, variants_of(spec), &a, &weights, call->x->data,
                        spec->in_features * 2, call->x->stride[0] * 2, err);
}

} // namespace moq::general
