/* NVFP4 linear for some dozens of tokens on Hopper: y[m, n] = round(sum_k x[m, k] W[n, k] +
 * bias[n]) of 16-bit activations and exact weights.
 *
 * W gives the 64 rows of a warpgroup's products, from registers, where a warp decodes its packed
 * codes while the products before are under way; the tokens come in as they are. A block has two to
 * four warpgroups that multiply and a warp each that copies weights and tokens, which go round in a
 * ring of steps of 128 columns. W is constant, so the ring is filled with it before x is complete
 * (dependent launch). Where a layer has fewer tiles than the chip multiprocessors, K is divided
 * among the blocks of a cluster and the warpgroups with the same rows; sums come together as
 * sm90_gemm_outputs.h has it. Where rounds of tiles do not come out even, blocks share the steps of
 * the last ones (sm90_schedule.h). Sums are added in the same order always.
 *
 * What bounds it (H200, docs/lab/nvfp4-medium.md): 91 instructions of a warp for 16 rows by 64
 * columns, of which 60 decode, so 120 to 200 cycles of a scheduler; with 128 tokens the tensor
 * cores, which share the register file with the decoding; what the second-level cache delivers, of
 * x too, which every tile of rows reads again. */
#include "cuda/linear/sm90/sm90_nvfp4_medium_exact.h"
#include "cuda/linear/sm90/sm90_nvfp4_medium_launch.h"

namespace moq::nvfp4_medium {

#define VARIANT(tokens, row_groups, k_groups, split_k, shared, step)                               \
    variant_of<MOQ_NVFP4_BF16, tokens, row_groups, k_groups, split_k, shared>(),

static const variant BFLOAT16_VARIANTS[] = {MOQ_NVFP4_MEDIUM_SHAPES(VARIANT)};

extern "C" int64_t moq_cuda_nvfp4_medium_workspace(const moq_linear_call *call) {
    method config = moq_nvfp4_medium_expand_config(call);
    return config.shape ? room_of_sums(&config).bytes : 0;
}

extern "C" moq_status moq_cuda_nvfp4_medium(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    method config = moq_nvfp4_medium_expand_config(call);
    if (!config.shape)
        return refuse(call, err);
    layout l = moq_nvfp4_medium_smem_layout(config.shape, config.cluster);
    gemm_args a = begin_args(call, &config, l, call->workspace);
    const variant *variants = spec->dtype == MOQ_DT_F16 ? float16_variants() : BFLOAT16_VARIANTS;
    return launch_tiles(call, &config, l, variants, &a, call->x->data, spec->in_features * 2,
                        call->x->stride[0] * 2, err);
}

} // namespace moq::nvfp4_medium
