/* Weight processing on a CUDA device, of a matrix or of all experts of a stack in the launches of
 * one matrix: codes stay there, and so do scales that are there, which kernels look at. Other
 * scales, and pre_quant_scale, are read and checked on the host first.
 *
 * There is one wait, at the end. Kernels tell the host in a note (cuda/tensor/cuda_prepare.h) that
 * something is wrong; only then it is looked for once more, to be named.
 *
 * Outputs that nobody has seen yet are written while codes and scales are checked. Into others goes
 * a second pass, which writes nothing if the first, over FP8 codes or NVFP4 block scales, has told
 * something in the workspace.
 *
 * A weight scale of zero, which a layer of zeros has, is met seldom and costs time: the codes under
 * it are looked at on the host, and FP8 codes are written from there. Where the scale is on the
 * device, kernels meet it on the way, and the work is done once more with that known.
 *
 * For swizzled NVFP4 weights the host waits after the checks, too. Checks alone are done where
 * several weights are to be written or none.
 *
 * Factors of partitions of packed NVFP4 go with the launch of a matrix; those of a stack lie in the
 * workspace, float32 [experts, partitions], copied and checked before. */
#include "ops/weight_device.h"

#include "core/swizzle.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_layout.h"
#include "cuda/tensor/cuda_nvfp4_pack.h"
#include "ops/weight_codes.h"
#include "ops/weight_mode.h"

#include <stdlib.h>

/* ---- the workspace ---- */

/* Findings come first, and scales begin here. */
#define SCALES_AT 16
_Static_assert(sizeof(moq_findings) <= SCALES_AT, "what was found comes first");

/* Floats of the workspace. */
static int64_t kept_scales(const moq_weight *w, bool fresh) {
    int64_t experts = moq_weight_matrices(w);
    if (w->experts && w->weight == MOQ_WEIGHT_E2M1_PACKED)
        return experts * w->partition_count;
    return fresh ? 0 : experts * moq_prepare_scale_count(w);
}

int64_t moq_prepare_workspace_on_cuda(const moq_weight *w, bool fresh) {
    int64_t kept = kept_scales(w, fresh);
    return fresh && kept == 0 ? 0 : SCALES_AT + kept * (int64_t)sizeof(float);
}

static moq_status forget_findings(const moq_prepare_job *j, moq_err *err) {
    *j->note = (moq_findings){0};
    if (j->found == j->note)
        return MOQ_OK;
    return moq_cuda_fill(j->found, 0, sizeof *j->found, j->stream, err);
}

/* ---- codes ---- */

/* True for a partition that means zero in at least one expert. */
static bool is_somewhere_zero(const moq_prepare_job *j, int32_t p) {
    bool zero = false;
    for (int64_t e = 0; e < moq_weight_matrices(j->w) && !zero; e++)
        zero = moq_prepare_is_zero(j, e, p);
    return zero;
}

/* Narrows a copy of all experts to one of them. */
static moq_code_copy copy_of(const moq_code_copy *all, int64_t expert) {
    moq_code_copy copy = *all;
    copy.experts = 1;
    copy.codes += expert * all->step;
    copy.out = all->out ? all->out + expert * all->span : NULL;
    copy.first += expert * all->span;
    return copy;
}

/* Moves a partition that means zero in some experts, expert by expert. */
static moq_status move_around_zeros(const moq_prepare_job *j, int32_t p, const moq_code_copy *all,
                                    moq_err *err) {
    for (int64_t e = 0; e < all->experts; e++) {
        moq_code_copy copy = copy_of(all, e);
        bool there = copy.out == copy.codes && copy.rule == MOQ_CODES_ANY;
        if (!moq_prepare_is_zero(j, e, p) && !there)
            MOQ_TRY(moq_cuda_copy_codes(&copy, j->stream, err));
        else if (moq_prepare_is_zero(j, e, p) && copy.out)
            MOQ_TRY(moq_cuda_fill(copy.out, 0, (size_t)(copy.rows * copy.columns), j->stream, err));
    }
    return MOQ_OK;
}

/* Copies or checks (out NULL) the codes of a source, rows of `columns` bytes, partition by
 * partition. Codes of a partition that means zero become zeros; codes in their place already stay.
 */
