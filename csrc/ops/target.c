/* The chip behind a device: see target.h. */
#include "ops/target.h"

#include "cuda/cuda.h"

#include <stdio.h>

moq_target moq_find_target(moq_device device) {
    moq_target target = {0};
    moq_cuda_device found;
    moq_err err;
    if (device.kind != MOQ_CUDA)
        return target;
    if (moq_cuda_query_device(device.index, &found, &err) == MOQ_OK) {
        target.capability = 10 * found.major + found.minor;
        target.sm_count = found.sm_count;
    } else {
        snprintf(target.missing, sizeof target.missing, "%.150s", err.message);
    }
    return target;
}
