/* Scale reading, checking and expansion: see scales.h. */
#include "core/scales.h"

#include "core/formats.h"

#include <math.h>
#include <string.h>

bool moq_is_scale_dtype(moq_dtype dtype) {
    return dtype == MOQ_DT_F32 || dtype == MOQ_DT_BF16 || dtype == MOQ_DT_F16 ||
           dtype == MOQ_DT_F64;
}

void moq_decode_scales(moq_dtype dtype, const void *src, int64_t n, float *out) {
    if (dtype != MOQ_DT_F64) {
        moq_decode_row(dtype, src, n, out);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        double value;
        memcpy(&value, (const char *)src + (size_t)i * sizeof value, sizeof value);
        out[i] = (float)value;
    }
}

moq_status moq_read_scales(const moq_tensor *t, const char *name, int64_t count, float *out,
                           moq_err *err) {
    char shape[128];
    if (!moq_is_scale_dtype(t->dtype) && t->dtype != MOQ_DT_E8M0)
        return moq_fail_of(err, MOQ_ERR_TYPE, name,
                           "expected float32, bfloat16, float16 or float64, got %s",
                           moq_dtype_name(t->dtype));
    if (moq_tensor_numel(t) != count)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected %lld values, got shape %s",
                           (long long)count, moq_shape_text(t, shape, sizeof shape));
    if (!moq_tensor_is_contiguous(t))
        return moq_fail_of(err, MOQ_ERR_BUFFER, name, "expected a contiguous tensor");
    moq_decode_scales(t->dtype, t->data, count, out);
    return MOQ_OK;
}

static bool keeps_rule(float scale, moq_scale_rule rule) {
    switch (rule) {
    case MOQ_SCALE_MAY_BE_ZERO:
        return scale >= 0 && isfinite(scale);
    case MOQ_SCALE_FOLDED:
        return scale >= 0 && scale <= MOQ_FOLDED_MOST;
    case MOQ_SCALE_DIVISOR:
        return scale > MOQ_DIVISOR_ABOVE && isfinite(scale);
    }
    return false;
}

/* Refuses a scale that breaks a rule. */
static moq_status refuse_scale(float scale, int64_t index, const char *name, moq_scale_rule rule,
                               moq_err *err) {
    bool divisor = rule == MOQ_SCALE_DIVISOR;
    bool beyond = isfinite(scale) && scale > 0;
    if (beyond && divisor)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected a value above %g, whose reciprocal is a float32, got %g at "
                           "index %lld",
                           (double)MOQ_DIVISOR_ABOVE, (double)scale, (long long)index);
    if (beyond)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected at most %g, so that its product with 8 is a float32 (compute "
                           "\"exact\" takes more), got %g at index %lld",
                           (double)MOQ_FOLDED_MOST, (double)scale, (long long)index);
    return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected %s finite value, got %g at index %lld",
                       divisor ? "a positive" : "a non-negative", (double)scale, (long long)index);
}

moq_status moq_check_scales(const float *scales, int64_t count, const char *name,
                            moq_scale_rule rule, moq_err *err) {
    for (int64_t i = 0; i < count; i++) {
        if (!keeps_rule(scales[i], rule))
            return refuse_scale(scales[i], i, name, rule, err);
    }
    return MOQ_OK;
}

void moq_expand_to_rows(const float *scales, const int64_t *partitions, int32_t count,
                        float *factor) {
    for (int32_t p = 0; p < count; p++) {
        for (int64_t i = 0; i < partitions[p]; i++)
            *factor++ = scales[p];
    }
}
