/* Codes of a matrix on the host: looked at under its scales, and written row by row into the one
 * tensor that all partitions share. */
#ifndef MOQ_OPS_WEIGHT_CODES_H
#define MOQ_OPS_WEIGHT_CODES_H

#include "ops/weight_scales.h"

/* The failure of a code that no intact checkpoint holds. */
moq_status moq_prepare_bad_code(const moq_weight *weight, int64_t row, int64_t column,
                                moq_err *err);

/* Codes of one partition: rows of the weight and, for e2m1, of its block scales. */
typedef struct {
    int32_t index;
    int64_t first; /* row of the matrix */
    moq_code_rows codes, groups;
    bool zero; /* known to mean zero, whatever the scales of rows say */
} moq_prepare_part;

/* Looks for codes that no intact checkpoint holds: NaN, or under a scale of zero a value. The
 * scales are of the matrix. */
moq_status moq_prepare_check_part(const moq_weight *weight, const moq_prepare_part *part,
                                  const moq_prepare_scales *scales, moq_err *err);

/* Destinations of the codes of a matrix and of its block scales of e2m1. */
typedef struct {
    uint8_t *weight, *groups;
} moq_prepare_out;

/* Writes the partition's rows of the prepared weight, and of its block scales of e2m1. */
void moq_prepare_write_part(const moq_weight *weight, const moq_prepare_part *part,
                            const moq_prepare_scales *scales, const moq_prepare_out *out);

#endif
