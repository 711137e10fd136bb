/* The tensors of a checkpoint that weight processing is given: see weight_sources.h. */
#include "ops/weight_sources.h"

#include <string.h>

/* ---- partitions and experts ---- */

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

const moq_source *moq_scale_source(const moq_weight *w, const moq_weight_sources *sources) {
    return w->checkpoint == MOQ_WEIGHT_E2M1 ? &sources->weight_scale_2 : &sources->weight_scale;
}

moq_code_rows moq_prepare_rows(const moq_source *source, int32_t p, int64_t first) {
    bool fused = source->count == 1;
    int32_t index = fused ? 0 : p;
    const moq_tensor t = moq_source_part(source, index);
    const uint8_t *data = t.data;
    return (moq_code_rows){data + (fused ? first : 0) * t.stride[0], t.stride[0],
                           moq_source_step(source, index)};
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
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected %d experts first, got shape %s",
                           (int)w->experts, moq_shape_text(view, shape, sizeof shape));
    *step = view->stride[0] * (int64_t)moq_dtype_size(view->dtype);
    view->ndim--;
    memmove(view->shape, view->shape + 1, (size_t)view->ndim * sizeof *view->shape);
    memmove(view->stride, view->stride + 1, (size_t)view->ndim * sizeof *view->stride);
    return MOQ_OK;
}

/* ---- shapes ---- */

moq_status moq_check_parts(const moq_weight *w, const moq_source *source, const char *name,
                           moq_err *err) {
    if (source->count == 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "missing, %s needs it", w->algo);
    if (source->count != 1 && source->count != w->partition_count)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected one tensor or %d, one a partition, got %d",
                           (int)w->partition_count, (int)source->count);
    return MOQ_OK;
}

/* Checks a source with a row for each row of the weight or, of pairs, for every two. */
static moq_status check_rows(const moq_weight *w, const moq_source *source, const char *name,
                             moq_dtype dtype, int64_t columns, bool pairs, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_parts(w, source, name, err));
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor t = moq_source_part(source, p);
        int64_t rows = (source->count == 1 ? w->out_features : w->partition[p]) / (pairs ? 2 : 1);
        if (t.dtype != dtype)
            return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s, got %s",
                               moq_dtype_name(dtype), moq_dtype_name(t.dtype));
        if (t.ndim != 2 || t.shape[0] != rows || t.shape[1] != columns)
            return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected shape [%lld, %lld], got %s",
                               (long long)rows, (long long)columns,
                               moq_shape_text(&t, shape, sizeof shape));
        if (t.shape[1] > 1 && t.stride[1] != 1)
            return moq_fail_of(err, MOQ_ERR_BUFFER, name,
                               "expected contiguous rows, got stride %lld", (long long)t.stride[1]);
    }
    return MOQ_OK;
}

/* Block scales: [rows, columns], [rows, 1, columns, 1], or a scalar where there is one block. */
static moq_status check_block_shapes(const moq_weight *w, const moq_source *source, moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE);
    char shape[128];
    int64_t columns = moq_weight_scale_columns(w);
    MOQ_TRY(moq_check_parts(w, source, name, err));
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor t = moq_source_part(source, p);
        int64_t rows =
            source->count == 1 ? moq_weight_block_rows(w) : moq_weight_partition_blocks(w, p);
        bool plain = t.ndim == 2 && t.shape[0] == rows && t.shape[1] == columns;
        bool spread = t.ndim == 4 && t.shape[0] == rows && t.shape[1] == 1 &&
                      t.shape[2] == columns && t.shape[3] == 1;
        bool scalar = rows * columns == 1 && moq_tensor_numel(&t) == 1;
        if (!plain && !spread && !scalar)
            return moq_fail_of(
                err, MOQ_ERR_VALUE, name,
                "expected shape [%lld, %lld] or [%lld, 1, %lld, 1] for %s, got %s", (long long)rows,
                (long long)columns, (long long)rows, (long long)columns,
                w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK ? "128x128 blocks" : "groups of its rows",
                moq_shape_text(&t, shape, sizeof shape));
    }
    return MOQ_OK;
}

static moq_status check_shapes(const moq_weight *w, const moq_weight_sources *sources,
                               moq_err *err) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1, int4 = w->checkpoint == MOQ_WEIGHT_INT4_GROUP;
    int64_t k = w->in_features;
    MOQ_TRY(check_rows(w, &sources->weight, moq_weight_param_name(w, MOQ_PARAM_WEIGHT),
                       moq_weight_code_dtype(w), e2m1 ? k / 2 : k, int4, err));
    if (e2m1 || w->checkpoint == MOQ_WEIGHT_E4M3_GROUP)
        MOQ_TRY(check_rows(w, &sources->weight_scale,
                           moq_weight_param_name(w, MOQ_PARAM_WEIGHT_SCALE),
                           e2m1 && !w->mx_scales ? MOQ_DT_E4M3 : MOQ_DT_E8M0,
                           moq_weight_scale_columns(w), false, err));
    if (moq_weight_has_scale_matrix(w))
        MOQ_TRY(check_block_shapes(w, &sources->weight_scale, err));
    return MOQ_OK;
}

moq_status moq_check_sources(const moq_weight *w, const moq_weight_sources *sources, moq_err *err) {
    MOQ_TRY_EXPERT(w, MOQ_EVERY_EXPERT, check_shapes(w, sources, err), err);
    return MOQ_OK;
}
