/* Codes of a matrix on the host: see weight_codes.h. */
#include "ops/weight_codes.h"

#include "core/formats.h"
#include "cpu/cpu_prepare.h"
#include "cpu/interrupt.h"

#include <string.h>

/* ---- refusals ---- */

moq_status moq_prepare_bad_code(const moq_weight *w, int64_t row, int64_t column, moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    return moq_fail_of(err, MOQ_ERR_VALUE,
                       moq_weight_param_name(w, e2m1 ? MOQ_PARAM_WEIGHT_SCALE : MOQ_PARAM_WEIGHT),
                       "%s at row %lld, column %lld",
                       e2m1 ? "a block scale that is NaN or negative" : "a NaN code",
                       (long long)row, (long long)column);
}

static moq_status fail_lost(const moq_weight *w, int64_t row, int64_t column, moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    return moq_fail_of(
        err, MOQ_ERR_VALUE,
        moq_weight_param_name(w, e2m1 ? MOQ_PARAM_WEIGHT_SCALE_2 : MOQ_PARAM_WEIGHT_SCALE),
        "zero over a code that is neither zero nor NaN, at row %lld, column %lld of "
        "the weight: the scale is lost",
        (long long)row, (long long)column);
}

/* ---- scales of zero ---- */

/* True for a row that means zero. */
static bool row_is_zero(const moq_prepare_scales *scales, int64_t n) {
    return scales->factor && scales->factor[n] == 0;
}

/* The scales of the partition's 128x128 blocks, which begin with its first row; NULL without any.
 */
static const float *blocks_of_part(const moq_weight *w, const moq_prepare_scales *scales,
                                   int32_t p) {
    int64_t row = 0;
    for (int32_t i = 0; i < p; i++)
        row += moq_weight_partition_blocks(w, i);
    return scales->block ? scales->block + row * moq_weight_scale_columns(w) : NULL;
}

/* The scales of the blocks that a row of the partition lies in. */
static const float *blocks_of_row(const moq_weight *w, const float *blocks, int64_t row) {
    return blocks + row / MOQ_FP8_BLOCK * moq_weight_scale_columns(w);
}

static int64_t block_width(const moq_weight *w, int64_t column) {
    int64_t rest = w->in_features - column;
    return rest < MOQ_FP8_BLOCK ? rest : MOQ_FP8_BLOCK;
}

/* ---- checks ---- */

/* Checks a row of codes in 128x128 blocks: a block of scale zero may hold zeros and NaN, another
 * one no NaN. */
static moq_status check_blocks(const moq_weight *w, const float *scales, int64_t n,
                               const uint8_t *codes, moq_err *err) {
    for (int64_t k = 0; k < w->in_features; k += MOQ_FP8_BLOCK) {
        bool zero = scales[k / MOQ_FP8_BLOCK] == 0;
        int64_t width = block_width(w, k);
        int64_t at = zero ? moq_cpu_find_e4m3_value(codes + k, width)
                          : moq_cpu_find_e4m3_nan(codes + k, width);
        if (at >= 0)
            return zero ? fail_lost(w, n, k + at, err) : moq_prepare_bad_code(w, n, k + at, err);
    }
    return MOQ_OK;
}

/* Checks the E8M0 scales of a row's groups. */
static moq_status check_powers(const moq_weight *w, int64_t n, const uint8_t *groups,
                               moq_err *err) {
    for (int64_t g = 0; g < moq_weight_scale_columns(w); g++)
        if (groups[g] == 0xff)
            return moq_fail_of(err, MOQ_ERR_VALUE, moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE),
                               "a NaN block scale at row %lld, column %lld", (long long)n,
                               (long long)g);
    return MOQ_OK;
}

/* Checks a row of int8, or one of the two rows of int4 in bytes: no code but zero may lie under a
 * scale of zero. `scales` are of the groups of int4. */
static moq_status check_integers(const moq_weight *w, const float *scales, bool zero, int64_t n,
                                 const uint8_t *codes, int shift, moq_err *err) {
    bool int4 = w->checkpoint == MOQ_WEIGHT_INT4_GROUP;
    for (int64_t k = 0; k < w->in_features; k++) {
        bool lost = int4 ? scales[k / w->group_size] == 0 && (codes[k] >> shift & 15) != 0
                         : zero && codes[k] != 0;
        if (lost)
            return fail_lost(w, n, k, err);
    }
    return MOQ_OK;
}

/* Checks a row of e4m3 codes, or of e2m1 codes with the scales of their groups. */
static moq_status check_row(const moq_weight *w, bool zero, int64_t n, const uint8_t *codes,
                            const uint8_t *groups, moq_err *err) {
    int64_t k = w->in_features, at;
    if (w->checkpoint == MOQ_WEIGHT_INT8_ROW)
        return check_integers(w, NULL, zero, n, codes, 0, err);
    if (w->checkpoint == MOQ_WEIGHT_E4M3_GROUP) {
        MOQ_TRY(check_powers(w, n, groups, err));
        groups = NULL;
    }
    if (zero) {
        at = groups ? moq_cpu_find_e2m1_value(codes, groups, k, w->group_size)
                    : moq_cpu_find_e4m3_value(codes, k);
        return at < 0 ? MOQ_OK : fail_lost(w, n, at, err);
    }
    at = groups ? moq_cpu_find_bad_block_scale(groups, moq_weight_scale_columns(w))
                : moq_cpu_find_e4m3_nan(codes, k);
    return at < 0 ? MOQ_OK : moq_prepare_bad_code(w, n, at, err);
}

