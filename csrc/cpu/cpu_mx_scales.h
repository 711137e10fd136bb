/* Block scales of MX as those of NVFP4, row by row (core/mx_scales.h). */
#ifndef MOQ_CPU_CPU_MX_SCALES_H
#define MOQ_CPU_CPU_MX_SCALES_H

#include "core/mx_scales.h"

/* Exponents of a row that have a say. */
typedef struct {
    int64_t nan; /* the first group whose scale is NaN, or -1; nothing else is known then */
    int least, most;
    bool all; /* groups of zeros have a say, too */
} moq_mx_range;

moq_mx_range moq_cpu_find_mx_range(const uint8_t *exponents, const uint8_t *codes, int64_t groups);

/* Writes e4m3 scales of a row, whose range was found and is no wider than MOQ_MX_SPAN, and returns
 * its factor. */
float moq_cpu_write_mx_row(const uint8_t *exponents, const uint8_t *codes, int64_t groups,
                           moq_mx_range range, uint8_t *scales);

#endif
