/* Weight processing on a CUDA device, of a matrix or of all experts of a stack in the launches of
 * one matrix: codes stay there, and so do scales that are there, which kernels look at. Other
 * scales, and pre_quant_scale, were read and checked on the host before.
 *
 * There is one wait, at the end. What kernels find wrong they tell the host in a note
 * (cuda/tensor/cuda_prepare.h); only then it is looked for once more, to be named.
 *
 * Outputs that nobody has seen yet are written while codes and scales are checked. Into others goes
 * a second pass, which writes nothing if the first, over FP8 codes or NVFP4 block scales, has told
 * something in the workspace.
 *
 * A weight scale of zero, which a layer of zeros has, is met seldom and costs time: the codes under
 * it are looked at on the host, and FP8 codes are written from there. Where the scale is on the
 * device, kernels meet it on the way, and the work is done once more with that known.
 *
 * For swizzled NVFP4 weights the host waits after the checks, too. Checks alone are what is done
 * where several weights are to be written or none.
 *
 * Factors of partitions of packed NVFP4 go with the launch of a matrix; those of a stack lie in the
 * workspace, float32 [experts, partitions], copied and checked before. */
#include "ops/weight_steps.h"

#include "core/formats.h"
#include "core/swizzle.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_layout.h"
#include "cuda/tensor/cuda_nvfp4_pack.h"
#include "cuda/tensor/cuda_prepare.h"

#include <stdlib.h>

/* In the workspace. */
#define SCALES_AT 16
_Static_assert(sizeof(moq_findings) <= SCALES_AT, "what was found comes first");

typedef struct {
    const moq_weight *w;
    const moq_weight_sources *sources;
    moq_prepare_scales *scales;
    moq_params *params;
    void *stream;
    bool fresh;
    bool only_checks;
    bool checked;
    moq_findings *note;  /* what was met, for the host */
    moq_findings *found; /* where checks tell it: there, or where later kernels see it */
    float *scale;        /* of rows or blocks, on the device */
    float *factor;       /* the scales of rows where there are some, else NULL */
    float *part_factor;  /* those of the partitions of a packed stack, else NULL */
    uint64_t *bad;       /* while the first bad code is looked for */
} job;

/* Float32 scales of a matrix that exist on the device, of rows or blocks. */
static int64_t scale_count(const moq_weight *w) {
    if (w->checkpoint == MOQ_WEIGHT_E2M1)
        return 0;
    return w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK ? moq_prepare_block_count(w) : w->out_features;
}

/* Floats of the workspace. */
static int64_t kept_scales(const moq_weight *w, bool fresh) {
    int64_t experts = moq_weight_matrices(w);
    if (w->experts && w->weight == MOQ_WEIGHT_E2M1_PACKED)
        return experts * w->partition_count;
    return fresh ? 0 : experts * scale_count(w);
}

int64_t moq_prepare_workspace(const moq_weight *w, bool fresh) {
    int64_t kept = w->device.kind == MOQ_CPU ? 0 : kept_scales(w, fresh);
    if (w->device.kind == MOQ_CPU || (fresh && kept == 0))
        return 0;
    return SCALES_AT + kept * (int64_t)sizeof(float);
}

/* ---- what is found ---- */

static moq_status forget_findings(const job *j, moq_err *err) {
    *j->note = (moq_findings){0};
    if (j->found == j->note)
        return MOQ_OK;
    return moq_cuda_fill(j->found, 0, sizeof *j->found, j->stream, err);
}

/* ---- codes ---- */

/* True for a partition of an expert that means zero, whatever its codes are: where that is known.
 */
static bool is_zero(const job *j, int64_t expert, int32_t p) {
    const moq_prepare_scales *scales = j->scales;
    return j->w->checkpoint == MOQ_WEIGHT_E2M1 && !scales->on_device &&
           scales->weight[expert * j->w->partition_count + p] == 0;
}

/* For an expert at least. */
static bool is_somewhere_zero(const job *j, int32_t p) {
    bool zero = false;
    for (int64_t e = 0; e < moq_weight_matrices(j->w) && !zero; e++)
        zero = is_zero(j, e, p);
    return zero;
}

