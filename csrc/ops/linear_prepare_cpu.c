/* Weight processing on the CPU: codes copied row by row into one tensor for all partitions. Two
 * passes: the first checks everything, the second writes. */
#include "core/formats.h"
#include "cpu/cpu_prepare.h"
#include "cpu/interrupt.h"
#include "ops/linear_prepare.h"

#include <string.h>

/* A row that means zero. */
static bool row_is_zero(const moq_prepare_scales *scales, int64_t n) {
    return scales->factor && scales->factor[n] == 0;
}

/* The scales of the partition's 128x128 blocks, which begin with its first row; NULL without any.
 */
static const float *blocks_of_part(const moq_linear_spec *spec, const moq_prepare_scales *scales,
                                   int32_t p) {
    int64_t row = 0;
    for (int32_t i = 0; i < p; i++)
        row += (spec->partition[i] + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
    return scales->block ? scales->block + row * moq_linear_scale_columns(spec) : NULL;
}

/* The scales of the blocks that a row of the partition lies in. */
static const float *blocks_of_row(const moq_linear_spec *spec, const float *blocks, int64_t row) {
    return blocks + row / MOQ_FP8_BLOCK * moq_linear_scale_columns(spec);
}

static int64_t block_width(const moq_linear_spec *spec, int64_t column) {
    int64_t rest = spec->in_features - column;
    return rest < MOQ_FP8_BLOCK ? rest : MOQ_FP8_BLOCK;
}

static moq_status fail_lost(const moq_linear_spec *spec, int64_t row, int64_t column,
                            moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    return moq_fail(
        err, MOQ_ERR_VALUE,
        "%s: zero over a code that is neither zero nor NaN, at row %lld, column %lld of "
        "the weight: the scale is lost",
        e2m1 ? "weight_scale_2" : "weight_scale", (long long)row, (long long)column);
}

/* One row of 128x128 blocks: a block of scale zero may hold zeros and NaN, another one no NaN. */
static moq_status check_blocks(const moq_linear_spec *spec, const float *scales, int64_t n,
                               const uint8_t *codes, moq_err *err) {
    for (int64_t k = 0; k < spec->in_features; k += MOQ_FP8_BLOCK) {
        bool zero = scales[k / MOQ_FP8_BLOCK] == 0;
        int64_t width = block_width(spec, k);
        int64_t at = zero ? moq_cpu_find_e4m3_value(codes + k, width)
                          : moq_cpu_find_e4m3_nan(codes + k, width);
        if (at >= 0)
            return zero ? fail_lost(spec, n, k + at, err)
                        : moq_prepare_bad_code(spec, n, k + at, err);
    }
    return MOQ_OK;
}

/* One row of e4m3 codes, or of e2m1 codes with the scales of their groups. */
static moq_status check_row(const moq_linear_spec *spec, bool zero, int64_t n, const uint8_t *codes,
                            const uint8_t *groups, moq_err *err) {
    int64_t k = spec->in_features, at;
    if (zero) {
        at = groups ? moq_cpu_find_e2m1_value(codes, groups, k, spec->group_size)
                    : moq_cpu_find_e4m3_value(codes, k);
        return at < 0 ? MOQ_OK : fail_lost(spec, n, at, err);
    }
    at = groups ? moq_cpu_find_bad_block_scale(groups, moq_linear_scale_columns(spec))
                : moq_cpu_find_e4m3_nan(codes, k);
    return at < 0 ? MOQ_OK : moq_prepare_bad_code(spec, n, at, err);
}

moq_status moq_prepare_check_part(const moq_linear_spec *spec, const moq_prepare_part *part,
                                  const moq_prepare_scales *scales, moq_err *err) {
    const float *blocks = blocks_of_part(spec, scales, part->index);
    moq_pace pace = {0};
    for (int64_t row = 0; row < spec->partition[part->index]; row++) {
        if (moq_stops(&pace, spec->in_features))
            return moq_fail(err, MOQ_ERR_INTERRUPTED, "interrupted");
        const uint8_t *codes = part->codes.data + row * part->codes.stride;
        const uint8_t *groups =
            part->groups.data ? part->groups.data + row * part->groups.stride : NULL;
        int64_t n = part->first + row;
        if (blocks)
            MOQ_TRY(check_blocks(spec, blocks_of_row(spec, blocks, row), n, codes, err));
        else
            MOQ_TRY(check_row(spec, part->zero || row_is_zero(scales, n), n, codes, groups, err));
    }
    return MOQ_OK;
}

/* Of codes that may be there already. */
static void copy_row(uint8_t *out, const uint8_t *codes, int64_t columns) {
    if (out != codes)
        memcpy(out, codes, (size_t)columns);
}

static void clear_zero_blocks(const moq_linear_spec *spec, const float *scales, uint8_t *out) {
    for (int64_t k = 0; k < spec->in_features; k += MOQ_FP8_BLOCK) {
        if (scales[k / MOQ_FP8_BLOCK] == 0)
            memset(out + k, 0, (size_t)block_width(spec, k));
    }
}

/* Row n of the layer from its codes and, for e2m1, their block scales. */
static void write_row(const moq_linear_spec *spec, int64_t n, const uint8_t *codes,
                      const uint8_t *scales, float *factor, moq_params *params) {
    int64_t k = spec->in_features;
    uint8_t *weight = params->of[MOQ_PARAM_WEIGHT].data;
    if (spec->checkpoint != MOQ_WEIGHT_E2M1) {
        copy_row(weight + n * k, codes, k);
        return;
    }
    int64_t columns = moq_linear_scale_columns(spec);
    if (spec->weight == MOQ_WEIGHT_E4M3_ROW) {
        factor[n] *= moq_cpu_fold_e2m1_row(codes, scales, k, spec->group_size, weight + n * k);
        return;
    }
    copy_row(weight + n * (k / 2), codes, k / 2);
    copy_row((uint8_t *)params->of[MOQ_PARAM_WEIGHT_SCALE].data + n * columns, scales, columns);
}

static void write_zero_row(const moq_linear_spec *spec, int64_t n, moq_params *params) {
    int64_t k = spec->in_features, columns = moq_linear_scale_columns(spec);
    int64_t bytes = spec->weight == MOQ_WEIGHT_E2M1 ? k / 2 : k;
    memset((uint8_t *)params->of[MOQ_PARAM_WEIGHT].data + n * bytes, 0, (size_t)bytes);
    if (spec->weight == MOQ_WEIGHT_E2M1)
        memset((uint8_t *)params->of[MOQ_PARAM_WEIGHT_SCALE].data + n * columns, 0,
               (size_t)columns);
}

void moq_prepare_write_part(const moq_linear_spec *spec, const moq_prepare_part *part,
                            const moq_prepare_scales *scales, moq_params *params) {
    const float *blocks = blocks_of_part(spec, scales, part->index);
    moq_pace pace = {0};
    for (int64_t row = 0; row < spec->partition[part->index]; row++) {
        int64_t n = part->first + row;
        if (moq_stops(&pace, spec->in_features))
            return;
        if (row_is_zero(scales, n)) {
            write_zero_row(spec, n, params);
            continue;
        }
        write_row(spec, n, part->codes.data + row * part->codes.stride,
                  part->groups.data ? part->groups.data + row * part->groups.stride : NULL,
                  scales->factor, params);
        if (blocks)
            clear_zero_blocks(spec, blocks_of_row(spec, blocks, row),
                              (uint8_t *)params->of[MOQ_PARAM_WEIGHT].data + n * spec->in_features);
    }
}

static moq_prepare_part part_of(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                int32_t p, int64_t first) {
    moq_prepare_part part = {.index = p, .first = first};
    part.codes = moq_prepare_rows(&sources->weight, p, first);
    if (spec->checkpoint == MOQ_WEIGHT_E2M1)
        part.groups = moq_prepare_rows(&sources->weight_scale, p, first);
    return part;
}

moq_status moq_prepare_on_cpu(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              const moq_prepare_scales *scales, moq_params *params, moq_err *err) {
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_prepare_part part = part_of(spec, sources, p, first);
        MOQ_TRY(moq_prepare_check_part(spec, &part, scales, err));
    }
    first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_prepare_part part = part_of(spec, sources, p, first);
        moq_prepare_write_part(spec, &part, scales, params);
    }
    if (scales->factor)
        memcpy(params->of[MOQ_PARAM_OUTPUT_SCALE].data, scales->factor,
               (size_t)spec->out_features * sizeof(float));
    if (scales->block)
        memcpy(params->of[MOQ_PARAM_WEIGHT_SCALE].data, scales->block,
               (size_t)(moq_linear_block_rows(spec) * moq_linear_scale_columns(spec)) *
                   sizeof(float));
    if (scales->input)
        memcpy(params->of[MOQ_PARAM_INPUT_SCALE].data, scales->input,
               (size_t)spec->partition_count * sizeof(float));
    if (scales->smooth)
        memcpy(params->of[MOQ_PARAM_PRE_QUANT_SCALE].data, scales->smooth,
               (size_t)spec->in_features * sizeof(float));
    return MOQ_OK;
}
