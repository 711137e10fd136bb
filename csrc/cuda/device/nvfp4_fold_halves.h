/* Folded NVFP4 weights as 16-bit operands, for chips whose tensor cores have no FP8 products, or
 * none that are faster: the codes of nvfp4_fold.h as float16, times 2^-8.
 *
 * There e4m3 and float16 have their subnormal numbers at the same place: all numbers of e4m3 times
 * 2^-8 are those of float16 whose last seven bits are zeros, so that rounding to them is an
 * addition and a mask. e2m1 * scale * fold * 2^-8 before that is exact, a multiple of 2^-21 with
 * six significant bits. For 8 weights 8 additions and as many masks, and 8 operations to find out
 * which number is even, beside those of the decoder. */
#ifndef MOQ_CUDA_DEVICE_NVFP4_FOLD_HALVES_H
#define MOQ_CUDA_DEVICE_NVFP4_FOLD_HALVES_H

#include "cuda/device/nvfp4_fold.h"

namespace moq {

#define MOQ_FOLDED_HALVES 256.0f /* what products with these weights leave out */

/* Scales of rows g and g + 8 times the powers of two of moq_pack_folds and 2^6: with the codes' own
 * 2^-14 that is 2^-8. It is at most 57344 where a code of the group is not zero; where all are, it
 * may be anything finite. */
static __device__ __forceinline__ uint32_t moq_fold_halves_scales(uint32_t bytes, bool upper,
                                                                  uint32_t folds) {
    uint32_t apart = __byte_perm(bytes, 0, upper ? 0x4342 : 0x4140), scales;
    scales = moq_nvfp4_multiply<MOQ_NVFP4_F16>(apart * 128, folds);
    scales = moq_nvfp4_multiply<MOQ_NVFP4_F16>(scales, 0x54005400u); /* 2^6 */
    asm("min.f16x2 %0, %0, %1;" : "+r"(scales) : "r"(0x7bff7bffu));
    return scales;
}

/* The nearest numbers whose last seven bits are zeros, ties to even. */
static __device__ __forceinline__ uint32_t moq_round_halves(uint32_t pair) {
    uint32_t odd = pair >> 7 & 0x00010001u;
    return (pair + 0x003f003fu + odd) & 0xff80ff80u;
}

/* As moq_nvfp4_fragment. */
static __device__ __forceinline__ void moq_fold_halves_fragment(uint32_t word, uint32_t scales,
                                                                uint32_t (&a)[4]) {
    moq_nvfp4_fragment<MOQ_NVFP4_F16>(word, scales, a);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = moq_round_halves(a[i]);
}

} // namespace moq

#endif