/* Those of one expert, of copies that are of all. */
static moq_code_copy copy_of(const moq_code_copy *all, int64_t expert) {
    moq_code_copy copy = *all;
    copy.experts = 1;
    copy.codes += expert * all->step;
    copy.out = all->out ? all->out + expert * all->span : NULL;
    copy.first += expert * all->span;
    return copy;
}

/* A partition that some experts have zeros for: expert by expert. */
static moq_status move_around_zeros(const job *j, int32_t p, const moq_code_copy *all,
                                    moq_err *err) {
    for (int64_t e = 0; e < all->experts; e++) {
        moq_code_copy copy = copy_of(all, e);
        bool there = copy.out == copy.codes && copy.rule == MOQ_CODES_ANY;
        if (!is_zero(j, e, p) && !there)
            MOQ_TRY(moq_cuda_copy_codes(&copy, j->stream, err));
        else if (is_zero(j, e, p) && copy.out)
            MOQ_TRY(moq_cuda_fill(copy.out, 0, (size_t)(copy.rows * copy.columns), j->stream, err));
    }
    return MOQ_OK;
}

/* Copies or checks (out NULL) the codes of a source, rows of `columns` bytes, partition by
 * partition. Those of a partition that means zero become zeros. What is in its place already stays
 * there. */
static moq_status move_codes(const job *j, const moq_source *source, int64_t columns,
                             moq_code_rule rule, uint8_t *out, moq_err *err) {
    const moq_weight *w = j->w;
    bool checked_before = rule == MOQ_CODES_ANY && w->checkpoint != MOQ_WEIGHT_E2M1;
    int64_t first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        moq_code_rows rows = moq_prepare_rows(source, p, first);
        moq_code_copy copy = {
            .codes = rows.data,
            .stride = rows.stride,
            .step = rows.step,
            .experts = moq_weight_matrices(w),
            .span = w->out_features * columns,
            .rows = w->partition[p],
            .columns = columns,
            .rule = rule,
            .out = out ? out + first * columns : NULL,
            .backwards = rule == MOQ_CODES_ANY,
            .found = checked_before ? j->note : j->found,
            .unless = checked_before ? j->found : NULL,
            .bad = j->bad,
            .first = first * columns,
        };
        bool there = copy.out == copy.codes && copy.rule == MOQ_CODES_ANY;
        if (is_somewhere_zero(j, p))
            MOQ_TRY(move_around_zeros(j, p, &copy, err));
        else if (!there)
            MOQ_TRY(moq_cuda_copy_codes(&copy, j->stream, err));
    }
    return MOQ_OK;
}

/* Looks at those that no intact checkpoint may hold some of: e4m3 weights, or block scales. */
static moq_status check_codes(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    if (w->checkpoint == MOQ_WEIGHT_E2M1)
        return move_codes(j, &j->sources->weight_scale, moq_weight_scale_columns(w),
                          MOQ_CODES_BLOCK_SCALE, NULL, err);
    return move_codes(j, &j->sources->weight, w->in_features, MOQ_CODES_E4M3, NULL, err);
}

/* The failure of the first bad one, of which there is one. */
static moq_status refuse_bad_code(job *j, moq_err *err) {
    bool e2m1 = j->w->checkpoint == MOQ_WEIGHT_E2M1;
    int64_t columns = e2m1 ? moq_weight_scale_columns(j->w) : j->w->in_features;
    uint64_t first = 0;
    void *memory;
    MOQ_TRY(moq_cuda_allocate(sizeof first, j->stream, &memory, err));
    j->bad = memory;
    moq_status status = moq_cuda_fill(memory, 0xff, sizeof first, j->stream, err);
    if (status == MOQ_OK)
        status = check_codes(j, err);
    if (status == MOQ_OK)
        status = moq_cuda_download(&first, memory, sizeof first, j->stream, err);
    j->bad = NULL;
    moq_cuda_release(memory, j->stream);
    MOQ_TRY(status);
    int64_t row = (int64_t)first / columns, rows = j->w->out_features;
    return moq_weight_name_expert(
        j->w, row / rows, moq_prepare_bad_code(j->w, row % rows, (int64_t)first % columns, err),
        err);
}

/* ---- scales ---- */

