/* Operation route: see route_call.h. */
#include "ops/route_call.h"

#include "cpu/cpu_route.h"
#include "cpu/float_mode.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_route.h"
#include "ops/check.h"

#include <math.h>
#include <string.h>

static const char *const NAMES[] = {
    [MOQ_ROUTE_SOFTMAX] = "softmax",
    [MOQ_ROUTE_TOPK_SOFTMAX] = "topk_softmax",
    [MOQ_ROUTE_SIGMOID] = "sigmoid",
    [MOQ_ROUTE_SQRTSOFTPLUS] = "sqrtsoftplus",
};

moq_status moq_route_scoring_from_name(const char *name, moq_route_scoring *out, moq_err *err) {
    for (int i = 0; i < (int)(sizeof NAMES / sizeof *NAMES); i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            *out = (moq_route_scoring)i;
            return MOQ_OK;
        }
    }
    return moq_fail_of(err, MOQ_ERR_VALUE, "scoring",
                       "expected 'softmax', 'topk_softmax', 'sigmoid' or 'sqrtsoftplus', "
                       "got '%s'",
                       name);
}

static moq_status check_logits(const moq_tensor *logits, moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_activation(logits, "router_logits", err));
    int64_t experts = logits->ndim > 0 ? logits->shape[logits->ndim - 1] : 0;
    if (experts < 1 || experts > MOQ_ROUTE_EXPERTS)
        return moq_fail_of(err, MOQ_ERR_VALUE, "router_logits",
                           "expected a last extent of 1 to %d experts, got shape %s",
                           MOQ_ROUTE_EXPERTS, moq_shape_text(logits, shape, sizeof shape));
    return MOQ_OK;
}

static moq_status check_groups(const moq_route *route, moq_err *err) {
    if (route->groups < 1 || route->experts % route->groups != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "num_groups",
                           "expected a divisor of the %d experts, got %d", route->experts,
                           route->groups);
    if (route->top_groups < 1 || route->top_groups > route->groups)
        return moq_fail_of(err, MOQ_ERR_VALUE, "topk_groups",
                           "expected 1 to num_groups = %d, got %d", route->groups,
                           route->top_groups);
    return MOQ_OK;
}

static moq_status check_top_k(const moq_route *route, moq_err *err) {
    int32_t most = route->experts / route->groups * route->top_groups;
    if (most > MOQ_ROUTE_TOP_K)
        most = MOQ_ROUTE_TOP_K;
    if (route->top_k >= 1 && route->top_k <= most)
        return MOQ_OK;
    return moq_fail_of(
        err, MOQ_ERR_VALUE, "top_k", "expected 1 to %d for %d of %d groups of %d, got %d", most,
        route->top_groups, route->groups, route->experts / route->groups, route->top_k);
}

static moq_status check_bias(const moq_route *route, moq_err *err) {
    const moq_tensor *bias = &route->bias;
    char shape[128];
    if (bias->ndim < 0)
        return MOQ_OK;
    if (route->scoring == MOQ_ROUTE_TOPK_SOFTMAX)
        return moq_fail_of(err, MOQ_ERR_VALUE, "correction_bias",
                           "expected None with scoring 'topk_softmax', which has no "
                           "scores before experts are chosen, got a tensor");
    MOQ_TRY(moq_check_device(bias, "correction_bias", route->logits.device, err));
    MOQ_TRY(moq_check_activation(bias, "correction_bias", err));
    if (bias->ndim != 1 || bias->shape[0] != route->experts)
        return moq_fail_of(err, MOQ_ERR_VALUE, "correction_bias", "expected shape [%d], got %s",
                           route->experts, moq_shape_text(bias, shape, sizeof shape));
    return MOQ_OK;
}

static moq_status check_padding(const moq_route *route, moq_err *err) {
    const moq_tensor *padding = &route->padding, *logits = &route->logits;
    char shape[128];
    if (padding->ndim < 0)
        return MOQ_OK;
    MOQ_TRY(moq_check_device(padding, "padding", logits->device, err));
    if (padding->dtype != MOQ_DT_BOOL)
        return moq_fail_of(err, MOQ_ERR_TYPE, "padding", "expected bool, got %s",
                           moq_dtype_name(padding->dtype));
    bool fits = padding->ndim == logits->ndim - 1 && moq_tensor_is_contiguous(padding);
    for (int i = 0; fits && i < padding->ndim; i++)
        fits = padding->shape[i] == logits->shape[i];
    if (!fits)
        return moq_fail_of(err, MOQ_ERR_VALUE, "padding",
                           "expected the shape of router_logits without its last axis, and "
                           "no gaps, got %s",
                           moq_shape_text(padding, shape, sizeof shape));
    return MOQ_OK;
}

moq_status moq_plan_route(const moq_route *asked, moq_route_plan *plan, moq_err *err) {
    moq_route *route = &plan->route;
    const moq_tensor *logits = &route->logits;
    *plan = (moq_route_plan){.route = *asked};
    MOQ_TRY(check_logits(logits, err));
    route->experts = (int32_t)logits->shape[logits->ndim - 1];
    if (route->top_groups == 0 && route->groups == 1)
        route->top_groups = 1;
    if (route->top_groups == 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "topk_groups",
                           "expected 1 to num_groups = %d, got none", route->groups);
    MOQ_TRY(check_groups(route, err));
    MOQ_TRY(check_top_k(route, err));
    MOQ_TRY(check_bias(route, err));
    MOQ_TRY(check_padding(route, err));
    if (!(route->factor > 0.0f) || isinf(route->factor))
        return moq_fail_of(err, MOQ_ERR_VALUE, "routed_scaling_factor",
                           "expected a positive finite number, got %g", (double)route->factor);
    int64_t shape[MOQ_MAX_NDIM];
    memcpy(shape, logits->shape, sizeof shape);
    shape[logits->ndim - 1] = route->top_k;
    plan->weights = moq_describe(MOQ_DT_F32, logits->ndim, shape);
    plan->ids = moq_describe(MOQ_DT_I32, logits->ndim, shape);
    plan->weights.device = plan->ids.device = logits->device;
    return MOQ_OK;
}

static moq_status run_on_cuda(const moq_route *route, float *weights, int32_t *ids, void *stream,
                              moq_err *err) {
    bool entered;
    MOQ_TRY(moq_cuda_enter(route->logits.device.index, &entered, err));
    moq_status status = moq_cuda_route(route, weights, ids, stream, err);
    moq_cuda_leave(entered);
    return status;
}

moq_status moq_run_route(const moq_route_plan *plan, const moq_tensor *weights,
                         const moq_tensor *ids, void *stream, moq_err *err) {
    const moq_route *route = &plan->route;
    const moq_tensor *inputs[] = {&route->logits, route->bias.ndim >= 0 ? &route->bias : NULL,
                                  route->padding.ndim >= 0 ? &route->padding : NULL, weights};
    MOQ_TRY(moq_check_output(weights, "out[0]", &plan->weights, inputs, 3, err));
    MOQ_TRY(moq_check_output(ids, "out[1]", &plan->ids, inputs, 4, err));
    if (moq_tensor_numel(ids) == 0)
        return MOQ_OK;
    if (route->logits.device.kind == MOQ_CUDA)
        return run_on_cuda(route, weights->data, ids->data, stream, err);
    unsigned flushes = moq_enter_float_mode();
    moq_cpu_route(route, weights->data, ids->data);
    moq_leave_float_mode(flushes);
    return MOQ_OK;
}
