/* Weight processing of a linear layer: checkpoint tensors to prepared ones. See ops/linear_call.h.
 *
 * Here: what is common to the devices. Shapes are checked, and scales read in float32 and checked,
 * but for those that may stay on a device; scales become one factor per row, so unequal scales of
 * fused layers stay exact. Codes, and what stays, are for the files next to this one. */
#include "ops/linear_prepare.h"

#include "core/formats.h"
#include "core/scales.h"
#include "cpu/float_mode.h"
#include "cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t partition_blocks(const moq_linear_spec *spec, int32_t p) {
    return (spec->partition[p] + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
}

/* ---- the codes: rows of the weight and of e4m3 group scales ---- */

static moq_status check_rows(const moq_linear_spec *spec, const moq_source *source,
                             const char *name, moq_dtype dtype, int64_t columns, moq_err *err) {
    char shape[128];
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: missing, %s needs it", name, spec->algo);
    if (source->count != 1 && source->count != spec->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "%s: expected one tensor or %d, one a partition, got %d", name,
                        (int)spec->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        int64_t rows = source->count == 1 ? spec->out_features : spec->partition[p];
        if (t->dtype != dtype)
            return moq_fail(err, MOQ_ERR_TYPE, "%s: expected %s, got %s", name,
                            moq_dtype_name(dtype), moq_dtype_name(t->dtype));
        if (t->ndim != 2 || t->shape[0] != rows || t->shape[1] != columns)
            return moq_fail(err, MOQ_ERR_VALUE, "%s: expected shape [%lld, %lld], got %s", name,
                            (long long)rows, (long long)columns,
                            moq_shape_text(t, shape, sizeof shape));
        if (t->shape[1] > 1 && t->stride[1] != 1)
            return moq_fail(err, MOQ_ERR_BUFFER, "%s: expected contiguous rows, got stride %lld",
                            name, (long long)t->stride[1]);
    }
    return MOQ_OK;
}

/* ---- the scales ---- */

/* As moq_read_scales, wherever the tensor is. */
static moq_status read_scales(const moq_tensor *t, const char *name, int64_t count, void *stream,
                              float *out, moq_err *err) {
    moq_tensor host = *t;
    size_t bytes = (size_t)count * moq_dtype_size(t->dtype);
    moq_status status = MOQ_OK;
    if (t->device.kind == MOQ_CPU)
        return moq_read_scales(t, name, count, out, err);
    host.data = malloc(bytes + 1);
    if (!host.data)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    if (moq_tensor_numel(t) == count && moq_tensor_is_contiguous(t)) /* else: refused below */
        status = moq_cuda_download(host.data, t->data, bytes, stream, err);
    if (status == MOQ_OK)
        status = moq_read_scales(&host, name, count, out, err);
    free(host.data);
    return status;
}

/* One value per partition from a list of scalars, a vector, or one scalar for all. */
static moq_status read_per_partition(const moq_linear_spec *spec, const moq_source *source,
                                     const char *name, void *stream, float *out, moq_err *err) {
    int32_t parts = spec->partition_count;
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: missing, %s needs it", name, spec->algo);
    if (source->count == 1) {
        bool shared = moq_tensor_numel(&source->part[0]) == 1;
        MOQ_TRY(read_scales(&source->part[0], name, shared ? 1 : parts, stream, out, err));
        for (int32_t p = 1; shared && p < parts; p++)
            out[p] = out[0];
        return MOQ_OK;
    }
    if (source->count != parts)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "%s: expected one tensor or %d, one a partition, got %d", name, (int)parts,
                        (int)source->count);
    for (int32_t p = 0; p < parts; p++)
        MOQ_TRY(read_scales(&source->part[p], name, 1, stream, out + p, err));
    return MOQ_OK;
}

