/* Linear of MXFP8, int8 and int4 weights of many tokens on Hopper: y[m, n] = round(fw[n] sum over
 * groups of s(n, group) sum_k x[m, k] C[n, k] + bias[n]).
 *
 * C is e4m3 with an E8M0 scale s for 32 columns, int8 with a factor fw a row, or int4 in pairs of
 * rows with a float32 scale for 128 columns, all as the checkpoint stores them. Codes become 16-bit
 * numbers exactly, as in general.cu. Sums of int4 are in units of the scale of the group at hand:
 * between groups they are multiplied by the ratio of both scales, which rounds a sum as adding a
 * scaled product does.
 *
 * Tile, tokens, stream-K tail and epilogue are those of the NVFP4 kernels (exact_prefill.h), the
 * mainloops are in general_prefill.h; here are the MXFP8 kernels and the launch.
 *
 * What bounds it (H200, docs/lab/any-chip.md): the tensor cores and the power they take. */
#include "cuda/linear/sm90/general_prefill.h"
#include "cuda/runtime/tensor_map.h"

namespace moq::general_prefill {

#define BFLOAT16(tokens, share) general_variant<E4M3_MX, AS_BF16, tokens, share>(),

static const variant E4M3_VARIANTS[] = {MOQ_NVFP4_PREFILL_SHAPES(BFLOAT16)};

extern "C" int64_t moq_cuda_general_prefill_workspace(const moq_linear_call *call) {
    moq_nvfp4_prefill_config config = moq_general_prefill_expand_config(call);
    return workspace_of(&config);
}

extern "C" moq_status moq_cuda_general_prefill(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    moq_nvfp4_prefill_config config = moq_general_prefill_expand_config(call);
    const variant *variants = E4M3_VARIANTS;
    CUtensorMap weights;
    if (spec->weight != MOQ_WEIGHT_E4M3_GROUP)
        variants = int_variants(spec->weight == MOQ_WEIGHT_INT4_GROUP, spec->dtype == MOQ_DT_F16);
    MOQ_TRY(moq_tensor_map_rows(
        &weights, call->weight, moq_code_rows_of(spec->weight, spec->out_features),
        spec->in_features, spec->in_features, (uint32_t)moq_code_rows_of(spec->weight, ROWS), err));
    return launch_exact(call, &config, &variants[config.index], divide_up(spec->in_features, STEP),
                        &weights, err);
}

} // namespace moq::general_prefill
