/* Kernel launches: see launch.h.
 *
 * The driver launches kernels, which takes the host 0.2 us less than the CUDA runtime does
 * (docs/lab/host-path.md). The runtime loads them and makes contexts: see moq_cuda_enter. */
#include "cuda/runtime/launch.h"

#include "core/invariant.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/pdl.h"

#include <pthread.h>
#include <stdlib.h>

/* Largest shared memory that a kernel has unasked, 48 KB, less up to 16 KB that it declares. */
#define SHARED_WITHOUT_ASKING (32 * 1024)
/* Places for kernels, more than there are kernels. */
#define PLACES 1024

moq_status moq_cuda_check(cudaError_t status, const char *what, moq_err *err) {
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s: %s (%s)", what, cudaGetErrorString(status),
                    cudaGetErrorName(status));
}

/* Switches from the environment, read at first use; several threads may read the same. */
typedef enum { NOT_ASKED, UNSET, OFF, ON } answer;

static struct process_facts {
    answer sync, pdl;
} process;

static answer ask_once(answer *known, const char *name) {
    answer found = __atomic_load_n(known, __ATOMIC_RELAXED);
    if (found == NOT_ASKED) {
        const char *text = getenv(name);
        found = !text || !*text ? UNSET : *text == '0' ? OFF : ON;
        __atomic_store_n(known, found, __ATOMIC_RELAXED);
    }
    return found;
}

/* ---- kernels ---- */

typedef struct {
    const void *kernel; /* written last; NULL for a free place */
    CUkernel handle;    /* handle in the driver, valid in every context */
    uint64_t allowed;   /* bit for each device on which it may have all shared memory */
    uint64_t asked;     /* bit for each device on which its code's age is known */
    uint64_t recent;
} known_kernel;

static struct kernel_table {
    pthread_mutex_t lock; /* held to write a place */
    known_kernel place[PLACES];
} table = {PTHREAD_MUTEX_INITIALIZER, {}};

/* Returns a kernel's place, or the free one that it will have. */
static known_kernel *place_of(const void *kernel) {
    size_t at = (size_t)((uint64_t)(uintptr_t)kernel * 0x9e3779b97f4a7c15ull >> 54);
    static_assert(PLACES == 1024, "the hash has ten bits");
    for (;; at = (at + 1) % PLACES) {
        const void *found = __atomic_load_n(&table.place[at].kernel, __ATOMIC_ACQUIRE);
        if (found == kernel || !found)
            return &table.place[at];
    }
}

static cudaError_t learn(const void *kernel) {
    pthread_mutex_lock(&table.lock);
    known_kernel *k = place_of(kernel);
    cudaError_t status = cudaSuccess;
    if (!k->kernel) { /* otherwise another thread was here first */
        status = cudaGetKernel(&k->handle, kernel);
        if (status == cudaSuccess)
            __atomic_store_n(&k->kernel, kernel, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&table.lock);
    return status;
}

/* Allows dynamic shared memory up to the limit of the current device, once for each kernel and
 * device. */
static cudaError_t allow_shared(known_kernel *k) {
    cudaFuncAttributes attributes;
    int device, limit;
    cudaError_t status = moq_cuda_current_device(&device);
    if (status != cudaSuccess)
        return status;
    uint64_t bit = 1ull << device; /* at most 64 devices: moq_cuda_query_device */
    if (__atomic_load_n(&k->allowed, __ATOMIC_RELAXED) & bit)
        return cudaSuccess;
    if ((status = cudaFuncGetAttributes(&attributes, k->kernel)) != cudaSuccess ||
        (status = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                         device)) != cudaSuccess ||
        (status = cudaFuncSetAttribute(k->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       limit - (int)attributes.sharedSizeBytes)) != cudaSuccess)
        return status;
    __atomic_fetch_or(&k->allowed, bit, __ATOMIC_RELAXED);
    return cudaSuccess;
}