/* Where the scale of partition p is. */
static const void *scale_of(const moq_source *source, int32_t p) {
    const moq_tensor *t = &source->part[source->count == 1 ? 0 : p];
    bool several = source->count == 1 && moq_tensor_numel(t) > 1;
    return (const char *)t->data + (several ? (size_t)p * moq_dtype_size(t->dtype) : 0);
}

/* Bytes from there to the one of the next expert. */
static int64_t step_of(const moq_source *source, int32_t p) {
    return moq_source_step(source, source->count == 1 ? 0 : p);
}

/* Scales of rows, blocks or partitions that stay on the device, to `out` as float32, one for each
 * row or block; what they are is told. */
static moq_status copy_device_scales(const job *j, float *out, moq_err *err) {
    const moq_weight *w = j->w;
    const moq_source *source = &j->sources->weight_scale;
    bool blocks = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    bool spread = !blocks && !w->per_row_scale; /* each over the rows of its partition */
    for (int32_t p = 0; p < (spread ? w->partition_count : source->count); p++) {
        const moq_tensor *t = &source->part[source->count == 1 ? 0 : p];
        moq_scale_copy copy = {
            .scales = spread ? scale_of(source, p) : t->data,
            .dtype = t->dtype,
            .count = spread ? w->partition[p] : moq_tensor_numel(t),
            .step = spread ? 0 : 1,
            .experts = moq_weight_matrices(w),
            .from_step = step_of(source, p),
            .out = out,
            .out_step = scale_count(w),
            .bad = &j->found->bad_scale,
            .zero = &j->found->zero_scale,
        };
        MOQ_TRY(moq_cuda_copy_scales(&copy, j->stream, err));
        out += copy.count;
    }
    return MOQ_OK;
}

/* One scale for each row from those of partitions, which are on the host. */
static moq_status fill_rows(const job *j, float *out, moq_err *err) {
    const moq_weight *w = j->w;
    if (w->experts)
        return moq_cuda_upload(out, j->scales->factor,
                               (size_t)(w->experts * w->out_features) * sizeof(float), j->stream,
                               err);
    for (int32_t p = 0; p < w->partition_count; out += w->partition[p++])
        MOQ_TRY(moq_cuda_fill_floats(out, j->scales->weight[p], w->partition[p], j->stream, err));
    return MOQ_OK;
}

/* Scales of rows or blocks of all experts. */
static int64_t all_scales(const job *j) {
    return moq_weight_matrices(j->w) * scale_count(j->w);
}

/* The scales of rows or blocks to where they are wanted on the device. */
static moq_status place_scales(job *j, moq_err *err) {
    const moq_prepare_scales *scales = j->scales;
    size_t bytes = (size_t)all_scales(j) * sizeof(float);
    if (scales->on_device)
        return copy_device_scales(j, j->scale, err);
    if (scales->block)
        return moq_cuda_upload(j->scale, scales->block, bytes, j->stream, err);
    if (scales->per_row)
        return moq_cuda_upload(j->scale, scales->factor, bytes, j->stream, err);
    return fill_rows(j, j->scale, err);
}

/* From the workspace to outputs that are not fresh. */
static moq_status write_scales(const job *j, moq_err *err) {
    moq_scale_copy copy = {
        .scales = j->scale,
        .dtype = MOQ_DT_F32,
        .count = all_scales(j),
        .step = 1,
        .experts = 1,
        .out = j->factor ? j->params->of[MOQ_PARAM_OUTPUT_SCALE].data
                         : j->params->of[MOQ_PARAM_WEIGHT_SCALE].data,
        .found = j->note,
        .unless = j->found,
    };
    return moq_cuda_copy_scales(&copy, j->stream, err);
}

