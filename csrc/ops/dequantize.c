/* Operation dequantize: see dequantize.h.
 *
 * The table of algorithms (core/algo.h) says of each how the codes are stored, how the scales cover
 * them and whether a second-level scale takes part. A layout function turns the shapes into strides
 * and block sizes of the one kernel. Where a format allows several shapes (scalars of any rank,
 * stacked experts packed along either axis), they are told apart here and nowhere else. */
#include "ops/dequantize.h"

#include "core/algo.h"
#include "ops/check.h"

#include <stdio.h>
#include <string.h>

static const float ONE = 1.0f;

static bool has_weight(const moq_algo_facts *facts) {
    return facts->codes != MOQ_STORED_NONE;
}

static moq_status find_format(const char *name, const moq_algo_facts **out, moq_err *err) {
    moq_algo algo;
    char names[MOQ_ALGO_LIST_SIZE], hint[64] = "";
    moq_text text = {name, strlen(name)};
    if (!moq_algo_parse(text, &algo)) {
        moq_algo_hint(text, hint, sizeof hint);
    } else if (has_weight(moq_algo_facts_of(algo))) {
        *out = moq_algo_facts_of(algo);
        return MOQ_OK;
    }
    return moq_fail_of(err, MOQ_ERR_UNSUPPORTED, "quant_algo", "expected one of %s, got '%.64s'%s",
                       moq_algo_list(has_weight, names, sizeof names), name, hint);
}

static moq_status fail_shape(moq_err *err, const char *name, const char *expected,
                             const moq_tensor *got) {
    char shape[128];
    return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected %s, got shape %s", expected,
                       moq_shape_text(got, shape, sizeof shape));
}

