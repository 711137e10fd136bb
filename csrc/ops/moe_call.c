/* The call of experts: shapes and layouts checked, a kernel picked, run. See ops/moe_call.h. */
#include "ops/moe_call.h"

#include "cuda/tensor/cuda_rows.h"
#include "ops/target.h"

#include <string.h>

/* ---- checks ---- */

static moq_status check_x(const moq_moe_spec *spec, const moq_tensor *x, moq_err *err) {
    char shape[128];
    moq_dtype dtype = moq_linear_x_dtype(&spec->w13);
    int64_t columns = moq_linear_x_columns(&spec->w13);
    if (x->dtype != dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "x", "expected %s, got %s", moq_dtype_name(dtype),
                           moq_dtype_name(x->dtype));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != columns)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x", "expected shape [..., %lld], got %s",
                           (long long)columns, moq_shape_text(x, shape, sizeof shape));
    return MOQ_OK;
}

/* True if a tensor has x's leading extents, then so many columns. */
static bool is_beside_x(const moq_tensor *x, int64_t columns, const moq_tensor *t) {
    size_t leading = (size_t)(x->ndim - 1) * sizeof *t->shape;
    return t->ndim == x->ndim && memcmp(t->shape, x->shape, leading) == 0 &&
           t->shape[t->ndim - 1] == columns;
}

/* The shape that is_beside_x asks for, in words. */
static const char *text_beside_x(const moq_tensor *x, int64_t columns, char *buffer, size_t size) {
    moq_tensor wanted = *x;
    wanted.shape[wanted.ndim - 1] = columns;
    return moq_shape_text(&wanted, buffer, size);
}

/* The scales beside codes, where they have some. */
static moq_status check_x_scale(const moq_moe_spec *spec, const moq_tensor *x,
                                const moq_tensor *scale, moq_err *err) {
    char expected[128], got[128];
    int64_t count = moq_moe_x_scales(spec);
    moq_dtype dtype = moq_moe_x_scale_dtype(spec);
    if (count == 0 && scale)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x_scale", "expected None, %s",
                           spec->w13.quantized_input
                               ? "x was quantized with w13_input_scale"
                               : "the layer was made without quantized_input");
    if (count == 0)
        return MOQ_OK;
    if (!scale)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x_scale", "missing, of %s %s beside the codes of x",
                           moq_dtype_name(dtype),
                           text_beside_x(x, count, expected, sizeof expected));
    if (scale->dtype != dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "x_scale", "expected %s, got %s",
                           moq_dtype_name(dtype), moq_dtype_name(scale->dtype));
    if (!is_beside_x(x, count, scale))
        return moq_fail_of(err, MOQ_ERR_VALUE, "x_scale", "expected shape %s, got %s",
                           text_beside_x(x, count, expected, sizeof expected),
                           moq_shape_text(scale, got, sizeof got));
    return MOQ_OK;
}

/* A tensor of the layer's slots: x's leading extents, then top_k. */
static moq_status check_slots(const moq_moe_spec *spec, const moq_tensor *x, const moq_tensor *t,
                              const char *name, moq_err *err) {
    char expected[128], got[128];
    if (is_beside_x(x, spec->top_k, t))
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected shape %s (top_k is %d), got %s",
                       text_beside_x(x, spec->top_k, expected, sizeof expected), (int)spec->top_k,
                       moq_shape_text(t, got, sizeof got));
}

static moq_status check_routing(const moq_moe_spec *spec, const moq_moe_inputs *in, moq_err *err) {
    if (in->weights->dtype != MOQ_DT_F32)
        return moq_fail_of(err, MOQ_ERR_TYPE, "topk_weights", "expected float32, got %s",
                           moq_dtype_name(in->weights->dtype));
    if (in->ids->dtype != MOQ_DT_I32 && in->ids->dtype != MOQ_DT_I64)
        return moq_fail_of(err, MOQ_ERR_TYPE, "topk_ids", "expected int32 or int64, got %s",
                           moq_dtype_name(in->ids->dtype));
    MOQ_TRY(check_slots(spec, in->x, in->weights, "topk_weights", err));
    MOQ_TRY(check_slots(spec, in->x, in->ids, "topk_ids", err));
    if (in->weights_on_input && spec->top_k != 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, "apply_router_weight_on_input",
                           "expected top_k = 1, the layer has %d", (int)spec->top_k);
    if (in->weights_on_input && spec->w13.quantized_input)
        return moq_fail_of(err, MOQ_ERR_VALUE, "apply_router_weight_on_input",
                           "codes cannot be multiplied; do it before x "
                           "is quantized, and pass topk_weights of 1");
    return MOQ_OK;
}

