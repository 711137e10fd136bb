/* Weight processing: checkpoint tensors to prepared ones. See ops/weight_prepare.h.
 *
 * Here: what is common to the devices. Shapes are checked, and scales read in float32 and checked,
 * but for those that may stay on a device; scales become one factor per row, so unequal scales of
 * fused layers stay exact. Codes, and what stays, are for the files next to this one. */
#include "ops/weight_steps.h"

#include "core/formats.h"
#include "core/scales.h"
#include "cpu/float_mode.h"
#include "cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- experts of a stack ---- */

moq_tensor moq_source_part(const moq_source *source, int32_t p) {
    moq_tensor t = source->part[p];
    t.data = (char *)t.data + source->expert * moq_source_step(source, p);
    return t;
}

int64_t moq_source_step(const moq_source *source, int32_t p) {
    return source->step ? source->step[p] : 0;
}

moq_weight_sources moq_sources_of(const moq_weight_sources *sources, int64_t expert) {
    moq_weight_sources of = *sources;
    of.weight.expert = of.weight_scale.expert = of.weight_scale_2.expert = expert;
    of.input_scale.expert = of.pre_quant_scale.expert = expert;
    return of;
}

/* One value of partitions may serve all experts, and so may the factors of x. */
static bool serves_all(const moq_weight *w, moq_param id, const moq_tensor *t) {
    bool of_partitions =
        id == MOQ_PARAM_WEIGHT_SCALE_2 || id == MOQ_PARAM_INPUT_SCALE ||
        (id == MOQ_PARAM_WEIGHT_SCALE && w->checkpoint == MOQ_WEIGHT_E4M3_ROW && !w->per_row_scale);
    return (of_partitions && moq_tensor_numel(t) == 1) ||
           (id == MOQ_PARAM_PRE_QUANT_SCALE && t->ndim == 1);
}

moq_status moq_stack_open(const moq_weight *w, moq_param id, const char *name, moq_tensor *view,
                          int64_t *step, moq_err *err) {
    char shape[128];
    *step = 0;
    if (serves_all(w, id, view))
        return MOQ_OK;
    if (view->ndim < 1 || view->shape[0] != w->experts)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: expected %d experts first, got shape %s", name,
                        (int)w->experts, moq_shape_text(view, shape, sizeof shape));
    *step = view->stride[0] * (int64_t)moq_dtype_size(view->dtype);
    view->ndim--;
    memmove(view->shape, view->shape + 1, (size_t)view->ndim * sizeof *view->shape);
    memmove(view->stride, view->stride + 1, (size_t)view->ndim * sizeof *view->stride);
    return MOQ_OK;
}

/* ---- the codes: rows of the weight and of e4m3 group scales ---- */

static moq_status check_rows(const moq_weight *w, const moq_source *source, const char *name,
                             moq_dtype dtype, int64_t columns, moq_err *err) {
    char shape[128];
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: missing, %s needs it", name, w->algo);
    if (source->count != 1 && source->count != w->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "%s: expected one tensor or %d, one a partition, got %d", name,
                        (int)w->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor t = moq_source_part(source, p);
        int64_t rows = source->count == 1 ? w->out_features : w->partition[p];
        if (t.dtype != dtype)
            return moq_fail(err, MOQ_ERR_TYPE, "%s: expected %s, got %s", name,
                            moq_dtype_name(dtype), moq_dtype_name(t.dtype));
        if (t.ndim != 2 || t.shape[0] != rows || t.shape[1] != columns)
            return moq_fail(err, MOQ_ERR_VALUE, "%s: expected shape [%lld, %lld], got %s", name,
                            (long long)rows, (long long)columns,
                            moq_shape_text(&t, shape, sizeof shape));
        if (t.shape[1] > 1 && t.stride[1] != 1)
            return moq_fail(err, MOQ_ERR_BUFFER, "%s: expected contiguous rows, got stride %lld",
                            name, (long long)t.stride[1]);
    }
    return MOQ_OK;
}

/* ---- the scales ---- */