/* True when t has exactly the `ndim` extents. */
static bool has_shape(const moq_tensor *t, int32_t ndim, const int64_t *shape) {
    if (t->ndim != ndim)
        return false;
    return ndim == 0 || memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

/* True when t has one value for each expert: [E], [E, 1], [E, 1, 1]. */
static bool is_per_expert(const moq_tensor *t, int64_t experts) {
    if (t->ndim < 1 || t->shape[0] != experts)
        return false;
    for (int i = 1; i < t->ndim; i++) {
        if (t->shape[i] != 1)
            return false;
    }
    return true;
}

/* A scale repeated over everything, to which a layout gives the strides it has. */
static moq_block_scale repeated(const void *data, moq_dtype dtype) {
    return (moq_block_scale){
        .data = data, .dtype = dtype, .stride = {0, 0, 0}, .block = {1, 1, INT64_MAX}};
}

/* The dtype that float scales are decoded as; NONE when the tensor holds something else. Scales of
 * tiles may be powers of two, as bytes. */
static moq_dtype float_scale_dtype(const moq_tensor *t, bool tiles) {
    switch (t->dtype) {
    case MOQ_DT_F32:
    case MOQ_DT_F16:
    case MOQ_DT_F64:
        return t->dtype;
    case MOQ_DT_E8M0:
    case MOQ_DT_U8:
        return tiles ? MOQ_DT_E8M0 : MOQ_DT_NONE;
    case MOQ_DT_BF16:
    case MOQ_DT_U16:
    case MOQ_DT_I16:
        return MOQ_DT_BF16;
    default:
        return MOQ_DT_NONE;
    }
}

static moq_status scale_dtype(const moq_algo_facts *format, const moq_tensor *scale, moq_dtype *out,
                              moq_err *err) {
    if (format->scale_dtype != MOQ_DT_F32) {
        *out = format->scale_dtype;
        return moq_check_dtype(scale, "weight_scale", format->scale_dtype, err);
    }
    bool tiles = format->scales == MOQ_SCALES_BLOCKS;
    *out = float_scale_dtype(scale, tiles);
    if (*out == MOQ_DT_NONE)
        return moq_fail_of(err, MOQ_ERR_TYPE, "weight_scale",
                           "expected float32, bfloat16, float16 or float64%s for %s, got %s",
                           tiles ? ", or bytes of float8_e8m0fnu," : "", format->name,
                           moq_dtype_name(scale->dtype));
    return moq_check_host(scale, "weight_scale", err);
}

/* Lays the scale's axes along `axes` (0 experts, 1 rows, 2 columns) where each has the extent of
 * its axis or 1; false where one does not. */
static bool align(const moq_tensor *scale, const moq_dequantize_job *job, int count,
                  const int *axes, moq_block_scale *s) {
    if (scale->ndim != count)
        return false;
    for (int i = 0; i < count; i++) {
        if (scale->shape[i] != 1 && scale->shape[i] != job->shape[axes[i]])
            return false;
    }
    for (int i = 0; i < count; i++) {
        if (scale->shape[i] == 1)
            continue;
        s->stride[axes[i]] = scale->stride[i];
        s->block[axes[i]] = 1;
    }
    return true;
}

static moq_status vector_layout(const moq_dequantize_plan *plan, moq_block_scale *s, moq_err *err) {
    static const int all[] = {0, 1, 2}, by_row[] = {0, 1}, by_column[] = {0, 2};
    const moq_tensor *scale = &plan->scale;
    const moq_dequantize_job *job = &plan->job;
    if (moq_tensor_numel(scale) == 1)
        return MOQ_OK;
    if (plan->weight.ndim == 2) {
        bool column = scale->ndim == 2 && scale->shape[1] == 1;
        if (align(scale, job, 1, all + 1, s) || (column && align(scale, job, 2, all + 1, s)))
            return MOQ_OK;
        return fail_shape(err, "weight_scale", "one value, or one for each row of weight", scale);
    }
    if (is_per_expert(scale, job->shape[0])) {
        s->stride[0] = scale->stride[0];
        s->block[0] = 1;
        return MOQ_OK;
    }
    if (scale->ndim == 2 && scale->shape[1] != 1 && job->shape[1] == job->shape[2])
        return fail_shape(err, "weight_scale",
                          "[E, rows, 1] or [E, 1, columns], as the experts are square", scale);
    if (align(scale, job, 1, all, s) || align(scale, job, 2, by_row, s) ||
        align(scale, job, 2, by_column, s) || align(scale, job, 3, all, s))
        return MOQ_OK;
    return fail_shape(err, "weight_scale",
                      "one value, or one for each expert, row or column of weight", scale);
}

static moq_status tile_layout(const moq_dequantize_plan *plan, int64_t size, moq_block_scale *s,
                              moq_err *err) {
    const moq_tensor *scale = &plan->scale;
    int64_t experts = plan->job.shape[0];
    int64_t down = plan->job.shape[1] / size + (plan->job.shape[1] % size != 0);
    int64_t across = plan->job.shape[2] / size + (plan->job.shape[2] % size != 0);
    bool stacked = plan->weight.ndim == 3;
    char expected[160];
    if (down * across == 1 && moq_tensor_numel(scale) == 1)
        return MOQ_OK;
    if (down * across == 1 && stacked && is_per_expert(scale, experts)) {
        s->stride[0] = scale->stride[0];
        return MOQ_OK;
    }
    /* [E, down, across] or [E, down, 1, across, 1]; without E for one weight. Of stacked experts
     * with one tile one way, also [E, across, 1, down, 1]: exporters scale the transposed weight.
     */
    const int64_t flat[] = {experts, down, across}, spaced[] = {experts, down, 1, across, 1};
    const int64_t turned[] = {experts, across, 1, down, 1};
    int first = stacked ? 0 : 1;
    bool is_spaced = has_shape(scale, 5 - first, spaced + first);
    if (!is_spaced && stacked && (down == 1 || across == 1) && has_shape(scale, 5, turned)) {
        s->stride[0] = scale->stride[0];
        s->stride[1] = scale->stride[3];
        s->stride[2] = scale->stride[1];
        s->block[1] = s->block[2] = size;
        return MOQ_OK;
    }
    if (!is_spaced && !has_shape(scale, 3 - first, flat + first)) {
        snprintf(expected, sizeof expected,
                 "one value for each %lld x %lld tile, [%s%lld, 1, %lld, 1]", (long long)size,
                 (long long)size, stacked ? "E, " : "", (long long)down, (long long)across);
        return fail_shape(err, "weight_scale", expected, scale);
    }
    int axis = 1 - first; /* of the tile rows */
    s->stride[0] = stacked ? scale->stride[0] : 0;
    s->stride[1] = scale->stride[axis];
    s->stride[2] = scale->stride[axis + (is_spaced ? 2 : 1)];
    s->block[1] = s->block[2] = size;
    return MOQ_OK;
}

static moq_status group_layout(const moq_algo_facts *format, const moq_dequantize_plan *plan,
                               bool along_rows, int64_t group_size, moq_block_scale *s,
                               moq_err *err) {
    const moq_tensor *scale = &plan->scale;
    int32_t ndim = plan->weight.ndim;
    int axis = along_rows ? 1 : 2; /* of {expert, row, column} */
    int64_t length = plan->job.shape[axis];
    int64_t want[3] = {plan->job.shape[0], plan->job.shape[1], plan->job.shape[2]};
    char expected[160];
    int64_t groups = scale->ndim == ndim ? scale->shape[ndim - (along_rows ? 2 : 1)] : -1;
    int64_t size = groups > 0 ? length / groups : format->groups[0];
    want[axis] = groups;
    if (groups < 0 || !has_shape(scale, ndim, want + 3 - ndim) ||
        (groups == 0 ? length != 0 : size == 0 || length % groups != 0)) {
        want[axis] = length;
        snprintf(expected, sizeof expected,
                 "the shape of the values, %s[%lld, %lld], divided by the group along %s",
                 ndim == 3 ? "[E] + " : "", (long long)want[1], (long long)want[2],
                 along_rows ? "the rows" : "the last axis");
        return fail_shape(err, "weight_scale", expected, scale);
    }
    if (groups > 0 && !moq_algo_takes_group(format, size)) {
        char sizes[32];
        snprintf(expected, sizeof expected, "groups of %s for %s, not of %lld",
                 moq_algo_groups_text(format, sizes, sizeof sizes), format->name, (long long)size);
        return fail_shape(err, "weight_scale", expected, scale);
    }
    if (groups > 0 && group_size && size != group_size)
        return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "the shapes say %lld, got %lld",
                           (long long)size, (long long)group_size);
    s->stride[0] = ndim == 3 ? scale->stride[0] : 0;
    s->stride[1] = scale->stride[ndim - 2];
    s->stride[2] = scale->stride[ndim - 1];
    s->block[2] = 1;
    s->block[axis] = size > 0 ? size : 1;
    return MOQ_OK;
}