/* Numbers below 0 say that an expert is elsewhere; others are here. */
static moq_status check_map(const moq_moe_spec *spec, const moq_tensor *map, moq_err *err) {
    char shape[128];
    if (!map && spec->global_experts != spec->experts)
        return moq_fail_of(err, MOQ_ERR_VALUE, "expert_map",
                           "missing, %d of %d experts are here (global_num_experts)",
                           (int)spec->experts, (int)spec->global_experts);
    if (!map)
        return MOQ_OK;
    if (map->dtype != MOQ_DT_I32)
        return moq_fail_of(err, MOQ_ERR_TYPE, "expert_map", "expected int32, got %s",
                           moq_dtype_name(map->dtype));
    if (map->ndim != 1 || map->shape[0] != spec->global_experts)
        return moq_fail_of(err, MOQ_ERR_VALUE, "expert_map", "expected shape [%d], got %s",
                           (int)spec->global_experts, moq_shape_text(map, shape, sizeof shape));
    if (!moq_tensor_is_contiguous(map))
        return moq_fail_of(err, MOQ_ERR_BUFFER, "expert_map", "expected a contiguous tensor");
    for (int64_t i = 0; map->device.kind == MOQ_CPU && i < map->shape[0]; i++) {
        int32_t local = ((const int32_t *)map->data)[i];
        if (local >= spec->experts)
            return moq_fail_of(err, MOQ_ERR_VALUE, "expert_map",
                               "expected numbers below num_experts = %d, got %d at index "
                               "%lld",
                               (int)spec->experts, (int)local, (long long)i);
    }
    return MOQ_OK;
}

static moq_status check_y(const moq_moe_spec *spec, const moq_tensor *x, const moq_tensor *y,
                          moq_err *err) {
    char got[128], expected[128];
    moq_dtype dtype = spec->w13.dtype;
    int64_t hidden = spec->w13.in_features;
    if (y->dtype != dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "out", "expected %s, got %s", moq_dtype_name(dtype),
                           moq_dtype_name(y->dtype));
    if (!is_beside_x(x, hidden, y))
        return moq_fail_of(err, MOQ_ERR_VALUE, "out", "expected shape %s, got %s",
                           text_beside_x(x, hidden, expected, sizeof expected),
                           moq_shape_text(y, got, sizeof got));
    if (moq_tensor_numel(y) > 0 && y->shape[y->ndim - 1] > 1 && y->stride[y->ndim - 1] != 1)
        return moq_fail_of(err, MOQ_ERR_BUFFER, "out",
                           "expected contiguous rows, got a stride of %lld",
                           (long long)y->stride[y->ndim - 1]);
    return MOQ_OK;
}

/* ---- the call ---- */

/* Runs the kernel, with the device current. */
static moq_status run(moq_job *job, moq_err *err) {
    moq_moe_job *j = (moq_moe_job *)job;
    j->call.stream = job->stream;
    j->call.workspace = job->workspace;
    moq_matrix_place(job, &j->y);
    MOQ_TRY(moq_matrix_fill(job, &j->x, err));
    if (j->call.accumulate && j->y.copied) /* what is added to */
        MOQ_TRY(moq_cuda_gather_rows(j->y.given, &j->y.tensor, job->stream, err));
    MOQ_TRY(j->kernel->run(&j->call, err));
    return moq_matrix_hand_back(job, &j->y, err);
}

/* Finds the matrices and what the job works in: first the kernel's part, then copies. */
static void place(moq_moe_job *j) {
    moq_matrix_open_input(&j->x, j->call.x, NULL);
    moq_matrix_open_output(&j->y, j->call.y);
    j->call.x = moq_matrix_tensor(&j->x);
    j->call.y = moq_matrix_tensor(&j->y);
    if (j->kernel->workspace)
        moq_job_reserve(&j->job, j->kernel->workspace(&j->call));
    moq_matrix_reserve(&j->job, &j->x);
    moq_matrix_reserve(&j->job, &j->y);
}

static moq_moe_weight weight_at(const moq_params *params, int place) {
    const moq_tensor *of = params->of + place;
    return (moq_moe_weight){
        .weight = of[MOQ_PARAM_WEIGHT].data,
        .weight_scale = of[MOQ_PARAM_WEIGHT_SCALE].data,
        .output_scale = of[MOQ_PARAM_OUTPUT_SCALE].data,
        .fold_scale = of[MOQ_PARAM_FOLD_SCALE].data,
        .input_scale = of[MOQ_PARAM_INPUT_SCALE].data,
        .pre_quant_scale = of[MOQ_PARAM_PRE_QUANT_SCALE].data,
        .bias = of[MOQ_PARAM_BIAS].data,
    };
}

