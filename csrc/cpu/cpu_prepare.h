/* Weight processing on the CPU, row by row: copies that check what they copy, and the folding of
 * NVFP4 block scales into e4m3 codes. Callers have validated shapes; rows are contiguous. */
#ifndef MOQ_CPU_CPU_PREPARE_H
#define MOQ_CPU_CPU_PREPARE_H

#include "core/status.h"

#include <stdbool.h>
#include <stdint.h>

/* Index of the first e4m3 code that is NaN, or -1. */
int64_t moq_cpu_find_e4m3_nan(const uint8_t *codes, int64_t count);

/* Index of the first e4m3 code that is neither zero nor NaN, or -1. */
int64_t moq_cpu_find_e4m3_value(const uint8_t *codes, int64_t count);

/* Index of the first of `columns` e2m1 codes that, times the e4m3 scale of its group, is neither
 * zero nor NaN, or -1. */
int64_t moq_cpu_find_e2m1_value(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                                int32_t group);

/* Index of the first e4m3 block scale that is NaN or negative, or -1. Minus zero counts as zero. */
int64_t moq_cpu_find_bad_block_scale(const uint8_t *scales, int64_t count);

/* One row of NVFP4 as e4m3: with v[k] = e2m1[k] * scale[k / group], writes e4m3(v[k] / r) and
 * returns r, the power of two 2^ceil(log2(max |v| / 448)), or 1 for a row of zeros. A power of two
 * leaves the six-bit products 1, 2 and 4 times a block scale exact and only rounds 1.5, 3 and 6
 * times it. */
float moq_cpu_fold_e2m1_row(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                            int32_t group, uint8_t *out);

/* One row of MXFP8 as e4m3, by the same r of v[k] = e4m3[k] * 2^(scale[k / group] - 127). Only
 * codes that become subnormal are rounded. */
float moq_cpu_fold_mx_row(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                          int32_t group, uint8_t *out);

#endif
