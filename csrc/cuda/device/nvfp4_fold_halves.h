/* Folding of packed NVFP4 weights into 16-bit operands, for chips whose tensor cores have no FP8
 * products, or none that are faster: the codes of nvfp4_fold.h as float16, times 2^-8.
 *
 * e2m1 * scale * fold * 2^-8 is exact in float16, a multiple of 2^-21 with six significant bits. It
 * is rounded to four, or to a multiple of 2^-17, by additions, since float16 arithmetic has twice
 * the throughput of integer arithmetic. Adding it to 3 * 2^-8, within the multiplication, rounds
 * small numbers to a multiple of 2^-17 and leaves others alone. For the result v, with six bits or
 * fewer, 129 v - (129 v - v) has four bits, ties to even: 129 v is rounded to 11 bits, those of 128
 * v and four of v. A number that is rounded twice keeps five bits the first time, an even one of
 * ties, so that the result is that of one rounding. */
#ifndef MOQ_CUDA_DEVICE_NVFP4_FOLD_HALVES_H
#define MOQ_CUDA_DEVICE_NVFP4_FOLD_HALVES_H

#include "cuda/device/nvfp4_fold.h"

namespace moq {

#define MOQ_FOLDED_HALVES 256.0f /* products with these weights leave this factor out */

/* Returns the scales of rows g and g + 8 times the powers of two of moq_pack_folds and 2^6; with
 * the codes' own 2^-14 that is 2^-8. A scale is at most 57344 if a code of its group is not zero,
 * and otherwise any finite number. */
static __device__ __forceinline__ uint32_t moq_fold_halves_scales(uint32_t bytes, bool upper,
                                                                  uint32_t folds) {
    uint32_t apart = __byte_perm(bytes, 0, upper ? 0x4342 : 0x4140), scales;
    scales = moq_nvfp4_multiply<MOQ_NVFP4_F16>(apart * 128, folds);
    scales = moq_nvfp4_multiply<MOQ_NVFP4_F16>(scales, 0x54005400u); /* 2^6 */
    asm("min.f16x2 %0, %0, %1;" : "+r"(scales) : "r"(0x7bff7bffu));
    return scales;
}

/* Returns e4m3 of two codes under a scale of moq_fold_halves_scales, times 2^-8. */
static __device__ __forceinline__ uint32_t moq_fold_halves(uint32_t codes, uint32_t scales) {
    const uint32_t LEAST = 0x22002200u, MANY = 0x58085808u; /* 3 * 2^-8, 129 */
    uint32_t rounded;
    asm("{\n"
        ".reg .b32 sum, v, many, rest;\n"
        "fma.rn.f16x2 sum, %1, %2, %3;\n"
        "sub.rn.f16x2 v, sum, %3;\n"
        "mul.rn.f16x2 many, v, %4;\n"
        "sub.rn.f16x2 rest, v, many;\n"
        "add.rn.f16x2 %0, many, rest;\n"
        "}"
        : "=r"(rounded)
        : "r"(codes), "r"(scales), "r"(LEAST), "r"(MANY));
    return rounded;
}

/* Folds a fragment, with the operands of moq_nvfp4_fragment. */
static __device__ __forceinline__ void moq_fold_halves_fragment(uint32_t word, uint32_t scales,
                                                                uint32_t (&a)[4]) {
    moq_nvfp4_codes<MOQ_NVFP4_F16>(word, a);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = moq_fold_halves(a[i], moq_nvfp4_twice(scales, i % 2));
}

} // namespace moq

#endif
