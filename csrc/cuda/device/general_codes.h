/* Register decoder of MXFP8, int8 and int4 codes as the checkpoint stores them: two codes become
 * 16-bit numbers, exactly.
 *
 * Instructions for two codes, from SASS of sm_90a: e4m3 PRMT, SHF, 2 LOP3 and HMUL2; int8 PRMT, 2
 * LOP3 and HFMA2; int4, of two rows, PRMT, SHF, 2 LOP3 and 2 HADD2. */
#ifndef MOQ_CUDA_DEVICE_GENERAL_CODES_H
#define MOQ_CUDA_DEVICE_GENERAL_CODES_H

#include "cuda/device/nvfp4_decode.h"

namespace moq {

enum general_kind { E4M3_MX, INT8, INT4 };

/* Returns 16 bits each of two codes of a word, bytes 0 and 1 or 2 and 3: e4m3 in the upper half of
 * its bits, others in the lower. */
template <int KIND> static __device__ __forceinline__ uint32_t spread(uint32_t word, int half) {
    if (KIND == E4M3_MX)
        return __byte_perm(word, 0, half ? 0x3424 : 0x1404);
    return __byte_perm(word, 0, half ? 0x4342 : 0x4140);
}

/* Subtracts two pairs, exactly for the operands used here. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
    uint32_t difference;
    if (TYPE == MOQ_NVFP4_F16)
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    else /* b times -1, plus a: sm_80 has no other */
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return difference;
}

/* Returns (a & mask) ^ bits by one instruction; the compiler would take two, with a constant each.
 */
static __device__ __forceinline__ uint32_t mask_and_flip(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
    return result;
}

/* Exponents of bf16 are biased by 120 more than those of e4m3: 2^120 twice. */
#define E4M3_TO_BF16 0x7b807b80u

/* Returns two codes of `spread` as numbers. e4m3 codes become bf16 times 2^-120 times `factor`, a
 * pair of powers of two; in fp16 they leave out 2^8, which sums get. */
template <int KIND, moq_nvfp4_type TYPE>
static __device__ __forceinline__ uint32_t widen(uint32_t pair, int row,
                                                 uint32_t factor = E4M3_TO_BF16) {
    constexpr bool HALVES = TYPE == MOQ_NVFP4_F16;
    if (KIND == E4M3_MX && HALVES)
        return (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
    if (KIND == E4M3_MX)
        return moq_nvfp4_multiply<TYPE>((pair & 0x80008000u) | (pair >> 4 & 0x07f007f0u), factor);
    uint32_t base = HALVES ? 0x64006400u : 0x43004300u; /* 1024 or 128, in steps of one */
    if (KIND == INT8)
        return subtract_pair<TYPE>(mask_and_flip(pair, 0x007f007fu, base),
                                   mask_and_flip(pair, 0x00800080u, base));
    return subtract_pair<TYPE>(mask_and_flip(pair >> 4 * row, 0x000f000fu, base | 0x00080008u),
                               base | 0x00080008u);
}

/* Exponents of E8M0 scales are lowered by 16, so that bf16 holds a scale times 2^120 up to 2^23;
 * larger ones become infinite. */
#define LOWERED 65536.0f

/* Returns 2^104 times two scales, whose codes are in two halves: what makes of e4m3 * 2^-120 the
 * weight * 2^-16. */
static __device__ __forceinline__ uint32_t e8m0_factors(uint32_t codes) {
    return (__vminu2(codes, 0x00970097u) + 0x00680068u) << 7;
}

/* Returns the factor of a group of 32 columns, byte `group` of a word, twice. */
static __device__ __forceinline__ uint32_t e8m0_factor(uint32_t word, int group) {
    return e8m0_factors(__byte_perm(word, 0, 0x4040 + 0x101 * group));
}

/* Number that `shift_codes` adds to int4 codes. */
template <moq_nvfp4_type TYPE> constexpr float INT4_SHIFT = TYPE == MOQ_NVFP4_F16 ? 72.0f : 136.0f;

/* Returns two int4 codes of a word plus INT4_SHIFT: those at bits 4i and 4i + 16. */
template <moq_nvfp4_type TYPE>
static __device__ __forceinline__ uint32_t shift_codes(uint32_t word, int i) {
    if (TYPE == MOQ_NVFP4_F16) /* 64 to 79 in steps of a sixteenth of the mantissa */
        return mask_and_flip(i == 0 ? word << 4 : word >> (4 * i - 4), 0x00f000f0u, 0x54805480u);
    return mask_and_flip(word >> 4 * i, 0x000f000fu, 0x43084308u);
}

} // namespace moq

#endif
