/* Scales of a weight on a CUDA device: see weight_device.h. Scales that lie there in a type that
 * kernels read stay, and kernels look at them; others come to the host and are checked there. */
#include "ops/weight_device.h"

#include "core/formats.h"
#include "cuda/cuda.h"

/* ---- what stays ---- */

static bool can_stay(const moq_tensor *t) {
    return t->device.kind != MOQ_CPU && moq_tensor_is_contiguous(t) &&
           (t->dtype == MOQ_DT_F32 || t->dtype == MOQ_DT_BF16 || t->dtype == MOQ_DT_F16);
}

/* True for scales of the weight that need not come to the host: they are on the device, and if they
 * are wrong, then by their values. Shapes of block scales were checked before. */
static bool weight_stays(const moq_weight *w, const moq_source *source) {
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

/* True for scales of x that need not come to the host: none has to be compared with another. */
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

/* The kinds of scales that stay, or those that do not. */
static int scales_that(const moq_prepare_job *j, bool stay) {
    int which = stay ? 0 : MOQ_SCALES_OF_SMOOTHING;
    if (j->weight_stays == stay)
        which |= MOQ_SCALES_OF_WEIGHT;
    return j->input_stays == stay ? which | MOQ_SCALES_OF_INPUT : which;
}

moq_status moq_prepare_bad_scale(const moq_prepare_job *j, moq_err *err) {
    return moq_prepare_read_scales(j->w, j->sources, scales_that(j, true), j->stream, &j->scales,
                                   err);
}

moq_status moq_prepare_read_job(moq_prepare_job *j, moq_err *err) {
    j->weight_stays = weight_stays(j->w, moq_scale_source(j->w, j->sources));
    j->input_stays = input_stays(j->w, &j->sources->input_scale);
    MOQ_TRY(moq_prepare_open_scales(j->w, j->sources, &j->scales, err));
    moq_status status = moq_prepare_read_scales(j->w, j->sources, scales_that(j, false), j->stream,
                                                &j->scales, err);
    if (status != MOQ_OK) /* if several are wrong, the first is named */
        MOQ_TRY(moq_prepare_bad_scale(j, err));
    return status;
}

moq_status moq_prepare_download_scales(moq_prepare_job *j, moq_err *err) {
    j->weight_stays = false;
    return moq_prepare_read_scales(j->w, j->sources, MOQ_SCALES_OF_WEIGHT, j->stream, &j->scales,
                                   err);
}

/* ---- scales of the weight ---- */

int64_t moq_prepare_scale_count(const moq_weight *w) {
    if (w->checkpoint == MOQ_WEIGHT_E2M1)
        return 0;
    return w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK ? moq_prepare_block_count(w) : w->out_features;
}

int64_t moq_prepare_all_scales(const moq_prepare_job *j) {
    return moq_weight_matrices(j->w) * moq_prepare_scale_count(j->w);
}

const void *moq_prepare_scale_at(const moq_source *source, int32_t p) {
    const moq_tensor *t = &source->part[source->count == 1 ? 0 : p];
    bool several = source->count == 1 && moq_tensor_numel(t) > 1;
    return (const char *)t->data + (several ? (size_t)p * moq_dtype_size(t->dtype) : 0);
}

/* Bytes from the scale of partition p to the one of the next expert. */
static int64_t step_of(const moq_source *source, int32_t p) {
    return moq_source_step(source, source->count == 1 ? 0 : p);
}

/* Queues scales that stay on the device to `out` as float32, one for each row or block; what they
 * are is told. */
static moq_status copy_device_scales(const moq_prepare_job *j, float *out, moq_err *err) {
    const moq_weight *w = j->w;
    const moq_source *source = &j->sources->weight_scale;
    bool blocks = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    bool spread = !blocks && !w->per_row_scale; /* each over the rows of its partition */
    for (int32_t p = 0; p < (spread ? w->partition_count : source->count); p++) {
        const moq_tensor *t = &source->part[source->count == 1 ? 0 : p];
        moq_scale_copy copy = {
            .scales = spread ? moq_prepare_scale_at(source, p) : t->data,
            .dtype = t->dtype,
            .count = spread ? w->partition[p] : moq_tensor_numel(t),
            .step = spread ? 0 : 1,
            .experts = moq_weight_matrices(w),
            .from_step = step_of(source, p),
            .out = out,
            .out_step = moq_prepare_scale_count(w),
            .bad = &j->found->bad_scale,
            .zero = &j->found->zero_scale,
        };
        MOQ_TRY(moq_cuda_copy_scales(&copy, j->stream, err));
        out += copy.count;
    }
    return MOQ_OK;
}

moq_status moq_prepare_fill_rows(const moq_prepare_job *j, float *out, moq_err *err) {
    const moq_weight *w = j->w;
    if (w->experts)
        return moq_cuda_upload(out, j->scales.factor,
                               (size_t)(w->experts * w->out_features) * sizeof(float), j->stream,
                               err);
    for (int32_t p = 0; p < w->partition_count; out += w->partition[p++])
        MOQ_TRY(moq_cuda_fill_floats(out, j->scales.weight[p], w->partition[p], j->stream, err));
    return MOQ_OK;
}

moq_status moq_prepare_place_scales(const moq_prepare_job *j, moq_err *err) {
    const moq_prepare_scales *scales = &j->scales;
    size_t bytes = (size_t)moq_prepare_all_scales(j) * sizeof(float);
    if (j->weight_stays)
        return copy_device_scales(j, j->scale, err);
    if (scales->block)
        return moq_cuda_upload(j->scale, scales->block, bytes, j->stream, err);
    if (j->w->per_row_scale)
        return moq_cuda_upload(j->scale, scales->factor, bytes, j->stream, err);
    return moq_prepare_fill_rows(j, j->scale, err);
}

moq_status moq_prepare_write_scales(const moq_prepare_job *j, moq_err *err) {
    moq_scale_copy copy = {
        .scales = j->scale,
        .dtype = MOQ_DT_F32,
        .count = moq_prepare_all_scales(j),
        .step = 1,
        .experts = 1,
        .out = j->factor ? j->params->of[MOQ_PARAM_OUTPUT_SCALE].data
                         : j->params->of[MOQ_PARAM_WEIGHT_SCALE].data,
        .found = j->note,
        .unless = j->found,
    };
    return moq_cuda_copy_scales(&copy, j->stream, err);
}

moq_status moq_prepare_place_part_factors(const moq_prepare_job *j, moq_err *err) {
    const moq_weight *w = j->w;
    const moq_source *source = &j->sources->weight_scale_2;
    int32_t parts = w->partition_count;
    if (!j->weight_stays)
        return moq_cuda_upload(j->part_factor, j->scales.weight,
                               (size_t)(w->experts * parts) * sizeof(float), j->stream, err);
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        moq_scale_copy copy = {
            .scales = t->data,
            .dtype = t->dtype,
            .count = source->count == 1 ? parts : 1,
            .step = moq_tensor_numel(t) == 1 ? 0 : 1,
            .experts = w->experts,
            .from_step = moq_source_step(source, p),
            .out = j->part_factor + p,
            .out_step = parts,
            .most = moq_weight_folds(w) ? MOQ_FOLDED_MOST : 0,
            .bad = &j->found->bad_scale,
            .zero = &j->found->zero_scale,
        };
        MOQ_TRY(moq_cuda_copy_scales(&copy, j->stream, err));
    }
    return MOQ_OK;
}

