/* Weight processing of a linear layer: checkpoint tensors to prepared ones. See ops/linear.h.
 *
 * Codes are copied row by row into one tensor for all partitions, scales become one factor per row,
 * so unequal scales of fused layers stay exact. A partition whose scale is zero is all zeros in the
 * producer's meaning; its codes, which are NaN on disk, are written as zeros. Two passes: the first
 * checks everything, the second writes. */
#include "ops/linear.h"

#include "core/formats.h"
#include "core/scales.h"
#include "cpu/prepare.h"

#include <stdlib.h>
#include <string.h>

/* Scales of a layer as float32, checked: what both passes work from. */
typedef struct {
    float *weight;   /* one per partition, or one per row (per-channel FP8) */
    bool per_row;    /* which of the two */
    float *block;    /* [block rows, columns] for FP8_PB_WO, else NULL */
    float *input;    /* one per partition, or NULL */
    float *factor;   /* [N], NULL for blocks */
    uint8_t *memory; /* what all of them point into */
} scale_set;

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

/* Row `row` of partition p, which starts at row `first` of the layer. */
static const uint8_t *source_row(const moq_source *source, int32_t p, int64_t first, int64_t row) {
    bool fused = source->count == 1;
    const moq_tensor *t = &source->part[fused ? 0 : p];
    return (const uint8_t *)t->data + ((fused ? first : 0) + row) * t->stride[0];
}

/* A row that means zero, whatever its codes are. */
static bool row_is_zero(const scale_set *scales, int64_t n) {
    return scales->factor && scales->factor[n] == 0;
}

static moq_status check_codes(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              const scale_set *scales, moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    const moq_source *source = e2m1 ? &sources->weight_scale : &sources->weight;
    int64_t columns = e2m1 ? moq_linear_scale_columns(spec) : spec->in_features;
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        for (int64_t row = 0; row < spec->partition[p]; row++) {
            if (row_is_zero(scales, first + row))
                continue;
            const uint8_t *codes = source_row(source, p, first, row);
            int64_t bad = e2m1 ? moq_cpu_find_bad_block_scale(codes, columns)
                               : moq_cpu_find_e4m3_nan(codes, columns);
            if (bad >= 0)
                return moq_fail(err, MOQ_ERR_VALUE, "%s: %s at row %lld, column %lld",
                                e2m1 ? "weight_scale" : "weight",
                                e2m1 ? "a block scale that is NaN or negative" : "a NaN code",
                                (long long)(first + row), (long long)bad);
        }
    }
    return MOQ_OK;
}

/* ---- the scales ---- */

/* One value per partition from a list of scalars, a vector, or one scalar for all. */
static moq_status read_per_partition(const moq_linear_spec *spec, const moq_source *source,
                                     const char *name, float *out, moq_err *err) {
    int32_t parts = spec->partition_count;
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "%s: missing, %s needs it", name, spec->algo);
    if (source->count == 1) {
        bool shared = moq_tensor_numel(&source->part[0]) == 1;
        MOQ_TRY(moq_read_scales(&source->part[0], name, shared ? 1 : parts, out, err));
        for (int32_t p = 1; shared && p < parts; p++)
            out[p] = out[0];
        return MOQ_OK;
    }
    if (source->count != parts)
        return moq_fail(err, MOQ_ERR_VALUE,
                        "%s: expected one tensor or %d, one a partition, got %d", name, (int)parts,
                        (int)source->count);
    for (int32_t p = 0; p < parts; p++)
        MOQ_TRY(moq_read_scales(&source->part[p], name, 1, out + p, err));
    return MOQ_OK;
}

/* One value per row: a vector for the layer, or one vector per partition. */
static moq_status read_per_row(const moq_linear_spec *spec, const moq_source *source, float *out,
                               moq_err *err) {
    if (source->count == 1)
        return moq_read_scales(&source->part[0], "weight_scale", spec->out_features, out, err);
    if (source->count != spec->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: expected one tensor or %d, got %d",
                        (int)spec->partition_count, (int)source->count);
    for (int32_t p = 0; p < source->count; out += spec->partition[p++])
        MOQ_TRY(moq_read_scales(&source->part[p], "weight_scale", spec->partition[p], out, err));
    return MOQ_OK;
}

/* Block scales: [rows, columns], [rows, 1, columns, 1], or a scalar where there is one block. */
static moq_status read_blocks(const moq_linear_spec *spec, const moq_source *source, float *out,
                              moq_err *err) {
    char shape[128];
    int64_t columns = moq_linear_scale_columns(spec);
    if (source->count == 0)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: missing, %s needs it", spec->algo);
    if (source->count != 1 && source->count != spec->partition_count)
        return moq_fail(err, MOQ_ERR_VALUE, "weight_scale: expected one tensor or %d, got %d",
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
        MOQ_TRY(moq_read_scales(t, "weight_scale", rows * columns, out, err));
        out += rows * columns;
    }
    return MOQ_OK;
}