static moq_status no_memory(moq_err *err) {
    return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
}

/* As moq_read_scales of one tensor of a source, wherever the tensor is. */
static moq_status read_scales(const moq_source *source, int32_t p, const char *name, int64_t count,
                              void *stream, float *out, moq_err *err) {
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

/* One value per partition from a list of scalars, a vector, or one scalar for all. */
static moq_status read_per_partition(const moq_weight *w, const moq_source *source,
                                     const char *name, void *stream, float *out, moq_err *err) {
    int32_t parts = w->partition_count;
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: missing, %s needs it", name, w->algo);
    if (source->count == 1) {
        bool shared = moq_tensor_numel(source->part) == 1;
        MOQ_TRY(read_scales(source, 0, name, shared ? 1 : parts, stream, out, err));
        for (int32_t p = 1; shared && p < parts; p++)
            out[p] = out[0];
        return MOQ_OK;
    }
    if (source->count != parts)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "%s: expected one tensor or %d, one a partition, got %d", name, (int)parts,
                        (int)source->count);
    for (int32_t p = 0; p < parts; p++)
        MOQ_TRY(read_scales(source, p, name, 1, stream, out + p, err));
    return MOQ_OK;
}

/* One by one, from a vector on the host with any stride. */
static moq_status read_apart(const moq_tensor *t, int64_t count, float *out, moq_err *err) {
    int64_t step = t->stride[0] * (int64_t)moq_dtype_size(t->dtype);
    moq_tensor one = *t;
    one.ndim = 0;
    for (int64_t i = 0; i < count; i++, one.data = (char *)one.data + step)
        MOQ_TRY(moq_read_scales(&one, "weight_scale", 1, out + i, err));
    return MOQ_OK;
}

/* As read_scales of the rows of a partition, which may be by turns with those of another one. */
static moq_status read_row_scales(const moq_source *source, int32_t p, int64_t count, void *stream,
                                  float *out, moq_err *err) {
    moq_tensor rows = moq_source_part(source, p);
    if (rows.ndim != 1 || rows.shape[0] != count || moq_tensor_is_contiguous(&rows))
        return read_scales(source, p, "weight_scale", count, stream, out, err);
    if (rows.device.kind == MOQ_CPU)
        return read_apart(&rows, count, out, err);
    size_t bytes = (size_t)((count - 1) * rows.stride[0] + 1) * moq_dtype_size(rows.dtype);
    void *memory = malloc(bytes); /* with what lies between */
    if (!memory)
        return no_memory(err);
    moq_status status = moq_cuda_download(memory, rows.data, bytes, stream, err);
    rows.data = memory;
    rows.device = (moq_device){.kind = MOQ_CPU};
    if (status == MOQ_OK)
        status = read_apart(&rows, count, out, err);
    free(memory);
    return status;
}

/* One value per row: a vector for the layer, or one vector per partition. */
static moq_status read_per_row(const moq_weight *w, const moq_source *source, void *stream,
                               float *out, moq_err *err) {
    if (source->count == 1)
        return read_scales(source, 0, "weight_scale", w->out_features, stream, out, err);
    if (source->count != w->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: expected one tensor or %d, got %d",
                        (int)w->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; out += w->partition[p++])
        MOQ_TRY(read_row_scales(source, p, w->partition[p], stream, out, err));
    return MOQ_OK;
}

