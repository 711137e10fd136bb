/* The work on rows that every quantization is made of, one table of functions for each level of
 * vector extensions.
 *
 * core/formats.h defines the conversions and cpu_quantize.h the formulas; every level gives the
 * same bits for every input, NaN included. Rows are consecutive values; source and destination do
 * not overlap. */
#ifndef MOQ_CPU_CPU_CONVERT_H
#define MOQ_CPU_CPU_CONVERT_H

#include "core/tensor.h"

typedef struct {
    /* Conversions as moq_decode_row and moq_encode_row of core/formats.h do them. */
    void (*decode)(moq_dtype dtype, const void *src, int64_t n, float *dst);
    void (*encode)(moq_dtype dtype, const float *src, int64_t n, void *dst);
    /* Codes of int8 as numbers, and of int4: four bits of each byte from bit `shift` on, 0 or 4. */
    void (*decode_int8)(const int8_t *src, int64_t n, float *dst);
    void (*decode_int4)(const uint8_t *src, int shift, int64_t n, float *dst);
    /* values *= the factor of each `group`, of which the last may have less. */
    void (*multiply_groups)(float *values, int64_t n, int64_t group, const float *factors);
    /* out = values * a * b, the exact product of numbers with at most 53 bits in all, rounded once;
     * +0 where a or b is 0. If `odd`, ready to be encoded: what the product rounded at once to a
     * type of at most 22 bits of precision is, encode makes of it. */
    void (*scale)(const float *restrict values, const float *restrict a, const float *restrict b,
                  int64_t n, bool odd, float *restrict out);

    /* The functions from here on read F32, BF16 or F16. */

    /* amax = the largest magnitude of each `group` values, of what is left in the last group; the
     * NaN 0x7fc00000 where one of the values is a NaN. */
    void (*amax)(moq_dtype dtype, const void *src, int64_t n, int64_t group, float *amax);
    /* codes = e4m3(x * factor), factor >= 0; all 0x7f when the factor is a NaN. */
    void (*multiply_e4m3)(moq_dtype dtype, const void *src, int64_t n, float factor,
                          uint8_t *codes);
    /* codes = e4m3(x / scale) with a scale for each group, which is infinite or, but for rounding,
     * at least amax / 448 and positive; codes under a scale that is a NaN are 0x7f. */
    void (*divide_e4m3)(moq_dtype dtype, const void *src, int64_t n, int64_t group,
                        const float *scales, uint8_t *codes);
    /* See moq_quantize_row_nvfp4. */
    void (*nvfp4)(moq_dtype dtype, const void *src, int64_t n, float scale_2, uint8_t *packed,
                  uint8_t *block_scales);
} moq_row_kernels;

/* The table of the level that moq_cpu_isa() names. */
const moq_row_kernels *moq_cpu_row_kernels(void);

/* Rounds n values to a dtype, F32, BF16 or F16, in their place. */
void moq_round_row(moq_dtype dtype, float *values, int64_t n);

/* Tables by level; vector kernels do the last few values of a row by the portable kernels. */
extern const moq_row_kernels moq_row_kernels_portable, moq_row_kernels_avx2, moq_row_kernels_avx512;

#endif