/* Those of x that are on the device: looked at, or copied, or both. */
static moq_status copy_input_scales(const job *j, bool look, bool copy, moq_err *err) {
    const moq_source *source = &j->sources->input_scale;
    float *out =
        copy ? j->params->of[MOQ_PARAM_INPUT_SCALE].data : NULL; /* NULL where they are not used */
    int32_t parts = j->w->partition_count;
    if (!j->scales->input_on_device || !(look || out))
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

/* Those of x that are on the host. */
static bool has_input_scales(const job *j) {
    return j->scales->input || j->scales->smooth;
}

static moq_status write_input_scales(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    size_t floats = (size_t)moq_weight_matrices(w) * sizeof(float);
    if (j->scales->input)
        MOQ_TRY(moq_cuda_upload(j->params->of[MOQ_PARAM_INPUT_SCALE].data, j->scales->input,
                                (size_t)w->partition_count * floats, j->stream, err));
    if (j->scales->smooth)
        MOQ_TRY(moq_cuda_upload(j->params->of[MOQ_PARAM_PRE_QUANT_SCALE].data, j->scales->smooth,
                                (size_t)w->in_features * floats, j->stream, err));
    return MOQ_OK;
}

/* ---- FP8 ---- */

static moq_status queue_fp8(const job *j, moq_err *err) {
    const moq_source *source = &j->sources->weight;
    int64_t k = j->w->in_features;
    uint8_t *out = j->params->of[MOQ_PARAM_WEIGHT].data;
    if (j->fresh)
        return move_codes(j, source, k, MOQ_CODES_E4M3, out, err);
    if (!j->checked)
        MOQ_TRY(check_codes(j, err));
    MOQ_TRY(move_codes(j, source, k, MOQ_CODES_ANY, out, err));
    return write_scales(j, err);
}

/* ---- packed NVFP4 ---- */

/* The factors of a stack's partitions to the workspace; what those that were on the device are is
 * told. */
static moq_status place_part_factors(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    const moq_source *source = &j->sources->weight_scale_2;
    int32_t parts = w->partition_count;
    if (!j->scales->on_device)
        return moq_cuda_upload(j->part_factor, j->scales->weight,
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

/* The rows of partition p and its factor, of all experts. */
static moq_pack_source pack_source(const job *j, int32_t p, int64_t first) {
    const moq_source *factors = &j->sources->weight_scale_2;
    moq_code_rows codes = moq_prepare_rows(&j->sources->weight, p, first);
    moq_code_rows scales = moq_prepare_rows(&j->sources->weight_scale, p, first);
    moq_pack_source source = {
        .codes = codes.data,
        .code_stride = codes.stride,
        .code_step = codes.step,
        .scales = scales.data,
        .scale_stride = scales.stride,
        .scale_step = scales.step,
        .rows = j->w->partition[p],
    };
    if (j->part_factor) {
        source.factor_at = j->part_factor + p;
        source.factor_dtype = MOQ_DT_F32;
    } else if (j->scales->on_device) {
        source.factor_at = scale_of(factors, p);
        source.factor_dtype = factors->part[factors->count == 1 ? 0 : p].dtype;
    } else {
        source.factor = j->scales->weight[p];
    }
    return source;
}

/* Packs the codes and block scales of all partitions at once: a slab may have rows of two. */
static moq_status pack(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    moq_params *params = j->params;
    int64_t first = 0;
    moq_pack_source *source = malloc((size_t)w->partition_count * sizeof *source);
    if (!source)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the partitions of a linear layer");
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++])
        source[p] = pack_source(j, p, first);
    moq_nvfp4_pack all = {
        .experts = moq_weight_matrices(w),
        .rows = w->out_features,
        .columns = w->in_features,
        .group = w->group_size,
        .source_count = w->partition_count,
        .source = source,
        .factor_step = w->partition_count,
        .checked = j->part_factor != NULL,
        .out = params->of[MOQ_PARAM_WEIGHT].data,
        .output_scale = params->of[MOQ_PARAM_OUTPUT_SCALE].data,
        .fold_scale = params->of[MOQ_PARAM_FOLD_SCALE].data,
        .found = j->note,
        .unless = j->fresh ? NULL : j->found,
    };
    moq_status status = moq_cuda_pack_nvfp4(&all, j->stream, err);
    free(source);
    return status;
}

static moq_status queue_packed(const job *j, moq_err *err) {
    if (j->part_factor)
        MOQ_TRY(place_part_factors(j, err));
    if (!j->fresh && !j->checked)
        MOQ_TRY(check_codes(j, err));
    return pack(j, err);
}

/* ---- swizzled NVFP4 ---- */

/* The block scales of each partition in swizzled order, those of an expert after the ones of the
 * expert before. */
static moq_status swizzle_scales(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    int64_t columns = moq_weight_scale_columns(w), across = moq_swizzle_across(columns), first = 0;
    int64_t span = moq_weight_block_rows(w) * across * MOQ_SWIZZLE_BYTES; /* of a matrix */
    uint8_t *out = j->params->of[MOQ_PARAM_WEIGHT_SCALE].data;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        moq_code_rows rows = moq_prepare_rows(&j->sources->weight_scale, p, first);
        moq_tensor plain = {.data = (void *)(uintptr_t)rows.data,
                            .device = w->device,
                            .dtype = MOQ_DT_E4M3,
                            .ndim = 3,
                            .shape = {moq_weight_matrices(w), w->partition[p], columns},
                            .stride = {rows.step, rows.stride, 1}};
        int64_t bytes = moq_swizzle_down(w->partition[p]) * across * MOQ_SWIZZLE_BYTES;
        MOQ_TRY(moq_cuda_swizzle_apart(&plain, out, span, j->stream, err));
        for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
            if (is_zero(j, e, p))
                MOQ_TRY(moq_cuda_fill(out + e * span, 0, (size_t)bytes, j->stream, err));
        }
        out += bytes;
    }
    return MOQ_OK;
}