/* Block scales: [rows, columns], [rows, 1, columns, 1], or a scalar where there is one block. */
static moq_status check_block_shapes(const moq_weight *w, const moq_source *source, moq_err *err) {
    char shape[128];
    int64_t columns = moq_weight_scale_columns(w);
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: missing, %s needs it", w->algo);
    if (source->count != 1 && source->count != w->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "weight_scale: expected one tensor or %d, one a partition, got %d",
                        (int)w->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor t = moq_source_part(source, p);
        int64_t rows =
            source->count == 1 ? moq_weight_block_rows(w) : moq_weight_partition_blocks(w, p);
        bool plain = t.ndim == 2 && t.shape[0] == rows && t.shape[1] == columns;
        bool spread = t.ndim == 4 && t.shape[0] == rows && t.shape[1] == 1 &&
                      t.shape[2] == columns && t.shape[3] == 1;
        bool scalar = rows * columns == 1 && moq_tensor_numel(&t) == 1;
        if (!plain && !spread && !scalar)
            return moq_fail(err, MOQ_ERR_VALUE,
                            "weight_scale: expected shape [%lld, %lld] or [%lld, 1, %lld, 1] for "
                            "128x128 blocks, got %s",
                            (long long)rows, (long long)columns, (long long)rows,
                            (long long)columns, moq_shape_text(&t, shape, sizeof shape));
    }
    return MOQ_OK;
}

static moq_status read_blocks(const moq_weight *w, const moq_source *source, void *stream,
                              float *out, moq_err *err) {
    int64_t columns = moq_weight_scale_columns(w);
    for (int32_t p = 0; p < source->count; p++) {
        int64_t rows =
            source->count == 1 ? moq_weight_block_rows(w) : moq_weight_partition_blocks(w, p);
        MOQ_TRY(read_scales(source, p, "weight_scale", rows * columns, stream, out, err));
        out += rows * columns;
    }
    return MOQ_OK;
}

static bool can_stay(const moq_tensor *t) {
    return t->device.kind != MOQ_CPU && moq_tensor_is_contiguous(t) &&
           (t->dtype == MOQ_DT_F32 || t->dtype == MOQ_DT_BF16 || t->dtype == MOQ_DT_F16);
}

/* The scales of rows, blocks or partitions. */
static const moq_source *weight_scales(const moq_weight *w, const moq_weight_sources *sources) {
    return w->checkpoint == MOQ_WEIGHT_E2M1 ? &sources->weight_scale_2 : &sources->weight_scale;
}

/* Scales that need not come to the host: they are on the device, and if they are wrong, then by
 * their values. Block scales were looked at before. */
static bool stay_on_device(const moq_weight *w, const moq_source *source) {
    bool blocks = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK, rows = w->per_row_scale;
    bool all = w->weight != MOQ_WEIGHT_E2M1_SWIZZLED &&
               (source->count == 1 || source->count == w->partition_count);
    for (int32_t p = 0; all && p < source->count; p++) {
        const moq_tensor t = moq_source_part(source, p);
        int64_t count = moq_tensor_numel(&t), parts = source->count == 1 ? w->partition_count : 1;
        int64_t wanted = !rows ? parts : source->count == 1 ? w->out_features : w->partition[p];
        all = can_stay(&t) && (blocks || count == wanted || (!rows && count == 1));
    }
    return all;
}

int64_t moq_prepare_block_count(const moq_weight *w) {
    return moq_weight_block_rows(w) * moq_weight_scale_columns(w);
}

static moq_status allocate_scales(const moq_weight *w, moq_prepare_scales *scales, moq_err *err) {
    bool blocks = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    bool many = !scales->on_device; /* else those of partitions may still be wanted */
    size_t experts = (size_t)moq_weight_matrices(w), k = (size_t)w->in_features;
    size_t parts = (size_t)w->partition_count * experts;
    size_t rows = many ? (size_t)w->out_features * experts : 0;
    size_t block = blocks && many ? (size_t)moq_prepare_block_count(w) * experts : 0;
    size_t weight = blocks ? 0 : scales->per_row ? rows : parts;
    size_t factor = blocks ? 0 : rows;
    size_t smooth = w->pre_quant_scale ? k * (experts + 1) : 0; /* and of another partition */
    float *memory = malloc((weight + block + parts + factor + smooth) * sizeof *memory);
    if (!memory)
        return no_memory(err);
    scales->memory = memory;
    scales->weight = blocks ? NULL : memory;
    scales->block = blocks ? memory + weight : NULL;
    scales->input = memory + weight + block;
    scales->factor = blocks ? NULL : memory + weight + block + parts;
    scales->smooth = memory + weight + block + parts + factor;
    return MOQ_OK;
}

