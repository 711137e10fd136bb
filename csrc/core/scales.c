/* Scale reading, checking and expansion: see scales.h. */
#include "core/scales.h"

#include "core/formats.h"

#include <math.h>

moq_status moq_read_scales(const moq_tensor *t, const char *name, int64_t count, float *out,
                           moq_err *err) {
    char shape[128];
    if (t->dtype != MOQ_DT_F32 && t->dtype != MOQ_DT_BF16 && t->dtype != MOQ_DT_F16)
        return moq_fail(err, MOQ_ERR_TYPE, "%s: expected float32, bfloat16 or float16, got %s",
                        name, moq_dtype_name(t->dtype));
    if (moq_tensor_numel(t) != count)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: expected %lld values, got shape %s", name,
                        (long long)count, moq_shape_text(t, shape, sizeof shape));
    if (!moq_tensor_is_contiguous(t))
        return moq_fail(err, MOQ_ERR_BUFFER, "%s: expected a contiguous tensor", name);
    moq_decode_row(t->dtype, t->data, count, out);
    return MOQ_OK;
}

moq_status moq_check_scales(const float *scales, int64_t count, const char *name,
                            moq_scale_rule rule, moq_err *err) {
    for (int64_t i = 0; i < count; i++) {
        bool good =
            isfinite(scales[i]) && (rule == MOQ_SCALE_POSITIVE ? scales[i] > 0 : scales[i] >= 0);
        if (!good)
            return moq_fail(err, MOQ_ERR_VALUE,
                            "%s: expected %s finite value, got %g at index %lld", name,
                            rule == MOQ_SCALE_POSITIVE ? "a positive" : "a non-negative",
                            (double)scales[i], (long long)i);
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