static moq_status queue_swizzled(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    MOQ_TRY(fill_rows(j, j->params->of[MOQ_PARAM_OUTPUT_SCALE].data, err));
    MOQ_TRY(copy_input_scales(j, false, true, err));
    MOQ_TRY(write_input_scales(j, err));
    MOQ_TRY(move_codes(j, &j->sources->weight, w->in_features / 2, MOQ_CODES_ANY,
                       j->params->of[MOQ_PARAM_WEIGHT].data, err));
    return swizzle_scales(j, err);
}

/* ---- */

static bool is_swizzled(const moq_weight *w) {
    return w->weight == MOQ_WEIGHT_E2M1_SWIZZLED;
}

static moq_status queue_checks(const job *j, moq_err *err) {
    MOQ_TRY(copy_input_scales(j, true, false, err));
    if (j->part_factor)
        MOQ_TRY(place_part_factors(j, err));
    return j->checked ? MOQ_OK : check_codes(j, err);
}

/* All that can be queued before the wait. */
static moq_status queue(const job *j, moq_err *err) {
    if (is_swizzled(j->w) || j->only_checks)
        return queue_checks(j, err);
    if (!j->fresh)
        MOQ_TRY(copy_input_scales(j, true, false, err));
    MOQ_TRY(j->w->checkpoint == MOQ_WEIGHT_E2M1 ? queue_packed(j, err) : queue_fp8(j, err));
    MOQ_TRY(copy_input_scales(j, j->fresh, true, err));
    return j->fresh ? write_input_scales(j, err) : MOQ_OK;
}

/* ---- scales of zero ---- */

static bool has_zero(const float *scales, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (scales[i] == 0)
            return true;
    }
    return false;
}

/* Among the scales of the weight that are on the host. */
static bool has_zero_scale(const job *j) {
    const moq_prepare_scales *scales = j->scales;
    if (scales->on_device)
        return false;
    if (j->w->checkpoint == MOQ_WEIGHT_E2M1)
        return has_zero(scales->weight, moq_weight_matrices(j->w) * j->w->partition_count);
    return has_zero(scales->block ? scales->block : scales->factor, all_scales(j));
}

