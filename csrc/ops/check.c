/* Checks on the tensors of an operation: see check.h. */
#include "ops/check.h"

#include "ops/target.h"

#include <math.h>
#include <string.h>

/* An empty tensor may have any extents; up to this one they can be doubled and rounded up. */
#define MAX_EXTENT (INT64_MAX / 256)

bool moq_holds(const moq_tensor *t, moq_dtype dtype) {
    if (t->dtype == dtype)
        return true;
    switch (moq_dtype_size(dtype)) {
    case 1:
        return t->dtype == MOQ_DT_U8;
    case 2:
        return t->dtype == MOQ_DT_U16 || t->dtype == MOQ_DT_I16;
    default:
        return false;
    }
}

static bool is_on(const moq_tensor *t, moq_device device) {
    return t->device.kind == device.kind &&
           (device.kind == MOQ_CPU || t->device.index == device.index);
}

moq_status moq_check_device(const moq_tensor *t, const char *name, moq_device device,
                            moq_err *err) {
    char shape[128], wanted[32], got[32];
    if (!is_on(t, device))
        return moq_fail_of(
            err, MOQ_ERR_BUFFER, name, "expected a tensor %s%s, got one %s%s",
            device.kind == MOQ_CPU ? "in host memory" : "on ",
            device.kind == MOQ_CPU ? "" : moq_device_text(device, wanted, sizeof wanted),
            t->device.kind == MOQ_CPU ? "in host memory" : "on ",
            t->device.kind == MOQ_CPU ? "" : moq_device_text(t->device, got, sizeof got));
    bool countable = moq_tensor_numel(t) >= 0;
    for (int i = 0; i < t->ndim; i++)
        countable = countable && t->shape[i] <= MAX_EXTENT;
    if (!countable)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "shape %s is too large",
                           moq_shape_text(t, shape, sizeof shape));
    return MOQ_OK;
}

moq_status moq_check_host(const moq_tensor *t, const char *name, moq_err *err) {
    return moq_check_device(t, name, (moq_device){MOQ_CPU, 0}, err);
}

moq_status moq_check_usable(const moq_tensor *t, const char *name, moq_err *err) {
    MOQ_TRY(moq_check_device(t, name, t->device, err));
    moq_target target = moq_find_target(t->device);
    if (target.missing[0])
        return moq_fail_of(err, MOQ_ERR_BUFFER, name, "cuda:%d cannot be used: %s",
                           (int)t->device.index, target.missing);
    return MOQ_OK;
}

moq_status moq_check_holds(const moq_tensor *t, const char *name, moq_dtype dtype, moq_err *err) {
    if (moq_holds(t, dtype))
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s%s, got %s", moq_dtype_name(dtype),
                       moq_dtype_carrier_text(dtype), moq_dtype_name(t->dtype));
}

moq_status moq_check_dtype(const moq_tensor *t, const char *name, moq_dtype dtype, moq_err *err) {
    MOQ_TRY(moq_check_holds(t, name, dtype, err));
    return moq_check_host(t, name, err);
}

moq_status moq_check_activation(const moq_tensor *x, const char *name, moq_err *err) {
    if (x->dtype != MOQ_DT_F32 && x->dtype != MOQ_DT_BF16 && x->dtype != MOQ_DT_F16)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected float32, bfloat16 or float16, got %s",
                           moq_dtype_name(x->dtype));
    return moq_check_usable(x, name, err);
}

moq_status moq_check_group_size(int64_t group_size, moq_err *err) {
    if (group_size < 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "expected a positive number, got %lld",
                           (long long)group_size);
    return MOQ_OK;
}

bool moq_same_shape(const moq_tensor *a, const moq_tensor *b) {
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i])
            return false;
    }
    return true;
}

moq_status moq_check_output(const moq_tensor *out, const char *name, const moq_tensor *expected,
                            const moq_tensor *const *inputs, int count, moq_err *err) {
    char want[128], got[128];
    MOQ_TRY(moq_check_holds(out, name, expected->dtype, err));
    MOQ_TRY(moq_check_device(out, name, expected->device, err));
    if (!moq_same_shape(out, expected))
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected shape %s, got %s",
                           moq_shape_text(expected, want, sizeof want),
                           moq_shape_text(out, got, sizeof got));
    if (out->readonly)
        return moq_fail_of(err, MOQ_ERR_BUFFER, name, "read-only memory cannot be written");
    if (!moq_tensor_is_contiguous(out))
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected a row-major tensor without gaps, got other strides");
    for (int i = 0; i < count; i++) {
        if (inputs[i] != NULL && moq_tensor_overlap(out, inputs[i]))
            return moq_fail_of(err, MOQ_ERR_BUFFER, name,
                               "its memory overlaps that of another argument");
    }
    return MOQ_OK;
}

moq_status moq_read_scale(const moq_tensor *scale, const char *name, float *out, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_dtype(scale, name, MOQ_DT_F32, err));
    if (moq_tensor_numel(scale) != 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected one element, got shape %s",
                           moq_shape_text(scale, shape, sizeof shape));
    memcpy(out, scale->data, sizeof *out);
    if (!(*out > 0.0f) || isinf(*out))
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected a positive finite number, got %g",
                           (double)*out);
    return MOQ_OK;
}

moq_tensor moq_describe(moq_dtype dtype, int32_t ndim, const int64_t *shape) {
    moq_tensor t = {.dtype = dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++)
        t.shape[i] = shape[i];
    moq_tensor_set_contiguous(&t);
    return t;
}
