/* Scales of a weight's checkpoint, read to the host: see weight_scales.h. */
#include "ops/weight_scales.h"

#include "core/scales.h"
#include "cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static moq_status no_memory(moq_err *err) {
    return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
}

/* ---- memory ---- */

int64_t moq_prepare_block_count(const moq_weight *w) {
    return moq_weight_block_rows(w) * moq_weight_scale_columns(w);
}

moq_status moq_prepare_open_scales(const moq_weight *w, const moq_weight_sources *sources,
                                   moq_prepare_scales *scales, moq_err *err) {
    bool blocks = moq_weight_has_scale_matrix(w);
    bool smooths = w->pre_quant_scale && sources->pre_quant_scale.count > 0;
    size_t experts = (size_t)moq_weight_matrices(w), k = (size_t)w->in_features;
    size_t parts = (size_t)w->partition_count * experts;
    size_t rows = blocks ? 0 : (size_t)w->out_features * experts;
    size_t block = blocks ? (size_t)moq_prepare_block_count(w) * experts : 0;
    size_t weight = blocks ? 0 : w->per_row_scale ? rows : parts;
    size_t smooth = smooths ? k * (experts + 1) : 0; /* and of another partition */
    float *memory = malloc((weight + block + parts + rows + smooth) * sizeof *memory);
    *scales = (moq_prepare_scales){.memory = memory};
    if (!memory)
        return no_memory(err);
    scales->weight = blocks ? NULL : memory;
    scales->block = blocks ? memory + weight : NULL;
    scales->input = memory + weight + block;
    scales->factor = blocks ? NULL : memory + weight + block + parts;
    scales->smooth = smooths ? memory + weight + block + parts + rows : NULL;
    return MOQ_OK;
}

static float *advance(float *scales, int64_t expert, int64_t count) {
    return scales ? scales + expert * count : NULL;
}

moq_prepare_scales moq_prepare_scales_of(const moq_weight *w, const moq_prepare_scales *scales,
                                         int64_t expert) {
    moq_prepare_scales of = *scales;
    int64_t parts = w->partition_count, rows = w->out_features;
    of.weight = advance(scales->weight, expert, w->per_row_scale ? rows : parts);
    of.block = advance(scales->block, expert, moq_prepare_block_count(w));
    of.input = advance(scales->input, expert, parts);
    of.smooth = advance(scales->smooth, expert, w->in_features);
    of.factor = advance(scales->factor, expert, rows);
    return of;
}

/* ---- tensors, on the host or on a device ---- */

moq_status moq_prepare_read_values(const moq_source *source, int32_t p, const char *name,
                                   int64_t count, void *stream, float *out, moq_err *err) {
    moq_tensor part = moq_source_part(source, p), host = part;
    const moq_tensor *t = &part;
    size_t bytes = (size_t)count * moq_dtype_size(t->dtype);
    moq_status status = MOQ_OK;
    if (t->device.kind == MOQ_CPU)
        return moq_read_scales(t, name, count, out, err);
    host.data = malloc(bytes + 1);
    if (!host.data)
        return no_memory(err);
    if (moq_tensor_numel(t) == count && moq_tensor_is_contiguous(t)) /* else: refused below */
        status = moq_cuda_download(host.data, t->data, bytes, stream, err);
    if (status == MOQ_OK)
        status = moq_read_scales(&host, name, count, out, err);
    free(host.data);
    return status;
}

/* Reads one value per partition, from a list of scalars, a vector, or one scalar for all. */
static moq_status read_per_partition(const moq_weight *w, const moq_source *source,
                                     const char *name, void *stream, float *out, moq_err *err) {
    int32_t parts = w->partition_count;
    MOQ_TRY(moq_check_parts(w, source, name, err));
    if (source->count == 1) {
        bool shared = moq_tensor_numel(source->part) == 1;
        MOQ_TRY(moq_prepare_read_values(source, 0, name, shared ? 1 : parts, stream, out, err));
        for (int32_t p = 1; shared && p < parts; p++)
            out[p] = out[0];
        return MOQ_OK;
    }
    for (int32_t p = 0; p < parts; p++)
        MOQ_TRY(moq_prepare_read_values(source, p, name, 1, stream, out + p, err));
    return MOQ_OK;
}