/* One value per row: a vector for the layer, or one vector per partition. */
static moq_status read_per_row(const moq_linear_spec *spec, const moq_source *source, void *stream,
                               float *out, moq_err *err) {
    if (source->count == 1)
        return read_scales(&source->part[0], "weight_scale", spec->out_features, stream, out, err);
    if (source->count != spec->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: expected one tensor or %d, got %d",
                        (int)spec->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; out += spec->partition[p++])
        MOQ_TRY(
            read_scales(&source->part[p], "weight_scale", spec->partition[p], stream, out, err));
    return MOQ_OK;
}

/* Block scales: [rows, columns], [rows, 1, columns, 1], or a scalar where there is one block. */
static moq_status check_block_shapes(const moq_linear_spec *spec, const moq_source *source,
                                     moq_err *err) {
    char shape[128];
    int64_t columns = moq_linear_scale_columns(spec);
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: missing, %s needs it", spec->algo);
    if (source->count != 1 && source->count != spec->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "weight_scale: expected one tensor or %d, one a partition, got %d",
                        (int)spec->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        int64_t rows = source->count == 1 ? moq_linear_block_rows(spec) : partition_blocks(spec, p);
        bool plain = t->ndim == 2 && t->shape[0] == rows && t->shape[1] == columns;
        bool spread = t->ndim == 4 && t->shape[0] == rows && t->shape[1] == 1 &&
                      t->shape[2] == columns && t->shape[3] == 1;
        bool scalar = rows * columns == 1 && moq_tensor_numel(t) == 1;
        if (!plain && !spread && !scalar)
            return moq_fail(err, MOQ_ERR_VALUE,
                            "weight_scale: expected shape [%lld, %lld] or [%lld, 1, %lld, 1] for "
                            "128x128 blocks, got %s",
                            (long long)rows, (long long)columns, (long long)rows,
                            (long long)columns, moq_shape_text(t, shape, sizeof shape));
    }
    return MOQ_OK;
}

static moq_status read_blocks(const moq_linear_spec *spec, const moq_source *source, void *stream,
                              float *out, moq_err *err) {
    int64_t columns = moq_linear_scale_columns(spec);
    for (int32_t p = 0; p < source->count; p++) {
        int64_t rows = source->count == 1 ? moq_linear_block_rows(spec) : partition_blocks(spec, p);
        MOQ_TRY(read_scales(&source->part[p], "weight_scale", rows * columns, stream, out, err));
        out += rows * columns;
    }
    return MOQ_OK;
}

static bool can_stay(const moq_tensor *t) {
    return t->device.kind != MOQ_CPU && moq_tensor_is_contiguous(t) &&
           (t->dtype == MOQ_DT_F32 || t->dtype == MOQ_DT_BF16 || t->dtype == MOQ_DT_F16);
}

/* The scales of rows, blocks or partitions. */
static const moq_source *weight_scales(const moq_linear_spec *spec,
                                       const moq_linear_sources *sources) {
    return spec->checkpoint == MOQ_WEIGHT_E2M1 ? &sources->weight_scale_2 : &sources->weight_scale;
}

/* Scales that need not come to the host: they are on the device, and if they are wrong, then by
 * their values. Block scales were looked at before. */
static bool stay_on_device(const moq_linear_spec *spec, const moq_source *source) {
    bool blocks = spec->checkpoint == MOQ_WEIGHT_E4M3_BLOCK, rows = spec->per_row_scale;
    bool all = spec->weight != MOQ_WEIGHT_E2M1_SWIZZLED &&
               (source->count == 1 || source->count == spec->partition_count);
    for (int32_t p = 0; all && p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        int64_t count = moq_tensor_numel(t), parts = source->count == 1 ? spec->partition_count : 1;
        int64_t wanted = !rows                ? parts
                         : source->count == 1 ? spec->out_features
                                              : spec->partition[p];
        all = can_stay(t) && (blocks || count == wanted || (!rows && count == 1));
    }
    return all;
}

