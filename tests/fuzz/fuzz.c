/* Test cases, checks and tensors of the fuzz targets: see fuzz.h. */
#include "fuzz.h"

#include "core/formats.h"
#include "cpu/threads.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One thread: coverage of a team's threads does not depend on the case alone. */
__attribute__((constructor)) static void use_one_thread(void) {
    moq_set_num_threads(1);
}

_Noreturn void fuzz_fail(const char *file, int line, const char *condition, const char *format,
                         ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: %s: ", file, line, condition);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

void fuzz_check_error(moq_status status, const moq_err *err) {
    FUZZ_CHECK(status == err->kind, "status %d, error record of kind %d", status, err->kind);
    FUZZ_CHECK(status != MOQ_ERR_INTERNAL, "%s", err->text);
    const size_t size = strnlen(err->text, sizeof err->text);
    FUZZ_CHECK(size > 0 && size < sizeof err->text, "message of %zu bytes", size);
    FUZZ_CHECK(status != MOQ_ERR_CONFIG || err->path[0] == '$', "path \"%s\"", err->path);
}

/* ---- the bytes of a case ---- */

uint64_t fuzz_bits(fuzz_input *in, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && in->size > 0; i++, in->size--)
        value |= (uint64_t)*in->data++ << (8 * i);
    return value;
}

int64_t fuzz_range(fuzz_input *in, int64_t low, int64_t high) {
    const uint64_t count = (uint64_t)high - (uint64_t)low + 1;
    const uint64_t value = fuzz_bits(in, count && count <= 256 ? 1 : count <= 65536 ? 2 : 8);
    return (int64_t)((uint64_t)low + (count ? value % count : value));
}

bool fuzz_flag(fuzz_input *in) {
    return fuzz_bits(in, 1) & 1;
}

float fuzz_float(fuzz_input *in) {
    const uint32_t bits = (uint32_t)fuzz_bits(in, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float fuzz_scale(fuzz_input *in) {
    const uint8_t kind = (uint8_t)fuzz_bits(in, 1);
    return kind >= 0xf0 ? fuzz_float(in) : kind == 0 ? 0.0f : (float)kind / 64;
}

void fuzz_fill(const fuzz_input *in, uint32_t salt, void *memory, size_t size) {
    uint8_t *bytes = memory;
    uint32_t state = salt | 1;
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = in->size > 0 ? in->data[i % in->size] : (uint8_t)i;
        if (i >= in->size || salt > 0) {
            state = state * 1664525u + 1013904223u; /* Numerical Recipes' generator */
            byte ^= (uint8_t)(state >> 24) & (uint8_t)(state >> 16);
        }
        bytes[i] = byte;
    }
}

/* ---- tensors ---- */

/* Elements from the lowest to the highest address, and the offset of the first one. */
static int64_t span_of(const moq_tensor *t, int64_t *first) {
    int64_t low = 0, high = 0;
    for (int i = 0; i < t->ndim; i++) {
        const int64_t reach = (t->shape[i] - 1) * t->stride[i];
        if (t->shape[i] == 0) {
            *first = 0;
            return 0;
        }
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    *first = -low;
    return high - low + 1;
}

static void draw_strides(fuzz_input *in, moq_tensor *t) {
    int64_t step = 1;
    const bool backwards = fuzz_flag(in); /* column-major instead of row-major */
    for (int i = 0; i < t->ndim; i++) {
        const int axis = backwards ? i : t->ndim - 1 - i;
        const int kind = (int)fuzz_range(in, 0, 7);
        if (kind == 7)
            step += fuzz_range(in, 0, 3);
        t->stride[axis] = kind == 6 ? 0 : kind == 5 ? -step : step;
        step *= t->shape[axis] > 0 && kind != 6 ? t->shape[axis] : 1;
    }
}

fuzz_tensor fuzz_make(fuzz_input *in, moq_dtype dtype, int32_t ndim, const int64_t *shape,
                      bool strided) {
    fuzz_tensor t = {.view = {.dtype = dtype, .ndim = ndim}};
    int64_t first;
    if (ndim > 0)
        memcpy(t.view.shape, shape, (size_t)ndim * sizeof *shape);
    moq_tensor_set_contiguous(&t.view);
    if (strided)
        draw_strides(in, &t.view);
    const size_t size = moq_dtype_size(dtype), span = (size_t)span_of(&t.view, &first);
    t.memory = malloc(span * size);
    fuzz_fill(in, (uint32_t)fuzz_bits(in, 1), t.memory, span * size);
    t.view.data = t.memory + (size_t)first * size;
    return t;
}

fuzz_tensor fuzz_result(const moq_tensor *like, uint8_t poison) {
    fuzz_tensor t = {.view = *like};
    const size_t bytes = (size_t)moq_tensor_numel(like) * moq_dtype_size(like->dtype);
    moq_tensor_set_contiguous(&t.view);
    t.view.data = t.memory = malloc(bytes);
    memset(t.memory, poison, bytes);
    return t;
}

void fuzz_free(fuzz_tensor *t) {
    free(t->memory);
    t->memory = NULL;
}

int64_t fuzz_offset(const moq_tensor *t, int64_t i) {
    int64_t offset = 0;
    for (int axis = t->ndim - 1; axis >= 0; axis--) {
        offset += i % t->shape[axis] * t->stride[axis];
        i /= t->shape[axis];
    }
    return offset;
}

float fuzz_element(const moq_tensor *t, int64_t i) {
    const bool packed = t->dtype == MOQ_DT_E2M1X2;
    const char *unit = t->data;
    float values[2] = {0, 0};
    unit += fuzz_offset(t, packed ? i / 2 : i) * (int64_t)moq_dtype_size(t->dtype);
    moq_decode_row(t->dtype, unit, packed ? 2 : 1, values);
    return values[packed ? i % 2 : 0];
}
