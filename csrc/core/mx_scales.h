/* Block scales of MX, powers of two as E8M0 bytes, as those of NVFP4 weights: a row whose exponents
 * lie at most MOQ_MX_SPAN apart has e4m3 scales, which are the same numbers times one factor.
 *
 *   2^(exponent - 127) = e4m3(2^(exponent - most + 8)) * 2^(most - 8 - 127)
 *
 * where `most` is the row's largest exponent. E4M3 has every power of two from 2^-9 to 2^8. Where
 * the exponents of all groups lie further apart, or one is 0, which exporters give groups of zeros,
 * those of groups whose codes are all zero have no say, and their scale is zero. A row of nothing
 * else has the factor 2^-8: one near 2^-127 would keep kernels from their usual arithmetic. */
#ifndef MOQ_CORE_MX_SCALES_H
#define MOQ_CORE_MX_SCALES_H

#include "core/formats.h"

#include <stdbool.h>
#include <stdint.h>

#define MOQ_MX_SPAN 17   /* the most that exponents of a row may differ by: 8 - (-9) */
#define MOQ_MX_NAN  0xff /* no exponent */
#define MOQ_MX_ONE  127  /* exponent of 1 */

/* The rows of a matrix, or of a part of each matrix of a stack. */
typedef struct {
    const uint8_t *codes;                 /* e2m1 [rows, 16 * groups], two codes a byte */
    const uint8_t *exponents;             /* E8M0 [rows, groups] */
    int64_t code_stride, exponent_stride; /* bytes from row to row */
    int64_t code_step, exponent_step;     /* bytes from expert to expert */
    int64_t rows, groups;
    int64_t experts; /* matrices of the stack, or 1 */
    int64_t span;    /* rows of a whole matrix: from expert to expert in the results */
    uint8_t *scales; /* e4m3 [rows, groups] without gaps */
    float *factors;  /* [rows] */
} moq_mx_rows;

#ifdef __CUDACC__
#define MOQ_MX_INLINE static __host__ __device__ __forceinline__
#else
#define MOQ_MX_INLINE static inline
#endif

/* True if all groups have a say in a row of these least and largest exponents. */
MOQ_MX_INLINE bool moq_mx_holds_all(int least, int most) {
    return least > 0 && most - least <= MOQ_MX_SPAN;
}

/* The e4m3 code of 2^(exponent - most + 8), for exponents from most - MOQ_MX_SPAN to most. */
MOQ_MX_INLINE uint8_t moq_mx_scale(int exponent, int most) {
    int field = exponent - most + 15; /* of a normal number, whose exponent has a bias of 7 */
    return (uint8_t)(field > 0 ? field << 3 : 1 << (field + 2));
}

/* The bits of 2^(most - 8 - 127) in float32, which is subnormal below 9. */
MOQ_MX_INLINE uint32_t moq_mx_factor_bits(int most) {
    return most > 8 ? (uint32_t)(most - 8) << 23 : 1u << (most + 14);
}

#endif