static moq_status allocate_scales(const moq_linear_spec *spec, moq_prepare_scales *scales,
                                  moq_err *err) {
    bool blocks = spec->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    bool many = !scales->on_device; /* else those of partitions may still be wanted */
    size_t parts = (size_t)spec->partition_count, rows = many ? (size_t)spec->out_features : 0;
    size_t block =
        blocks && many ? (size_t)(moq_linear_block_rows(spec) * moq_linear_scale_columns(spec)) : 0;
    size_t weight = blocks ? 0 : scales->per_row ? rows : parts;
    size_t factor = blocks ? 0 : rows, smooth = (size_t)spec->in_features * 2;
    float *memory = malloc(
        (weight + block + parts + factor + (spec->pre_quant_scale ? smooth : 0)) * sizeof *memory);
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    scales->memory = memory;
    scales->weight = blocks ? NULL : memory;
    scales->block = blocks ? memory + weight : NULL;
    scales->input = memory + weight + block;
    scales->factor = blocks ? NULL : memory + weight + block + parts;
    scales->smooth = memory + weight + block + parts + factor;
    return MOQ_OK;
}

/* Scales of rows or blocks. */
static moq_status read_many(const moq_linear_spec *spec, const moq_source *source, void *stream,
                            float *out, moq_err *err) {
    bool blocks = spec->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    int64_t count = moq_linear_block_rows(spec) * moq_linear_scale_columns(spec);
    MOQ_TRY(blocks ? read_blocks(spec, source, stream, out, err)
                   : read_per_row(spec, source, stream, out, err));
    return moq_check_scales(out, blocks ? count : spec->out_features, "weight_scale",
                            MOQ_SCALE_MAY_BE_ZERO, err);
}

/* Scales of partitions. */
static moq_status read_few(const moq_linear_spec *spec, const moq_linear_sources *sources,
                           void *stream, float *out, moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    const char *name = e2m1 ? "weight_scale_2" : "weight_scale";
    const moq_source *source = weight_scales(spec, sources);
    MOQ_TRY(read_per_partition(spec, source, name, stream, out, err));
    bool folds = e2m1 && (spec->weight == MOQ_WEIGHT_E4M3_ROW || moq_linear_folds(spec));
    return moq_check_scales(out, spec->partition_count, name,
                            folds ? MOQ_SCALE_FOLDED : MOQ_SCALE_MAY_BE_ZERO, err);
}

moq_status moq_prepare_bad_scale(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                 void *stream, moq_err *err) {
    bool blocks = spec->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    int64_t count = blocks ? moq_linear_block_rows(spec) * moq_linear_scale_columns(spec)
                    : spec->per_row_scale ? spec->out_features
                                          : spec->partition_count;
    float *values = malloc((size_t)count * sizeof *values);
    if (!values)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    moq_status status = blocks || spec->per_row_scale
                            ? read_many(spec, &sources->weight_scale, stream, values, err)
                            : read_few(spec, sources, stream, values, err);
    free(values);
    return status;
}

moq_status moq_prepare_bring_scales(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                    moq_prepare_scales *scales, void *stream, moq_err *err) {
    scales->on_device = false;
    return read_few(spec, sources, stream, scales->weight, err);
}

static moq_status read_weight_scales(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                     moq_prepare_scales *scales, void *stream, moq_err *err) {
    if (scales->block)
        return read_many(spec, &sources->weight_scale, stream, scales->block, err);
    if (scales->per_row) {
        MOQ_TRY(read_many(spec, &sources->weight_scale, stream, scales->weight, err));
        memcpy(scales->factor, scales->weight, (size_t)spec->out_features * sizeof(float));
        return MOQ_OK;
    }
    MOQ_TRY(read_few(spec, sources, stream, scales->weight, err));
    moq_expand_to_rows(scales->weight, spec->partition, spec->partition_count, scales->factor);
    return MOQ_OK;
}

moq_status moq_prepare_scales_at_home(const moq_linear_spec *spec,
                                      const moq_linear_sources *sources, void *stream,
                                      moq_prepare_scales *home, moq_err *err) {
    *home = (moq_prepare_scales){.per_row = spec->per_row_scale};
    MOQ_TRY(allocate_scales(spec, home, err));
    return read_weight_scales(spec, sources, home, stream, err);
}