static moq_status move_codes(const moq_prepare_job *j, const moq_source *source, int64_t columns,
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

/* Looks for bytes that no intact checkpoint holds, among e4m3 weights or block scales. */
static moq_status check_codes(const moq_prepare_job *j, moq_err *err) {
    const moq_weight *w = j->w;
    if (w->checkpoint == MOQ_WEIGHT_E2M1)
        return move_codes(j, &j->sources->weight_scale, moq_weight_scale_columns(w),
                          MOQ_CODES_BLOCK_SCALE, NULL, err);
    return move_codes(j, &j->sources->weight, w->in_features, MOQ_CODES_E4M3, NULL, err);
}

/* Finds the first bad code, of which there is one, and refuses it. */
static moq_status refuse_bad_code(moq_prepare_job *j, moq_err *err) {
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
    return moq_weight_fail_in_expert(
        j->w, row / rows, moq_prepare_bad_code(j->w, row % rows, (int64_t)first % columns, err),
        err);
}

/* ---- FP8 ---- */

static moq_status queue_fp8(const moq_prepare_job *j, moq_err *err) {
    const moq_source *source = &j->sources->weight;
    int64_t k = j->w->in_features;
    uint8_t *out = j->params->of[MOQ_PARAM_WEIGHT].data;
    if (j->fresh)
        return move_codes(j, source, k, MOQ_CODES_E4M3, out, err);
    if (!j->checked)
        MOQ_TRY(check_codes(j, err));
    MOQ_TRY(move_codes(j, source, k, MOQ_CODES_ANY, out, err));
    return moq_prepare_write_scales(j, err);
}

/* ---- packed NVFP4 ---- */

/* The rows of partition p and its factor, of all experts. */
static moq_pack_source pack_source(const moq_prepare_job *j, int32_t p, int64_t first) {
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
    } else if (j->weight_stays) {
        source.factor_at = moq_prepare_scale_at(factors, p);
        source.factor_dtype = factors->part[factors->count == 1 ? 0 : p].dtype;
    } else {
        source.factor = j->scales.weight[p];
    }
    return source;
}

/* Packs the codes and block scales of all partitions at once: a slab may have rows of two. */
static moq_status pack(const moq_prepare_job *j, moq_err *err) {
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
        .row_factor = j->row_factor,
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

static moq_status queue_packed(const moq_prepare_job *j, moq_err *err) {
    if (j->part_factor)
        MOQ_TRY(moq_prepare_place_part_factors(j, err));
    if (!j->fresh && !j->checked)
        MOQ_TRY(check_codes(j, err));
    return pack(j, err);
}

/* ---- swizzled NVFP4 ---- */

/* The block scales of each partition in swizzled order, those of an expert after the ones of the
 * expert before. */
static moq_status swizzle_scales(const moq_prepare_job *j, moq_err *err) {
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
            if (moq_prepare_is_zero(j, e, p))
                MOQ_TRY(moq_cuda_fill(out + e * span, 0, (size_t)bytes, j->stream, err));
        }
        out += bytes;
    }
    return MOQ_OK;
}

static moq_status queue_swizzled(const moq_prepare_job *j, moq_err *err) {
    const moq_weight *w = j->w;
    MOQ_TRY(moq_prepare_fill_rows(j, j->params->of[MOQ_PARAM_OUTPUT_SCALE].data, err));
    MOQ_TRY(moq_prepare_copy_input_scales(j, false, true, err));
    MOQ_TRY(moq_prepare_write_input_scales(j, err));
    MOQ_TRY(move_codes(j, &j->sources->weight, w->in_features / 2, MOQ_CODES_ANY,
                       j->params->of[MOQ_PARAM_WEIGHT].data, err));
    return swizzle_scales(j, err);
}

/* ---- the steps ---- */

static bool is_swizzled(const moq_weight *w) {
    return w->weight == MOQ_WEIGHT_E2M1_SWIZZLED;
}

static moq_status queue_checks(const moq_prepare_job *j, moq_err *err) {
    MOQ_TRY(moq_prepare_copy_input_scales(j, true, false, err));
    if (j->part_factor)
        MOQ_TRY(moq_prepare_place_part_factors(j, err));
    return j->checked ? MOQ_OK : check_codes(j, err);
}

/* Queues all that can be queued before the wait. */
static moq_status queue(const moq_prepare_job *j, moq_err *err) {
    if (is_swizzled(j->w) || j->only_checks)
        return queue_checks(j, err);
    if (!j->fresh)
        MOQ_TRY(moq_prepare_copy_input_scales(j, true, false, err));
    MOQ_TRY(j->w->checkpoint == MOQ_WEIGHT_E2M1 ? queue_packed(j, err) : queue_fp8(j, err));
    MOQ_TRY(moq_prepare_copy_input_scales(j, j->fresh, true, err));
    return j->fresh ? moq_prepare_write_input_scales(j, err) : MOQ_OK;
}

