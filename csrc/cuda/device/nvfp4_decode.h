/* Register decoder of packed NVFP4 weights (core/nvfp4_packed.h): a word becomes 16-bit operands of
 * matrix products.
 *
 * A word holds 8 weights of a group, the m16k16 fragment of a lane: pairs 0 and 2 belong to row g,
 * 1 and 3 to row g + 8. A pair's sign and magnitude move to the sign, the last two bits of the
 * exponent and the first of the fraction of bfloat16: that is e2m1 * 2^-126 exactly, 0.5 included,
 * which is subnormal. A block scale's byte, shifted by 4, is scale * 2^-120 exactly; times 2^127
 * and 2^112 it is scale * 2^119. The product is weight * 2^-7 with six significant bits: exact. In
 * float16 the factors are e2m1 * 2^-14 and scale * 2^7, and the product is again weight * 2^-7, at
 * least 2^-17: exact.
 *
 * Callers multiply outputs by MOQ_NVFP4_FACTOR, together with the scale of the row.
 *
 * Instructions for 8 weights, from SASS of sm_90a:
 *
 *                 LOP3  SHF.R  PRMT  left shifts  HMUL2
 *    bfloat16        6      1     0            3      4
 *    float16         8      0     0            4      4
 *    two scales      0      0     1            1      2   (float16: 1)
 *
 * so 0.875 logic operations a weight, 1.0 with scales for every word. A sign and a magnitude that
 * move by different distances are masked, multiplied by the sum of two powers and masked again: no
 * bit shifted out of a field reaches another. Left shifts are written as multiplications; ptxas
 * makes IMAD.SHL of them, which uses another pipe, or SHF.L where that pipe is busier. */
#ifndef MOQ_CUDA_DEVICE_NVFP4_DECODE_H
#define MOQ_CUDA_DEVICE_NVFP4_DECODE_H

#include <cuda_runtime.h>
#include <stdint.h>

namespace moq {

#define MOQ_NVFP4_FACTOR 128.0f

/* Type of the activations. */
typedef enum { MOQ_NVFP4_BF16, MOQ_NVFP4_F16 } moq_nvfp4_type;

/* Multiplies two pairs, exactly for the operands used here; neither type flushes subnormals. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ uint32_t moq_nvfp4_multiply(uint32_t a, uint32_t b) {
    uint32_t product;
    if (TYPE == MOQ_NVFP4_F16)
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    else
#if __CUDA_ARCH__ >= 900
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(product)
            : "r"(a), "r"(b), "r"(0x80008000u)); /* -0, which keeps the sign of a zero */
#endif
    return product;
}

/* Returns the low or the high half of a register twice. The compiler folds it into the following
 * multiplication, unlike a byte permutation. */
static __device__ __forceinline__ uint32_t moq_nvfp4_twice(uint32_t halves, bool high) {
    uint32_t twice;
    if (high)
        asm("{\n"
            ".reg .b16 low, high;\n"
            "mov.b32 {low, high}, %1;\n"
            "mov.b32 %0, {high, high};\n"
            "}"
            : "=r"(twice)
            : "r"(halves));
    else
        asm("{\n"
            ".reg .b16 low, high;\n"
            "mov.b32 {low, high}, %1;\n"
            "mov.b32 %0, {low, low};\n"
            "}"
            : "=r"(twice)
            : "r"(halves));
    return twice;
}

/* Returns the scales of rows g and g + 8 in the low and the high half, from two neighbouring bytes
 * of a group: bytes 0 and 1 of `bytes` or, if `upper`, bytes 2 and 3. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ uint32_t moq_nvfp4_scales(uint32_t bytes, bool upper) {
    uint32_t apart = __byte_perm(bytes, 0, upper ? 0x4342 : 0x4140);
    if (TYPE == MOQ_NVFP4_F16)
        return moq_nvfp4_multiply<TYPE>(apart * 128, 0x78007800u); /* 2^15 */
    apart = moq_nvfp4_multiply<TYPE>(apart * 16, 0x7f007f00u);     /* 2^127 */
    return moq_nvfp4_multiply<TYPE>(apart, 0x77807780u);           /* 2^112 */
}

/* Moves the fields of a word to their places in 16-bit numbers: e2m1 * 2^-126 or, in float16, *
 * 2^-14. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ void moq_nvfp4_codes(uint32_t word, uint32_t (&pair)[4]) {
    const uint32_t SIGN = 0x80008000u;
    if (TYPE == MOQ_NVFP4_F16) {
        const uint32_t MAGNITUDE = 0x0e000e00u;
        pair[0] = (word & 0x81c081c0u) * (1 + 8) & (SIGN | MAGNITUDE);
        pair[1] = (word & 0x10381038u) * (8 + 64) & (SIGN | MAGNITUDE);
        pair[2] = (word & 0x40074007u) * (2 + 512) & (SIGN | MAGNITUDE);
        pair[3] = (word * 4 & SIGN) | (word & MAGNITUDE);
    } else {
        const uint32_t MAGNITUDE = 0x01c001c0u;
        pair[0] = word & (SIGN | MAGNITUDE);
        pair[1] = word * 8 & (SIGN | MAGNITUDE);
        pair[2] = (word & 0x40074007u) * (2 + 64) & (SIGN | MAGNITUDE);
        pair[3] = (word * 4 & SIGN) | (word >> 3 & MAGNITUDE);
    }
}

/* Decodes a fragment: weights * 2^-7 from a word and the scales of its rows. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ void moq_nvfp4_fragment(uint32_t word, uint32_t scales,
                                                          uint32_t (&a)[4]) {
    moq_nvfp4_codes<TYPE>(word, a);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = moq_nvfp4_multiply<TYPE>(a[i], moq_nvfp4_twice(scales, i % 2));
}

} // namespace moq

#endif
