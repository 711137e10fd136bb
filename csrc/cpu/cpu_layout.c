/* Rearranging codes and scales on the CPU: see cpu_layout.h. */
#include "cpu/cpu_layout.h"

#include "core/formats.h"
#include "cpu/cpu_rows.h"
#include "cpu/interrupt.h"

#include <string.h>

/* Values of a row between two questions whether to go on; even. */
#define PIECE 65536

/* Bytes of one padded matrix. */
static int64_t swizzled_size(int64_t rows, int64_t columns) {
    return moq_swizzle_down(rows) * moq_swizzle_across(columns) * MOQ_SWIZZLE_BYTES;
}

void moq_cpu_swizzle(const moq_tensor *scale, uint8_t *out) {
    int64_t columns = moq_row_length(scale), rows = scale->shape[scale->ndim - 2];
    int64_t across = moq_swizzle_across(columns);
    int64_t size = swizzled_size(rows, columns), step = scale->stride[scale->ndim - 1];
    int64_t total = moq_row_count(scale);
    if (total == 0 || columns == 0)
        return;
    memset(out, 0, (size_t)(total / rows * size));
    moq_pace pace = {0};
    for (int64_t r = 0; r < total && !moq_stops(&pace, columns); r++) {
        const uint8_t *src = (const uint8_t *)scale->data + moq_row_offset(scale, r);
        uint8_t *dst = out + r / rows * size;
        for (int64_t k = 0; k < columns; k++)
            dst[moq_swizzle_at(r % rows, k, across)] = src[k * step];
    }
}

void moq_cpu_unswizzle(const uint8_t *swizzled, const moq_tensor *logical, uint8_t *out) {
    int64_t columns = moq_row_length(logical), rows = logical->shape[logical->ndim - 2];
    int64_t across = moq_swizzle_across(columns);
    int64_t size = swizzled_size(rows, columns), total = columns ? moq_row_count(logical) : 0;
    moq_pace pace = {0};
    for (int64_t r = 0; r < total && !moq_stops(&pace, columns); r++) {
        const uint8_t *src = swizzled + r / rows * size;
        for (int64_t k = 0; k < columns; k++)
            *out++ = src[moq_swizzle_at(r % rows, k, across)];
    }
}

void moq_cpu_pack_fp4(const moq_tensor *codes, uint8_t *packed) {
    int64_t n = moq_row_length(codes), rows = n ? moq_row_count(codes) : 0;
    int64_t step = codes->stride[codes->ndim - 1];
    moq_pace pace = {0};
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *src = (const uint8_t *)codes->data + moq_row_offset(codes, r);
        for (int64_t at = 0; at < n; at += PIECE) {
            int64_t end = n - at < PIECE ? n : at + PIECE;
            if (moq_stops(&pace, end - at))
                return;
            for (int64_t k = at; k < end; k += 2)
                *packed++ = (uint8_t)((src[k * step] & 15) | src[(k + 1) * step] << 4);
        }
    }
}

void moq_cpu_unpack_fp4(const moq_tensor *packed, uint8_t *codes) {
    int64_t n = moq_row_length(packed), rows = n ? moq_row_count(packed) : 0;
    int64_t step = packed->stride[packed->ndim - 1];
    moq_pace pace = {0};
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *src = (const uint8_t *)packed->data + moq_row_offset(packed, r);
        for (int64_t at = 0; at < n; at += PIECE) {
            int64_t end = n - at < PIECE ? n : at + PIECE;
            if (moq_stops(&pace, end - at))
                return;
            for (int64_t j = at; j < end; j++) {
                *codes++ = src[j * step] & 15;
                *codes++ = src[j * step] >> 4;
            }
        }
    }
}

void moq_requantize_table(float scale, float target, uint8_t moved[256]) {
    float inverse = 1.0f / target;
    for (int code = 0; code < 256; code++) {
        float value = moq_e4m3_decode((uint8_t)code) * scale;
        float rounded = moq_fp16_decode(moq_fp16_encode(value));
        moved[code] = scale == 0.0f ? 0 : moq_e4m3_encode(rounded * inverse);
    }
}

void moq_cpu_requantize_rows(const moq_tensor *codes, int64_t first, int64_t rows, float scale,
                             float target, uint8_t *out) {
    int64_t n = codes->shape[1];
    uint8_t moved[256];
    moq_requantize_table(scale, target, moved);
    moq_pace pace = {0};
    for (int64_t r = first; r < first + rows && !moq_stops(&pace, n); r++) {
        const uint8_t *src = (const uint8_t *)codes->data + moq_row_offset(codes, r);
        for (int64_t k = 0; k < n; k++)
            out[r * n + k] = moved[src[k * codes->stride[1]]];
    }
}