/* Writes a layer with a scale of zero from the host, and its scales of x. */
static moq_status prepare_on_host(moq_prepare_job *j, moq_err *err) {
    MOQ_TRY(moq_prepare_on_host(j, err));
    if (j->only_checks)
        return MOQ_OK;
    MOQ_TRY(forget_findings(j, err));
    MOQ_TRY(moq_prepare_copy_input_scales(j, false, true, err));
    MOQ_TRY(moq_prepare_write_input_scales(j, err));
    return moq_cuda_wait(j->stream, err);
}

/* Packs once more, with the factors of partitions on the host, after a look at the codes under
 * zeros. */
static moq_status pack_again(moq_prepare_job *j, moq_err *err) {
    MOQ_TRY(moq_prepare_download_scales(j, err));
    MOQ_TRY(moq_prepare_check_zero_parts(j, err));
    MOQ_TRY(forget_findings(j, err));
    MOQ_TRY(queue(j, err));
    return moq_cuda_wait(j->stream, err);
}

static moq_status refuse_bad_scales(const moq_prepare_job *j, moq_err *err) {
    if (!j->note->bad_scale && !j->note->bad_input_scale)
        return MOQ_OK;
    return moq_prepare_bad_scale(j, err);
}

static moq_status prepare(moq_prepare_job *j, moq_err *err) {
    bool e2m1 = j->w->checkpoint == MOQ_WEIGHT_E2M1, swizzled = is_swizzled(j->w);
    if (moq_prepare_has_zero_scale(j)) {
        if (!e2m1)
            return prepare_on_host(j, err);
        MOQ_TRY(moq_prepare_check_zero_parts(j, err));
    }
    MOQ_TRY(forget_findings(j, err));
    if (!e2m1)
        MOQ_TRY(moq_prepare_place_scales(j, err));
    MOQ_TRY(queue(j, err));
    MOQ_TRY(moq_cuda_wait(j->stream, err));
    MOQ_TRY(refuse_bad_scales(j, err));
    if (j->note->zero_scale && !e2m1)
        return prepare_on_host(j, err);
    if (j->note->zero_scale)
        MOQ_TRY(pack_again(j, err));
    if (j->note->bad_code)
        return refuse_bad_code(j, err);
    if (j->only_checks || (!swizzled && (j->fresh || !moq_prepare_has_input_scales(j))))
        return MOQ_OK;
    MOQ_TRY(swizzled ? queue_swizzled(j, err) : moq_prepare_write_input_scales(j, err));
    return moq_cuda_wait(j->stream, err);
}

moq_status moq_prepare_on_cuda(const moq_weight *w, const moq_weight_sources *sources,
                               moq_prepare_mode mode, moq_params *params, moq_err *err) {
    moq_findings *note;
    moq_err after;
    MOQ_TRY(moq_cuda_take_note(&note, err));
    bool blocks = w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK;
    moq_tensor *out = &params->of[blocks ? MOQ_PARAM_WEIGHT_SCALE : MOQ_PARAM_OUTPUT_SCALE];
    float *scale = mode.fresh ? out->data : (float *)((char *)mode.workspace + SCALES_AT);
    bool sees = !mode.fresh && !mode.only_checks && !is_swizzled(w);
    bool packed_stack = w->experts && w->weight == MOQ_WEIGHT_E2M1_PACKED;
    moq_prepare_job j = {
        .w = w,
        .sources = sources,
        .params = params,
        .stream = mode.stream,
        .fresh = mode.fresh,
        .only_checks = mode.only_checks,
        .checked = mode.checked,
        .row_factor = mode.row_factor,
        .note = note,
        .found = sees ? mode.workspace : note,
        .scale = scale,
        .factor = moq_prepare_scale_count(w) == 0 || blocks ? NULL : scale,
        .part_factor = packed_stack ? (float *)((char *)mode.workspace + SCALES_AT) : NULL,
    };
    moq_status status = moq_prepare_read_job(&j, err);
    /* Nothing is left to do when this returns: kernels of linears may read weights before the
     * kernel ahead of them has ended. */
    if (status == MOQ_OK)
        status = prepare(&j, err);
    if (status != MOQ_OK)
        moq_cuda_wait(mode.stream, &after);
    free(j.scales.memory);
    moq_cuda_return_note(note);
    return status;
}
