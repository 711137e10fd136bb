/* FP8 experts for decode on Hopper with a kernel for each product: instances of the kernels of
 * up_down.h and split_k.h for e4m3 weights (fp8_format.h), which say what is computed, the layouts
 * and tiles, and what bounds it. */
#include "cuda/moe/sm90/decode/fp8_split_k.h"

namespace moq::moe_decode {

/* Returns the down kernel for the K range of a warp, one of MOQ_MOE_FP8_DECODE_SPLIT_K
 * (decode.h). */
template <moq_dtype DT, moq_input_mode MODE>
static const void *down_kernel_with(const moq_moe_decode_half *h) {
#define BLOCKS(count)                                                                              \
    if (h->split == count)                                                                         \
        return (const void *)moe_decode_down_split_k<fp8_split_k<2, count, DT, MODE>>;
    MOQ_MOE_FP8_DECODE_SPLIT_K(BLOCKS)
#undef BLOCKS
    return (const void *)moe_decode_down<fp8<2, DT, MODE>>;
}

template <moq_dtype DT>
static const void *down_kernel_of(const moq_moe_decode_half *h, moq_input_mode mode) {
    return mode == MOQ_INPUT_E4M3_TENSOR  ? down_kernel_with<DT, MOQ_INPUT_E4M3_TENSOR>(h)
           : mode == MOQ_INPUT_E4M3_TOKEN ? down_kernel_with<DT, MOQ_INPUT_E4M3_TOKEN>(h)
                                          : down_kernel_with<DT, MOQ_INPUT_E4M3_GROUP>(h);
}

moq_status launch_fp8(const moq_moe_call *call, const moq_moe_decode_share *share, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    moq_input_mode mode = spec->w13.input;
    up_args up = up_of(call, share);
    down_args down = down_of(call, share);
    MOQ_TRY(describe_fp8(call, &up.common, err));
    MOQ_TRY(describe_fp8(call, &down.common, err));
    bool half = spec->w13.dtype == MOQ_DT_F16;
    const void *up_kernel = spec->w13.quantized_input
                                ? coded_up_kernel_of(&share->up, spec->w13.dtype, mode)
                            : half ? up_kernel_of<MOQ_DT_F16, false>(&share->up, mode)
                                   : up_kernel_of<MOQ_DT_BF16, false>(&share->up, mode);
    const void *down_kernel = half ? down_kernel_of<MOQ_DT_F16>(&share->down, mode)
                                   : down_kernel_of<MOQ_DT_BF16>(&share->down, mode);
    return launch_all(call, share, "FP8 experts", up_kernel, &up, down_kernel, &down, err);
}

} // namespace moq::moe_decode
