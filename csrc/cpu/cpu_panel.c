/* The panel of a pass: rows of x as its kernel multiplies them. See cpu/cpu_pass.h. */
#include "cpu/cpu_pass.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"
#include "cpu/cpu_quantize.h"
#include "cpu/interrupt.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Values of x that a thread takes at least while the panel is laid out. */
enum { VALUES_PER_THREAD = 2048 };
/* Columns of a panel that are laid out at a time; a multiple of MOQ_TILE_STEP. */
enum { ARRANGED_COLUMNS = 16384 };

/* Rows of x that are not quantized are multiplied as they are if the exponent of their largest
 * magnitude lies within these, else they are brought to the upper one: K below 2^32 products with
 * weights below 2^12 do not overflow there, and values 2^150 times smaller than the largest still
 * count, with weights of 2^-10 and the powers of two that kernels leave out. */
enum { HIGHEST_AS_IS = 80, LOWEST_AS_IS = -60 };

double moq_take_power(float *values, int64_t n, int exponent) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        float magnitude = fabsf(values[i]);
        largest = magnitude <= FLT_MAX && magnitude > largest ? magnitude : largest;
    }
    if (largest == 0)
        return 1.0;
    double power = ldexp(1.0, ilogbf(largest) - exponent), inverse = 1.0 / power;
    for (int64_t i = 0; i < n; i++)
        values[i] = (float)((double)values[i] * inverse);
    return power;
}

/* True if one of the e4m3 codes is a NaN, which the kernels' decoding does not know. */
static bool has_nan(const uint8_t *codes, int64_t n) {
    uint8_t found = 0;
    for (int64_t i = 0; i < n; i++)
        found |= (uint8_t)((codes[i] & 0x7f) == 0x7f);
    return found;
}

/* Lays out a row of x as it is, for e2m1 weights. */
static void convert_row(const moq_pass *p, const moq_pass_row *r, void *out) {
    memset(r->row + p->k, 0, (size_t)(p->padded - p->k) * sizeof(float));
    static const moq_order ORDER[] = {[MOQ_DECODE] = MOQ_ORDER_DECODE,
                                      [MOQ_MEDIUM] = MOQ_ORDER_MEDIUM,
                                      [MOQ_PREFILL] = MOQ_ORDER_E2M1};
    p->tiles->convert(r->row, p->padded, ORDER[p->regime], out);
}

/* Lays out a row of x that is not quantized. */
static double decode_as_is(const moq_pass *p, const moq_pass_row *r, void *out) {
    const float highest = ldexpf(1, HIGHEST_AS_IS), lowest = ldexpf(1, LOWEST_AS_IS);
    float amax;
    moq_cpu_row_kernels()->amax(MOQ_DT_F32, r->row, p->k, p->k, &amax);
    bool ordinary = amax == 0 || (amax >= lowest && amax < highest);
    double power = ordinary ? 1.0 : moq_take_power(r->row, p->k, HIGHEST_AS_IS - 1);
    convert_row(p, r, out);
    return power;
}

/* e2m1 weights have their own order of columns, which general ones have, too. */
static void decode_codes(const moq_pass *p, const moq_pass_row *r, void *out) {
    moq_weight_layout weight = p->call->spec->weight;
    if (weight != MOQ_WEIGHT_E2M1 && !moq_layout_is_general(weight)) {
        p->tiles->decode_e4m3(r->codes, p->k, out);
        return;
    }
    moq_cpu_row_kernels()->decode(MOQ_DT_E4M3, r->codes, p->k, r->row);
    convert_row(p, r, out);
}

/* Copies the scales of a row's groups to the panel. */
static double place_group_scales(const moq_pass *p, const moq_pass_row *r, int64_t m) {
    bool finite = true;
    for (int64_t g = 0; g < p->groups; g++)
        finite = finite && isfinite(r->scales[g]);
    double power = moq_take_power(r->scales, p->groups, MOQ_HIGHEST_SCALE);
    for (int64_t g = 0; g < p->groups; g++)
        p->group_scales[g * p->rows + m] = r->scales[g];
    return finite ? power : NAN;
}

/* Codes and scales of row m: made of its values, or as x has them. The factor of all of the row. */
static float find_codes(const moq_pass *p, const moq_pass_row *r, int64_t m) {
    float factor = p->input_scale;
    if (p->read_codes) {
        p->read_codes(p, m, r);
        return p->call->spec->input == MOQ_INPUT_E4M3_TOKEN ? r->scales[0] : factor;
    }
    p->read(p, m, r->row);
    switch (p->call->spec->input) {
    case MOQ_INPUT_AS_IS:
        break;
    case MOQ_INPUT_NVFP4:
        moq_quantize_row_nvfp4(r->row, p->k, factor, r->codes, r->blocks);
        break;
    case MOQ_INPUT_E4M3_TENSOR:
        moq_quantize_row_fp8_static(r->row, p->k, 1.0f / factor, r->codes);
        break;
    case MOQ_INPUT_E4M3_TOKEN:
        return moq_quantize_row_fp8_token(r->row, p->k, r->codes);
    case MOQ_INPUT_E4M3_GROUP:
        moq_quantize_row_fp8_group(r->row, p->k, MOQ_FP8_BLOCK, r->codes, r->scales);
        break;
    case MOQ_INPUT_INT8:
        if (!p->call->input_scale)
            factor = moq_int8_scale(r->row, p->k);
        moq_round_row_int8(r->row, p->k, 1.0f / factor);
        break;
    }
    return factor;
}

