/* The call of a linear: shapes and layouts checked, a kernel picked, launched. See
 * ops/linear_call.h. */
#include "ops/linear_call.h"

#include "cpu/cpu_low_rank.h"
#include "cuda/linear/cuda_low_rank.h"
#include "ops/target.h"

#include <string.h>

static moq_status check_x(const moq_linear_spec *spec, const moq_tensor *x, moq_err *err) {
    char shape[128];
    moq_dtype dtype = moq_linear_x_dtype(spec);
    if (x->dtype != dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "x", "expected %s, got %s", moq_dtype_name(dtype),
                           moq_dtype_name(x->dtype));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != spec->in_features)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x", "expected shape [..., %lld], got %s",
                           (long long)spec->in_features, moq_shape_text(x, shape, sizeof shape));
    return MOQ_OK;
}

moq_status moq_linear_output_shape(const moq_linear_spec *spec, const moq_tensor *x, int64_t *shape,
                                   moq_err *err) {
    MOQ_TRY(check_x(spec, x, err));
    memcpy(shape, x->shape, (size_t)x->ndim * sizeof *shape);
    shape[x->ndim - 1] = spec->out_features;
    return MOQ_OK;
}

static moq_status check_y(const moq_linear_spec *spec, const moq_tensor *x, const moq_tensor *y,
                          moq_err *err) {
    char got[128], expected[128];
    moq_tensor wanted = *x;
    wanted.shape[wanted.ndim - 1] = spec->out_features;
    if (y->dtype != spec->dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "out", "expected %s, got %s",
                           moq_dtype_name(spec->dtype), moq_dtype_name(y->dtype));
    if (y->ndim != x->ndim ||
        memcmp(y->shape, wanted.shape, (size_t)y->ndim * sizeof *y->shape) != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "out", "expected shape %s, got %s",
                           moq_shape_text(&wanted, expected, sizeof expected),
                           moq_shape_text(y, got, sizeof got));
    if (moq_tensor_numel(y) > 0 && spec->out_features > 1 && y->stride[y->ndim - 1] != 1)
        return moq_fail_of(err, MOQ_ERR_BUFFER, "out",
                           "expected contiguous rows, got a stride of %lld",
                           (long long)y->stride[y->ndim - 1]);
    return MOQ_OK;
}

static moq_status check_bias(const moq_linear_spec *spec, const moq_tensor *bias, moq_err *err) {
    char shape[128];
    if (!bias)
        return MOQ_OK;
    if (bias->dtype != spec->dtype && bias->dtype != MOQ_DT_F32)
        return moq_fail_of(err, MOQ_ERR_TYPE, "bias", "expected %s or float32, got %s",
                           moq_dtype_name(spec->dtype), moq_dtype_name(bias->dtype));
    if (bias->ndim != 1 || bias->shape[0] != spec->out_features)
        return moq_fail_of(err, MOQ_ERR_VALUE, "bias", "expected shape [%lld], got %s",
                           (long long)spec->out_features,
                           moq_shape_text(bias, shape, sizeof shape));
    if (!moq_tensor_is_contiguous(bias))
        return moq_fail_of(err, MOQ_ERR_BUFFER, "bias", "expected a contiguous tensor");
    return MOQ_OK;
}

/* ---- the call ---- */

/* ---- the low-rank part ---- */

static void reserve_low_rank(moq_linear_job *j) {
    const moq_low_rank *l = &j->low_rank;
    bool on_cpu = l->spec->device.kind == MOQ_CPU;
    if (!l->spec->rank)
        return;
    j->inner_at =
        moq_job_reserve(&j->job, on_cpu ? moq_cpu_low_rank_bytes(l) : moq_cuda_low_rank_bytes(l));
    j->addend_at = moq_job_reserve(&j->job, l->m * l->spec->out_features * (int64_t)sizeof(float));
}

/* Computes what the kernel is to add to its outputs. */
static moq_status find_addend(moq_linear_job *j, moq_err *err) {
    moq_low_rank *l = &j->low_rank;
    if (!l->spec->rank)
        return MOQ_OK;
    l->x = j->call.x;
    l->stream = j->job.stream;
    l->inner = (float *)((char *)j->job.workspace + j->inner_at);
    l->addend = (float *)((char *)j->job.workspace + j->addend_at);
    j->call.addend = l->addend;
    return l->spec->device.kind == MOQ_CPU ? moq_cpu_low_rank(l, err) : moq_cuda_low_rank(l, err);
}