moq_status moq_prepare_check_part(const moq_weight *w, const moq_prepare_part *part,
                                  const moq_prepare_scales *scales, moq_err *err) {
    const float *blocks = blocks_of_part(w, scales, part->index);
    moq_pace pace = {0};
    for (int64_t row = 0; row < w->partition[part->index]; row++) {
        if (moq_stops(&pace, w->in_features))
            return moq_fail(err, MOQ_ERR_INTERRUPTED, "interrupted");
        bool int4 = w->checkpoint == MOQ_WEIGHT_INT4_GROUP;
        const uint8_t *codes = part->codes.data + (int4 ? row / 2 : row) * part->codes.stride;
        const uint8_t *groups =
            part->groups.data ? part->groups.data + row * part->groups.stride : NULL;
        int64_t n = part->first + row;
        if (int4)
            MOQ_TRY(check_integers(w, blocks + row * moq_weight_scale_columns(w), false, n, codes,
                                   row % 2 * 4, err));
        else if (blocks)
            MOQ_TRY(check_blocks(w, blocks_of_row(w, blocks, row), n, codes, err));
        else
            MOQ_TRY(check_row(w, part->zero || row_is_zero(scales, n), n, codes, groups, err));
    }
    return MOQ_OK;
}

/* ---- rows of the result ---- */

/* Copies codes, which may be there already. */
static void copy_row(uint8_t *out, const uint8_t *codes, int64_t columns) {
    if (out != codes)
        memcpy(out, codes, (size_t)columns);
}

static void clear_zero_blocks(const moq_weight *w, const float *scales, uint8_t *out) {
    for (int64_t k = 0; k < w->in_features; k += MOQ_FP8_BLOCK) {
        if (scales[k / MOQ_FP8_BLOCK] == 0)
            memset(out + k, 0, (size_t)block_width(w, k));
    }
}

/* Writes row n of a layout that only general kernels read, or folds its powers of two. */
static void write_general_row(const moq_weight *w, int64_t n, const uint8_t *codes,
                              const uint8_t *scales, float *factor, const moq_prepare_out *out) {
    int64_t k = w->in_features, columns = moq_weight_scale_columns(w);
    if (w->weight == MOQ_WEIGHT_E4M3_ROW) {
        factor[n] *= moq_cpu_fold_mx_row(codes, scales, k, w->group_size, out->weight + n * k);
        return;
    }
    if (w->weight == MOQ_WEIGHT_INT4_GROUP) {
        if (n % 2 == 0)
            copy_row(out->weight + n / 2 * k, codes, k);
        return;
    }
    copy_row(out->weight + n * k, codes, k);
    if (w->weight == MOQ_WEIGHT_E4M3_GROUP)
        copy_row(out->groups + n * columns, scales, columns);
}

/* Writes row n of the layer from its codes and, for e2m1, their block scales. */
static void write_row(const moq_weight *w, int64_t n, const uint8_t *codes, const uint8_t *scales,
                      float *factor, const moq_prepare_out *out) {
    int64_t k = w->in_features;
    uint8_t *weight = out->weight;
    if (moq_layout_is_general(w->checkpoint)) {
        write_general_row(w, n, codes, scales, factor, out);
        return;
    }
    if (w->checkpoint != MOQ_WEIGHT_E2M1) {
        copy_row(weight + n * k, codes, k);
        return;
    }
    int64_t columns = moq_weight_scale_columns(w);
    if (w->weight == MOQ_WEIGHT_E4M3_ROW) {
        factor[n] *= moq_cpu_fold_e2m1_row(codes, scales, k, w->group_size, weight + n * k);
        return;
    }
    copy_row(weight + n * (k / 2), codes, k / 2);
    copy_row(out->groups + n * columns, scales, columns);
}

static void write_zero_row(const moq_weight *w, int64_t n, const moq_prepare_out *out) {
    int64_t k = w->in_features, columns = moq_weight_scale_columns(w);
    int64_t bytes = w->weight == MOQ_WEIGHT_E2M1 ? k / 2 : k;
    memset(out->weight + n * bytes, 0, (size_t)bytes);
    if (w->weight == MOQ_WEIGHT_E2M1)
        memset(out->groups + n * columns, 0, (size_t)columns);
}

void moq_prepare_write_part(const moq_weight *w, const moq_prepare_part *part,
                            const moq_prepare_scales *scales, const moq_prepare_out *out) {
    const float *blocks = blocks_of_part(w, scales, part->index);
    moq_pace pace = {0};
    for (int64_t row = 0; row < w->partition[part->index]; row++) {
        int64_t n = part->first + row;
        if (moq_stops(&pace, w->in_features))
            return;
        if (row_is_zero(scales, n)) {
            write_zero_row(w, n, out);
            continue;
        }
        write_row(w, n,
                  part->codes.data + moq_code_rows_of(w->checkpoint, row) * part->codes.stride,
                  part->groups.data ? part->groups.data + row * part->groups.stride : NULL,
                  scales->factor, out);
        if (w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK)
            clear_zero_blocks(w, blocks_of_row(w, blocks, row), out->weight + n * w->in_features);
    }
}
