/* Arithmetic on tensor views: see tensor.h. Everything here works on shapes alone and reads no
 * data. */
#include "core/tensor.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    const char *name;
    const char *alias;
    size_t size;
} dtype_row;

static const dtype_row DTYPES[MOQ_DT_COUNT] = {
    [MOQ_DT_NONE] = {"invalid", "", 0},
    [MOQ_DT_BOOL] = {"bool", "bool", 1},
    [MOQ_DT_U8] = {"uint8", "u8", 1},
    [MOQ_DT_I8] = {"int8", "i8", 1},
    [MOQ_DT_U16] = {"uint16", "u16", 2},
    [MOQ_DT_I16] = {"int16", "i16", 2},
    [MOQ_DT_I32] = {"int32", "i32", 4},
    [MOQ_DT_I64] = {"int64", "i64", 8},
    [MOQ_DT_F16] = {"float16", "fp16", 2},
    [MOQ_DT_BF16] = {"bfloat16", "bf16", 2},
    [MOQ_DT_F32] = {"float32", "fp32", 4},
    [MOQ_DT_F64] = {"float64", "fp64", 8},
    [MOQ_DT_E4M3] = {"float8_e4m3fn", "e4m3", 1},
    [MOQ_DT_E5M2] = {"float8_e5m2", "e5m2", 1},
    [MOQ_DT_E8M0] = {"float8_e8m0fnu", "e8m0", 1},
    [MOQ_DT_E2M1X2] = {"float4_e2m1fn_x2", "e2m1", 1},
};

size_t moq_dtype_size(moq_dtype dtype) {
    return dtype > MOQ_DT_NONE && dtype < MOQ_DT_COUNT ? DTYPES[dtype].size : 0;
}

const char *moq_dtype_name(moq_dtype dtype) {
    return dtype >= MOQ_DT_NONE && dtype < MOQ_DT_COUNT ? DTYPES[dtype].name : "invalid";
}

const char *moq_dtype_carrier_text(moq_dtype dtype) {
    switch (moq_dtype_size(dtype)) {
    case 1:
        return dtype == MOQ_DT_U8 ? "" : " or raw uint8";
    case 2:
        return " or a raw carrier of its width";
    default:
        return "";
    }
}

moq_dtype moq_dtype_from_name(const char *name) {
    for (int i = MOQ_DT_NONE + 1; i < MOQ_DT_COUNT; i++) {
        if (strcmp(name, DTYPES[i].name) == 0 || strcmp(name, DTYPES[i].alias) == 0)
            return (moq_dtype)i;
    }
    return MOQ_DT_NONE;
}

int64_t moq_tensor_numel(const moq_tensor *t) {
    int64_t limit = INT64_MAX / 8; /* 8: the largest element, so that the size in bytes fits too */
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0)
            return 0;
    }
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0 || t->shape[i] > limit / count)
            return -1;
        count *= t->shape[i];
    }
    return count;
}

bool moq_tensor_is_contiguous(const moq_tensor *t) {
    int64_t expected = 1;
    if (moq_tensor_numel(t) == 0)
        return true;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] == 1)
            continue;
        if (t->stride[i] != expected)
            return false;
        expected *= t->shape[i];
    }
    return true;
}

void moq_tensor_set_contiguous(moq_tensor *t) {
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        t->stride[i] = step;
        step *= t->shape[i] > 0 ? t->shape[i] : 1;
    }
}

bool moq_tensor_as_rows(const moq_tensor *t, moq_tensor *rows) {
    int64_t columns = t->ndim > 0 ? t->shape[t->ndim - 1] : 1, count = 1, stride = columns;
    for (int i = t->ndim - 2; i >= 0; i--) {
        if (t->shape[i] == 1)
            continue;
        if (count == 1)
            stride = t->stride[i];
        else if (t->stride[i] != stride * count)
            return false;
        count *= t->shape[i];
    }
    *rows = (moq_tensor){.data = t->data,
                         .dtype = t->dtype,
                         .device = t->device,
                         .ndim = 2,
                         .readonly = t->readonly,
                         .shape = {count, columns},
                         .stride = {stride, t->ndim > 0 ? t->stride[t->ndim - 1] : 1}};
    return true;
}

void moq_tensor_extent(const moq_tensor *t, uintptr_t *first, uintptr_t *end) {
    uintptr_t base = (uintptr_t)t->data;
    uintptr_t size = (uintptr_t)moq_dtype_size(t->dtype);
    *first = *end = base;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0)
            return;
    }
    /* Unsigned arithmetic: negative strides walk down from `data`, and wrap-around is defined. */
    for (int i = 0; i < t->ndim; i++) {
        uintptr_t reach = (uintptr_t)(t->shape[i] - 1) * (uintptr_t)t->stride[i] * size;
        if (t->stride[i] < 0)
            *first += reach;
        else
            *end += reach;
    }
    *end += size;
}

bool moq_tensor_overlap(const moq_tensor *a, const moq_tensor *b) {
    uintptr_t a_first, a_end, b_first, b_end;
    if (a->device.kind != b->device.kind || a->device.index != b->device.index)
        return false;
    moq_tensor_extent(a, &a_first, &a_end);
    moq_tensor_extent(b, &b_first, &b_end);
    return a_first < a_end && b_first < b_end && a_first < b_end && b_first < a_end;
}

const char *moq_device_text(moq_device device, char *buffer, size_t size) {
    if (device.kind == MOQ_CPU)
        snprintf(buffer, size, "cpu");
    else
        snprintf(buffer, size, "cuda:%d", (int)device.index);
    return buffer;
}

const char *moq_shape_text(const moq_tensor *t, char *buffer, size_t size) {
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (int i = 0; i < t->ndim && used < size; i++) {
        used += (size_t)snprintf(buffer + used, size - used, "%s%lld", i ? ", " : "",
                                 (long long)t->shape[i]);
    }
    if (used < size)
        snprintf(buffer + used, size - used, "]");
    return buffer;
}