/* Runs the kernel, with the device current. */
static moq_status run(moq_job *job, moq_err *err) {
    moq_linear_job *j = (moq_linear_job *)job;
    j->call.stream = job->stream;
    j->call.workspace = job->workspace;
    moq_matrix_place(job, &j->y);
    MOQ_TRY(moq_matrix_fill(job, &j->x, err));
    MOQ_TRY(find_addend(j, err));
    MOQ_TRY(j->kernel->run(&j->call, err));
    return moq_matrix_hand_back(job, &j->y, err);
}

/* Finds the matrices and what the job works in: first the kernel's part, then copies. */
static void place(moq_linear_job *j) {
    const float *smoothing = j->kernel->kernel.smooths ? NULL : j->call.pre_quant_scale;
    if (smoothing)
        j->call.pre_quant_scale = NULL;
    moq_matrix_open_input(&j->x, j->call.x, smoothing);
    moq_matrix_open_output(&j->y, j->call.y);
    j->call.x = moq_matrix_tensor(&j->x);
    j->call.y = moq_matrix_tensor(&j->y);
    if (j->kernel->workspace)
        moq_job_reserve(&j->job, j->kernel->workspace(&j->call));
    moq_matrix_reserve(&j->job, &j->x);
    moq_matrix_reserve(&j->job, &j->y);
    reserve_low_rank(j);
}

moq_status moq_linear_open_choice(const moq_linear_spec *spec, const moq_params *params,
                                  const moq_tensor *x, const moq_tensor *bias, const moq_tensor *y,
                                  int64_t m, moq_choice choice, moq_linear_job *job, moq_err *err) {
    moq_input_mode input = moq_linear_input_without_scale(spec);
    job->kernel = moq_linear_kernel_at(choice.kernel);
    if (!params->of[MOQ_PARAM_INPUT_SCALE].data && input != spec->input) {
        job->spec = *spec;
        job->spec.input = input;
        spec = &job->spec;
    }
    job->call = (moq_linear_call){
        .spec = spec,
        .m = m,
        .x = x,
        .y = y,
        .weight = params->of[MOQ_PARAM_WEIGHT].data,
        .weight_scale = params->of[MOQ_PARAM_WEIGHT_SCALE].data,
        .output_scale = params->of[MOQ_PARAM_OUTPUT_SCALE].data,
        .fold_scale = params->of[MOQ_PARAM_FOLD_SCALE].data,
        .input_scale = params->of[MOQ_PARAM_INPUT_SCALE].data,
        .pre_quant_scale = params->of[MOQ_PARAM_PRE_QUANT_SCALE].data,
        .bias = bias ? bias->data : NULL,
        .bias_dtype = bias ? bias->dtype : MOQ_DT_NONE,
        .config = choice.config,
    };
    job->low_rank = (moq_low_rank){.spec = spec,
                                   .m = m,
                                   .lora_a = params->of[MOQ_PARAM_LORA_A].data,
                                   .lora_b = params->of[MOQ_PARAM_LORA_B].data};
    moq_job_open(&job->job, spec->device, run);
    if (spec->device.kind == MOQ_CUDA) {
        MOQ_TRY(moq_check_target(spec->device, &spec->target, err));
        MOQ_TRY(moq_check_address(job->call.weight, "weight", err));
    }
    place(job);
    return MOQ_OK;
}

moq_status moq_linear_open(moq_plan *plan, const moq_params *params, const moq_tensor *x,
                           const moq_tensor *bias, const moq_tensor *y, moq_linear_job *job,
                           moq_err *err) {
    const moq_linear_spec *spec = plan->problem;
    moq_choice choice;
    MOQ_TRY(check_x(spec, x, err));
    MOQ_TRY(check_y(spec, x, y, err));
    MOQ_TRY(check_bias(spec, bias, err));
    MOQ_TRY(moq_check_params(plan->param, plan->param_count, params, "params", err));
    int64_t m = moq_tensor_numel(x) / spec->in_features;
    if (m == 0) {
        moq_job_open(&job->job, spec->device, NULL);
        return MOQ_OK;
    }
    bool scaled = params->of[MOQ_PARAM_INPUT_SCALE].data != NULL;
    MOQ_TRY(moq_plan_pick(plan, m, scaled, &choice, err));
    return moq_linear_open_choice(spec, params, x, bias, y, m, choice, job, err);
}