static moq_status allocate_scales(const moq_linear_spec *spec, scale_set *scales, moq_err *err) {
    bool blocks = spec->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    size_t parts = (size_t)spec->partition_count, rows = (size_t)spec->out_features;
    size_t block =
        blocks ? (size_t)(moq_linear_block_rows(spec) * moq_linear_scale_columns(spec)) : 0;
    size_t weight = blocks ? 0 : scales->per_row ? rows : parts;
    size_t factor = blocks ? 0 : rows;
    float *memory = malloc((weight + block + parts + factor) * sizeof *memory);
    if (!memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the scales of a linear layer");
    scales->memory = (uint8_t *)memory;
    scales->weight = blocks ? NULL : memory;
    scales->block = blocks ? memory + weight : NULL;
    scales->input = memory + weight + block;
    scales->factor = blocks ? NULL : memory + weight + block + parts;
    return MOQ_OK;
}

static moq_status read_weight_scales(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                     scale_set *scales, moq_err *err) {
    if (scales->block) {
        int64_t count = moq_linear_block_rows(spec) * moq_linear_scale_columns(spec);
        MOQ_TRY(read_blocks(spec, &sources->weight_scale, scales->block, err));
        return moq_check_scales(scales->block, count, "weight_scale", MOQ_SCALE_MAY_BE_ZERO, err);
    }
    if (scales->per_row) {
        MOQ_TRY(read_per_row(spec, &sources->weight_scale, scales->weight, err));
        MOQ_TRY(moq_check_scales(scales->weight, spec->out_features, "weight_scale",
                                 MOQ_SCALE_MAY_BE_ZERO, err));
        memcpy(scales->factor, scales->weight, (size_t)spec->out_features * sizeof(float));
        return MOQ_OK;
    }
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    const char *name = e2m1 ? "weight_scale_2" : "weight_scale";
    const moq_source *source = e2m1 ? &sources->weight_scale_2 : &sources->weight_scale;
    MOQ_TRY(read_per_partition(spec, source, name, scales->weight, err));
    MOQ_TRY(
        moq_check_scales(scales->weight, spec->partition_count, name, MOQ_SCALE_MAY_BE_ZERO, err));
    moq_expand_to_rows(scales->weight, spec->partition, spec->partition_count, scales->factor);
    return MOQ_OK;
}

static moq_status read_input_scales(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                    scale_set *scales, moq_err *err) {
    bool used = spec->input == MOQ_INPUT_E4M3_TENSOR || spec->input == MOQ_INPUT_NVFP4;
    if (sources->input_scale.count > 0) { /* one that is not used has to be right all the same */
        MOQ_TRY(read_per_partition(spec, &sources->input_scale, "input_scale", scales->input, err));
        MOQ_TRY(moq_check_scales(scales->input, spec->partition_count, "input_scale",
                                 MOQ_SCALE_POSITIVE, err));
    }
    if (!used || sources->input_scale.count == 0)
        scales->input = NULL;
    return MOQ_OK;
}

static moq_status check_sources(const moq_linear_spec *spec, const moq_linear_sources *sources,
                                scale_set *scales, moq_err *err) {
    bool e2m1 = spec->checkpoint == MOQ_WEIGHT_E2M1;
    int64_t k = spec->in_features;
    MOQ_TRY(check_rows(spec, &sources->weight, "weight", e2m1 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3,
                       e2m1 ? k / 2 : k, err));
    if (e2m1)
        MOQ_TRY(check_rows(spec, &sources->weight_scale, "weight_scale", MOQ_DT_E4M3,
                           moq_linear_scale_columns(spec), err));
    MOQ_TRY(allocate_scales(spec, scales, err));
    MOQ_TRY(read_weight_scales(spec, sources, scales, err));
    MOQ_TRY(read_input_scales(spec, sources, scales, err));
    return check_codes(spec, sources, scales, err);
}

/* ---- the second pass ---- */

static void write_row(const moq_linear_spec *spec, const moq_linear_sources *sources, int32_t p,
                      int64_t first, int64_t row, float *factor, moq_linear_params *params) {
    int64_t k = spec->in_features, n = first + row;
    const uint8_t *codes = source_row(&sources->weight, p, first, row);
    uint8_t *weight = params->weight.data;
    if (spec->checkpoint != MOQ_WEIGHT_E2M1) {
        memcpy(weight + n * k, codes, (size_t)k);
        return;
    }
    int64_t columns = moq_linear_scale_columns(spec);
    const uint8_t *scales = source_row(&sources->weight_scale, p, first, row);
    if (spec->weight == MOQ_WEIGHT_E4M3_ROW) {
        factor[n] *= moq_cpu_fold_e2m1_row(codes, scales, k, spec->group_size, weight + n * k);
        return;
    }
    memcpy(weight + n * (k / 2), codes, (size_t)(k / 2));
    memcpy((uint8_t *)params->weight_scale.data + n * columns, scales, (size_t)columns);
}

static void write_zero_row(const moq_linear_spec *spec, int64_t n, moq_linear_params *params) {
    int64_t k = spec->in_features, columns = moq_linear_scale_columns(spec);
    int64_t bytes = spec->weight == MOQ_WEIGHT_E2M1 ? k / 2 : k;
    memset((uint8_t *)params->weight.data + n * bytes, 0, (size_t)bytes);
    if (spec->weight == MOQ_WEIGHT_E2M1)
        memset((uint8_t *)params->weight_scale.data + n * columns, 0, (size_t)columns);
}

static void write_params(const moq_linear_spec *spec, const moq_linear_sources *sources,
                         const scale_set *scales, moq_linear_params *params) {
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        for (int64_t row = 0; row < spec->partition[p]; row++) {
            if (row_is_zero(scales, first + row))
                write_zero_row(spec, first + row, params);
            else
                write_row(spec, sources, p, first, row, scales->factor, params);
        }
    }
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
}

moq_status moq_linear_prepare(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              moq_linear_params *params, moq_err *err) {
    scale_set scales = {.per_row = spec->per_row_scale};
    MOQ_TRY(moq_linear_check_params(spec, params, "out", err));
    moq_status status = check_sources(spec, sources, &scales, err);
    if (status == MOQ_OK)
        write_params(spec, sources, &scales, params);
    free(scales.memory);
    return status;
}
