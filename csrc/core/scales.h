/* Reading and checking of scales, and their folding into one factor per output row.
 *
 * A scale may be a float32, bfloat16 or float16 tensor of any rank. Zero is legal for a weight: a
 * producer writes it for an all-zero layer, beside codes that are NaN, so it has to mean "this
 * weight is zero". Negative, infinite and NaN scales mean a damaged file and are refused. */
#ifndef MOQ_CORE_SCALES_H
#define MOQ_CORE_SCALES_H

#include "core/tensor.h"

/* Reads a contiguous scale tensor of exactly `count` values. `name` is for messages. */
moq_status moq_read_scales(const moq_tensor *t, const char *name, int64_t count, float *out,
                           moq_err *err);

typedef enum { MOQ_SCALE_MAY_BE_ZERO, MOQ_SCALE_POSITIVE } moq_scale_rule;

/* MOQ_ERR_VALUE naming the first value that breaks the rule. */
moq_status moq_check_scales(const float *scales, int64_t count, const char *name,
                            moq_scale_rule rule, moq_err *err);

/* factor[row] = scales[partition of row]: one value per row from one per partition. */
void moq_expand_to_rows(const float *scales, const int64_t *partitions, int32_t count,
                        float *factor);

#endif
