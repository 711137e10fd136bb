/* Rows of strided tensors: see rows.h. */
#include "cpu/rows.h"

#include "core/formats.h"
#include "cpu/convert.h"

#include <math.h>
#include <string.h>

int64_t moq_row_length(const moq_tensor *t) {
    return t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
}

int64_t moq_row_count(const moq_tensor *t) {
    int64_t rows = 1;
    for (int i = 0; i + 1 < t->ndim; i++)
        rows *= t->shape[i];
    return rows;
}

int64_t moq_row_offset(const moq_tensor *t, int64_t row) {
    int64_t offset = 0;
    for (int i = t->ndim - 2; i >= 0; i--) {
        offset += row % t->shape[i] * t->stride[i];
        row /= t->shape[i];
    }
    return offset;
}

void moq_gather(const void *src, int64_t stride, size_t size, int64_t n, void *dst) {
    const char *from = src;
    char *to = dst;
    if (stride == 1) {
        memcpy(dst, src, (size_t)n * size);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        memcpy(to + (size_t)i * size, from + i * stride * (int64_t)size, size);
}

void moq_load_row(const moq_tensor *t, int64_t row, float *dst) {
    size_t size = moq_dtype_size(t->dtype);
    int64_t n = moq_row_length(t);
    int64_t stride = t->ndim > 0 ? t->stride[t->ndim - 1] : 1;
    const char *src = (const char *)t->data + moq_row_offset(t, row) * (int64_t)size;
    if (stride == 1 || n <= 1) {
        moq_cpu_row_kernels()->decode(t->dtype, src, n, dst);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        moq_decode_row(t->dtype, src + i * stride * (int64_t)size, 1, dst + i);
}

/* The larger of two magnitudes; a NaN stays. */
static float larger(float amax, float magnitude) {
    return magnitude <= amax || isnan(amax) ? amax : magnitude;
}

float moq_row_amax(const float *x, int64_t n) {
    float amax = 0.0f;
    moq_cpu_row_kernels()->amax(MOQ_DT_F32, x, n, n, &amax);
    return amax;
}

float moq_tensor_amax(const moq_tensor *t, float *row) {
    int64_t rows = moq_row_count(t), n = moq_row_length(t);
    float amax = 0.0f;
    for (int64_t r = 0; r < rows; r++) {
        moq_load_row(t, r, row);
        amax = larger(amax, moq_row_amax(row, n));
    }
    return amax;
}
