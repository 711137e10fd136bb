/* The CUDA floor of a build without CUDA: every call says so, and why. See cuda.h. */
#include "cuda/cuda.h"
#include "cuda/linear.h"

static moq_status absent(moq_err *err) {
    return moq_fail(err, MOQ_ERR_INTERNAL, "moqext was built without CUDA: " MOQ_CUDA_WHY_NOT);
}

bool moq_cuda_built(void) {
    return false;
}

moq_status moq_cuda_device_count(int *count, moq_err *err) {
    *count = 0;
    return absent(err);
}

moq_status moq_cuda_query_device(int index, moq_cuda_device *out, moq_err *err) {
    (void)index;
    (void)out;
    return absent(err);
}

moq_status moq_cuda_enter(int32_t device, int32_t *previous, moq_err *err) {
    (void)device;
    (void)previous;
    return absent(err);
}

void moq_cuda_leave(int32_t device, int32_t previous) {
    (void)device;
    (void)previous;
}

bool moq_cuda_is_capturing(void *stream) {
    (void)stream;
    return false;
}

moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}