static float *advance(float *scales, int64_t expert, int64_t count) {
    return scales ? scales + expert * count : NULL;
}

moq_prepare_scales moq_prepare_scales_of(const moq_weight *w, const moq_prepare_scales *scales,
                                         int64_t expert) {
    moq_prepare_scales of = *scales;
    int64_t parts = w->partition_count, rows = w->out_features;
    of.weight = advance(scales->weight, expert, scales->per_row ? rows : parts);
    of.block = advance(scales->block, expert, moq_prepare_block_count(w));
    of.input = advance(scales->input, expert, parts);
    of.smooth = advance(scales->smooth, expert, w->in_features);
    of.factor = advance(scales->factor, expert, rows);
    return of;
}

/* Scales of rows or blocks. */
static moq_status read_scale_matrix(const moq_weight *w, const moq_source *source, void *stream,
                                    float *out, moq_err *err) {
    bool blocks = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    int64_t count = moq_prepare_block_count(w);
    MOQ_TRY(blocks ? read_blocks(w, source, stream, out, err)
                   : read_per_row(w, source, stream, out, err));
    return moq_check_scales(out, blocks ? count : w->out_features, "weight_scale",
                            MOQ_SCALE_MAY_BE_ZERO, err);
}

/* Scales of partitions. */
static moq_status read_scale_vector(const moq_weight *w, const moq_weight_sources *sources,
                                    void *stream, float *out, moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    const char *name = e2m1 ? "weight_scale_2" : "weight_scale";
    const moq_source *source = weight_scales(w, sources);
    MOQ_TRY(read_per_partition(w, source, name, stream, out, err));
    bool folds = e2m1 && (w->weight == MOQ_WEIGHT_E4M3_ROW || moq_weight_folds(w));
    return moq_check_scales(out, w->partition_count, name,
                            folds ? MOQ_SCALE_FOLDED : MOQ_SCALE_MAY_BE_ZERO, err);
}

static moq_status read_weight_scales(const moq_weight *w, const moq_weight_sources *sources,
                                     moq_prepare_scales *scales, void *stream, moq_err *err) {
    if (scales->block)
        return read_scale_matrix(w, &sources->weight_scale, stream, scales->block, err);
    if (scales->per_row) {
        MOQ_TRY(read_scale_matrix(w, &sources->weight_scale, stream, scales->weight, err));
        memcpy(scales->factor, scales->weight, (size_t)w->out_features * sizeof(float));
        return MOQ_OK;
    }
    MOQ_TRY(read_scale_vector(w, sources, stream, scales->weight, err));
    moq_expand_to_rows(scales->weight, w->partition, w->partition_count, scales->factor);
    return MOQ_OK;
}

static moq_status read_all_weight_scales(const moq_weight *w, const moq_weight_sources *sources,
                                         const moq_prepare_scales *scales, void *stream,
                                         moq_err *err) {
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        moq_prepare_scales to = moq_prepare_scales_of(w, scales, e);
        moq_status status = read_weight_scales(w, &from, &to, stream, err);
        if (status != MOQ_OK)
            return moq_weight_name_expert(w, e, status, err);
    }
    return MOQ_OK;
}

moq_status moq_prepare_scales_to_host(const moq_weight *w, const moq_weight_sources *sources,
                                      void *stream, moq_prepare_scales *on_host, moq_err *err) {
    *on_host = (moq_prepare_scales){.per_row = w->per_row_scale};
    MOQ_TRY(allocate_scales(w, on_host, err));
    return read_all_weight_scales(w, sources, on_host, stream, err);
}

moq_status moq_prepare_download_scales(const moq_weight *w, const moq_weight_sources *sources,
                                       moq_prepare_scales *scales, void *stream, moq_err *err) {
    scales->on_device = false;
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        moq_status status =
            read_scale_vector(w, &from, stream, scales->weight + e * w->partition_count, err);
        if (status != MOQ_OK)
            return moq_weight_name_expert(w, e, status, err);
    }
    return MOQ_OK;
}