/* Code from before 9.0 runs on later devices too, compiled by the driver from PTX. */
static bool is_recent(known_kernel *k) {
    cudaFuncAttributes attributes;
    int device;
    if (moq_cuda_current_device(&device) != cudaSuccess)
        return false;
    uint64_t bit = 1ull << device; /* at most 64 devices, as in allow_shared */
    if (!(__atomic_load_n(&k->asked, __ATOMIC_ACQUIRE) & bit)) {
        if (cudaFuncGetAttributes(&attributes, k->kernel) == cudaSuccess &&
            attributes.ptxVersion >= 90)
            __atomic_fetch_or(&k->recent, bit, __ATOMIC_RELAXED);
        __atomic_fetch_or(&k->asked, bit, __ATOMIC_RELEASE);
    }
    return __atomic_load_n(&k->recent, __ATOMIC_RELAXED) & bit;
}

bool moq_cuda_is_recent(const void *kernel) {
    if (__atomic_load_n(&place_of(kernel)->kernel, __ATOMIC_ACQUIRE) != kernel &&
        learn(kernel) != cudaSuccess)
        return false;
    return is_recent(place_of(kernel));
}

/* ---- launches ---- */

moq_status moq_cuda_settle(cudaStream_t stream, const char *what, moq_err *err) {
    if (ask_once(&process.sync, "MOQEXT_SYNC") != ON || moq_cuda_is_capturing(stream))
        return MOQ_OK;
    cudaError_t status = cudaStreamSynchronize(stream);
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL,
                    "%s: %s (%s); it may come from earlier work on this device", what,
                    cudaGetErrorString(status), cudaGetErrorName(status));
}

bool moq_cuda_overlaps(void) {
    return ask_once(&process.pdl, "MOQEXT_PDL") != OFF;
}

moq_status moq_cuda_launch(const moq_launch *launch, void **args, moq_err *err) {
    const moq_driver *driver;
    CUlaunchAttribute attribute[2];
    CUlaunchConfig config = {};
    known_kernel *k = place_of(launch->kernel);
    MOQ_ASSERT(launch->grid.x && launch->grid.y && launch->grid.z);
    MOQ_ASSERT(launch->grid.y <= 65535 && launch->grid.z <= 65535);
    MOQ_ASSERT(!launch->cluster || launch->grid.x % launch->cluster == 0);
    MOQ_TRY(moq_cuda_find_driver(&driver, err));
    config.gridDimX = launch->grid.x;
    config.gridDimY = launch->grid.y;
    config.gridDimZ = launch->grid.z;
    config.blockDimX = launch->block.x;
    config.blockDimY = launch->block.y;
    config.blockDimZ = launch->block.z;
    config.sharedMemBytes = (unsigned)launch->shared;
    config.hStream = launch->stream;
    config.attrs = attribute;
    if (launch->cluster) {
        attribute[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute[config.numAttrs].value.clusterDim.x = launch->cluster;
        attribute[config.numAttrs].value.clusterDim.y = 1;
        attribute[config.numAttrs++].value.clusterDim.z = 1;
    }
    if (__atomic_load_n(&k->kernel, __ATOMIC_ACQUIRE) != launch->kernel) {
        MOQ_TRY(moq_cuda_check(learn(launch->kernel), launch->what, err));
        k = place_of(launch->kernel);
    }
    answer pdl = ask_once(&process.pdl, "MOQEXT_PDL");
    bool knows = launch->pdl && pdl != OFF && is_recent(k);
    if (knows && (pdl == ON || moq_pdl_allows(driver, launch->stream))) {
        attribute[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (launch->shared > SHARED_WITHOUT_ASKING)
        MOQ_TRY(moq_cuda_check(allow_shared(k), launch->what, err));
    MOQ_TRY(moq_cuda_check_driver(driver->launch(&config, (CUfunction)k->handle, args, NULL),
                                  launch->what, err));
    if (pdl == UNSET)
        moq_pdl_launched(driver, launch->stream, knows);
    return moq_cuda_settle(launch->stream, launch->what, err);
}