static moq_status read_input_scales(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                    moq_prepare_scales *scales, void *stream, moq_err *err) {
    bool used = spec->input == MOQ_INPUT_E4M3_TENSOR || spec->input == MOQ_INPUT_NVFP4;
    if (sources->input_scale.count > 0) { /* one that is not used has to be right all the same */
        MOQ_TRY(read_per_partition(spec, &sources->input_scale, "input_scale", stream,
                                   scales->input, err));
        MOQ_TRY(moq_check_scales(scales->input, spec->partition_count, "input_scale",
                                 MOQ_SCALE_DIVISOR, err));
    }
    for (int i = 1;
         spec->one_input_scale && sources->input_scale.count && i < spec->partition_count; i++)
        if (scales->input[i] != scales->input[0])
            return moq_fail(err, MOQ_ERR_VALUE,
                            "input_scale: expected the same for all partitions (one_input_scale), "
                            "got %g and %g",
                            (double)scales->input[0], (double)scales->input[i]);
    if (!used || sources->input_scale.count == 0)
        scales->input = NULL;
    return MOQ_OK;
}

/* They too may stay, where none has to be compared with another. */
static bool input_stays(const moq_linear_spec *spec, const moq_source *source) {
    int32_t parts = spec->partition_count;
    bool all =
        (source->count == 1 || source->count == parts) && (!spec->one_input_scale || parts == 1);
    for (int32_t p = 0; all && p < source->count; p++) {
        int64_t count = moq_tensor_numel(&source->part[p]);
        all = can_stay(&source->part[p]) && (count == 1 || (source->count == 1 && count == parts));
    }
    return all;
}

moq_status moq_prepare_bad_input_scale(const moq_linear_spec *spec,
                                       const moq_linear_sources *sources, void *stream,
                                       moq_err *err) {
    float values[MOQ_MAX_PARTITIONS];
    moq_prepare_scales scales = {.input = values};
    return read_input_scales(spec, sources, &scales, stream, err);
}

static moq_status read_smoothing(const moq_linear_spec *spec, const moq_source *source,
                                 void *stream, int32_t p, float *out, moq_err *err) {
    const char *name = "pre_quant_scale";
    MOQ_TRY(read_scales(&source->part[p], name, spec->in_features, stream, out, err));
    for (int64_t k = 0; k < spec->in_features; k++)
        if (!isfinite(out[k]))
            return moq_fail(err, MOQ_ERR_VALUE, "%s: expected finite values, got %g at index %lld",
                            name, (double)out[k], (long long)k);
    return MOQ_OK;
}

/* The factors of x: fused layers have one x, and so the same factors. */
static moq_status read_pre_quant_scale(const moq_linear_spec *spec, const moq_source *source,
                                       moq_prepare_scales *scales, void *stream, moq_err *err) {
    float *values = scales->smooth, *others = values + spec->in_features;
    if (!spec->pre_quant_scale || source->count == 0) {
        scales->smooth = NULL;
        return MOQ_OK;
    }
    if (source->count != 1 && source->count != spec->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "pre_quant_scale: expected one tensor or %d, one a partition, got %d",
                        (int)spec->partition_count, (int)source->count);
    MOQ_TRY(read_smoothing(spec, source, stream, 0, values, err));
    for (int32_t p = 1; p < source->count; p++) {
        MOQ_TRY(read_smoothing(spec, source, stream, p, others, err));
        for (int64_t k = 0; k < spec->in_features; k++)
            if (others[k] != values[k])
                return moq_fail(err, MOQ_ERR_VALUE,
                                "pre_quant_scale: expected the same for all partitions, got %g and "
                                "%g at index %lld",
                                (double)values[k], (double)others[k], (long long)k);
    }
    return MOQ_OK;
}

