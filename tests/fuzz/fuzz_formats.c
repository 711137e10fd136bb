/* Number formats: every conversion against the others and against the definition of rounding.
 *
 * Case: one byte that chooses the formats of the tensor conversion, then float32 values and codes.
 */
#include "fuzz.h"

#include "core/formats.h"
#include "ops/convert.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SIZE_LIMIT 128

typedef struct {
    moq_dtype dtype;
    uint32_t codes;     /* how many there are */
    uint32_t magnitude; /* mask of a code without its sign */
    uint32_t largest;   /* code of the largest finite magnitude */
    bool overflows;     /* to an infinity, where the others saturate */
} format;

static const format FORMATS[] = {
    {MOQ_DT_E4M3, 256, 0x7f, 0x7e, false},      {MOQ_DT_E5M2, 256, 0x7f, 0x7b, false},
    {MOQ_DT_E8M0, 256, 0xff, 0xfe, false},      {MOQ_DT_E2M1X2, 16, 0x7, 0x7, false},
    {MOQ_DT_BF16, 65536, 0x7fff, 0x7f7f, true}, {MOQ_DT_F16, 65536, 0x7fff, 0x7bff, true},
};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof *FORMATS };

static float decode(const format *f, uint32_t code) {
    switch (f->dtype) {
    case MOQ_DT_E4M3:
        return moq_e4m3_decode((uint8_t)code);
    case MOQ_DT_E5M2:
        return moq_e5m2_decode((uint8_t)code);
    case MOQ_DT_E8M0:
        return moq_e8m0_decode((uint8_t)code);
    case MOQ_DT_E2M1X2:
        return moq_e2m1_decode((uint8_t)code);
    case MOQ_DT_BF16:
        return moq_bf16_decode((uint16_t)code);
    default:
        return moq_fp16_decode((uint16_t)code);
    }
}

static uint32_t encode(const format *f, float value) {
    switch (f->dtype) {
    case MOQ_DT_E4M3:
        return moq_e4m3_encode(value);
    case MOQ_DT_E5M2:
        return moq_e5m2_encode(value);
    case MOQ_DT_E8M0:
        return moq_e8m0_encode(value);
    case MOQ_DT_E2M1X2:
        return moq_e2m1_encode(value);
    case MOQ_DT_BF16:
        return moq_bf16_encode(value);
    default:
        return moq_fp16_encode(value);
    }
}

