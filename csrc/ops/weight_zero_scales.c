/* Scales of zero, which a layer of zeros has: see weight_device.h. They are met seldom and cost
 * time: the codes under them are looked at on the host, and FP8 codes are written from there. */
#include "ops/weight_device.h"

#include "cuda/cuda.h"
#include "ops/weight_codes.h"

#include <stdlib.h>

bool moq_prepare_is_zero(const moq_prepare_job *j, int64_t expert, int32_t p) {
    return j->w->checkpoint == MOQ_WEIGHT_E2M1 && !j->weight_stays &&
           j->scales.weight[expert * j->w->partition_count + p] == 0;
}

static bool has_zero(const float *scales, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (scales[i] == 0)
            return true;
    }
    return false;
}

bool moq_prepare_has_zero_scale(const moq_prepare_job *j) {
    const moq_prepare_scales *scales = &j->scales;
    if (j->weight_stays)
        return false;
    if (j->w->checkpoint == MOQ_WEIGHT_E2M1)
        return has_zero(scales->weight, moq_weight_matrices(j->w) * j->w->partition_count);
    return has_zero(scales->block ? scales->block : scales->factor, moq_prepare_all_scales(j));
}

/* ---- e2m1 ---- */

/* Downloads rows of codes, and leaves out the gaps between them. */
static moq_status download_rows(moq_code_rows rows, int64_t count, int64_t columns, uint8_t *out,
                                void *stream, moq_err *err) {
    if (rows.stride == columns)
        return moq_cuda_download(out, rows.data, (size_t)(count * columns), stream, err);
    for (int64_t i = 0; i < count; i++)
        MOQ_TRY(moq_cuda_download(out + i * columns, rows.data + i * rows.stride, (size_t)columns,
                                  stream, err));
    return MOQ_OK;
}

/* Looks at the e2m1 codes of a partition whose second-level scale is zero, on the host. */
static moq_status check_zero_part(const moq_prepare_job *j, const moq_weight_sources *sources,
                                  int32_t p, int64_t first, moq_err *err) {
    const moq_weight *w = j->w;
    int64_t rows = w->partition[p], k = w->in_features / 2;
    int64_t groups = moq_weight_scale_columns(w);
    uint8_t *memory = malloc((size_t)(rows * (k + groups)) + 1);
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the codes of a linear layer");
    const moq_prepare_scales none = {0};
    const moq_prepare_part part = {
        p, first, {memory, k, 0}, {memory + rows * k, groups, 0}, .zero = true};
    moq_status status = download_rows(moq_prepare_rows(&sources->weight, p, first), rows, k, memory,
                                      j->stream, err);
    if (status == MOQ_OK)
        status = download_rows(moq_prepare_rows(&sources->weight_scale, p, first), rows, groups,
                               memory + rows * k, j->stream, err);
    if (status == MOQ_OK)
        status = moq_prepare_check_part(w, &part, &none, err);
    free(memory);
    return status;
}

static moq_status check_zero_parts_of(const moq_prepare_job *j, int64_t expert, moq_err *err) {
    const moq_weight_sources sources = moq_sources_of(j->sources, expert);
    int64_t first = 0;
    for (int32_t p = 0; p < j->w->partition_count; first += j->w->partition[p++]) {
        if (moq_prepare_is_zero(j, expert, p))
            MOQ_TRY(check_zero_part(j, &sources, p, first, err));
    }
    return MOQ_OK;
}

moq_status moq_prepare_check_zero_parts(const moq_prepare_job *j, moq_err *err) {
    /* if several are wrong, a scale is named first */
    MOQ_TRY(moq_prepare_bad_scale(j, err));
    for (int64_t e = 0; e < moq_weight_matrices(j->w); e++)
        MOQ_TRY_EXPERT(j->w, e, check_zero_parts_of(j, e, err), err);
    return MOQ_OK;
}

/* ---- FP8 ---- */

/* A partition of FP8 codes that lie on the host, without gaps, with the whole matrix. */
static moq_prepare_part part_on_host(const moq_weight *w, int32_t p, int64_t first,
                                     const uint8_t *codes) {
    int64_t k = w->in_features;
    return (moq_prepare_part){.index = p, .first = first, .codes = {codes + first * k, k, 0}};
}

/* Brings the FP8 codes of a matrix to `codes` and checks them there under `scales`. */
static moq_status download_codes(const moq_prepare_job *j, const moq_source *source,
                                 const moq_prepare_scales *scales, uint8_t *codes, moq_err *err) {
    const moq_weight *w = j->w;
    int64_t k = w->in_features, first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        const moq_prepare_part part = part_on_host(w, p, first, codes);
        MOQ_TRY(download_rows(moq_prepare_rows(source, p, first), w->partition[p], k,
                              codes + first * k, j->stream, err));
        MOQ_TRY(moq_prepare_check_part(w, &part, scales, err));
    }
    return MOQ_OK;
}

/* Brings all codes to `codes`, on the host, and checks them there. */
static moq_status download_all_codes(const moq_prepare_job *j, uint8_t *codes, moq_err *err) {
    const moq_weight *w = j->w;
    int64_t span = w->out_features * w->in_features;
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        const moq_weight_sources from = moq_sources_of(j->sources, e);
        const moq_prepare_scales mine = moq_prepare_scales_of(w, &j->scales, e);
        MOQ_TRY_EXPERT(w, e, download_codes(j, &from.weight, &mine, codes + e * span, err), err);
    }
    return MOQ_OK;
}

/* Writes all codes by way of `codes`, on the host, where they were checked. */
static moq_status fill_on_host(const moq_prepare_job *j, uint8_t *codes, moq_err *err) {
    const moq_weight *w = j->w;
    const moq_prepare_scales *home = &j->scales;
    int64_t span = w->out_features * w->in_features, experts = moq_weight_matrices(w);
    for (int64_t e = 0; e < experts; e++) {
        const moq_prepare_scales mine = moq_prepare_scales_of(w, home, e);
        const moq_prepare_out out = {.weight = codes + e * span};
        int64_t first = 0;
        for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
            const moq_prepare_part part = part_on_host(w, p, first, out.weight);
            moq_prepare_write_part(w, &part, &mine, &out);
        }
    }
    moq_tensor *scale = home->block ? &j->params->of[MOQ_PARAM_WEIGHT_SCALE]
                                    : &j->params->of[MOQ_PARAM_OUTPUT_SCALE];
    MOQ_TRY(moq_cuda_upload(j->params->of[MOQ_PARAM_WEIGHT].data, codes, (size_t)(experts * span),
                            j->stream, err));
    return moq_cuda_upload(scale->data, home->block ? home->block : home->factor,
                           (size_t)moq_prepare_all_scales(j) * sizeof(float), j->stream, err);
}

moq_status moq_prepare_on_host(moq_prepare_job *j, moq_err *err) {
    const moq_weight *w = j->w;
    MOQ_TRY(moq_prepare_bad_scale(j, err));
    if (j->weight_stays)
        MOQ_TRY(moq_prepare_download_scales(j, err));
    uint8_t *codes = malloc((size_t)(moq_weight_matrices(w) * w->out_features * w->in_features));
    if (!codes)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the codes of a linear layer");
    moq_status status = download_all_codes(j, codes, err);
    if (status == MOQ_OK && !j->only_checks)
        status = fill_on_host(j, codes, err);
    free(codes);
    return status;
}