/* Rows of codes from the device, without gaps. */
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
static moq_status check_zero_part(const job *j, const moq_weight_sources *sources, int32_t p,
                                  int64_t first, moq_err *err) {
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

static moq_status check_zero_parts_of(const job *j, int64_t expert, moq_err *err) {
    const moq_weight_sources sources = moq_sources_of(j->sources, expert);
    int64_t first = 0;
    for (int32_t p = 0; p < j->w->partition_count; first += j->w->partition[p++]) {
        if (is_zero(j, expert, p))
            MOQ_TRY(check_zero_part(j, &sources, p, first, err));
    }
    return MOQ_OK;
}

static moq_status check_zero_parts(const job *j, moq_err *err) {
    /* if several are wrong, a scale is named first */
    MOQ_TRY(moq_prepare_bad_scale(j->w, j->sources, j->scales, j->stream, err));
    for (int64_t e = 0; e < moq_weight_matrices(j->w); e++) {
        moq_status status = check_zero_parts_of(j, e, err);
        if (status != MOQ_OK)
            return moq_weight_name_expert(j->w, e, status, err);
    }
    return MOQ_OK;
}

/* A partition of FP8 codes that lie without gaps on the host with the ones of the whole matrix. */
static moq_prepare_part part_on_host(const moq_weight *w, int32_t p, int64_t first,
                                     const uint8_t *codes) {
    int64_t k = w->in_features;
    return (moq_prepare_part){.index = p, .first = first, .codes = {codes + first * k, k, 0}};
}

/* FP8 codes of a matrix, from the device into `codes`, and checked there under the scales `home`.
 */
static moq_status download_codes(const job *j, const moq_source *source,
                                 const moq_prepare_scales *on_host, uint8_t *codes, moq_err *err) {
    const moq_weight *w = j->w;
    int64_t k = w->in_features, first = 0;
    for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
        const moq_prepare_part part = part_on_host(w, p, first, codes);
        MOQ_TRY(download_rows(moq_prepare_rows(source, p, first), w->partition[p], k,
                              codes + first * k, j->stream, err));
        MOQ_TRY(moq_prepare_check_part(w, &part, on_host, err));
    }
    return MOQ_OK;
}

/* All codes to `codes`, on the host, and checked there. */
static moq_status download_all_codes(const job *j, const moq_prepare_scales *on_host,
                                     uint8_t *codes, moq_err *err) {
    const moq_weight *w = j->w;
    int64_t span = w->out_features * w->in_features;
    for (int64_t e = 0; e < moq_weight_matrices(w); e++) {
        const moq_weight_sources from = moq_sources_of(j->sources, e);
        const moq_prepare_scales mine = moq_prepare_scales_of(w, on_host, e);
        moq_status status = download_codes(j, &from.weight, &mine, codes + e * span, err);
        if (status != MOQ_OK)
            return moq_weight_name_expert(w, e, status, err);
    }
    return MOQ_OK;
}

/* All codes by way of `codes`, on the host, where they were checked. */
static moq_status fill_on_host(const job *j, const moq_prepare_scales *on_host, uint8_t *codes,
                               moq_err *err) {
    const moq_weight *w = j->w;
    int64_t span = w->out_features * w->in_features, experts = moq_weight_matrices(w);
    for (int64_t e = 0; e < experts; e++) {
        const moq_prepare_scales mine = moq_prepare_scales_of(w, on_host, e);
        const moq_prepare_out out = {.weight = codes + e * span};
        int64_t first = 0;
        for (int32_t p = 0; p < w->partition_count; first += w->partition[p++]) {
            const moq_prepare_part part = part_on_host(w, p, first, out.weight);
            moq_prepare_write_part(w, &part, &mine, &out);
        }
    }
    moq_tensor *scale = on_host->block ? &j->params->of[MOQ_PARAM_WEIGHT_SCALE]
                                       : &j->params->of[MOQ_PARAM_OUTPUT_SCALE];
    MOQ_TRY(moq_cuda_upload(j->params->of[MOQ_PARAM_WEIGHT].data, codes, (size_t)(experts * span),
                            j->stream, err));
    return moq_cuda_upload(scale->data, on_host->block ? on_host->block : on_host->factor,
                           (size_t)all_scales(j) * sizeof(float), j->stream, err);
}

