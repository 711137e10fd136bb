/* Weight processing on a CUDA device: the codes stay there, the scales were read on the host.
 *
 * Into tensors that somebody may already look at, two passes over FP8 codes: the first checks, the
 * second writes. Into fresh ones both at once. Of NVFP4 only the block scales can be wrong, a ninth
 * of the bytes. Scales of rows or blocks that are on the device stay there: a kernel reads them,
 * none of a row is taken to be zero, and if one is, the codes are gone through once more. Those of
 * partitions stay there too where fresh outputs are packed: the kernel that packs looks at them.
 * The workspace holds what the kernels have found and the scales that may stay, as float32. */
#include "ops/linear_prepare.h"

#include "core/swizzle.h"
#include "cuda/cuda.h"
#include "cuda/layout.h"
#include "cuda/nvfp4_pack.h"
#include "cuda/prepare.h"

/* In the workspace. */
#define SCALES_AT 16
_Static_assert(sizeof(moq_findings) <= SCALES_AT, "what was found comes first");

typedef struct {
    const moq_linear_spec *spec;
    const moq_linear_sources *sources;
    const moq_prepare_scales *scales;
    moq_linear_params *params;
    void *stream;
    moq_findings *found; /* on the device */
    float *scale;        /* of rows, blocks or packed partitions, there too */
    float *factor;       /* the same where they are of rows, else NULL */
    bool zero_rows;      /* among those */
} job;

int64_t moq_prepare_workspace(const moq_linear_spec *spec) {
    int64_t scales = moq_prepare_scale_count(spec) * (int64_t)sizeof(float);
    return spec->device.kind == MOQ_CPU ? 0 : SCALES_AT + scales;
}

static bool has_zero(const float *factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (factor[i] == 0)
            return true;
    }
    return false;
}

/* True for a partition that means zero, whatever its codes are. */
static bool is_zero(const job *j, int32_t p) {
    const moq_prepare_scales *scales = j->scales;
    return scales->weight && !scales->per_row && !scales->on_device && scales->weight[p] == 0;
}

/* Copies or checks (out NULL) the codes of a source, rows of `columns` bytes, partition by
 * partition. Those that mean zero become zeros. What is in its place already stays there. */
static moq_status move_codes(const job *j, const moq_source *source, int64_t columns,
                             moq_code_rule rule, uint8_t *out, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows rows = moq_prepare_rows(source, p, first);
        moq_code_copy copy = {
            .codes = rows.data,
            .stride = rows.stride,
            .rows = spec->partition[p],
            .columns = columns,
            .rule = rule,
            .factor = j->zero_rows ? j->factor + first : NULL,
            .out = out ? out + first * columns : NULL,
            .backwards = rule == MOQ_CODES_ANY,
            .first = first * columns,
            .bad = &j->found->bad_code,
        };
        bool there = copy.out == copy.codes && copy.rule == MOQ_CODES_ANY && !copy.factor;
        if (!is_zero(j, p) && !there)
            MOQ_TRY(moq_cuda_copy_codes(&copy, j->stream, err));
        else if (is_zero(j, p) && out)
            MOQ_TRY(moq_cuda_fill(copy.out, 0, (size_t)(copy.rows * columns), j->stream, err));
    }
    return MOQ_OK;
}

static moq_status forget_findings(const job *j, moq_err *err) {
    return moq_cuda_fill(j->found, 0xff, sizeof *j->found, j->stream, err);
}

/* Waits for the checks so far. */
static moq_status read_findings(const job *j, moq_findings *found, moq_err *err) {
    return moq_cuda_download(found, j->found, sizeof *found, j->stream, err);
}

static moq_status refuse_bad_code(const job *j, const moq_findings *found, int64_t columns,
                                  moq_err *err) {
    if (found->bad_code == UINT64_MAX)
        return MOQ_OK;
    return moq_prepare_bad_code(j->spec, (int64_t)found->bad_code / columns,
                                (int64_t)found->bad_code % columns, err);
}

