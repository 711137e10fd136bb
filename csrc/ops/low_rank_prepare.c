/* The low-rank pairs of a linear: see low_rank_prepare.h. */
#include "ops/low_rank_prepare.h"

#include "cuda/cuda.h"
#include "ops/weight_scales.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t size_of_a(const moq_weight *w) {
    return moq_weight_ranks(w) * w->in_features;
}

static int64_t size_of_b(const moq_weight *w) {
    return w->out_features * w->rank;
}

static moq_status check_values(const char *name, const float *values, int64_t count,
                               int64_t columns, moq_err *err) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(values[i]))
            return moq_fail_of(
                err, MOQ_ERR_VALUE, name, "expected finite values, got %g at row %lld, column %lld",
                (double)values[i], (long long)(i / columns), (long long)(i % columns));
    return MOQ_OK;
}

/* Reads a matrix [rows, columns] of one partition, or of all. */
static moq_status read_matrix(const moq_source *source, int32_t p, const char *name, int64_t rows,
                              int64_t columns, void *stream, float *out, moq_err *err) {
    char shape[128];
    const moq_tensor t = moq_source_part(source, p);
    if (t.ndim != 2 || t.shape[0] != rows || t.shape[1] != columns)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected shape [%lld, %lld], got %s",
                           (long long)rows, (long long)columns,
                           moq_shape_text(&t, shape, sizeof shape));
    MOQ_TRY(moq_prepare_read_values(source, p, name, rows * columns, stream, out, err));
    return check_values(name, out, rows * columns, columns, err);
}

/* Reads lora_a, with `rank` rows for each partition. */
static moq_status read_a(const moq_weight *w, const moq_source *source, void *stream, float *out,
                         moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_LORA_A);
    int64_t k = w->in_features;
    MOQ_TRY(moq_check_parts(w, source, name, err));
    int64_t rows = source->count == 1 ? moq_weight_ranks(w) : w->rank;
    for (int32_t p = 0; p < source->count; p++, out += rows * k)
        MOQ_TRY(read_matrix(source, p, name, rows, k, stream, out, err));
    return MOQ_OK;
}

/* Reads lora_b, with a row for each row of the weight. */
static moq_status read_b(const moq_weight *w, const moq_source *source, void *stream, float *out,
                         moq_err *err) {
    const char *name = moq_weight_param_name(w, MOQ_PARAM_LORA_B);
    MOQ_TRY(moq_check_parts(w, source, name, err));
    for (int32_t p = 0; p < source->count; p++) {
        int64_t rows = source->count == 1 ? w->out_features : w->partition[p];
        MOQ_TRY(read_matrix(source, p, name, rows, w->rank, stream, out, err));
        out += rows * w->rank;
    }
    return MOQ_OK;
}

moq_status moq_low_rank_read(const moq_weight *w, const moq_weight_sources *sources, void *stream,
                             moq_low_rank_values *values, moq_err *err) {
    values->memory = NULL;
    if (!w->rank)
        return MOQ_OK;
    values->memory = malloc((size_t)(size_of_a(w) + size_of_b(w)) * sizeof(float));
    if (!values->memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the low-rank pair of a linear layer");
    MOQ_TRY(read_a(w, &sources->lora_a, stream, values->memory, err));
    return read_b(w, &sources->lora_b, stream, values->memory + size_of_a(w), err);
}

static moq_status write_floats(const moq_weight *w, const float *values, int64_t count,
                               void *stream, float *out, moq_err *err) {
    size_t bytes = (size_t)count * sizeof *values;
    if (w->device.kind == MOQ_CUDA)
        return moq_cuda_upload(out, values, bytes, stream, err);
    memcpy(out, values, bytes);
    return MOQ_OK;
}

moq_status moq_low_rank_write(const moq_weight *w, const moq_low_rank_values *values, void *stream,
                              moq_params *params, moq_err *err) {
    if (!w->rank)
        return MOQ_OK;
    const float *a = values->memory, *b = a + size_of_a(w);
    MOQ_TRY(write_floats(w, a, size_of_a(w), stream, params->of[MOQ_PARAM_LORA_A].data, err));
    MOQ_TRY(write_floats(w, b, size_of_b(w), stream, params->of[MOQ_PARAM_LORA_B].data, err));
    return w->device.kind == MOQ_CUDA ? moq_cuda_wait(stream, err) : MOQ_OK;
}