/* Weight processing of an FP8 layer with a scale of zero: on the host. */
static moq_status prepare_on_host(const job *j, moq_err *err) {
    const moq_weight *w = j->w;
    moq_prepare_scales on_host = {0};
    MOQ_TRY(moq_prepare_bad_scale(w, j->sources, j->scales, j->stream, err));
    uint8_t *codes = malloc((size_t)(moq_weight_matrices(w) * w->out_features * w->in_features));
    if (!codes)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the codes of a linear layer");
    moq_status status = moq_prepare_scales_to_host(w, j->sources, j->stream, &on_host, err);
    if (status == MOQ_OK)
        status = download_all_codes(j, &on_host, codes, err);
    if (status == MOQ_OK && !j->only_checks)
        status = fill_on_host(j, &on_host, codes, err);
    free(on_host.memory);
    free(codes);
    if (status != MOQ_OK || j->only_checks)
        return status;
    MOQ_TRY(forget_findings(j, err));
    MOQ_TRY(copy_input_scales(j, false, true, err));
    MOQ_TRY(write_input_scales(j, err));
    return moq_cuda_wait(j->stream, err);
}

/* Packing once more, with the factors of partitions on the host, and the codes under zeros looked
 * at. */
static moq_status pack_again(job *j, moq_err *err) {
    MOQ_TRY(moq_prepare_download_scales(j->w, j->sources, j->scales, j->stream, err));
    MOQ_TRY(check_zero_parts(j, err));
    MOQ_TRY(forget_findings(j, err));
    MOQ_TRY(queue(j, err));
    return moq_cuda_wait(j->stream, err);
}

/* ---- */

static moq_status refuse_bad_scales(const job *j, moq_err *err) {
    if (!j->note->bad_scale && !j->note->bad_input_scale)
        return MOQ_OK;
    return moq_prepare_bad_scale(j->w, j->sources, j->scales, j->stream, err);
}

static moq_status prepare(job *j, moq_err *err) {
    bool e2m1 = j->w->checkpoint == MOQ_WEIGHT_E2M1, swizzled = is_swizzled(j->w);
    if (has_zero_scale(j)) {
        if (!e2m1)
            return prepare_on_host(j, err);
        MOQ_TRY(check_zero_parts(j, err));
    }
    MOQ_TRY(forget_findings(j, err));
    if (!e2m1)
        MOQ_TRY(place_scales(j, err));
    MOQ_TRY(queue(j, err));
    MOQ_TRY(moq_cuda_wait(j->stream, err));
    MOQ_TRY(refuse_bad_scales(j, err));
    if (j->note->zero_scale && !e2m1)
        return prepare_on_host(j, err);
    if (j->note->zero_scale)
        MOQ_TRY(pack_again(j, err));
    if (j->note->bad_code)
        return refuse_bad_code(j, err);
    if (j->only_checks || (!swizzled && (j->fresh || !has_input_scales(j))))
        return MOQ_OK;
    MOQ_TRY(swizzled ? queue_swizzled(j, err) : write_input_scales(j, err));
    return moq_cuda_wait(j->stream, err);
}

moq_status moq_prepare_on_cuda(const moq_weight *w, const moq_weight_sources *sources,
                               moq_prepare_scales *scales, moq_prepare_mode mode,
                               moq_params *params, moq_err *err) {
    moq_findings *note;
    moq_err after;
    MOQ_TRY(moq_cuda_take_note(&note, err));
    moq_tensor *out = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK ? &params->of[MOQ_PARAM_WEIGHT_SCALE]
                                                             : &params->of[MOQ_PARAM_OUTPUT_SCALE];
    float *scale = mode.fresh ? out->data : (float *)((char *)mode.workspace + SCALES_AT);
    bool sees = !mode.fresh && !mode.only_checks && !is_swizzled(w);
    bool packed_stack = w->experts && w->weight == MOQ_WEIGHT_E2M1_PACKED;
    job j = {
        .w = w,
        .sources = sources,
        .scales = scales,
        .params = params,
        .stream = mode.stream,
        .fresh = mode.fresh,
        .only_checks = mode.only_checks,
        .checked = mode.checked,
        .note = note,
        .found = sees ? mode.workspace : note,
        .scale = scale,
        .factor = scale_count(w) == 0 || w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK ? NULL : scale,
        .part_factor = packed_stack ? (float *)((char *)mode.workspace + SCALES_AT) : NULL,
    };
    /* Also since kernels of linears read weights before the kernel ahead of them is known to have
     * ended, nothing is left to do when this returns. */
    moq_status status = prepare(&j, err);
    if (status != MOQ_OK)
        moq_cuda_wait(mode.stream, &after);
    moq_cuda_return_note(note);
    return status;
}