static bool same_bits(float a, float b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static bool same(float a, float b) {
    return same_bits(a, b) || (isnan(a) && isnan(b));
}

/* A finite value becomes the nearest representable one, a tie the even code, except in e8m0, where
 * it goes up. */
static void check_nearest(const format *f, float value, uint32_t code) {
    const uint32_t magnitude = code & f->magnitude;
    const double given = f->dtype == MOQ_DT_E8M0 ? (double)value : fabs((double)value);
    const double got = fabs((double)decode(f, code));
    const double largest = decode(f, f->largest);
    if (magnitude > f->largest) {
        const double step = largest - (double)decode(f, f->largest - 1);
        FUZZ_CHECK(f->overflows && given >= largest + step / 2, "%a became code %#x", value, code);
        return;
    }
    for (int side = -1; side <= 1; side += 2) {
        if ((side < 0 && magnitude == 0) || (side > 0 && magnitude == f->largest))
            continue;
        const double other = fabs((double)decode(f, magnitude + (uint32_t)side));
        const double middle = (got + other) / 2;
        const bool nearer = side < 0 ? given >= middle : given <= middle;
        FUZZ_CHECK(nearer, "dtype %d: %a became code %#x, %a is nearer", f->dtype, value, code,
                   other);
        if (given == middle)
            FUZZ_CHECK(f->dtype == MOQ_DT_E8M0 ? side < 0 : (magnitude & 1) == 0,
                       "dtype %d: the tie %a became code %#x", f->dtype, value, code);
    }
}

static void check_value(const format *f, float value) {
    const uint32_t code = encode(f, value);
    FUZZ_CHECK(code < f->codes, "dtype %d: %a became %#x", f->dtype, value, code);
    const float back = decode(f, code);
    FUZZ_CHECK(encode(f, back) == code, "dtype %d: %a, code %#x, %a", f->dtype, value, code, back);
    if (isnan(value)) {
        FUZZ_CHECK(isnan(back) || (f->dtype == MOQ_DT_E2M1X2 && back == 6.0f), "%#x", code);
        return;
    }
    FUZZ_CHECK(!isnan(back), "dtype %d: %a became NaN", f->dtype, value);
    if (f->dtype != MOQ_DT_E8M0)
        FUZZ_CHECK(signbit(back) == signbit(value), "dtype %d: %a became %a", f->dtype, value,
                   back);
    if (isfinite(value))
        check_nearest(f, value, code);
    else if (f->dtype != MOQ_DT_E8M0 || value > 0)
        FUZZ_CHECK(f->overflows ? isinf(back) : (code & f->magnitude) == f->largest, "%#x", code);
}

static void check_code(const format *f, uint32_t code) {
    const float value = decode(f, code);
    const uint32_t back = encode(f, value);
    if (isnan(value))
        FUZZ_CHECK(isnan(decode(f, back)), "dtype %d: code %#x became %#x", f->dtype, code, back);
    else if (isinf(value) && !f->overflows)
        FUZZ_CHECK((back & f->magnitude) == f->largest, "%#x became %#x", code, back);
    else
        FUZZ_CHECK(back == code, "dtype %d: code %#x became %#x", f->dtype, code, back);
}

static void check_order(const format *f, float a, float b) {
    if (isnan(a) || isnan(b))
        return;
    const float low = decode(f, encode(f, a < b ? a : b)),
                high = decode(f, encode(f, a < b ? b : a));
    FUZZ_CHECK(low <= high, "dtype %d: %a and %a changed their order", f->dtype, a, b);
}

/* The loops over rows do what the functions of single values do, and touch no byte more. */
static void check_rows(const format *f, const float *values, size_t count) {
    const bool packed = f->dtype == MOQ_DT_E2M1X2;
    const size_t units = packed ? (count + 1) / 2 : count;
    uint8_t *codes = malloc(units * moq_dtype_size(f->dtype));
    float *back = malloc(count * sizeof *back);
    moq_encode_row(f->dtype, values, (int64_t)count, codes);
    moq_decode_row(f->dtype, codes, (int64_t)count, back);
    for (size_t i = 0; i < count; i++) {
        const float one = decode(f, encode(f, values[i]));
        FUZZ_CHECK(same_bits(one, back[i]), "dtype %d: %a gave %a and %a", f->dtype, values[i], one,
                   back[i]);
    }
    FUZZ_CHECK(!packed || count % 2 == 0 || codes[units - 1] >> 4 == 0, "%#x", codes[units - 1]);
    free(codes);
    free(back);
}

/* A strided tensor of any float format to any other, element by element. */
static void check_convert(fuzz_input *in) {
    static const moq_dtype DTYPES[] = {MOQ_DT_F32, MOQ_DT_E4M3,   MOQ_DT_E5M2, MOQ_DT_E8M0,
                                       MOQ_DT_F16, MOQ_DT_E2M1X2, MOQ_DT_BF16, MOQ_DT_U8};
    const uint8_t kinds = (uint8_t)fuzz_bits(in, 1);
    const moq_dtype from = DTYPES[kinds & 7], to = DTYPES[kinds >> 3 & 7];
    const int32_t ndim = (int32_t)fuzz_range(in, 0, 4);
    int64_t shape[4];
    for (int i = 0; i < ndim; i++)
        shape[i] = fuzz_range(in, 0, i == 3 ? 40 : 9);
    moq_tensor wanted;
    moq_err err;
    fuzz_tensor x = fuzz_make(in, from, ndim, shape, fuzz_flag(in));
    moq_status status = moq_describe_convert(&x.view, "x", to, &wanted, &err);
    if (status == MOQ_OK) {
        fuzz_tensor out = fuzz_result(&wanted, 0xa5);
        status = moq_run_convert(&x.view, "x", &out.view, &err);
        FUZZ_CHECK((status == MOQ_OK) == (moq_dtype_is_float(from) && moq_dtype_is_float(to)), "%s",
                   err.text);
        const int64_t values = moq_tensor_numel(&x.view) * (from == MOQ_DT_E2M1X2 ? 2 : 1);
        for (int64_t i = 0; i < values && status == MOQ_OK; i++) {
            const float value = fuzz_element(&x.view, i), got = fuzz_element(&out.view, i);
            float expected = value;
            for (int f = 0; f < FORMAT_COUNT; f++) {
                if (FORMATS[f].dtype == to)
                    expected = decode(&FORMATS[f], encode(&FORMATS[f], value));
            }
            FUZZ_CHECK(same(got, expected), "%d to %d: %a became %a", from, to, value, got);
        }
        fuzz_free(&out);
    }
    if (status != MOQ_OK)
        fuzz_check_error(status, &err);
    fuzz_free(&x);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > SIZE_LIMIT)
        return 0;
    const size_t count = size / sizeof(float);
    float *values = malloc(count * sizeof *values);
    memcpy(values, data, count * sizeof *values);
    for (int f = 0; f < FORMAT_COUNT; f++) {
        for (size_t i = 0; i < count; i++) {
            uint32_t code = 0;
            memcpy(&code, data + i, FORMATS[f].codes > 256 ? 2 : 1);
            check_value(&FORMATS[f], values[i]);
            check_order(&FORMATS[f], values[i], values[(i + 1) % count]);
            check_code(&FORMATS[f], code % FORMATS[f].codes);
        }
        check_rows(&FORMATS[f], values, count);
    }
    check_convert(&(fuzz_input){data, size});
    free(values);
    return 0;
}
