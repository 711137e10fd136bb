/* Weight processing of MX weights of four bits: see weight_mx.h.
 *
 * Memory to work in: the factors of all rows, float32 [experts, rows], then their scales, e4m3
 * [experts, rows, groups], each from a multiple of 16 bytes on. On a device kernels fill it, and
 * the host waits for what they find; a row that they refuse is looked at once more here, to be
 * named. */
#include "ops/weight_mx.h"

#include "core/sizes.h"
#include "cpu/cpu_mx_scales.h"
#include "cpu/interrupt.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_mx_scales.h"

#include <math.h>
#include <stdlib.h>

static const float ONE = 1.0f;

static int64_t all_rows(const moq_weight *w) {
    return moq_weight_matrices(w) * w->out_features;
}

static int64_t factor_bytes(const moq_weight *w) {
    return round_up(all_rows(w) * (int64_t)sizeof(float), 16);
}

static int64_t memory_bytes(const moq_weight *w) {
    return factor_bytes(w) + round_up(all_rows(w) * moq_weight_scale_columns(w), 16);
}

int64_t moq_prepare_mx_workspace(const moq_weight *w) {
    return w->mx_scales ? memory_bytes(w) : 0;
}

/* ---- sources of NVFP4 ---- */

/* A weight's sources as those of NVFP4, and the tensors that they have besides the given ones. */
typedef struct {
    moq_weight_sources sources;
    moq_tensor scale, second;
    int64_t step;
    float *factors;
    uint8_t *scales;
} nvfp4_sources;

static void open_sources(const moq_weight *w, const moq_weight_sources *given, void *memory,
                         nvfp4_sources *of) {
    int64_t n = w->out_features, groups = moq_weight_scale_columns(w);
    of->factors = memory;
    of->scales = (uint8_t *)memory + factor_bytes(w);
    of->step = n * groups;
    of->scale = (moq_tensor){.data = of->scales,
                             .device = w->device,
                             .dtype = MOQ_DT_E4M3,
                             .ndim = 2,
                             .shape = {n, groups},
                             .stride = {groups, 1}};
    of->second = (moq_tensor){.data = (void *)(uintptr_t)&ONE, .dtype = MOQ_DT_F32};
    of->second.device = (moq_device){MOQ_CPU, 0};
    of->sources = *given;
    of->sources.weight_scale = (moq_source){.count = 1, .part = &of->scale};
    of->sources.weight_scale.step = w->experts ? &of->step : NULL;
    of->sources.weight_scale_2 = (moq_source){.count = 1, .part = &of->second};
}

/* The rows of partition p, which begin at row `first` of a matrix, from the given expert on. */
static moq_mx_rows rows_of(const moq_weight *w, const moq_weight_sources *given, int32_t p,
                           int64_t first, const nvfp4_sources *of) {
    moq_code_rows codes = moq_prepare_rows(&given->weight, p, first);
    moq_code_rows exponents = moq_prepare_rows(&given->weight_scale, p, first);
    int64_t row = given->weight.expert * w->out_features + first;
    int64_t groups = moq_weight_scale_columns(w);
    return (moq_mx_rows){
        .codes = codes.data,
        .exponents = exponents.data,
        .code_stride = codes.stride,
        .exponent_stride = exponents.stride,
        .code_step = codes.step,
        .exponent_step = exponents.step,
        .rows = w->partition[p],
        .groups = groups,
        .experts = moq_weight_matrices(w),
        .span = w->out_features,
        .scales = of->scales + row * groups,
        .factors = of->factors + row,
    };
}

/* ---- refusals ---- */

/* Fails for a row of a matrix that has no such scales. */
static moq_status check_range(const moq_weight *w, int64_t row, moq_mx_range range, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE);
    if (range.nan >= 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "a block scale that is NaN at row %lld, column %lld", (long long)row,
                           (long long)range.nan);
    if (range.most - range.least <= MOQ_MX_SPAN)
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, name,
                       "the exponents of row %lld span %d, from %d to %d, and %d is the most that "
                       "kernels hold; `moqext convert --to bf16` reads it",
                       (long long)row, range.most - range.least, range.least - MOQ_MX_ONE,
                       range.most - MOQ_MX_ONE, MOQ_MX_SPAN);
}

/* ---- on the CPU ---- */

static moq_status convert_part(const moq_weight *w, const moq_mx_rows *rows, int64_t first,
                               moq_err *err) {
    moq_pace pace = {0};
    for (int64_t i = 0; i < rows->rows; i++) {
        const uint8_t *codes = rows->codes + i * rows->code_stride;
        const uint8_t *exponents = rows->exponents + i * rows->exponent_stride;
        if (moq_stops(&pace, rows->groups))
            return moq_fail(err, MOQ_ERR_INTERRUPTED, "interrupted");
        moq_mx_range range = moq_cpu_find_mx_range(exponents, codes, rows->groups);
        MOQ_TRY(check_range(w, first + i, range, err));
        rows->factors[i] = moq_cpu_write_mx_row(exponents, codes, rows->groups, range,
                                                rows->scales + i * rows->groups);
    }
    return MOQ_OK;
}

static moq_status convert_matrix(const moq_weight *w, const moq_weight_sources *given,
                                 const nvfp4_sources *of, moq_err *err) {
    int64_t first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        moq_mx_rows rows = rows_of(w, given, p, first, of);
        MOQ_TRY(convert_part(w, &rows, first, err));
    }
    return MOQ_OK;
}

