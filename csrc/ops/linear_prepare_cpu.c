/* Weight processing on the CPU: codes copied row by row into one tensor for all partitions. Two
 * passes: the first checks everything, the second writes. */
#include "cpu/prepare.h"
#include "ops/linear_prepare.h"

#include <string.h>

/* A row that means zero, whatever its codes are. */
static bool row_is_zero(const moq_prepare_scales *scales, int64_t n) {
    return scales->factor && scales->factor[n] == 0;
}

static moq_status check_codes(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              const moq_prepare_scales *scales, moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    const moq_source *source = e2m1 ? &sources->weight_scale : &sources->weight;
    int64_t columns = e2m1 ? moq_linear_scale_columns(spec) : spec->in_features;
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows rows = moq_prepare_rows(source, p, first);
        for (int64_t row = 0; row < spec->partition[p]; row++) {
            if (row_is_zero(scales, first + row))
                continue;
            const uint8_t *codes = rows.data + row * rows.stride;
            int64_t bad = e2m1 ? moq_cpu_find_bad_block_scale(codes, columns)
                               : moq_cpu_find_e4m3_nan(codes, columns);
            if (bad >= 0)
                return moq_prepare_bad_code(spec, first + row, bad, err);
        }
    }
    return MOQ_OK;
}

/* Of codes that may be there already. */
static void copy_row(uint8_t *out, const uint8_t *codes, int64_t columns) {
    if (out != codes)
        memcpy(out, codes, (size_t)columns);
}

/* Row n of the layer from its codes and, for e2m1, their block scales. */
static void write_row(const moq_linear_spec *spec, int64_t n, const uint8_t *codes,
                      const uint8_t *scales, float *factor, moq_linear_params *params) {
    int64_t k = spec->in_features;
    uint8_t *weight = params->weight.data;
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
    copy_row((uint8_t *)params->weight_scale.data + n * columns, scales, columns);
}

static void write_zero_row(const moq_linear_spec *spec, int64_t n, moq_linear_params *params) {
    int64_t k = spec->in_features, columns = moq_linear_scale_columns(spec);
    int64_t bytes = spec->weight == MOQ_WEIGHT_E2M1 ? k / 2 : k;
    memset((uint8_t *)params->weight.data + n * bytes, 0, (size_t)bytes);
    if (spec->weight == MOQ_WEIGHT_E2M1)
        memset((uint8_t *)params->weight_scale.data + n * columns, 0, (size_t)columns);
}

static void write_codes(const moq_linear_spec *spec, const moq_linear_sources *sources,
                        const moq_prepare_scales *scales, moq_linear_params *params) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows codes = moq_prepare_rows(&sources->weight, p, first), groups = {0};
        if (e2m1)
            groups = moq_prepare_rows(&sources->weight_scale, p, first);
        for (int64_t row = 0; row < spec->partition[p]; row++) {
            if (row_is_zero(scales, first + row))
                write_zero_row(spec, first + row, params);
            else
                write_row(spec, first + row, codes.data + row * codes.stride,
                          e2m1 ? groups.data + row * groups.stride : NULL, scales->factor, params);
        }
    }
}

moq_status moq_prepare_on_cpu(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              const moq_prepare_scales *scales, moq_linear_params *params,
                              moq_err *err) {
    MOQ_TRY(check_codes(spec, sources, scales, err));
    write_codes(spec, sources, scales, params);
    if (scales->factor)
        memcpy(params->output_scale.data, scales->factor,
               (size_t)spec->out_features * sizeof(float));
    if (scales->block)
        memcpy(params->weight_scale.data, scales->block,
               (size_t)(moq_linear_block_rows(spec) * moq_linear_scale_columns(spec)) *
                   sizeof(float));
    if (scales->input)
        memcpy(params->input_scale.data, scales->input,
               (size_t)spec->partition_count * sizeof(float));
    if (scales->smooth)
        memcpy(params->pre_quant_scale.data, scales->smooth,
               (size_t)spec->in_features * sizeof(float));
    return MOQ_OK;
}
