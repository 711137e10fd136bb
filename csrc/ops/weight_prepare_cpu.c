/* Weight processing on the CPU, in two passes: the first checks everything, the second writes. */
#include "ops/weight_mode.h"

#include "ops/weight_codes.h"

#include <stdlib.h>
#include <string.h>

static moq_prepare_part split_of(const moq_weight *w, const moq_weight_sources *sources, int32_t p,
                                 int64_t first) {
    moq_prepare_part part = {.index = p, .first = first};
    part.codes = moq_prepare_rows(&sources->weight, p, moq_code_rows_of(w->checkpoint, first));
    if (w->checkpoint == MOQ_WEIGHT_E2M1 || w->checkpoint == MOQ_WEIGHT_E4M3_GROUP)
        part.groups = moq_prepare_rows(&sources->weight_scale, p, first);
    return part;
}

static moq_status check_matrix(const moq_weight *w, const moq_weight_sources *sources,
                               const moq_prepare_scales *scales, moq_err *err) {
    int64_t first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        moq_prepare_part part = split_of(w, sources, p, first);
        MOQ_TRY(moq_prepare_check_part(w, &part, scales, err));
    }
    return MOQ_OK;
}

static void write_matrix(const moq_weight *w, const moq_weight_sources *sources,
                         const moq_prepare_scales *scales, const moq_prepare_out *out) {
    int64_t first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        moq_prepare_part part = split_of(w, sources, p, first);
        moq_prepare_write_part(w, &part, scales, out);
    }
}

/* Finds the prepared codes of an expert; block scales that are no bytes are written with all other
 * scales. */
static moq_prepare_out out_of(const moq_weight *w, const moq_params *params, int64_t expert) {
    int64_t bytes = w->weight == MOQ_WEIGHT_E2M1 ? w->in_features / 2 : w->in_features;
    int64_t groups = w->out_features * moq_weight_scale_columns(w);
    moq_prepare_out out = {.weight = params->of[MOQ_PARAM_WEIGHT].data};
    out.weight += expert * moq_code_rows_of(w->weight, w->out_features) * bytes;
    if (w->weight == MOQ_WEIGHT_E2M1 || w->weight == MOQ_WEIGHT_E4M3_GROUP)
        out.groups = (uint8_t *)params->of[MOQ_PARAM_WEIGHT_SCALE].data + expert * groups;
    return out;
}

/* Writes the scales of all experts. */
static void write_scales(const moq_params *params, moq_param id, const float *scales,
                         int64_t count) {
    if (scales)
        memcpy(params->of[id].data, scales, (size_t)count * sizeof(float));
}

static void write_all_scales(const moq_weight *w, bool uses_input_scale,
                             const moq_prepare_scales *scales, const moq_params *params) {
    int64_t experts = moq_weight_matrices(w);
    if (moq_weight_has_output_scale(w))
        write_scales(params, MOQ_PARAM_OUTPUT_SCALE, scales->factor, experts * w->out_features);
    write_scales(params, MOQ_PARAM_WEIGHT_SCALE, scales->block,
                 experts * moq_prepare_block_count(w));
    if (uses_input_scale)
        write_scales(params, MOQ_PARAM_INPUT_SCALE, scales->input, experts * w->partition_count);
    write_scales(params, MOQ_PARAM_PRE_QUANT_SCALE, scales->smooth, experts * w->in_features);
}

/* Checks and writes codes, under scales that were read. */
static moq_status prepare(const moq_weight *w, const moq_weight_sources *sources,
                          moq_prepare_mode mode, const moq_prepare_scales *scales,
                          moq_params *params, moq_err *err) {
    int64_t experts = moq_weight_matrices(w);
    for (int64_t e = 0; e < experts && !mode.checked; e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        moq_prepare_scales mine = moq_prepare_scales_of(w, scales, e);
        MOQ_TRY_EXPERT(w, e, check_matrix(w, &from, &mine, err), err);
    }
    if (mode.only_checks)
        return MOQ_OK;
    for (int64_t e = 0; e < experts; e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        moq_prepare_scales mine = moq_prepare_scales_of(w, scales, e);
        moq_prepare_out out = out_of(w, params, e);
        write_matrix(w, &from, &mine, &out);
    }
    write_all_scales(w, moq_uses_input_scale(w, sources), scales, params);
    return MOQ_OK;
}

static void multiply_rows(const moq_weight *w, const float *row_factor, float *factor) {
    for (int64_t i = 0; row_factor && i < moq_weight_matrices(w) * w->out_features; i++)
        factor[i] *= row_factor[i];
}

moq_status moq_prepare_on_cpu(const moq_weight *w, const moq_weight_sources *sources,
                              moq_prepare_mode mode, moq_params *params, moq_err *err) {
    int all = MOQ_SCALES_OF_WEIGHT | MOQ_SCALES_OF_INPUT | MOQ_SCALES_OF_SMOOTHING;
    moq_prepare_scales scales;
    moq_status status = moq_prepare_open_scales(w, sources, &scales, err);
    if (status == MOQ_OK)
        status = moq_prepare_read_scales(w, sources, all, NULL, &scales, err);
    if (status == MOQ_OK)
        multiply_rows(w, mode.row_factor, scales.factor);
    if (status == MOQ_OK)
        status = prepare(w, sources, mode, &scales, params, err);
    free(scales.memory);
    return status;
}