/* Whether there are some that the weight's products use. */
static bool uses_input_scale(const moq_weight *w, const moq_weight_sources *sources) {
    bool used = w->input == MOQ_INPUT_E4M3_TENSOR || w->input == MOQ_INPUT_NVFP4;
    return used && sources->input_scale.count > 0;
}

/* Of an expert; one that is not used has to be right all the same. */
static moq_status read_input_scales(const moq_weight *w, const moq_weight_sources *sources,
                                    float *out, void *stream, moq_err *err) {
    if (sources->input_scale.count == 0)
        return MOQ_OK;
    MOQ_TRY(read_per_partition(w, &sources->input_scale, "input_scale", stream, out, err));
    MOQ_TRY(moq_check_scales(out, w->partition_count, "input_scale", MOQ_SCALE_DIVISOR, err));
    for (int i = 1; w->one_input_scale && i < w->partition_count; i++)
        if (out[i] != out[0])
            return moq_fail(err, MOQ_ERR_VALUE,
                            "input_scale: expected the same for all partitions (one_input_scale), "
                            "got %g and %g",
                            (double)out[0], (double)out[i]);
    return MOQ_OK;
}

/* They too may stay, where none has to be compared with another. */
static bool input_stays(const moq_weight *w, const moq_source *source) {
    int32_t parts = w->partition_count;
    bool all =
        (source->count == 1 || source->count == parts) && (!w->one_input_scale || parts == 1);
    for (int32_t p = 0; all && p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        int64_t count = moq_tensor_numel(t);
        all = can_stay(t) && (count == 1 || (source->count == 1 && count == parts));
    }
    return all;
}

/* Reads the scales of an expert that stayed on the device into `out`, where there is room for all
 * of one matrix. */
static moq_status look_at_scales(const moq_weight *w, const moq_weight_sources *sources,
                                 const moq_prepare_scales *scales, void *stream, float *out,
                                 moq_err *err) {
    bool many = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK || w->per_row_scale;
    if (scales->on_device)
        MOQ_TRY(many ? read_scale_matrix(w, &sources->weight_scale, stream, out, err)
                     : read_scale_vector(w, sources, stream, out, err));
    return scales->input_on_device ? read_input_scales(w, sources, out, stream, err) : MOQ_OK;
}

moq_status moq_prepare_bad_scale(const moq_weight *w, const moq_weight_sources *sources,
                                 const moq_prepare_scales *scales, void *stream, moq_err *err) {
    int64_t room = moq_prepare_block_count(w); /* of block scales or of rows or partitions */
    moq_status status = MOQ_OK;
    room = room < w->out_features ? w->out_features : room;
    float *values = malloc((size_t)room * sizeof *values);
    if (!values)
        return no_memory(err);
    for (int64_t e = 0; e < moq_weight_matrices(w) && status == MOQ_OK; e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        status = look_at_scales(w, &from, scales, stream, values, err);
        if (status != MOQ_OK)
            moq_weight_name_expert(w, e, status, err);
    }
    free(values);
    return status;
}

static moq_status read_smoothing(const moq_weight *w, const moq_source *source, void *stream,
                                 int32_t p, float *out, moq_err *err) {
    const char *name = "pre_quant_scale";
    MOQ_TRY(read_scales(source, p, name, w->in_features, stream, out, err));
    for (int64_t k = 0; k < w->in_features; k++)
        if (!isfinite(out[k]))
            return moq_fail(err, MOQ_ERR_VALUE, "%s: expected finite values, got %g at index %lld",
                            name, (double)out[k], (long long)k);
    return MOQ_OK;
}

/* The factors of x of an expert: fused layers have one x, and so the same factors. `others` has
 * room for those of another partition. */