/* Second-level scale: one value, one for each expert, or [E, P] for P equal parts of each expert's
 * outputs (gate and up with their own). */
static moq_status second_layout(const moq_algo_facts *format, const moq_dequantize_plan *plan,
                                int output_axis, moq_block_scale *s, moq_err *err) {
    const moq_tensor *scale = &plan->scale_2;
    int64_t experts = plan->job.shape[0], outputs = plan->job.shape[output_axis];
    bool parted = format->second == MOQ_SECOND_PARTS;
    moq_dtype dtype = float_scale_dtype(scale, false);
    if (dtype == MOQ_DT_NONE)
        return moq_fail_of(err, MOQ_ERR_TYPE, "weight_scale_2",
                           "expected float32, bfloat16, float16 or float64, got %s",
                           moq_dtype_name(scale->dtype));
    MOQ_TRY(moq_check_host(scale, "weight_scale_2", err));
    *s = repeated(scale->data, dtype);
    if (moq_tensor_numel(scale) == 1)
        return MOQ_OK;
    if (plan->weight.ndim == 2)
        return fail_shape(err, "weight_scale_2", "one value", scale);
    if (is_per_expert(scale, experts)) {
        s->stride[0] = scale->stride[0];
        return MOQ_OK;
    }
    int64_t parts = scale->ndim == 2 && scale->shape[0] == experts ? scale->shape[1] : 0;
    if (!parted || parts == 0 || outputs % parts != 0)
        return fail_shape(
            err, "weight_scale_2",
            parted ? "one value, one for each expert, or [E, P] for P equal parts of its outputs"
                   : "one value, or one for each expert",
            scale);
    s->stride[0] = scale->stride[0];
    s->stride[output_axis] = scale->stride[1];
    s->block[output_axis] = outputs > 0 ? outputs / parts : 1;
    return MOQ_OK;
}

static moq_status check_presence(const moq_algo_facts *format, const moq_tensor *scale,
                                 const moq_tensor *scale_2, moq_err *err) {
    if (scale == NULL)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale", "%s needs one, got none",
                           format->name);
    if ((format->second == MOQ_SECOND_FACTOR || format->second == MOQ_SECOND_PARTS) &&
        scale_2 == NULL)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale_2", "%s needs one, got none",
                           format->name);
    if (format->second == MOQ_SECOND_NONE && scale_2 != NULL)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale_2", "%s has none, got a tensor",
                           format->name);
    return MOQ_OK;
}

/* Stored axes to experts, rows and columns of codes, and of values where two share a byte. */
static void take_codes(const moq_tensor *weight, moq_code_kind kind, moq_dequantize_job *job) {
    int32_t ndim = weight->ndim;
    job->kind = kind;
    job->codes = weight->data;
    for (int i = 0; i < 3; i++) {
        int axis = ndim - 3 + i;
        job->shape[i] = axis >= 0 ? weight->shape[axis] : 1;
        job->code_stride[i] = axis >= 0 ? weight->stride[axis] : 0;
    }
    if (kind == MOQ_CODE_E2M1_COLUMNS)
        job->shape[2] *= 2;
    if (kind == MOQ_CODE_E2M1_ROWS || kind == MOQ_CODE_INT4_ROWS)
        job->shape[1] *= 2;
}

static moq_dtype stored_dtype(moq_stored_codes codes) {
    switch (codes) {
    case MOQ_STORED_E4M3:
        return MOQ_DT_E4M3;
    case MOQ_STORED_INT8:
        return MOQ_DT_I8;
    case MOQ_STORED_E2M1:
        return MOQ_DT_E2M1X2;
    case MOQ_STORED_INT4:
    case MOQ_STORED_NONE:
        break;
    }
    return MOQ_DT_U8;
}