/* The spec of a call: x, and what is between the projections, are quantized by token where there is
 * no scale and the algorithm says so. */
static const moq_moe_spec *spec_of_call(const moq_moe_spec *spec, const moq_params *params,
                                        moq_moe_job *job) {
    bool scales[2] = {params->of[MOQ_PARAM_OF_W13 + MOQ_PARAM_INPUT_SCALE].data,
                      params->of[MOQ_PARAM_OF_W2 + MOQ_PARAM_INPUT_SCALE].data};
    if ((scales[0] && scales[1]) || !spec->w13.by_token)
        return spec;
    job->spec = *spec;
    if (!scales[0])
        job->spec.w13.input = moq_linear_input_without_scale(&spec->w13);
    if (!scales[1])
        job->spec.w2.input = moq_linear_input_without_scale(&spec->w2);
    return &job->spec;
}

moq_status moq_moe_open_choice(const moq_moe_spec *spec, const moq_params *params,
                               const moq_moe_inputs *in, moq_choice choice, moq_moe_job *job,
                               moq_err *err) {
    job->kernel = moq_moe_kernel_at(choice.kernel);
    spec = spec_of_call(spec, params, job);
    job->call = (moq_moe_call){
        .spec = spec,
        .tokens = moq_tensor_numel(in->x) / moq_linear_x_columns(&spec->w13),
        .x = in->x,
        .x_scale = in->x_scale,
        .y = in->y,
        .weights = in->weights,
        .ids = in->ids,
        .expert_map = in->expert_map ? in->expert_map->data : NULL,
        .weights_on_input = in->weights_on_input,
        .accumulate = in->accumulate,
        .w13 = weight_at(params, MOQ_PARAM_OF_W13),
        .w2 = weight_at(params, MOQ_PARAM_OF_W2),
        .config = choice.config,
    };
    moq_job_open(&job->job, spec->w13.device, run);
    if (spec->w13.device.kind == MOQ_CUDA) {
        MOQ_TRY(moq_check_target(spec->w13.device, &spec->w13.target, err));
        MOQ_TRY(moq_check_address(job->call.w13.weight, "w13_weight", err));
        MOQ_TRY(moq_check_address(job->call.w2.weight, "w2_weight", err));
    }
    place(job);
    return MOQ_OK;
}

/* Static scales of activations stand for all experts, so there is none that could be found from
 * the rows of one. */
static moq_status check_scales(const moq_moe_spec *spec, const moq_params *params, moq_err *err) {
    moq_input_mode mode = spec->w13.input;
    bool given = params->of[MOQ_PARAM_OF_W13 + MOQ_PARAM_INPUT_SCALE].data &&
                 params->of[MOQ_PARAM_OF_W2 + MOQ_PARAM_INPUT_SCALE].data;
    bool by_token = spec->w13.by_token && !spec->w13.quantized_input;
    if (given || by_token || (mode != MOQ_INPUT_E4M3_TENSOR && mode != MOQ_INPUT_NVFP4))
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, "params",
                       "expected \"w13_input_scale\" and \"w2_input_scale\", %s with compute "
                       "\"%s\" quantizes activations with them",
                       spec->w13.algo, moq_compute_name(spec->w13.compute));
}

moq_status moq_moe_open(moq_plan *plan, const moq_params *params, const moq_moe_inputs *in,
                        moq_moe_job *job, moq_err *err) {
    const moq_moe_spec *spec = plan->problem;
    moq_choice choice;
    MOQ_TRY(check_x(spec, in->x, err));
    MOQ_TRY(check_x_scale(spec, in->x, in->x_scale, err));
    MOQ_TRY(check_routing(spec, in, err));
    MOQ_TRY(check_map(spec, in->expert_map, err));
    MOQ_TRY(check_y(spec, in->x, in->y, err));
    MOQ_TRY(moq_check_params(plan->param, plan->param_count, params, "params", err));
    MOQ_TRY(check_scales(spec, params, err));
    int64_t tokens = moq_tensor_numel(in->x) / moq_linear_x_columns(&spec->w13);
    if (tokens == 0) {
        moq_job_open(&job->job, spec->w13.device, NULL);
        return MOQ_OK;
    }
    MOQ_TRY(moq_plan_pick(plan, tokens, true, &choice, err));
    return moq_moe_open_choice(spec, params, in, choice, job, err);
}
