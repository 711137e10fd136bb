/* The portable linear kernel, plain C in float32: the oracle of every other one. See
 * cpu/cpu_linear.h.
 *
 * Sums run over 16 lanes in a fixed order, which a compiler turns into whatever vectors the
 * baseline of the architecture has. Bound by decoding for few rows of x (about 1 ns a weight). */
#include "cpu/cpu_linear.h"

#include "core/formats.h"

#include <string.h>

enum { LANES = 16 };

static void decode_e4m3(const uint8_t *codes, int64_t n, void *out) {
    moq_decode_row(MOQ_DT_E4M3, codes, n, out);
    moq_pad_floats(out, n);
}

/* values[i] = e2m1[i] * e4m3[i / group], exactly. */
static void decode_e2m1(const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t group,
                        void *out) {
    float *values = out;
    moq_decode_row(MOQ_DT_E2M1X2, codes, n, values);
    for (int64_t at = 0; at < n; at += group) {
        float scale = moq_e4m3_decode(*scales++);
        for (int64_t i = at; i < at + group && i < n; i++)
            values[i] *= scale;
    }
    moq_pad_floats(values, n);
}

static void convert(const float *row, int64_t padded, moq_order order, void *out) {
    (void)order;
    memcpy(out, row, (size_t)padded * sizeof *row);
}

static float dot(const float *a, const float *b, int64_t n) {
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        for (int j = 0; j < LANES; j++)
            lane[j] += a[i + j] * b[i + j];
    }
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; j++)
            lane[j] += lane[j + width];
    }
    return lane[0];
}

static void multiply(const moq_tile *t) {
    const float *weight = t->weight, *x = (const float *)t->panel + t->first;
    for (int64_t n = 0; n < t->rows; n++) {
        for (int64_t m = 0; m < t->m; m++) {
            float *sum = &t->sums[n * t->sums_stride + m];
            *sum = (t->fresh ? 0 : *sum) +
                   dot(weight + n * t->weight_stride, x + m * t->panel_stride, t->k);
        }
    }
}

const moq_linear_tiles moq_linear_portable = {
    .name = "portable",
    .isa = MOQ_ISA_PORTABLE,
    .unit = sizeof(float),
    .e4m3_unit = 1.0f,
    .e2m1_unit = 1.0f,
    .pad_rows = 1,
    .tile_columns = 512,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .multiply = multiply,
    .speed = {.decode = 1e-9, .few = 1e-9, .product = 1e-10},
};
