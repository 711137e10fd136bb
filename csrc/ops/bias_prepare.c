/* The biases of a stack of experts: see bias_prepare.h. */
#include "ops/bias_prepare.h"

#include "cuda/cuda.h"
#include "cuda/tensor/cuda_prepare.h"
#include "ops/check.h"
#include "ops/transfer.h"

#include <stdlib.h>

static moq_status prepare_on_host(const moq_tensor *bias, const char *name, bool only_checks,
                                  const moq_tensor *out, moq_err *err) {
    return only_checks ? moq_check_copy(bias, name, out, err) : moq_run_copy(bias, name, out, err);
}

/* Uploads the biases, by way of float32 on the host. */
static moq_status upload(const moq_tensor *bias, const char *name, void *stream,
                         const moq_tensor *out, moq_err *err) {
    size_t bytes = (size_t)moq_tensor_numel(out) * sizeof(float);
    moq_tensor home = moq_describe(MOQ_DT_F32, out->ndim, out->shape);
    home.data = malloc(bytes + 1);
    if (!home.data)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the biases of experts");
    moq_status status = moq_run_copy(bias, name, &home, err);
    if (status == MOQ_OK)
        status = moq_cuda_upload(out->data, home.data, bytes, stream, err);
    free(home.data);
    return status;
}

static moq_status check_on_device(const moq_tensor *bias, const char *name, const moq_tensor *out,
                                  moq_err *err) {
    char expected[128], got[128];
    MOQ_TRY(moq_check_activation(bias, name, err));
    if (moq_same_shape(bias, out))
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected shape %s, got %s",
                       moq_shape_text(out, expected, sizeof expected),
                       moq_shape_text(bias, got, sizeof got));
}

static moq_status copy_on_device(const moq_tensor *bias, void *stream, const moq_tensor *out,
                                 moq_err *err) {
    moq_scale_copy copy = {
        .scales = bias->data,
        .dtype = bias->dtype,
        .count = bias->shape[1],
        .step = bias->stride[1],
        .experts = bias->shape[0],
        .from_step = bias->stride[0] * (int64_t)moq_dtype_size(bias->dtype),
        .out = out->data,
        .out_step = out->shape[1],
    };
    return moq_cuda_copy_scales(&copy, stream, err);
}

static moq_status check_for_cuda(const moq_tensor *bias, const char *name, const moq_tensor *out,
                                 moq_err *err) {
    if (bias->device.kind == MOQ_CUDA)
        return check_on_device(bias, name, out, err);
    moq_tensor home = moq_describe(MOQ_DT_F32, out->ndim, out->shape);
    return moq_check_copy(bias, name, &home, err);
}

static moq_status prepare_on_cuda(const moq_tensor *bias, const char *name, void *stream,
                                  const moq_tensor *out, moq_err *err) {
    if (bias->device.kind == MOQ_CUDA)
        MOQ_TRY(copy_on_device(bias, stream, out, err));
    else
        MOQ_TRY(upload(bias, name, stream, out, err));
    return moq_cuda_wait(stream, err);
}

moq_status moq_bias_prepare(const moq_weight *weight, const moq_tensor *bias, moq_prepare_mode mode,
                            const moq_tensor *out, moq_err *err) {
    const char *name = moq_weight_param_name(weight, MOQ_PARAM_BIAS);
    bool entered;
    if (weight->device.kind == MOQ_CPU)
        return prepare_on_host(bias, name, mode.only_checks, out, err);
    MOQ_TRY(check_for_cuda(bias, name, out, err));
    if (mode.only_checks)
        return MOQ_OK;
    MOQ_TRY(moq_cuda_enter(weight->device.index, &entered, err));
    moq_status status = prepare_on_cuda(bias, name, mode.stream, out, err);
    moq_cuda_leave(entered);
    return status;
}