/* The kind of codes for the kernel; `along_rows` as groups_along_rows has it. */
static moq_code_kind code_kind(moq_stored_codes codes, bool along_rows) {
    switch (codes) {
    case MOQ_STORED_E4M3:
        return MOQ_CODE_E4M3;
    case MOQ_STORED_INT8:
        return MOQ_CODE_INT8;
    case MOQ_STORED_E2M1:
        return along_rows ? MOQ_CODE_E2M1_ROWS : MOQ_CODE_E2M1_COLUMNS;
    case MOQ_STORED_INT4:
    case MOQ_STORED_NONE:
        break;
    }
    return MOQ_CODE_INT4_ROWS;
}

/* Stacked experts whose scales agree with the codes in the last extent have their groups, and the
 * packing, along the axis before it. */
static bool groups_along_rows(const moq_algo_facts *format, const moq_tensor *weight,
                              const moq_tensor *scale) {
    return format->scales == MOQ_SCALES_GROUPS && format->codes != MOQ_STORED_INT4 &&
           weight->ndim == 3 && scale->ndim == 3 && weight->shape[2] == scale->shape[2] &&
           weight->shape[1] != scale->shape[1];
}

static moq_status check_tensors(const moq_algo_facts *format, const moq_tensor *weight,
                                const moq_tensor *scale, const moq_tensor *scale_2,
                                moq_dtype out_dtype, moq_err *err) {
    MOQ_TRY(check_presence(format, scale, scale_2, err));
    if (format->codes != MOQ_STORED_E2M1 || weight->dtype != MOQ_DT_I8) /* packed, also as int8 */
        MOQ_TRY(moq_check_holds(weight, "weight", stored_dtype(format->codes), err));
    MOQ_TRY(moq_check_host(weight, "weight", err));
    if (weight->ndim != 2 && weight->ndim != 3)
        return fail_shape(err, "weight", "2 dimensions, or 3 for stacked experts", weight);
    if (out_dtype != MOQ_DT_F32 && out_dtype != MOQ_DT_BF16 && out_dtype != MOQ_DT_F16)
        return moq_fail_of(err, MOQ_ERR_TYPE, "dtype",
                           "expected float32, bfloat16 or float16, got %s",
                           moq_dtype_name(out_dtype));
    return MOQ_OK;
}

moq_status moq_plan_dequantize(const char *algo, const moq_tensor *weight, const moq_tensor *scale,
                               const moq_tensor *scale_2, int64_t group_size, moq_dtype out_dtype,
                               moq_dequantize_plan *plan, moq_err *err) {
    const moq_algo_facts *format = NULL;
    moq_dtype dtype = MOQ_DT_NONE;
    MOQ_TRY(find_format(algo, &format, err));
    MOQ_TRY(moq_check_group_size(group_size, err));
    MOQ_TRY(check_tensors(format, weight, scale, scale_2, out_dtype, err));
    MOQ_TRY(scale_dtype(format, scale, &dtype, err));
    *plan = (moq_dequantize_plan){.weight = *weight, .scale = *scale, .scale_2 = {.ndim = -1}};
    bool along_rows = groups_along_rows(format, weight, scale);
    take_codes(weight, code_kind(format->codes, along_rows), &plan->job);

    moq_block_scale *first = &plan->job.scale[0], *second = &plan->job.scale[1];
    *first = repeated(scale->data, dtype);
    *second = repeated(&ONE, MOQ_DT_F32);
    if (format->scales == MOQ_SCALES_BLOCKS)
        MOQ_TRY(tile_layout(plan, group_size ? group_size : format->group, first, err));
    else if (format->scales == MOQ_SCALES_GROUPS)
        MOQ_TRY(group_layout(format, plan, along_rows, group_size, first, err));
    else
        MOQ_TRY(vector_layout(plan, first, err));
    if (scale_2 != NULL) {
        plan->scale_2 = *scale_2;
        if (format->second != MOQ_SECOND_UNUSED)
            MOQ_TRY(second_layout(format, plan, along_rows ? 2 : 1, second, err));
    }
    plan->out = moq_describe(out_dtype, weight->ndim, plan->job.shape + 3 - weight->ndim);
    return MOQ_OK;
}

moq_status moq_run_dequantize(const moq_dequantize_plan *plan, const moq_tensor *out,
                              moq_err *err) {
    const moq_tensor *inputs[] = {&plan->weight, &plan->scale,
                                  plan->scale_2.ndim >= 0 ? &plan->scale_2 : NULL};
    MOQ_TRY(moq_check_output(out, "out", &plan->out, inputs, 3, err));
    moq_cpu_dequantize(&plan->job, plan->out.dtype, out->data);
    return MOQ_OK;
}
