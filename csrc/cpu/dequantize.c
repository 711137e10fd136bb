/* Dequantization on the CPU: see dequantize.h. */
#include "cpu/dequantize.h"

#include "core/formats.h"
#include "cpu/rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Scratch for one row. */
typedef struct {
    double *product;
    float *scale[2];
    float *values; /* codes, at last the result */
    uint8_t *bytes;
} scratch;

static void decode_codes(const moq_dequantize_job *job, int64_t expert, int64_t row,
                         const scratch *tmp) {
    bool paired_rows = job->kind == MOQ_CODE_E2M1_ROWS || job->kind == MOQ_CODE_INT4_ROWS;
    int64_t n = job->shape[2];
    int64_t stored = job->kind == MOQ_CODE_E2M1_COLUMNS ? n / 2 : n;
    const uint8_t *src = (const uint8_t *)job->codes + expert * job->code_stride[0] +
                         (paired_rows ? row / 2 : row) * job->code_stride[1];
    int shift = row % 2 ? 4 : 0;
    moq_gather(src, job->code_stride[2], 1, stored, tmp->bytes);
    switch (job->kind) {
    case MOQ_CODE_E4M3:
        moq_decode_row(MOQ_DT_E4M3, tmp->bytes, n, tmp->values);
        break;
    case MOQ_CODE_INT8:
        for (int64_t i = 0; i < n; i++)
            tmp->values[i] = (float)(int8_t)tmp->bytes[i];
        break;
    case MOQ_CODE_E2M1_COLUMNS:
        moq_decode_row(MOQ_DT_E2M1X2, tmp->bytes, n, tmp->values);
        break;
    case MOQ_CODE_E2M1_ROWS:
        for (int64_t i = 0; i < n; i++)
            tmp->values[i] = moq_e2m1_decode((uint8_t)(tmp->bytes[i] >> shift));
        break;
    case MOQ_CODE_INT4_ROWS:
        for (int64_t i = 0; i < n; i++) {
            int nibble = tmp->bytes[i] >> shift & 15;
            tmp->values[i] = (float)(nibble < 8 ? nibble : nibble - 16);
        }
        break;
    }
}

static void spread_scale(const moq_block_scale *s, int64_t expert, int64_t row, int64_t n,
                         float *out) {
    int64_t size = (int64_t)moq_dtype_size(s->dtype);
    const char *src =
        (const char *)s->data +
        (expert / s->block[0] * s->stride[0] + row / s->block[1] * s->stride[1]) * size;
    for (int64_t at = 0; at < n; at += s->block[2]) {
        int64_t end = n - at < s->block[2] ? n : at + s->block[2];
        float value;
        moq_decode_row(s->dtype, src, 1, &value);
        for (int64_t i = at; i < end; i++)
            out[i] = value;
        src += s->stride[2] * size;
    }
}

static void apply_scales(const scratch *tmp, int64_t n) {
    const float *a = tmp->scale[0], *b = tmp->scale[1];
    for (int64_t i = 0; i < n; i++) {
        bool zero = a[i] == 0.0f || b[i] == 0.0f;
        tmp->product[i] = zero ? 0.0 : (double)tmp->values[i] * (double)a[i] * (double)b[i];
    }
}

/* To float32 with the last bit set where anything was cut off ("round to odd"), so that rounding
 * the result to a type of at most 22 bits of precision is as good as rounding the double itself. */
static float round_to_odd(double value) {
    float rounded = (float)value;
    uint32_t bits;
    if (isnan(value) || (double)rounded == value)
        return rounded;
    memcpy(&bits, &rounded, sizeof bits);
    bits -= fabs((double)rounded) > fabs(value); /* to the neighbour towards zero */
    bits |= 1;
    memcpy(&rounded, &bits, sizeof bits);
    return rounded;
}

static void store(const scratch *tmp, int64_t n, moq_dtype dtype, void *out) {
    for (int64_t i = 0; i < n; i++)
        tmp->values[i] =
            dtype == MOQ_DT_F32 ? (float)tmp->product[i] : round_to_odd(tmp->product[i]);
    moq_encode_row(dtype, tmp->values, n, out);
}

moq_status moq_cpu_dequantize(const moq_dequantize_job *job, moq_dtype dtype, void *out,
                              moq_err *err) {
    int64_t n = job->shape[2];
    if (job->shape[0] == 0 || job->shape[1] == 0 || n == 0)
        return MOQ_OK;
    double *memory = malloc((size_t)n * (sizeof(double) + 3 * sizeof(float) + 1));
    if (memory == NULL)
        return moq_fail(err, MOQ_ERR_MEMORY, "dequantize: no memory for a row of %lld values",
                        (long long)n);
    float *floats = (float *)(memory + n);
    scratch tmp = {memory, {floats, floats + n}, floats + 2 * n, (uint8_t *)(floats + 3 * n)};
    char *dst = out;
    for (int64_t e = 0; e < job->shape[0]; e++) {
        for (int64_t r = 0; r < job->shape[1]; r++) {
            decode_codes(job, e, r, &tmp);
            spread_scale(&job->scale[0], e, r, n, tmp.scale[0]);
            spread_scale(&job->scale[1], e, r, n, tmp.scale[1]);
            apply_scales(&tmp, n);
            store(&tmp, n, dtype, dst);
            dst += n * (int64_t)moq_dtype_size(dtype);
        }
    }
    free(memory);
    return MOQ_OK;
}