static moq_status prepare_fp8(job *j, bool fresh, moq_err *err) {
    const moq_source *source = &j->sources->weight;
    int64_t k = j->spec->in_features;
    uint8_t *out = j->params->weight.data;
    moq_findings found;
    MOQ_TRY(move_codes(j, source, k, MOQ_CODES_E4M3, fresh ? out : NULL, err));
    MOQ_TRY(read_findings(j, &found, err));
    if (!(found.scales & MOQ_BAD_SCALE))
        MOQ_TRY(moq_prepare_bad_scale(j->spec, j->sources, j->stream, err));
    if (j->factor && !(found.scales & MOQ_ZERO_SCALE)) {
        j->zero_rows = true;
        MOQ_TRY(forget_findings(j, err));
        MOQ_TRY(move_codes(j, source, k, MOQ_CODES_E4M3, fresh ? out : NULL, err));
        MOQ_TRY(read_findings(j, &found, err));
    }
    MOQ_TRY(refuse_bad_code(j, &found, k, err));
    return fresh ? MOQ_OK : move_codes(j, source, k, MOQ_CODES_ANY, out, err);
}

/* Packs the codes and block scales of all partitions at once: a slab may have rows of two. */
static moq_status pack(const job *j, bool checks, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    moq_linear_params *params = j->params;
    int64_t first = 0;
    moq_nvfp4_pack all = {
        .rows = spec->out_features,
        .columns = spec->in_features,
        .group = spec->group_size,
        .source_count = spec->partition_count,
        .factors = j->scales->on_device ? j->scale : NULL,
        .out = params->weight.data,
        .output_scale = params->output_scale.data,
        .largest = params->fold_scale.data,
        .bad = checks ? &j->found->bad_code : NULL,
    };
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows codes = moq_prepare_rows(&j->sources->weight, p, first);
        moq_code_rows scales = moq_prepare_rows(&j->sources->weight_scale, p, first);
        all.source[p] = (moq_pack_source){
            .codes = codes.data,
            .code_stride = codes.stride,
            .scales = scales.data,
            .scale_stride = scales.stride,
            .rows = spec->partition[p],
            .factor = j->scales->on_device ? 0 : j->scales->weight[p],
        };
    }
    if (!moq_linear_folds(spec))
        return moq_cuda_pack_nvfp4(&all, j->stream, err);
    MOQ_TRY(moq_cuda_fill(all.largest, 0, (size_t)all.rows * sizeof(float), j->stream, err));
    MOQ_TRY(moq_cuda_pack_nvfp4(&all, j->stream, err));
    return moq_cuda_find_fold_scales(all.largest, all.output_scale, all.rows, j->stream, err);
}

static moq_status check_block_scales(const job *j, moq_err *err) {
    int64_t columns = moq_linear_scale_columns(j->spec);
    moq_findings found;
    MOQ_TRY(move_codes(j, &j->sources->weight_scale, columns, MOQ_CODES_BLOCK_SCALE, NULL, err));
    MOQ_TRY(read_findings(j, &found, err));
    return refuse_bad_code(j, &found, columns, err);
}

/* Fresh outputs are packed while they are checked, and nothing is waited for in between. */
static moq_status prepare_packed(const job *j, bool fresh, moq_err *err) {
    moq_findings found;
    if (!fresh) {
        MOQ_TRY(check_block_scales(j, err));
        return pack(j, false, err);
    }
    MOQ_TRY(pack(j, true, err));
    MOQ_TRY(read_findings(j, &found, err));
    if (!(found.scales & MOQ_BAD_SCALE))
        MOQ_TRY(moq_prepare_bad_scale(j->spec, j->sources, j->stream, err));
    return refuse_bad_code(j, &found, moq_linear_scale_columns(j->spec), err);
}

/* The block scales of each partition in swizzled order. */
static moq_status swizzle_scales(const job *j, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    int64_t columns = moq_linear_scale_columns(spec), first = 0;
    uint8_t *out = j->params->weight_scale.data;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows rows = moq_prepare_rows(&j->sources->weight_scale, p, first);
        moq_tensor plain = {.data = (void *)(uintptr_t)rows.data,
                            .device = spec->device,
                            .dtype = MOQ_DT_E4M3,
                            .ndim = 2,
                            .shape = {spec->partition[p], columns},
                            .stride = {rows.stride, 1}};
        int64_t bytes =
            moq_swizzle_down(spec->partition[p]) * moq_swizzle_across(columns) * MOQ_SWIZZLE_BYTES;
        if (is_zero(j, p))
            MOQ_TRY(moq_cuda_fill(out, 0, (size_t)bytes, j->stream, err));
        else
            MOQ_TRY(moq_cuda_swizzle(&plain, out, j->stream, err));
        out += bytes;
    }
    return MOQ_OK;
}

