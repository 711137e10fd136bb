/* Devices that the driver offers, and what each is. See cuda.h.
 *
 * The CUDA runtime is linked statically, so this works, and fails with a reason, without a driver.
 */
#include "cuda/runtime/driver.h"
#include "cuda/runtime/launch.h"

#include <pthread.h>
#include <stdio.h>

#define MAX_DEVICES 64

static struct device_table {
    pthread_mutex_t lock;
    bool known[MAX_DEVICES];
    moq_cuda_device device[MAX_DEVICES];
    CUcontext context[MAX_DEVICES]; /* NULL until it is asked for */
} table = {PTHREAD_MUTEX_INITIALIZER, {false}, {}, {}};

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

/* 0 where the driver does not tell. */
static int attribute(int index, cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, index) == cudaSuccess ? value : 0;
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
    out->sm_mhz = attribute(index, cudaDevAttrClockRate) / 1000;
    out->memory_mhz = attribute(index, cudaDevAttrMemoryClockRate) / 1000;
    out->bus_bits = attribute(index, cudaDevAttrGlobalMemoryBusWidth);
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

/* Asks the driver, which makes no context current. Without a driver there is only the default
 * stream, which nothing captures. */
extern "C" bool moq_cuda_is_capturing(void *stream) {
    const moq_driver *driver;
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    moq_err err;
    return moq_cuda_find_driver(&driver, &err) == MOQ_OK &&
           driver->capture_info((CUstream)stream, &status, NULL, NULL, NULL, NULL, NULL) ==
               CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Retains the primary context of a device, which the CUDA runtime uses too, from the first call on.
 */
static moq_status find_context(const moq_driver *driver, int32_t device, CUcontext *context,
                               moq_err *err) {
    CUdevice handle;
    moq_status status = MOQ_OK;
    if (device < 0 || device >= MAX_DEVICES)
        return moq_fail(err, MOQ_ERR_VALUE, "device: the first %d are used, got %d", MAX_DEVICES,
                        (int)device);
    *context = __atomic_load_n(&table.context[device], __ATOMIC_ACQUIRE);
    if (*context)
        return MOQ_OK;
    pthread_mutex_lock(&table.lock);
    if (!table.context[device]) { /* otherwise another thread was here first */
        status = moq_cuda_check_driver(driver->device(&handle, device), "cuDeviceGet", err);
        if (status == MOQ_OK)
            status = moq_cuda_check_driver(driver->primary_context(context, handle),
                                           "cuDevicePrimaryCtxRetain", err);
        if (status == MOQ_OK)
            __atomic_store_n(&table.context[device], *context, __ATOMIC_RELEASE);
    }
    *context = table.context[device];
    pthread_mutex_unlock(&table.lock);
    return status;
}

/* Makes a device current by its context, not by cudaSetDevice. A thread without a context, because
 * it is new or another library took it away, has one for the call. A thread of another device gets
 * its own back, without a context for a device that nobody uses. */
static moq_status enter(int32_t device, bool *entered, moq_err *err) {
    const moq_driver *driver;
    CUcontext wanted, current = NULL;
    CUdevice now;
    *entered = false;
    MOQ_TRY(moq_cuda_find_driver(&driver, err));
    MOQ_TRY(find_context(driver, device, &wanted, err));
    MOQ_TRY(moq_cuda_check_driver(driver->current_context(&current), "cuCtxGetCurrent", err));
    if (current == wanted)
        return MOQ_OK;
    /* Keeps a context of the caller's own on the same device: the caller's memory belongs to it. */
    if (current && driver->current_device(&now) == CUDA_SUCCESS && now == device)
        return MOQ_OK;
    MOQ_TRY(moq_cuda_check_driver(driver->push_context(wanted), "cuCtxPushCurrent", err));
    *entered = true;
    return MOQ_OK;
}

/* Device that the thread has entered and not left; -1 also after a nested one was left. */
static __thread struct entered_device {
    int32_t number;
} inside = {-1};

extern "C" moq_status moq_cuda_enter(int32_t device, bool *entered, moq_err *err) {
    moq_status status = enter(device, entered, err);
    inside.number = status == MOQ_OK ? device : -1;
    return status;
}

cudaError_t moq_cuda_current_device(int *device) {
    *device = inside.number;
    return inside.number >= 0 ? cudaSuccess : cudaGetDevice(device);
}

extern "C" void moq_cuda_leave(bool entered) {
    const moq_driver *driver;
    CUcontext own;
    moq_err err;
    inside.number = -1;
    if (entered && moq_cuda_find_driver(&driver, &err) == MOQ_OK)
        driver->pop_context(&own);
}

extern "C" moq_status moq_cuda_order(void *before, void *after, moq_err *err) {
    cudaEvent_t event;
    MOQ_TRY(
        moq_cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event", err));
    cudaError_t status = cudaEventRecord(event, (cudaStream_t)before);
    if (status == cudaSuccess)
        status = cudaStreamWaitEvent((cudaStream_t)after, event, 0);
    cudaEventDestroy(event); /* destroyed when it has happened */
    return moq_cuda_check(status, "ordering two streams", err);
}

extern "C" void moq_cuda_versions(int *runtime, int *driver) {
    *runtime = *driver = 0;
    cudaRuntimeGetVersion(runtime);
    cudaDriverGetVersion(driver);
}