/* Reads values one by one, from a vector on the host with any stride. */
static moq_status read_apart(const moq_tensor *t, const char *name, int64_t count, float *out,
                             moq_err *err) {
    int64_t step = t->stride[0] * (int64_t)moq_dtype_size(t->dtype);
    moq_tensor one = *t;
    one.ndim = 0;
    for (int64_t i = 0; i < count; i++, one.data = (char *)one.data + step)
        MOQ_TRY(moq_read_scales(&one, name, 1, out + i, err));
    return MOQ_OK;
}

/* Reads the scales of a partition's rows, which may take turns with the rows of another one. */
static moq_status read_row_scales(const moq_source *source, int32_t p, const char *name,
                                  int64_t count, void *stream, float *out, moq_err *err) {
    moq_tensor rows = moq_source_part(source, p);
    if (rows.ndim != 1 || rows.shape[0] != count || moq_tensor_is_contiguous(&rows))
        return moq_prepare_read_values(source, p, name, count, stream, out, err);
    if (rows.device.kind == MOQ_CPU)
        return read_apart(&rows, name, count, out, err);
    size_t bytes = (size_t)((count - 1) * rows.stride[0] + 1) * moq_dtype_size(rows.dtype);
    void *memory = malloc(bytes); /* with what lies between */
    if (!memory)
        return no_memory(err);
    moq_status status = moq_cuda_download(memory, rows.data, bytes, stream, err);
    rows.data = memory;
    rows.device = (moq_device){.kind = MOQ_CPU};
    if (status == MOQ_OK)
        status = read_apart(&rows, name, count, out, err);
    free(memory);
    return status;
}

/* Reads one value per row, from a vector for the layer or one vector per partition. */
static moq_status read_per_row(const moq_weight *w, const moq_source *source, void *stream,
                               float *out, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE);
    if (source->count == 1)
        return moq_prepare_read_values(source, 0, name, w->out_features, stream, out, err);
    if (source->count != w->partition_count)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected one tensor or %d, got %d",
                           (int)w->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; out += w->partition[p++])
        MOQ_TRY(read_row_scales(source, p, name, w->partition[p], stream, out, err));
    return MOQ_OK;
}

static moq_status read_blocks(const moq_weight *w, const moq_source *source, void *stream,
                              float *out, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE);
    int64_t columns = moq_weight_scale_columns(w);
    for (int32_t p = 0; p < source->count; p++) {
        int64_t rows =
            source->count == 1 ? moq_weight_block_rows(w) : moq_weight_partition_blocks(w, p);
        MOQ_TRY(moq_prepare_read_values(source, p, name, rows * columns, stream, out, err));
        out += rows * columns;
    }
    return MOQ_OK;
}

/* ---- the scales of one expert ---- */

/* Reads scales of rows or blocks. */
static moq_status read_scale_matrix(const moq_weight *w, const moq_source *source, void *stream,
                                    float *out, moq_err *err) {
    bool blocks = moq_weight_has_scale_matrix(w);
    int64_t count = moq_prepare_block_count(w);
    MOQ_TRY(blocks ? read_blocks(w, source, stream, out, err)
                   : read_per_row(w, source, stream, out, err));
    return moq_check_scales(out, blocks ? count : w->out_features,
                            moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE), MOQ_SCALE_MAY_BE_ZERO,
                            err);
}

/* Reads scales of partitions. */
static moq_status read_scale_vector(const moq_weight *w, const moq_weight_sources *sources,
                                    void *stream, float *out, moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    const char *name =
        moq_weight_param_name(w, e2m1 ? MOQ_PARAM_WEIGHT_SCALE_2 : MOQ_PARAM_WEIGHT_SCALE);
    const moq_source *source = moq_scale_source(w, sources);
    MOQ_TRY(read_per_partition(w, source, name, stream, out, err));
    bool folds = e2m1 && (w->weight == MOQ_WEIGHT_E4M3_ROW || moq_weight_folds(w));
    return moq_check_scales(out, w->partition_count, name,
                            folds ? MOQ_SCALE_FOLDED : MOQ_SCALE_MAY_BE_ZERO, err);
}

