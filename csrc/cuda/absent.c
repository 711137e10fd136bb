/* The CUDA floor of a build without CUDA: every call says so, and why. See cuda.h. */
#include "cuda/cuda.h"

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
