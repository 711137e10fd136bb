/* The whole surface of the CUDA floor, in C: what ops and binding may call.
 *
 * With a build without nvcc the same functions exist (absent.c) and fail with that reason. */
#ifndef MOQ_CUDA_CUDA_H
#define MOQ_CUDA_CUDA_H

#include "core/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char name[256];
    int major; /* compute capability */
    int minor;
    int sm_count;
    uint64_t memory; /* bytes */
} moq_cuda_device;

/* True when the extension was compiled with nvcc. */
bool moq_cuda_built(void);
/* Number of usable devices. MOQ_ERR_INTERNAL with the reason where there is no driver, or none. */
moq_status moq_cuda_device_count(int *count, moq_err *err);
moq_status moq_cuda_query_device(int index, moq_cuda_device *out, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
