/* Reading and checking of scales, and their folding into one factor per output row.
 *
 * A scale may be a tensor of any rank in one of the types of moq_is_scale_dtype: float32, bfloat16
 * or float16 as exporters write, e8m0 as DeepSeek-V4 has for its blocks, float64 as tools leave
 * behind. Zero is legal for a weight: a producer writes it for an all-zero layer, beside codes that
 * are NaN, so it has to mean "this weight is zero". Negative, infinite and NaN scales mean a
 * damaged file and are refused, and so are those that arithmetic in float32 cannot serve
 * (core/formats.h). */
#ifndef MOQ_CORE_SCALES_H
#define MOQ_CORE_SCALES_H

#include "core/tensor.h"

/* True for the types in which any scale may be stored. */
bool moq_is_scale_dtype(moq_dtype dtype);

/* n consecutive scales of such a type, or powers of two (E8M0), as float32; float64 is rounded. */
void moq_decode_scales(moq_dtype dtype, const void *src, int64_t n, float *out);

/* Reads a contiguous scale tensor of exactly `count` values. `name` is for messages. Whether a
 * scale may be powers of two is for the caller, who knows what it is of. */
moq_status moq_read_scales(const moq_tensor *t, const char *name, int64_t count, float *out,
                           moq_err *err);

typedef enum {
    MOQ_SCALE_MAY_BE_ZERO,
    MOQ_SCALE_FOLDED, /* may be zero, and is at most MOQ_FOLDED_MOST */
    MOQ_SCALE_DIVISOR /* above MOQ_DIVISOR_ABOVE */
} moq_scale_rule;

/* MOQ_ERR_VALUE naming the first value that breaks the rule. */
moq_status moq_check_scales(const float *scales, int64_t count, const char *name,
                            moq_scale_rule rule, moq_err *err);

/* factor[row] = scales[partition of row]: one value per row from one per partition. */
void moq_expand_to_rows(const float *scales, const int64_t *partitions, int32_t count,
                        float *factor);

#endif