static moq_status convert_on_cpu(const moq_weight *w, const moq_weight_sources *given,
                                 const nvfp4_sources *of, moq_err *err) {
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        moq_weight_sources from = moq_sources_of(given, e);
        MOQ_TRY_EXPERT(w, e, convert_matrix(w, &from, of, err), err);
    }
    return MOQ_OK;
}

static moq_status prepare_on_cpu(const moq_weight *w, const moq_weight_sources *given,
                                 moq_prepare_mode mode, moq_params *params, moq_err *err) {
    nvfp4_sources of;
    void *memory = malloc((size_t)memory_bytes(w) + 1);
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    open_sources(w, given, memory, &of);
    mode.row_factor = of.factors;
    mode.checked = true; /* scales that are made here are right */
    moq_status status = convert_on_cpu(w, given, &of, err);
    if (status == MOQ_OK)
        status = moq_prepare_on_cpu(w, &of.sources, mode, params, err);
    free(memory);
    return status;
}

/* ---- on a device ---- */

static moq_status queue_conversion(const moq_weight *w, const moq_weight_sources *given,
                                   const nvfp4_sources *of, moq_findings *found, void *stream,
                                   moq_err *err) {
    int64_t first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        moq_mx_rows rows = rows_of(w, given, p, first, of);
        MOQ_TRY(moq_cuda_convert_mx_scales(&rows, found, stream, err));
    }
    return MOQ_OK;
}

/* Refuses row `row` of a matrix from its bytes on the device, which come to `memory`. */
static moq_status refuse_row(const moq_weight *w, const moq_mx_rows *part, int64_t first,
                             int64_t row, uint8_t *memory, void *stream, moq_err *err) {
    int64_t at = row - first, groups = part->groups;
    MOQ_TRY(moq_cuda_download(memory, part->exponents + at * part->exponent_stride, (size_t)groups,
                              stream, err));
    MOQ_TRY(moq_cuda_download(memory + groups, part->codes + at * part->code_stride,
                              (size_t)(w->in_features / 2), stream, err));
    return check_range(w, row, moq_cpu_find_mx_range(memory, memory + groups, groups), err);
}

static moq_status refuse_row_of(const moq_weight *w, const moq_weight_sources *given,
                                const nvfp4_sources *of, int64_t row, void *stream, moq_err *err) {
    int64_t first = 0, groups = moq_weight_scale_columns(w);
    int32_t p = 0;
    for (; row >= first + w->partition[p]; first += w->partition[p++])
        continue;
    moq_mx_rows part = rows_of(w, given, p, first, of);
    uint8_t *memory = malloc((size_t)(groups + w->in_features / 2));
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    moq_status status = refuse_row(w, &part, first, row, memory, stream, err);
    free(memory);
    return status;
}

/* Finds the first row that was refused, whose factor is NaN, and says why. */
static moq_status refuse(const moq_weight *w, const moq_weight_sources *given,
                         const nvfp4_sources *of, void *stream, moq_err *err) {
    int64_t rows = all_rows(w), n = w->out_features, bad = 0;
    float *factors = malloc((size_t)rows * sizeof *factors);
    if (!factors)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    moq_status status =
        moq_cuda_download(factors, of->factors, (size_t)rows * sizeof *factors, stream, err);
    while (status == MOQ_OK && bad < rows - 1 && !isnan(factors[bad]))
        bad++;
    free(factors);
    MOQ_TRY(status);
    moq_weight_sources from = moq_sources_of(given, bad / n);
    MOQ_TRY_EXPERT(w, bad / n, refuse_row_of(w, &from, of, bad % n, stream, err), err);
    return moq_fail(err, MOQ_ERR_INTERNAL, "block scales changed while they were looked at");
}

/* Converts all scales and waits for what was found in them. */
static moq_status convert_on_cuda(const moq_weight *w, const moq_weight_sources *given,
                                  const nvfp4_sources *of, void *stream, moq_err *err) {
    moq_findings *note;
    moq_err after;
    MOQ_TRY(moq_cuda_take_note(&note, err));
    moq_status status = queue_conversion(w, given, of, note, stream, err);
    moq_status waited = moq_cuda_wait(stream, status == MOQ_OK ? err : &after);
    bool bad = note->bad_code != 0;
    moq_cuda_return_note(note);
    MOQ_TRY(status);
    MOQ_TRY(waited);
    return bad ? refuse(w, given, of, stream, err) : MOQ_OK;
}

static moq_status prepare_on_cuda(const moq_weight *w, const moq_weight_sources *given,
                                  moq_prepare_mode mode, moq_params *params, moq_err *err) {
    nvfp4_sources of;
    open_sources(w, given, mode.workspace, &of);
    MOQ_TRY(mode.checked ? queue_conversion(w, given, &of, NULL, mode.stream, err)
                         : convert_on_cuda(w, given, &of, mode.stream, err));
    mode.workspace = (char *)mode.workspace + memory_bytes(w);
    mode.row_factor = of.factors;
    mode.checked = true; /* scales that are made here are right */
    return moq_prepare_on_cuda(w, &of.sources, mode, params, err);
}

moq_status moq_prepare_mx(const moq_weight *w, const moq_weight_sources *sources,
                          moq_prepare_mode mode, moq_params *params, moq_err *err) {
    return w->device.kind == MOQ_CPU ? prepare_on_cpu(w, sources, mode, params, err)
                                     : prepare_on_cuda(w, sources, mode, params, err);
}