/* A row of x in the kernel's unit, up to the returned factor: as it is, or what its codes mean. A
 * NaN among the codes of a row makes its factor NaN, and so every output of the row; under a scale
 * found from the row there is one where that scale is not finite. */
static double decode_x(const moq_pass *p, const moq_pass_row *r, int64_t m, void *out) {
    const moq_linear_tiles *tiles = p->tiles;
    float factor = find_codes(p, r, m);
    bool given = p->read_codes != NULL;
    double power;
    switch (p->call->spec->input) {
    case MOQ_INPUT_AS_IS:
        return decode_as_is(p, r, out);
    case MOQ_INPUT_NVFP4:
        tiles->decode_e2m1(r->codes, r->blocks, p->k, MOQ_NVFP4_GROUP, out);
        return has_nan(r->blocks, p->k / MOQ_NVFP4_GROUP) ? NAN : factor;
    case MOQ_INPUT_E4M3_TENSOR:
        decode_codes(p, r, out);
        return has_nan(r->codes, p->k) ? NAN : factor;
    case MOQ_INPUT_E4M3_TOKEN:
        decode_codes(p, r, out);
        return isfinite(factor) && !(given && has_nan(r->codes, p->k)) ? factor : NAN;
    case MOQ_INPUT_E4M3_GROUP:
        power = place_group_scales(p, r, m);
        tiles->decode_e4m3(r->codes, p->k, out);
        return given && has_nan(r->codes, p->k) ? NAN : power;
    case MOQ_INPUT_INT8:
        convert_row(p, r, out);
        return factor;
    }
    return NAN;
}

/* Arranges columns, some after the other. */
void moq_pass_arrange(const moq_pass *p, int64_t begin, int64_t end, int64_t first, int64_t last) {
    moq_arrange *arrange_panel =
        p->regime == MOQ_MEDIUM ? p->tiles->arrange_medium : p->tiles->arrange;
    moq_pace pace = {0};
    for (int64_t k = first; k < last && !moq_stops(&pace, (end - begin) * ARRANGED_COLUMNS);
         k += ARRANGED_COLUMNS)
        arrange_panel(&p->arranging, begin, end, k,
                      last - k < ARRANGED_COLUMNS ? last : k + ARRANGED_COLUMNS);
}

void moq_pass_load_rows(void *context, int64_t begin, int64_t end) {
    moq_pass *p = context;
    size_t padded = (size_t)p->padded, bytes = padded * p->tiles->unit;
    size_t groups = (size_t)round_up(p->groups, 16);
    char *scratch = moq_take_scratch(MOQ_SCRATCH_ROW, 6 * padded + 4 * groups);
    if (!scratch) {
        p->failed = 1;
        return;
    }
    moq_pass_row r = {.row = (float *)scratch};
    r.scales = r.row + padded;
    r.codes = (uint8_t *)(r.scales + groups);
    r.blocks = r.codes + padded;
    moq_pace pace = {0};
    for (int64_t m = begin; m < end && !moq_stops(&pace, p->padded); m++) {
        p->factor[m] = decode_x(p, &r, m, (char *)p->decoded + (size_t)m * bytes);
    }
    if (p->together)
        moq_pass_arrange(p, begin, end, 0, p->padded);
}

/* Ranges are counted in steps of columns. */
static void arrange_columns(void *context, int64_t begin, int64_t end) {
    moq_pass *p = context;
    moq_pass_arrange(p, 0, p->rows, begin * MOQ_TILE_STEP, end * MOQ_TILE_STEP);
}

void moq_pass_narrow_factors(moq_pass *p) {
    double least = (double)FLT_MAX, most = (double)FLT_MIN;
    for (int64_t m = 0; m < p->rows; m++) {
        double factor = p->factor[m];
        p->narrow_factor[m] = (float)factor;
        least = factor < least ? factor : least;
        most = factor > most ? factor : most;
    }
    p->least = least;
    p->most = most;
    p->held = least >= (double)FLT_MIN && most <= (double)FLT_MAX;
}

void moq_pass_load(moq_pass *p) {
    const moq_linear_tiles *tiles = p->tiles;
    /* A thread arranges what it has decoded where all of them get rows enough. */
    p->together = p->arranges && p->rows >= moq_num_threads() * tiles->arrange_rows;
    moq_shares rows = {.count = p->rows,
                       .grain =
                           p->together ? tiles->arrange_rows : 1 + VALUES_PER_THREAD / p->padded,
                       .nanoseconds = p->nanoseconds};
    moq_parallel_for(&rows, moq_pass_load_rows, p);
    if (p->arranges && !p->together) {
        moq_shares columns = {.count = p->padded / MOQ_TILE_STEP,
                              .grain = 1 + VALUES_PER_THREAD / (p->rows * MOQ_TILE_STEP),
                              .nanoseconds = p->nanoseconds};
        moq_parallel_for(&columns, arrange_columns, p);
    }
    moq_pass_narrow_factors(p);
}
