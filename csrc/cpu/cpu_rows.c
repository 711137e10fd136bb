/* Rows of strided tensors: see cpu_rows.h. */
#include "cpu/cpu_rows.h"

#include "cpu/cpu_convert.h"

#include <string.h>

/* Values gathered at once. */
#define PIECE 512

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

/* A copy of constant size is one load and one store. */
static inline void gather(const char *from, int64_t step, size_t size, int64_t n, char *to) {
    for (int64_t i = 0; i < n; i++)
        memcpy(to + (size_t)i * size, from + i * step, size);
}

void moq_gather(const void *src, int64_t stride, size_t size, int64_t n, void *dst) {
    int64_t step = stride * (int64_t)size;
    if (stride == 1)
        memcpy(dst, src, (size_t)n * size);
    else if (size == 1)
        gather(src, step, 1, n, dst);
    else if (size == 2)
        gather(src, step, 2, n, dst);
    else if (size == 4)
        gather(src, step, 4, n, dst);
    else
        gather(src, step, size, n, dst);
}

void moq_gather_row(const moq_tensor *t, int64_t row, void *dst) {
    size_t size = moq_dtype_size(t->dtype);
    const char *src = (const char *)t->data + moq_row_offset(t, row) * (int64_t)size;
    moq_gather(src, t->ndim > 0 ? t->stride[t->ndim - 1] : 1, size, moq_row_length(t), dst);
}

void moq_load_row(const moq_tensor *t, int64_t row, float *dst) {
    const moq_row_kernels *kernels = moq_cpu_row_kernels();
    size_t size = moq_dtype_size(t->dtype);
    int64_t n = moq_row_length(t);
    int64_t stride = t->ndim > 0 ? t->stride[t->ndim - 1] : 1;
    const char *src = (const char *)t->data + moq_row_offset(t, row) * (int64_t)size;
    if (stride == 1) {
        kernels->decode(t->dtype, src, n, dst);
        return;
    }
    float buffer[PIECE];
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t count = n - at < PIECE ? n - at : PIECE;
        moq_gather(src + at * stride * (int64_t)size, stride, size, count, buffer);
        kernels->decode(t->dtype, buffer, count, dst + at);
    }
}

float moq_row_amax(const float *x, int64_t n) {
    float amax = 0.0f;
    moq_cpu_row_kernels()->amax(MOQ_DT_F32, x, n, n, &amax);
    return amax;
}
