/* Experts with NVFP4 weights for few tokens on Hopper, exact products: sm90_moe_decode_kernels.h
 * says what is computed and how.
 *
 * Weights are in the packed layout (core/nvfp4_packed.h), 0.5625 bytes each. The decoder takes
 * nearly as long as the memory, 14 to 15 ns of a multiprocessor for a unit where the memory of an
 * H200 brings one in 17 (docs/lab/nvfp4-decode.md). In the first form a stage is four units, two
 * blocks of K of two slabs or four of one, a bulk copy for each slab; with slices it is a slab by
 * all blocks of a slice, one copy, and two blocks of K are multiplied in turn. Eight warps of 128
 * registers: sixteen of 64 had copies of half the size, and were slower at every number of tokens.
 *
 * Measured: see docs/lab/experts-decode.md. */
#include "cuda/moe/sm90/cuda_moe_sm90.h"
#include "cuda/moe/sm90/sm90_moe_decode_nvfp4.h"
#include "cuda/moe/sm90/sm90_moe_fused.h"

namespace moq::moe_decode {

/* Kernels by what a slice has, which is MOQ_MOE_NVFP4_DECODE_SPLIT_K of moe_decode.h. */
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
    return h->slabs == 2 ? (const void *)moe_decode_down<nvfp4<2, TYPE>>
                         : (const void *)moe_decode_down<nvfp4<1, TYPE>>;
}

extern "C" moq_status moq_cuda_moe_nvfp4_decode(const moq_moe_call *call, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    bool half = spec->w13.dtype == MOQ_DT_F16;
    moq_moe_decode_share share;
    moq_moe_decode_partition(spec, call->tokens, call->config, &share);
    if (share.tiles.grid)
        return launch_fused_nvfp4(call, &share.tiles, err);
    up_args up = up_of(call, &share);
    down_args down = down_of(call, &share);
    describe_packed(&up.common.w);
    describe_packed(&down.common.w);
    const void *up_kernel = half ? kernel_of<MOQ_NVFP4_F16>(&share.up, true)
                                 : kernel_of<MOQ_NVFP4_BF16>(&share.up, true);
    const void *down_kernel = half ? kernel_of<MOQ_NVFP4_F16>(&share.down, false)
                                   : kernel_of<MOQ_NVFP4_BF16>(&share.down, false);
    return launch_all(call, &share, "NVFP4 experts", up_kernel, &up, down_kernel, &down, err);
}

extern "C" int64_t moq_cuda_moe_nvfp4_decode_workspace(const moq_moe_call *call) {
    return moq_moe_decode_workspace(call->spec, call->tokens, call->config);
}

} // namespace moq::moe_decode
