/* NVFP4 experts for decode on Hopper with a kernel for each product: instances of the kernels of
 * up_down.h and split_k.h for packed weights (nvfp4_format.h), which say what is computed, the
 * layouts and tiles, and what bounds it. */
#include "cuda/moe/sm90/decode/nvfp4_format.h"
#include "cuda/moe/sm90/decode/split_k.h"

namespace moq::moe_decode {

/* Returns the kernel for the K range of a warp, one of MOQ_MOE_NVFP4_DECODE_SPLIT_K
 * (decode.h). */
template <moq_nvfp4_type TYPE, int BLOCKS>
static const void *split_k_kernel(const moq_moe_decode_half *h, bool up) {
    if (!up)
        return (const void *)moe_decode_down_split_k<nvfp4_split_k<2, BLOCKS, TYPE>>;
    return h->slabs == 2 ? (const void *)moe_decode_up_split_k<nvfp4_split_k<2, BLOCKS, TYPE>>
                         : (const void *)moe_decode_up_split_k<nvfp4_split_k<1, BLOCKS, TYPE>>;
}

template <moq_nvfp4_type TYPE> static const void *kernel_of(const moq_moe_decode_half *h, bool up) {
#define BLOCKS(count)                                                                              \
    if (h->split == count)                                                                         \
        return split_k_kernel<TYPE, count>(h, up);
    MOQ_MOE_NVFP4_DECODE_SPLIT_K(BLOCKS)
#undef BLOCKS
    if (up)
        return h->slabs == 2 ? (const void *)moe_decode_up<nvfp4<2, TYPE>>
                             : (const void *)moe_decode_up<nvfp4<1, TYPE>>;
    return (const void *)moe_decode_down<nvfp4<2, TYPE>>;
}

moq_status launch_nvfp4(const moq_moe_call *call, const moq_moe_decode_share *share, moq_err *err) {
    bool half = call->spec->w13.dtype == MOQ_DT_F16;
    up_args up = up_of(call, share);
    down_args down = down_of(call, share);
    describe_packed(&up.common.w);
    describe_packed(&down.common.w);
    const void *up_kernel = half ? kernel_of<MOQ_NVFP4_F16>(&share->up, true)
                                 : kernel_of<MOQ_NVFP4_BF16>(&share->up, true);
    const void *down_kernel = half ? kernel_of<MOQ_NVFP4_F16>(&share->down, false)
                                   : kernel_of<MOQ_NVFP4_BF16>(&share->down, false);
    return launch_all(call, share, "NVFP4 experts", up_kernel, &up, down_kernel, &down, err);
}

} // namespace moq::moe_decode
