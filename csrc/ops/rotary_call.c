/* Operation rotary_embedding: see rotary_call.h. */
#include "ops/rotary_call.h"

#include "cpu/cpu_rotary.h"
#include "cpu/float_mode.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_rotary.h"
#include "ops/check.h"

/* Angles [B or 1, T, D] as [B, T, 1, D]. */
static moq_status take_angles(const moq_tensor *angles, const char *name, const moq_tensor *x,
                              moq_tensor *out, moq_err *err) {
    char got[128];
    int64_t batch = x->shape[0], tokens = x->shape[1], columns = x->shape[3];
    if (angles->dtype != x->dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s as x, got %s",
                           moq_dtype_name(x->dtype), moq_dtype_name(angles->dtype));
    if (angles->ndim != 3 || (angles->shape[0] != batch && angles->shape[0] != 1) ||
        angles->shape[1] != tokens || angles->shape[2] != columns)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected shape [1, %lld, %lld] or [%lld, ...], got %s",
                           (long long)tokens, (long long)columns, (long long)batch,
                           moq_shape_text(angles, got, sizeof got));
    MOQ_TRY(moq_check_device(angles, name, x->device, err));
    *out = *angles;
    out->ndim = 4;
    out->shape[0] = batch;
    out->shape[2] = 1;
    out->shape[3] = columns;
    out->stride[0] = angles->shape[0] == 1 ? 0 : angles->stride[0];
    out->stride[2] = 0;
    out->stride[3] = angles->stride[2];
    return MOQ_OK;
}

moq_status moq_plan_rotary(const moq_tensor *x, const moq_tensor *cos, const moq_tensor *sin,
                           moq_rotary *plan, moq_err *err) {
    char got[128];
    MOQ_TRY(moq_check_activation(x, "x", err));
    if (x->ndim != 4 || x->shape[3] % 2 != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x",
                           "expected shape [batch, tokens, heads, an even number], got %s",
                           moq_shape_text(x, got, sizeof got));
    plan->x = *x;
    MOQ_TRY(take_angles(cos, "cos", x, &plan->cos, err));
    return take_angles(sin, "sin", x, &plan->sin, err);
}

static moq_status run_on_cuda(const moq_rotary *plan, const moq_tensor *out, void *stream,
                              moq_err *err) {
    bool entered;
    MOQ_TRY(moq_cuda_enter(plan->x.device.index, &entered, err));
    moq_status status = moq_cuda_rotate(plan, out->data, stream, err);
    moq_cuda_leave(entered);
    return status;
}

moq_status moq_run_rotary(const moq_rotary *plan, const moq_tensor *out, void *stream,
                          moq_err *err) {
    const moq_tensor *inputs[] = {&plan->x, &plan->cos, &plan->sin};
    moq_tensor expected = moq_describe(plan->x.dtype, plan->x.ndim, plan->x.shape);
    expected.device = plan->x.device;
    MOQ_TRY(moq_check_output(out, "out", &expected, inputs, 3, err));
    if (moq_tensor_numel(out) == 0)
        return MOQ_OK;
    if (plan->x.device.kind == MOQ_CUDA)
        return run_on_cuda(plan, out, stream, err);
    unsigned flushes = moq_enter_float_mode();
    moq_status status = moq_cpu_rotate(plan, out->data, err);
    moq_leave_float_mode(flushes);
    return status;
}