static moq_status read_weight_scales(const moq_weight *w, const moq_weight_sources *sources,
                                     const moq_prepare_scales *scales, void *stream, moq_err *err) {
    if (w->checkpoint == MOQ_WEIGHT_E4M3_GROUP) { /* bytes beside the codes */
        for (int64_t n = 0; n < w->out_features; n++)
            scales->factor[n] = 1;
        return MOQ_OK;
    }
    if (scales->block)
        return read_scale_matrix(w, &sources->weight_scale, stream, scales->block, err);
    if (w->per_row_scale) {
        MOQ_TRY(read_scale_matrix(w, &sources->weight_scale, stream, scales->weight, err));
        memcpy(scales->factor, scales->weight, (size_t)w->out_features * sizeof(float));
        return MOQ_OK;
    }
    MOQ_TRY(read_scale_vector(w, sources, stream, scales->weight, err));
    moq_expand_to_rows(scales->weight, w->partition, w->partition_count, scales->factor);
    return MOQ_OK;
}

bool moq_uses_input_scale(const moq_weight *w, const moq_weight_sources *sources) {
    return moq_input_has_scale(w->input) && sources->input_scale.count > 0;
}

/* Reads the scales of x. One that is not used has to be right all the same. */
static moq_status read_input_scales(const moq_weight *w, const moq_weight_sources *sources,
                                    float *out, void *stream, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_INPUT_SCALE);
    if (sources->input_scale.count == 0)
        return MOQ_OK;
    MOQ_TRY(read_per_partition(w, &sources->input_scale, name, stream, out, err));
    MOQ_TRY(moq_check_scales(out, w->partition_count, name, MOQ_SCALE_DIVISOR, err));
    for (int i = 1; w->one_input_scale && i < w->partition_count; i++)
        if (out[i] != out[0])
            return moq_fail_of(err, MOQ_ERR_VALUE, name,
                               "expected the same for all partitions (one_input_scale), "
                               "got %g and %g",
                               (double)out[0], (double)out[i]);
    return MOQ_OK;
}

static moq_status read_smoothing(const moq_weight *w, const moq_source *source, void *stream,
                                 int32_t p, float *out, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_PRE_QUANT_SCALE);
    MOQ_TRY(moq_prepare_read_values(source, p, name, w->in_features, stream, out, err));
    for (int64_t k = 0; k < w->in_features; k++)
        if (!isfinite(out[k]))
            return moq_fail_of(err, MOQ_ERR_VALUE, name,
                               "expected finite values, got %g at index %lld", (double)out[k],
                               (long long)k);
    return MOQ_OK;
}

/* Reads the factors of x. Fused layers have one x, and so the same factors; `others` has room for
 * the factors of another partition. */
static moq_status read_pre_quant_scale(const moq_weight *w, const moq_source *source, float *values,
                                       float *others, void *stream, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_PRE_QUANT_SCALE);
    MOQ_TRY(moq_check_parts(w, source, name, err));
    MOQ_TRY(read_smoothing(w, source, stream, 0, values, err));
    for (int32_t p = 1; p < source->count; p++) {
        MOQ_TRY(read_smoothing(w, source, stream, p, others, err));
        for (int64_t k = 0; k < w->in_features; k++)
            if (others[k] != values[k])
                return moq_fail_of(err, MOQ_ERR_VALUE, name,
                                   "expected the same for all partitions, got %g and "
                                   "%g at index %lld",
                                   (double)values[k], (double)others[k], (long long)k);
    }
    return MOQ_OK;
}