static moq_status check_sources(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                moq_prepare_scales *scales, void *stream, moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    int64_t k = spec->in_features;
    MOQ_TRY(check_rows(spec, &sources->weight, "weight", e2m1 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3,
                       e2m1 ? k / 2 : k, err));
    if (e2m1)
        MOQ_TRY(check_rows(spec, &sources->weight_scale, "weight_scale", MOQ_DT_E4M3,
                           moq_linear_scale_columns(spec), err));
    if (spec->checkpoint == MOQ_WEIGHT_E4M3_BLOCK)
        MOQ_TRY(check_block_shapes(spec, &sources->weight_scale, err));
    scales->on_device = stay_on_device(spec, weight_scales(spec, sources));
    MOQ_TRY(allocate_scales(spec, scales, err));
    if (!scales->on_device)
        MOQ_TRY(read_weight_scales(spec, sources, scales, stream, err));
    scales->input_on_device = input_stays(spec, &sources->input_scale);
    moq_status status =
        scales->input_on_device ? MOQ_OK : read_input_scales(spec, sources, scales, stream, err);
    if (scales->input_on_device)
        scales->input = NULL;
    if (status == MOQ_OK)
        status = read_pre_quant_scale(spec, &sources->pre_quant_scale, scales, stream, err);
    if (status != MOQ_OK && scales->on_device) /* if several are wrong, the first is named */
        MOQ_TRY(moq_prepare_bad_scale(spec, sources, stream, err));
    if (status != MOQ_OK && scales->input_on_device)
        MOQ_TRY(moq_prepare_bad_input_scale(spec, sources, stream, err));
    return status;
}

/* ---- */

moq_code_rows moq_prepare_rows(const moq_source *source, int32_t p, int64_t first) {
    bool fused = source->count == 1;
    const moq_tensor *t = &source->part[fused ? 0 : p];
    const uint8_t *data = t->data;
    return (moq_code_rows){data + (fused ? first : 0) * t->stride[0], t->stride[0]};
}

moq_status moq_prepare_bad_code(const moq_linear_spec *spec, int64_t row, int64_t column,
                                moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    return moq_fail(err, MOQ_ERR_VALUE, "%s: %s at row %lld, column %lld",
                    e2m1 ? "weight_scale" : "weight",
                    e2m1 ? "a block scale that is NaN or negative" : "a NaN code", (long long)row,
                    (long long)column);
}

static moq_status prepare(const moq_linear_spec *spec, const moq_linear_sources *sources,
                          moq_prepare_way way, moq_params *params, moq_err *err) {
    moq_prepare_scales scales = {.per_row = spec->per_row_scale};
    moq_status status = check_sources(spec, sources, &scales, way.stream, err);
    if (status == MOQ_OK)
        status = spec->device.kind == MOQ_CPU
                     ? moq_prepare_on_cpu(spec, sources, &scales, params, err)
                     : moq_prepare_on_cuda(spec, sources, &scales, way, params, err);
    free(scales.memory);
    return status;
}

static moq_status prepare_on_stream(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                    moq_prepare_way way, moq_params *params, moq_err *err) {
    if (moq_cuda_is_capturing(way.stream))
        return moq_fail(err, MOQ_ERR_INTERNAL,
                        "prepare: its stream is being captured into a CUDA graph, but has to be "
                        "waited for; prepare weights before the capture");
    return prepare(spec, sources, way, params, err);
}

static moq_status prepare_anywhere(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                   moq_prepare_way way, moq_params *params, moq_err *err) {
    moq_param_spec wanted[MOQ_MAX_PARAMS];
    int count = moq_linear_prepared_params(spec, wanted);
    bool entered;
    MOQ_TRY(moq_check_params(wanted, count, params, "out", err));
    if (spec->device.kind == MOQ_CPU)
        return prepare(spec, sources, way, params, err);
    MOQ_TRY(moq_cuda_enter(spec->device.index, &entered, err));
    moq_status status = prepare_on_stream(spec, sources, way, params, err);
    moq_cuda_leave(entered);
    return status;
}

/* A subnormal scale is no zero, which would make zeros of its weights. */
moq_status moq_linear_prepare(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              moq_prepare_way way, moq_params *params, moq_err *err) {
    unsigned flushes = moq_enter_float_mode();
    moq_status status = prepare_anywhere(spec, sources, way, params, err);
    moq_leave_float_mode(flushes);
    return status;
}