static moq_status read_pre_quant_scale(const moq_weight *w, const moq_source *source, float *values,
                                       float *others, void *stream, moq_err *err) {
    if (source->count != 1 && source->count != w->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "pre_quant_scale: expected one tensor or %d, one a partition, got %d",
                        (int)w->partition_count, (int)source->count);
    MOQ_TRY(read_smoothing(w, source, stream, 0, values, err));
    for (int32_t p = 1; p < source->count; p++) {
        MOQ_TRY(read_smoothing(w, source, stream, p, others, err));
        for (int64_t k = 0; k < w->in_features; k++)
            if (others[k] != values[k])
                return moq_fail(err, MOQ_ERR_VALUE,
                                "pre_quant_scale: expected the same for all partitions, got %g and "
                                "%g at index %lld",
                                (double)values[k], (double)others[k], (long long)k);
    }
    return MOQ_OK;
}

/* ---- all of them ---- */

static moq_status check_shapes(const moq_weight *w, const moq_weight_sources *sources,
                               moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    int64_t k = w->in_features;
    MOQ_TRY(check_rows(w, &sources->weight, "weight", e2m1 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3,
                       e2m1 ? k / 2 : k, err));
    if (e2m1)
        MOQ_TRY(check_rows(w, &sources->weight_scale, "weight_scale", MOQ_DT_E4M3,
                           moq_weight_scale_columns(w), err));
    if (w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK)
        MOQ_TRY(check_block_shapes(w, &sources->weight_scale, err));
    return MOQ_OK;
}

/* The scales of an expert that do not stay where they are. */
static moq_status read_expert(const moq_weight *w, const moq_weight_sources *sources,
                              const moq_prepare_scales *scales, float *others, void *stream,
                              moq_err *err) {
    moq_prepare_scales mine = *scales;
    if (!scales->on_device)
        MOQ_TRY(read_weight_scales(w, sources, &mine, stream, err));
    if (!scales->input_on_device)
        MOQ_TRY(read_input_scales(w, sources, mine.input, stream, err));
    if (scales->smooth)
        return read_pre_quant_scale(w, &sources->pre_quant_scale, mine.smooth, others, stream, err);
    return MOQ_OK;
}

/* ---- scales of a stack on the device that are wanted on the host ---- */

/* Whether those of all experts lie one after the other on the device: one copy brings them. */
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

/* The source as it is, or where it comes at once, on the host. */
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

static moq_status read_experts(const moq_weight *w, const moq_weight_sources *sources,
                               const moq_prepare_scales *scales, void *stream, moq_err *err) {
    float *others = advance(scales->smooth, moq_weight_matrices(w), w->in_features);
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        moq_weight_sources from = moq_sources_of(sources, e);
        moq_prepare_scales to = moq_prepare_scales_of(w, scales, e);
        moq_status status = read_expert(w, &from, &to, others, stream, err);
        if (status != MOQ_OK)
            return moq_weight_name_expert(w, e, status, err);
    }
    return MOQ_OK;
}

/* The scales that do not stay where they are, those of a stack brought from the device in one copy.
 */
static moq_status read_brought(const moq_weight *w, const moq_weight_sources *sources,
                               const moq_prepare_scales *scales, void *stream, moq_err *err) {
    moq_weight_sources on_host = *sources;
    const moq_source *given = weight_scales(w, sources);
    moq_source *weight =
        w->checkpoint == MOQ_WEIGHT_E2M1 ? &on_host.weight_scale_2 : &on_host.weight_scale;
    moq_status status = MOQ_OK;
    if (!scales->on_device)
        status = download_source(w, given, stream, weight, err);
    if (status == MOQ_OK && !scales->input_on_device)
        status = download_source(w, &sources->input_scale, stream, &on_host.input_scale, err);
    if (status == MOQ_OK && scales->smooth)
        status =
            download_source(w, &sources->pre_quant_scale, stream, &on_host.pre_quant_scale, err);
    if (status == MOQ_OK)
        status = read_experts(w, &on_host, scales, stream, err);
    leave_source(weight, given);
    leave_source(&on_host.input_scale, &sources->input_scale);
    leave_source(&on_host.pre_quant_scale, &sources->pre_quant_scale);
    return status;
}

