/* Functions of the CUDA driver: see driver.h. */
#include "cuda/runtime/driver.h"

#include "cuda/runtime/launch.h"

#include <pthread.h>

static struct found_driver {
    pthread_mutex_t lock;
    bool ready; /* written last */
    moq_driver driver;
} found = {PTHREAD_MUTEX_INITIALIZER, false, {}};

static cudaError_t find(const char *name, unsigned version, void **entry) {
    cudaDriverEntryPointQueryResult result;
    cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, entry, version, cudaEnableDefault, &result);
    return status == cudaSuccess && !*entry ? cudaErrorNotSupported : status;
}

static moq_status find_all(moq_driver *driver, moq_err *err) {
    void *entry = NULL;
#define FIND(member, name, version)                                                                \
    MOQ_TRY(moq_cuda_check(find(#name, version, &entry), "the CUDA driver's " #name, err));        \
    driver->member = (PFN_##name##_v##version)entry;
    MOQ_DRIVER_FUNCTIONS(FIND)
#undef FIND
    return moq_cuda_check_driver(driver->init(0), "cuInit", err);
}

moq_status moq_cuda_find_driver(const moq_driver **driver, moq_err *err) {
    moq_status status = MOQ_OK;
    *driver = &found.driver;
    if (__atomic_load_n(&found.ready, __ATOMIC_ACQUIRE))
        return MOQ_OK;
    pthread_mutex_lock(&found.lock);
    if (!found.ready) { /* otherwise another thread was here first */
        status = find_all(&found.driver, err);
        __atomic_store_n(&found.ready, status == MOQ_OK, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&found.lock);
    return status;
}

/* Driver errors have the numbers of the runtime's. */
moq_status moq_cuda_check_driver(CUresult result, const char *what, moq_err *err) {
    return moq_cuda_check((cudaError_t)result, what, err);
}
