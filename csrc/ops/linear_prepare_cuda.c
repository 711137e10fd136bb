/* Weight processing on a CUDA device: the codes stay there, the scales were read on the host.
 *
 * Into tensors that somebody may already look at, two passes over FP8 codes: the first checks, the
 * second writes. Into fresh ones both at once. Of NVFP4 only the block scales can be wrong, a ninth
 * of the bytes, so they are always looked at first. The workspace holds the position of the first
 * bad code and, where every row has a scale of its own, the factors of the rows. */
#include "ops/linear_prepare.h"

#include "cuda/cuda.h"
#include "cuda/prepare.h"

/* In the workspace. */
#define FACTORS_AT 16

typedef struct {
    const moq_linear_spec *spec;
    const moq_linear_sources *sources;
    const moq_prepare_scales *scales;
    moq_linear_params *params;
    void *stream;
    uint64_t *bad; /* on the device: position of the first bad code, ~0 for none */
    float *factor; /* on the device: [N], or NULL without a scale a row */
} job;

int64_t moq_prepare_workspace(const moq_linear_spec *spec) {
    int64_t factors = spec->per_row_scale ? spec->out_features : 0;
    return spec->device.kind == MOQ_CPU ? 0 : FACTORS_AT + factors * (int64_t)sizeof(float);
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
    return j->scales->weight && !j->scales->per_row && j->scales->weight[p] == 0;
}

/* Copies or checks (out NULL) the codes of a source, rows of `columns` bytes, partition by
 * partition. Those that mean zero become zeros. */
static moq_status move_codes(const job *j, const moq_source *source, int64_t columns,
                             moq_code_rule rule, uint8_t *out, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    int64_t first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows rows = moq_prepare_rows(source, p, first);
        bool zeros = j->factor && has_zero(j->scales->factor + first, spec->partition[p]);
        moq_code_copy copy = {
            .codes = rows.data,
            .stride = rows.stride,
            .rows = spec->partition[p],
            .columns = columns,
            .rule = rule,
            .factor = zeros ? j->factor + first : NULL,
            .out = out ? out + first * columns : NULL,
            .first = first * columns,
            .bad = j->bad,
        };
        if (!is_zero(j, p))
            MOQ_TRY(moq_cuda_copy_codes(&copy, j->stream, err));
        else if (out)
            MOQ_TRY(moq_cuda_fill(copy.out, 0, (size_t)(copy.rows * columns), j->stream, err));
    }
    return MOQ_OK;
}

/* Waits for the checks so far. */
static moq_status refuse_bad_codes(const job *j, int64_t columns, moq_err *err) {
    uint64_t bad;
    MOQ_TRY(moq_cuda_download(&bad, j->bad, sizeof bad, j->stream, err));
    if (bad == UINT64_MAX)
        return MOQ_OK;
    return moq_prepare_bad_code(j->spec, (int64_t)bad / columns, (int64_t)bad % columns, err);
}

static moq_status prepare_fp8(const job *j, bool fresh, moq_err *err) {
    const moq_source *source = &j->sources->weight;
    int64_t k = j->spec->in_features;
    uint8_t *out = j->params->weight.data;
    MOQ_TRY(move_codes(j, source, k, MOQ_CODES_E4M3, fresh ? out : NULL, err));
    MOQ_TRY(refuse_bad_codes(j, k, err));
    return fresh ? MOQ_OK : move_codes(j, source, k, MOQ_CODES_ANY, out, err);
}

/* Folds the block scales into e4m3 codes; the factors of the rows take the powers of two. */
static moq_status fold(const job *j, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    int64_t k = spec->in_features, first = 0;
    for (int32_t p = 0; p < spec->partition_count; first += spec->partition[p++]) {
        moq_code_rows codes = moq_prepare_rows(&j->sources->weight, p, first);
        moq_code_rows scales = moq_prepare_rows(&j->sources->weight_scale, p, first);
        uint8_t *out = (uint8_t *)j->params->weight.data + first * k;
        moq_fold part = {
            .codes = codes.data,
            .code_stride = codes.stride,
            .scales = scales.data,
            .scale_stride = scales.stride,
            .rows = spec->partition[p],
            .columns = k,
            .group = spec->group_size,
            .factor = j->scales->weight[p],
            .out = out,
            .out_factor = (float *)j->params->output_scale.data + first,
        };
        if (is_zero(j, p))
            MOQ_TRY(moq_cuda_fill(out, 0, (size_t)(part.rows * k), j->stream, err));
        else
            MOQ_TRY(moq_cuda_fold_e2m1(&part, j->stream, err));
    }
    return MOQ_OK;
}

static moq_status check_block_scales(const job *j, moq_err *err) {
    int64_t columns = moq_linear_scale_columns(j->spec);
    MOQ_TRY(move_codes(j, &j->sources->weight_scale, columns, MOQ_CODES_BLOCK_SCALE, NULL, err));
    return refuse_bad_codes(j, columns, err);
}

static moq_status copy_e2m1(const job *j, moq_err *err) {
    MOQ_TRY(move_codes(j, &j->sources->weight, j->spec->in_features / 2, MOQ_CODES_ANY,
                       j->params->weight.data, err));
    return move_codes(j, &j->sources->weight_scale, moq_linear_scale_columns(j->spec),
                      MOQ_CODES_ANY, j->params->weight_scale.data, err);
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

static moq_status write_scales(const job *j, moq_err *err) {
    const moq_linear_spec *spec = j->spec;
    size_t blocks = (size_t)(moq_linear_block_rows(spec) * moq_linear_scale_columns(spec));
    if (j->scales->factor)
        MOQ_TRY(write_factors(j, err));
    if (j->scales->block)
        MOQ_TRY(moq_cuda_upload(j->params->weight_scale.data, j->scales->block,
                                blocks * sizeof(float), j->stream, err));
    if (j->scales->input)
        MOQ_TRY(moq_cuda_upload(j->params->input_scale.data, j->scales->input,
                                (size_t)spec->partition_count * sizeof(float), j->stream, err));
    return MOQ_OK;
}

moq_status moq_prepare_on_cuda(const moq_linear_spec *spec, const moq_linear_sources *sources,
                               const moq_prepare_scales *scales, moq_prepare_way way,
                               moq_linear_params *params, moq_err *err) {
    bool rows = spec->per_row_scale;
    job j = {
        .spec = spec,
        .sources = sources,
        .scales = scales,
        .params = params,
        .stream = way.stream,
        .bad = way.workspace,
        .factor = rows ? (float *)((char *)way.workspace + FACTORS_AT) : NULL,
    };
    MOQ_TRY(moq_cuda_fill(j.bad, 0xff, sizeof *j.bad, j.stream, err));
    if (rows)
        MOQ_TRY(moq_cuda_upload(j.factor, scales->factor,
                                (size_t)spec->out_features * sizeof(float), j.stream, err));
    if (spec->checkpoint != MOQ_WEIGHT_E2M1) {
        MOQ_TRY(prepare_fp8(&j, way.fresh, err));
        return write_scales(&j, err);
    }
    MOQ_TRY(check_block_scales(&j, err));
    MOQ_TRY(write_scales(&j, err));
    return spec->weight == MOQ_WEIGHT_E4M3_ROW ? fold(&j, err) : copy_e2m1(&j, err);
}