static moq_status check_sources(const moq_weight *w, const moq_weight_sources *sources,
                                moq_prepare_scales *scales, void *stream, moq_err *err) {
    moq_status status = check_shapes(w, sources, err);
    if (status != MOQ_OK)
        return moq_weight_name_expert(w, MOQ_EVERY_EXPERT, status, err);
    scales->on_device = stay_on_device(w, weight_scales(w, sources));
    scales->input_on_device = input_stays(w, &sources->input_scale);
    MOQ_TRY(allocate_scales(w, scales, err));
    if (!w->pre_quant_scale || sources->pre_quant_scale.count == 0)
        scales->smooth = NULL;
    status = read_brought(w, sources, scales, stream, err);
    if (status != MOQ_OK) /* if several are wrong, the first is named */
        MOQ_TRY(moq_prepare_bad_scale(w, sources, scales, stream, err));
    if (scales->input_on_device || !uses_input_scale(w, sources))
        scales->input = NULL;
    return status;
}

/* ---- */

moq_code_rows moq_prepare_rows(const moq_source *source, int32_t p, int64_t first) {
    bool fused = source->count == 1;
    int32_t index = fused ? 0 : p;
    const moq_tensor t = moq_source_part(source, index);
    const uint8_t *data = t.data;
    return (moq_code_rows){data + (fused ? first : 0) * t.stride[0], t.stride[0],
                           moq_source_step(source, index)};
}

moq_status moq_prepare_bad_code(const moq_weight *w, int64_t row, int64_t column, moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    return moq_fail(err, MOQ_ERR_VALUE, "%s: %s at row %lld, column %lld",
                    e2m1 ? "weight_scale" : "weight",
                    e2m1 ? "a block scale that is NaN or negative" : "a NaN code", (long long)row,
                    (long long)column);
}

static moq_status prepare(const moq_weight *w, const moq_weight_sources *sources,
                          moq_prepare_mode mode, moq_params *params, moq_err *err) {
    moq_prepare_scales scales = {.per_row = w->per_row_scale};
    moq_status status = check_sources(w, sources, &scales, mode.stream, err);
    if (status == MOQ_OK)
        status = w->device.kind == MOQ_CPU
                     ? moq_prepare_on_cpu(w, sources, mode, &scales, params, err)
                     : moq_prepare_on_cuda(w, sources, &scales, mode, params, err);
    free(scales.memory);
    return status;
}

static moq_status prepare_on_stream(const moq_weight *w, const moq_weight_sources *sources,
                                    moq_prepare_mode mode, moq_params *params, moq_err *err) {
    if (moq_cuda_is_capturing(mode.stream))
        return moq_fail(err, MOQ_ERR_INTERNAL,
                        "prepare: its stream is being captured into a CUDA graph, but has to be "
                        "waited for; prepare weights before the capture");
    return prepare(w, sources, mode, params, err);
}

static moq_status prepare_anywhere(const moq_weight *w, const moq_weight_sources *sources,
                                   moq_prepare_mode mode, moq_params *params, moq_err *err) {
    moq_param_spec wanted[MOQ_MAX_PARAMS];
    int count = moq_weight_prepared_params(w, wanted);
    bool entered;
    MOQ_TRY(moq_check_params(wanted, count, params, "out", err));
    if (w->device.kind == MOQ_CPU)
        return prepare(w, sources, mode, params, err);
    MOQ_TRY(moq_cuda_enter(w->device.index, &entered, err));
    moq_status status = prepare_on_stream(w, sources, mode, params, err);
    moq_cuda_leave(entered);
    return status;
}

/* A subnormal scale is no zero, which would make zeros of its weights. */
moq_status moq_weight_prepare(const moq_weight *w, const moq_weight_sources *sources,
                              moq_prepare_mode mode, moq_params *params, moq_err *err) {
    unsigned flushes = moq_enter_float_mode();
    moq_status status = prepare_anywhere(w, sources, mode, params, err);
    moq_leave_float_mode(flushes);
    return status;
}
