/* NVFP4 weights of the packed layout (core/nvfp4_packed.h) as 16-bit operands of matrix products:
 * the register decoder that all kernels of that layout share.
 *
 * A word holds 8 weights of a group, the m16k16 fragment of a lane: pairs 0 and 2 are of row g, 1
 * and 3 of row g + 8. A pair's sign and magnitude go to where bfloat16 has its sign, the last two
 * bits of its exponent and the first of its fraction: that is e2m1 * 2^-126 exactly, 0.5 included,
 * which is subnormal. A block scale's byte, shifted by 4, is scale * 2^-120 exactly, and times
 * 2^127 and 2^112 it is scale * 2^119. The product is weight * 2^-7, of six significant bits:
 * exact. In float16 they are e2m1 * 2^-14, scale * 2^7, and again weight * 2^-7, at least 2^-17:
 * exact.
 *
 * Whoever multiplies gives back MOQ_NVFP4_FACTOR with the factor of the row.
 *
 * Instructions for 8 weights, from SASS of sm_90a:
 *
 *                LOP3  SHF.R  PRMT  left shifts  HMUL2
 *   bfloat16        6      1     0            3      4
 *   float16         8      0     0            4      4
 *   two scales      0      0     1            1      2   (float16: 1)
 *
 * so 0.875 logic operations a weight, 1.0 with scales for every word. A sign and a magnitude that
 * go different ways are masked, multiplied by the sum of two powers and masked again: nothing that
 * is shifted out of a field reaches another. Left shifts are written as multiplications; ptxas
 * makes IMAD.SHL of them, which is another pipe's, or SHF.L where it finds that pipe busier.
 */
#ifndef MOQ_CUDA_DEVICE_NVFP4_DECODE_H
#define MOQ_CUDA_DEVICE_NVFP4_DECODE_H

#include <cuda_runtime.h>
#include <stdint.h>

namespace moq {

#define MOQ_NVFP4_FACTOR 128.0f

/* What activations are made of. */
typedef enum { MOQ_NVFP4_BF16, MOQ_NVFP4_F16 } moq_nvfp4_type;

/* Two products, exact wherever they are used here; neither flushes subnormals. */
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

/* The low or the high half of a register, twice. The compiler makes it a part of the multiplication
 * that follows, which it does not of a byte permutation. */
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

/* The scales of rows g and g + 8, in the low and the high half, from the two neighbouring bytes of
 * a group: those of `bytes` from byte 0 or, where `upper`, from byte 2 on. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ uint32_t moq_nvfp4_scales(uint32_t bytes, bool upper) {
    uint32_t apart = __byte_perm(bytes, 0, upper ? 0x4342 : 0x4140);
    if (TYPE == MOQ_NVFP4_F16)
        return moq_nvfp4_multiply<TYPE>(apart * 128, 0x78007800u); /* 2^15 */
    apart = moq_nvfp4_multiply<TYPE>(apart * 16, 0x7f007f00u);     /* 2^127 */
    return moq_nvfp4_multiply<TYPE>(apart, 0x77807780u);           /* 2^112 */
}

/* The fields of a word where a 16-bit number has them: e2m1 * 2^-126 or, in float16, * 2^-14. */
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

/* The fragment: weights * 2^-7 from a word and the scales of its rows. */
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