static moq_status read_expert(const moq_weight *w, const moq_weight_sources *sources, int which,
                              const moq_prepare_scales *scales, float *others, void *stream,
                              moq_err *err) {
    if (which & MOQ_SCALES_OF_WEIGHT)
        MOQ_TRY(read_weight_scales(w, sources, scales, stream, err));
    if (which & MOQ_SCALES_OF_INPUT)
        MOQ_TRY(read_input_scales(w, sources, scales->input, stream, err));
    if (which & MOQ_SCALES_OF_SMOOTHING && scales->smooth)
        return read_pre_quant_scale(w, &sources->pre_quant_scale, scales->smooth, others, stream,
                                    err);
    return MOQ_OK;
}

/* ---- the scales of all experts ---- */

/* True if the tensors of all experts lie one after the other on the device: one copy brings them.
 */
static bool comes_at_once(const moq_weight *w, const moq_source *source) {
    bool all = w->experts > 1 && source->count > 0;
    for (int32_t p = 0; all && p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        int64_t bytes = moq_tensor_numel(t) * (int64_t)moq_dtype_size(t->dtype);
        all = t->device.kind == MOQ_CUDA && bytes > 0 && moq_tensor_is_contiguous(t) &&
              moq_source_step(source, p) == bytes;
    }
    return all;
}

/* Frees what download_source made. */
static void leave_source(moq_source *source, const moq_source *given) {
    for (int32_t p = 0; source->part != given->part && p < source->count; p++)
        free(source->part[p].data);
    if (source->part != given->part)
        free((moq_tensor *)(uintptr_t)source->part);
}

/* Makes *source the given one, on the host where it comes at once. */
static moq_status download_source(const moq_weight *w, const moq_source *given, void *stream,
                                  moq_source *source, moq_err *err) {
    *source = *given;
    if (!comes_at_once(w, given))
        return MOQ_OK;
    moq_tensor *part = calloc((size_t)given->count, sizeof *part);
    if (!part)
        return no_memory(err);
    source->part = part;
    for (int32_t p = 0; p < given->count; p++) {
        size_t bytes = (size_t)(moq_source_step(given, p) * w->experts);
        part[p] = given->part[p];
        part[p].device = (moq_device){MOQ_CPU, 0};
        part[p].data = malloc(bytes);
        if (!part[p].data)
            return no_memory(err);
        MOQ_TRY(moq_cuda_download(part[p].data, given->part[p].data, bytes, stream, err));
    }
    return MOQ_OK;
}

static moq_status read_experts(const moq_weight *w, const moq_weight_sources *sources, int which,
                               void *stream, const moq_prepare_scales *scales, moq_err *err) {
    float *others = advance(scales->smooth, moq_weight_matrices(w), w->in_features);
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        moq_prepare_scales to = moq_prepare_scales_of(w, scales, e);
        MOQ_TRY_EXPERT(w, e, read_expert(w, &from, which, &to, others, stream, err), err);
    }
    return MOQ_OK;
}

moq_status moq_prepare_read_scales(const moq_weight *w, const moq_weight_sources *sources,
                                   int which, void *stream, const moq_prepare_scales *scales,
                                   moq_err *err) {
    moq_weight_sources home = *sources;
    const moq_source *given = moq_scale_source(w, sources);
    moq_source *weight =
        w->checkpoint == MOQ_WEIGHT_E2M1 ? &home.weight_scale_2 : &home.weight_scale;
    moq_status status = MOQ_OK;
    if (which & MOQ_SCALES_OF_WEIGHT)
        status = download_source(w, given, stream, weight, err);
    if (status == MOQ_OK && which & MOQ_SCALES_OF_INPUT)
        status = download_source(w, &sources->input_scale, stream, &home.input_scale, err);
    if (status == MOQ_OK && which & MOQ_SCALES_OF_SMOOTHING && scales->smooth)
        status = download_source(w, &sources->pre_quant_scale, stream, &home.pre_quant_scale, err);
    if (status == MOQ_OK)
        status = read_experts(w, &home, which, stream, scales, err);
    leave_source(weight, given);
    leave_source(&home.input_scale, &sources->input_scale);
    leave_source(&home.pre_quant_scale, &sources->pre_quant_scale);
    return status;
}
