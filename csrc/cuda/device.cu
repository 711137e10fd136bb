/* The devices: how many the driver offers and what each is. See cuda.h.
 *
 * The runtime is linked statically, so this works, and fails with a reason, without a driver. */
#include "cuda/cuda.h"

#include <cuda_runtime.h>
#include <pthread.h>
#include <stdio.h>

#define MAX_DEVICES 64

static struct device_table {
    pthread_mutex_t lock;
    bool known[MAX_DEVICES];
    moq_cuda_device device[MAX_DEVICES];
} table = {PTHREAD_MUTEX_INITIALIZER, {false}, {}};

extern "C" bool moq_cuda_built(void) {
    return true;
}

extern "C" const char *moq_cuda_archs(void) {
    return MOQ_CUDA_ARCHS;
}

extern "C" moq_status moq_cuda_device_count(int *count, moq_err *err) {
    cudaError_t status = cudaGetDeviceCount(count);
    if (status == cudaSuccess && *count > 0)
        return MOQ_OK;
    *count = 0;
    return moq_fail(err, MOQ_ERR_INTERNAL, "no CUDA device: %s",
                    status == cudaSuccess ? "the driver reports none" : cudaGetErrorString(status));
}

static cudaError_t ask(int index, moq_cuda_device *out) {
    cudaDeviceProp prop;
    cudaError_t status = cudaGetDeviceProperties(&prop, index);
    if (status != cudaSuccess)
        return status;
    snprintf(out->name, sizeof out->name, "%s", prop.name);
    out->major = prop.major;
    out->minor = prop.minor;
    out->sm_count = prop.multiProcessorCount;
    out->shared_per_block = (int)prop.sharedMemPerBlockOptin;
    out->l2_bytes = prop.l2CacheSize;
    out->memory = prop.totalGlobalMem;
    return cudaSuccess;
}

static bool is_known(int index) {
    return index >= 0 && index < MAX_DEVICES &&
           __atomic_load_n(&table.known[index], __ATOMIC_ACQUIRE);
}

static moq_status learn(int index, moq_err *err) {
    int count;
    MOQ_TRY(moq_cuda_device_count(&count, err));
    if (index < 0 || index >= count || index >= MAX_DEVICES)
        return moq_fail(err, MOQ_ERR_VALUE, "device: there is no cuda:%d, the driver offers %d",
                        index, count);
    pthread_mutex_lock(&table.lock);
    cudaError_t status = is_known(index) ? cudaSuccess : ask(index, &table.device[index]);
    __atomic_store_n(&table.known[index], status == cudaSuccess, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&table.lock);
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "CUDA device %d cannot be queried: %s", index,
                    cudaGetErrorString(status));
}

extern "C" moq_status moq_cuda_query_device(int index, moq_cuda_device *out, moq_err *err) {
    if (!is_known(index))
        MOQ_TRY(learn(index, err));
    *out = table.device[index]; /* never changes again */
    return MOQ_OK;
}

extern "C" bool moq_cuda_is_capturing(void *stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing((cudaStream_t)stream, &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
}

static moq_status check(cudaError_t status, const char *what, moq_err *err) {
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s: %s", what, cudaGetErrorString(status));
}

/* A thread has no context, which functions of the driver need, before it has set a device. */
extern "C" moq_status moq_cuda_enter(int32_t device, int32_t *previous, moq_err *err) {
    static __thread bool has_set_one;
    MOQ_TRY(check(cudaGetDevice(previous), "cudaGetDevice", err));
    if (*previous == device && has_set_one)
        return MOQ_OK;
    MOQ_TRY(check(cudaSetDevice(device), "cudaSetDevice", err));
    has_set_one = true;
    return MOQ_OK;
}

extern "C" void moq_cuda_leave(int32_t device, int32_t previous) {
    if (previous != device)
        cudaSetDevice(previous);
}

extern "C" moq_status moq_cuda_order(void *before, void *after, moq_err *err) {
    cudaEvent_t event;
    MOQ_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event", err));
    cudaError_t status = cudaEventRecord(event, (cudaStream_t)before);
    if (status == cudaSuccess)
        status = cudaStreamWaitEvent((cudaStream_t)after, event, 0);
    cudaEventDestroy(event); /* when it has happened */
    return check(status, "ordering two streams", err);
}

extern "C" void moq_cuda_versions(int *runtime, int *driver) {
    *runtime = *driver = 0;
    cudaRuntimeGetVersion(runtime);
    cudaDriverGetVersion(driver);
}
