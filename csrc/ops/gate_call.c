/* Operation router_logits: see gate_call.h. */
#include "ops/gate_call.h"

#include "cuda/cuda.h"
#include "cuda/tensor/cuda_gate.h"
#include "ops/check.h"

#define STEP 32 /* columns */

static moq_status check_rows(const moq_tensor *t, const char *name, moq_err *err) {
    char got[128];
    if (t->device.kind != MOQ_CUDA)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "router_logits runs on CUDA devices only");
    MOQ_TRY(moq_check_usable(t, name, err));
    if (t->dtype != MOQ_DT_BF16 && t->dtype != MOQ_DT_F16)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected bfloat16 or float16, got %s",
                           moq_dtype_name(t->dtype));
    if (t->ndim != 2 || t->shape[1] % STEP != 0 || t->shape[1] == 0 ||
        (t->shape[0] > 0 && t->stride[1] != 1))
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected rows without gaps of a multiple of %d values, got %s", STEP,
                           moq_shape_text(t, got, sizeof got));
    if ((uintptr_t)t->data % 16 != 0 || (t->shape[0] > 1 && t->stride[0] % 8 != 0))
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected rows at multiples of 16 bytes");
    return MOQ_OK;
}

moq_status moq_plan_gate(const moq_tensor *x, const moq_tensor *weight, moq_dtype dtype,
                         moq_gate *plan, moq_err *err) {
    char got[128];
    MOQ_TRY(check_rows(x, "x", err));
    MOQ_TRY(check_rows(weight, "weight", err));
    MOQ_TRY(moq_check_device(weight, "weight", x->device, err));
    if (weight->dtype != x->dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "weight", "expected %s as x, got %s",
                           moq_dtype_name(x->dtype), moq_dtype_name(weight->dtype));
    if (weight->shape[1] != x->shape[1] || weight->shape[0] < 1 || weight->shape[0] > INT32_MAX / 8)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight", "expected shape [experts, %lld], got %s",
                           (long long)x->shape[1], moq_shape_text(weight, got, sizeof got));
    if (dtype != MOQ_DT_F32 && dtype != x->dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, "dtype", "expected float32 or %s, got %s",
                           moq_dtype_name(x->dtype), moq_dtype_name(dtype));
    *plan = (moq_gate){.x = *x, .weight = *weight, .dtype = dtype};
    return MOQ_OK;
}

moq_status moq_run_gate(const moq_gate *plan, const moq_tensor *out, void *stream, moq_err *err) {
    const moq_tensor *inputs[] = {&plan->x, &plan->weight};
    const int64_t shape[] = {plan->x.shape[0], plan->weight.shape[0]};
    moq_tensor expected = moq_describe(plan->dtype, 2, shape);
    bool entered;
    expected.device = plan->x.device;
    MOQ_TRY(moq_check_output(out, "out", &expected, inputs, 2, err));
    if (moq_tensor_numel(out) == 0)
        return MOQ_OK;
    MOQ_TRY(moq_cuda_enter(plan->x.device.index, &entered, err));
    const moq_status status = moq_cuda_gate(plan, out->data, stream, err);
    moq_cuda_leave(entered);
    return status;
}
