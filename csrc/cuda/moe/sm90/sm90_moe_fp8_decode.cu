/* Experts with FP8 weights for few tokens on Hopper: sm90_moe_decode_kernels.h says what is
 * computed and how.
 *
 * Weights are e4m3 as the checkpoint has them, x and g are quantized to e4m3 on the way, by one
 * scale an expert, one a token, or one for 128 columns. A stage is 128 columns of a warp's slabs, a
 * box of 16 rows in the 128-byte swizzle for each slab; with slices of K, of one slab. A lane
 * quantizes the columns that it multiplies: 32 of a token, of which its groups of 16 bytes of W
 * have the same order, 70 to 150 instructions where the memory takes 440 for a slab; with slices
 * once for all items of a chunk. Hopper has no products of e4m3 for a warp (mma.sync is compiled to
 * conversions and products of float16), so codes become float16, which holds them, those of x once
 * for all slabs; sums are float32, not the 14 bits of wgmma.
 *
 * Who quantizes by token needs the whole row: the first kernel finds the scales of the tokens that
 * a block has while its rings fill, and leaves the maximum of g of each slot and 16 rows for the
 * second.
 *
 * Measured: see docs/lab/experts-decode.md. */
#include "cuda/choice/moe_decode.h"
#include "cuda/moe/sm90/cuda_moe_sm90.h"
#include "cuda/moe/sm90/sm90_moe_decode_fp8.h"
#include "cuda/moe/sm90/sm90_moe_fused.h"

namespace moq::moe_decode {

/* Kernels by what a slice has, which is MOQ_MOE_FP8_DECODE_SPLIT_K of moe_decode.h. */
template <moq_dtype DT, moq_input_mode MODE, int BLOCKS>
static const void *split_k_kernel(const moq_moe_decode_half *h, bool up) {
    if (!up)
        return (const void *)moe_decode_down_split_k<fp8_split_k<2, BLOCKS, DT, MODE>>;
    return h->slabs == 2 ? (const void *)moe_decode_up_split_k<fp8_split_k<2, BLOCKS, DT, MODE>>
                         : (const void *)moe_decode_up_split_k<fp8_split_k<1, BLOCKS, DT, MODE>>;
}

template <moq_dtype DT, moq_input_mode MODE>
static const void *kernel_with(const moq_moe_decode_half *h, bool up) {
#define BLOCKS(count)                                                                              \
    if (h->split == count)                                                                         \
        return split_k_kernel<DT, MODE, count>(h, up);
    MOQ_MOE_FP8_DECODE_SPLIT_K(BLOCKS)
#undef BLOCKS
    if (up)
        return h->slabs == 2 ? (const void *)moe_decode_up<fp8<2, DT, MODE>>
                             : (const void *)moe_decode_up<fp8<1, DT, MODE>>;
    return h->slabs == 2 ? (const void *)moe_decode_down<fp8<2, DT, MODE>>
                         : (const void *)moe_decode_down<fp8<1, DT, MODE>>;
}

template <moq_dtype DT>
static const void *kernel_of(const moq_moe_decode_half *h, moq_input_mode mode, bool up) {
    return mode == MOQ_INPUT_E4M3_TENSOR  ? kernel_with<DT, MOQ_INPUT_E4M3_TENSOR>(h, up)
           : mode == MOQ_INPUT_E4M3_TOKEN ? kernel_with<DT, MOQ_INPUT_E4M3_TOKEN>(h, up)
                                          : kernel_with<DT, MOQ_INPUT_E4M3_GROUP>(h, up);
}

extern "C" moq_status moq_cuda_moe_fp8_decode(const moq_moe_call *call, moq_err *err) {
    const moq_moe_spec *spec = call->spec;
    moq_input_mode mode = spec->w13.input;
    moq_moe_decode_share share;
    moq_moe_decode_partition(spec, call->tokens, call->config, &share);
    if (share.tiles.grid)
        return launch_fused_fp8(call, &share.tiles, err);
    up_args up = up_of(call, &share);
    down_args down = down_of(call, &share);
    MOQ_TRY(describe_fp8(call, &up.common, err));
    MOQ_TRY(describe_fp8(call, &down.common, err));
    bool half = spec->w13.dtype == MOQ_DT_F16;
    const void *up_kernel = half ? kernel_of<MOQ_DT_F16>(&share.up, mode, true)
                                 : kernel_of<MOQ_DT_BF16>(&share.up, mode, true);
    const void *down_kernel = half ? kernel_of<MOQ_DT_F16>(&share.down, mode, false)
                                   : kernel_of<MOQ_DT_BF16>(&share.down, mode, false);
    return launch_all(call, &share, "FP8 experts", up_kernel, &up, down_kernel, &down, err);
}

extern "C" int64_t moq_cuda_moe_fp8_decode_workspace(const moq_moe_call *call) {
    return moq_moe_decode_workspace(call->spec, call->tokens, call->config);
}

} // namespace moq::moe_decode
