/* Quantization of activations on the CPU: see quantize.h. */
#include "cpu/quantize.h"

#include "core/formats.h"
#include "cpu/rows.h"

#include <float.h>

/* The larger of a and b; a when it is NaN, which fmaxf would drop. */
static float at_least(float a, float b) {
    return a < b ? b : a;
}

float moq_fp8_dynamic_scale(float amax) {
    float scale = amax / MOQ_E4M3_MAX;
    return scale < FLT_MIN ? 1.0f : scale;
}

float moq_nvfp4_dynamic_scale(float amax) {
    float scale = amax / MOQ_NVFP4_MAX;
    return scale == 0.0f ? 1.0f : scale;
}

static void divide_and_encode(float *x, int64_t n, float scale, uint8_t *codes) {
    for (int64_t i = 0; i < n; i++)
        x[i] /= scale;
    moq_encode_row(MOQ_DT_E4M3, x, n, codes);
}

void moq_quantize_row_fp8_static(float *x, int64_t n, float inverse, uint8_t *codes) {
    for (int64_t i = 0; i < n; i++)
        x[i] *= inverse;
    moq_encode_row(MOQ_DT_E4M3, x, n, codes);
}

float moq_quantize_row_fp8_token(float *x, int64_t n, uint8_t *codes) {
    float scale = at_least(moq_row_amax(x, n) / MOQ_E4M3_MAX, MOQ_FP8_TOKEN_MIN_SCALE);
    divide_and_encode(x, n, scale, codes);
    return scale;
}

void moq_quantize_row_fp8_group(float *x, int64_t n, int64_t group, uint8_t *codes, float *scales) {
    for (int64_t at = 0; at < n; at += group) {
        int64_t length = n - at < group ? n - at : group;
        float scale = at_least(moq_row_amax(x + at, length), MOQ_FP8_GROUP_MIN_AMAX) / MOQ_E4M3_MAX;
        divide_and_encode(x + at, length, scale, codes + at);
        *scales++ = scale;
    }
}

void moq_quantize_row_nvfp4(float *x, int64_t n, float scale_2, uint8_t *packed,
                            uint8_t *block_scales) {
    float largest = MOQ_E2M1_MAX * scale_2;
    for (int64_t at = 0; at < n; at += MOQ_NVFP4_GROUP) {
        uint8_t block_scale = moq_e4m3_encode(moq_row_amax(x + at, MOQ_NVFP4_GROUP) / largest);
        float step = moq_e4m3_decode(block_scale) * scale_2;
        for (int i = 0; i < MOQ_NVFP4_GROUP; i++)
            x[at + i] = step == 0.0f ? 0.0f : x[at + i] / step;
        *block_scales++ = block_scale;
    }
    moq_encode_row(MOQ_DT_E2M1X2, x, n, packed);
}

void moq_cpu_quantize_fp8_tensor(const moq_tensor *x, float scale, uint8_t *codes, float *row) {
    int64_t rows = moq_row_count(x), n = moq_row_length(x);
    float inverse = 1.0f / scale;
    for (int64_t r = 0; r < rows; r++) {
        moq_load_row(x, r, row);
        moq_quantize_row_fp8_static(row, n, inverse, codes + r * n);
    }
}

void moq_cpu_quantize_fp8_token(const moq_tensor *x, uint8_t *codes, float *scales, float *row) {
    int64_t rows = moq_row_count(x), n = moq_row_length(x);
    for (int64_t r = 0; r < rows; r++) {
        moq_load_row(x, r, row);
        scales[r] = moq_quantize_row_fp8_token(row, n, codes + r * n);
    }
}

void moq_cpu_quantize_fp8_group(const moq_tensor *x, int64_t group, uint8_t *codes, float *scales,
                                float *row) {
    int64_t rows = moq_row_count(x), n = moq_row_length(x);
    int64_t groups = n / group + (n % group != 0);
    for (int64_t r = 0; r < rows; r++) {
        moq_load_row(x, r, row);
        moq_quantize_row_fp8_group(row, n, group, codes + r * n, scales + r * groups);
    }
}

void moq_cpu_quantize_nvfp4(const moq_tensor *x, float scale_2, uint8_t *packed,
                            uint8_t *block_scales, float *row) {
    int64_t rows = moq_row_count(x), n = moq_row_length(x);
    for (int64_t r = 0; r < rows; r++) {
        moq_load_row(x, r, row);
        moq_quantize_row_nvfp4(row, n, scale_2, packed + r * n / 2,
                               block_scales + r * n / MOQ_NVFP4_GROUP);
    }
}