static moq_status copy_e2m1(const job *j, moq_err *err) {
    MOQ_TRY(move_codes(j, &j->sources->weight, j->spec->in_features / 2, MOQ_CODES_ANY,
                       j->params->weight.data, err));
    return swizzle_scales(j, err);
}

/* The factor of each row, not yet folded. */
static moq_status write_factors(const job *j, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    float *out = j->params->output_scale.data;
    if (j->factor)
        return moq_cuda_copy(out, j->factor, (size_t)spec->out_features * sizeof(float), j->stream,
                             err);
    for (int32_t p = 0; p < spec->partition_count; out += spec->partition[p++])
        MOQ_TRY(
            moq_cuda_fill_floats(out, j->scales->weight[p], spec->partition[p], j->stream, err));
    return MOQ_OK;
}

/* Those of x. */
static moq_status write_input_scales(const job *j, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    if (j->scales->input)
        MOQ_TRY(moq_cuda_upload(j->params->input_scale.data, j->scales->input,
                                (size_t)spec->partition_count * sizeof(float), j->stream, err));
    if (j->scales->smooth)
        MOQ_TRY(moq_cuda_upload(j->params->pre_quant_scale.data, j->scales->smooth,
                                (size_t)spec->in_features * sizeof(float), j->stream, err));
    return MOQ_OK;
}

static moq_status write_scales(const job *j, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    size_t count = (size_t)moq_prepare_scale_count(spec);
    if (!j->scales->block)
        MOQ_TRY(write_factors(j, err));
    else
        MOQ_TRY(moq_cuda_copy(j->params->weight_scale.data, j->scale, count * sizeof(float),
                              j->stream, err));
    return write_input_scales(j, err);
}

/* Scales on the device to the workspace, as float32. */
static moq_status place_device_scales(const job *j, moq_err *err) {
    bool packed = j->spec->weight == MOQ_WEIGHT_E2M1_PACKED;
    const moq_source *source = packed ? &j->sources->weight_scale_2 : &j->sources->weight_scale;
    float *out = j->scale;
    for (int32_t i = 0; i < source->count; i++) {
        const moq_tensor *t = &source->part[i];
        int64_t own = moq_tensor_numel(t);
        int32_t times = packed && source->count == 1 && own == 1 ? j->spec->partition_count : 1;
        for (; times > 0; times--, out += own) /* one may serve all partitions */
            MOQ_TRY(moq_cuda_read_scales(t->data, t->dtype, own, out, &j->found->scales, j->stream,
                                         err));
    }
    return MOQ_OK;
}

/* The scales of rows or blocks to the workspace, and those of partitions if they stay there. */
static moq_status place_scales(job *j, moq_err *err) {
    const float *host = j->factor ? j->scales->factor : j->scales->block;
    size_t count = (size_t)moq_prepare_scale_count(j->spec);
    if (j->scales->on_device)
        return place_device_scales(j, err);
    if (!host)
        return MOQ_OK;
    j->zero_rows = j->factor && has_zero(host, (int64_t)count);
    return moq_cuda_upload(j->scale, host, count * sizeof(float), j->stream, err);
}

static moq_status process(job *j, bool fresh, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    MOQ_TRY(forget_findings(j, err));
    MOQ_TRY(place_scales(j, err));
    if (spec->weight == MOQ_WEIGHT_E2M1_PACKED) {
        MOQ_TRY(prepare_packed(j, fresh, err));
        return write_input_scales(j, err);
    }
    if (spec->checkpoint != MOQ_WEIGHT_E2M1) {
        MOQ_TRY(prepare_fp8(j, fresh, err));
        return write_scales(j, err);
    }
    MOQ_TRY(check_block_scales(j, err));
    MOQ_TRY(write_scales(j, err));
    return copy_e2m1(j, err);
}

moq_status moq_prepare_on_cuda(const moq_linear_spec *spec, const moq_linear_sources *sources,
                               const moq_prepare_scales *scales, moq_prepare_way way,
                               moq_linear_params *params, moq_err *err) {
    float *scale = (float *)((char *)way.workspace + SCALES_AT);
    job j = {
        .spec = spec,
        .sources = sources,
        .scales = scales,
        .params = params,
        .stream = way.stream,
        .found = way.workspace,
        .scale = scale,
        .factor = spec->per_row_scale ? scale : NULL,
    };
    MOQ_TRY(process(&j, way.fresh, err));
    /* Kernels of linears read weights before the kernel ahead of them is known to have ended. */
    return moq_cuda_wait(way.stream, err);
}