/* ---- scales of x ---- */

moq_status moq_prepare_copy_input_scales(const moq_prepare_job *j, bool look, bool copy,
                                         moq_err *err) {
    const moq_source *source = &j->sources->input_scale;
    float *out =
        copy ? j->params->of[MOQ_PARAM_INPUT_SCALE].data : NULL; /* NULL where they are not used */
    int32_t parts = j->w->partition_count;
    if (!j->input_stays || !(look || out))
        return MOQ_OK;
    for (int32_t p = 0; p < source->count; p++) {
        const moq_tensor *t = &source->part[p];
        bool shared = source->count == 1 && moq_tensor_numel(t) == 1;
        moq_scale_copy each = {
            .scales = t->data,
            .dtype = t->dtype,
            .count = shared ? parts : moq_tensor_numel(t),
            .step = shared ? 0 : 1,
            .experts = moq_weight_matrices(j->w),
            .from_step = moq_source_step(source, p),
            .out = out ? out + p : NULL,
            .out_step = parts,
            .above = MOQ_DIVISOR_ABOVE,
            .bad = look ? &j->found->bad_input_scale : NULL,
            .zero = look ? &j->found->bad_input_scale : NULL,
            .found = j->note,
            .unless = look ? NULL : j->found,
        };
        MOQ_TRY(moq_cuda_copy_scales(&each, j->stream, err));
    }
    return MOQ_OK;
}

/* True for input scales that were read to the host and that products use. */
static bool has_input(const moq_prepare_job *j) {
    return !j->input_stays && moq_uses_input_scale(j->w, j->sources);
}

bool moq_prepare_has_input_scales(const moq_prepare_job *j) {
    return has_input(j) || j->scales.smooth;
}

moq_status moq_prepare_write_input_scales(const moq_prepare_job *j, moq_err *err) {
    const moq_weight *w = j->w;
    size_t floats = (size_t)moq_weight_matrices(w) * sizeof(float);
    if (has_input(j))
        MOQ_TRY(moq_cuda_upload(j->params->of[MOQ_PARAM_INPUT_SCALE].data, j->scales.input,
                                (size_t)w->partition_count * floats, j->stream, err));
    if (j->scales.smooth)
        MOQ_TRY(moq_cuda_upload(j->params->of[MOQ_PARAM_PRE_QUANT_SCALE].data, j->scales.smooth,
                                (size_t)w->in_features * floats, j->stream, err));
    return MOQ_OK;
}
