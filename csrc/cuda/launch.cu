/* Launching: see launch.h. */
#include "cuda/launch.h"

#include <stdlib.h>

/* More dynamic shared memory than this has to be asked for, kernel by kernel. */
#define SHARED_WITHOUT_ASKING (48 * 1024)
/* Kernels times devices; beyond, each launch asks again. */
#define SLOTS 512

moq_status moq_cuda_check(cudaError_t status, const char *what, moq_err *err) {
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s: %s (%s)", what, cudaGetErrorString(status),
                    cudaGetErrorName(status));
}

/* What the environment said when it was first asked, and the kernels that have been allowed all
 * the shared memory there is, each on each device. Several threads may find out the same. */
static struct process_facts {
    int sync, overlap; /* 0 unknown, 1 no, 2 yes */
    uint64_t allowed[SLOTS];
} process;

static bool ask_once(int *answer, const char *name, bool otherwise) {
    int known = __atomic_load_n(answer, __ATOMIC_RELAXED);
    if (!known) {
        const char *text = getenv(name);
        known = 1 + (text && *text ? *text != '0' : otherwise);
        __atomic_store_n(answer, known, __ATOMIC_RELAXED);
    }
    return known == 2;
}

/* Dynamic shared memory up to the limit of the device, once a kernel and device. */
static cudaError_t allow_shared(const void *kernel) {
    cudaFuncAttributes attributes;
    int device, limit;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess)
        return status;
    uint64_t key = (uint64_t)(uintptr_t)kernel << 6 | (uint64_t)device; /* moq_cuda_query_device */
    size_t slot = (size_t)((key >> 10) * 0x9e3779b97f4a7c15ull >> 55);
    static_assert(SLOTS == 512, "the hash has nine bits");
    for (int i = 0; i < SLOTS; i++, slot = (slot + 1) % SLOTS) {
        uint64_t found = __atomic_load_n(&process.allowed[slot], __ATOMIC_RELAXED);
        if (found == key)
            return cudaSuccess;
        if (!found)
            break;
    }
    if ((status = cudaFuncGetAttributes(&attributes, kernel)) != cudaSuccess ||
        (status = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                         device)) != cudaSuccess ||
        (status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       limit - (int)attributes.sharedSizeBytes)) != cudaSuccess)
        return status;
    uint64_t empty = 0; /* whoever loses the slot asks again next time */
    __atomic_compare_exchange_n(&process.allowed[slot], &empty, key, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return cudaSuccess;
}

moq_status moq_cuda_settle(cudaStream_t stream, const char *what, moq_err *err) {
    if (!ask_once(&process.sync, "MOQEXT_SYNC", false) || moq_cuda_is_capturing(stream))
        return MOQ_OK;
    cudaError_t status = cudaStreamSynchronize(stream);
    if (status == cudaSuccess)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL,
                    "%s: %s (%s); it may come from earlier work on this device", what,
                    cudaGetErrorString(status), cudaGetErrorName(status));
}

moq_status moq_cuda_launch(const moq_launch *launch, void **args, moq_err *err) {
    cudaLaunchAttribute attribute[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = launch->grid;
    config.blockDim = launch->block;
    config.dynamicSmemBytes = launch->shared;
    config.stream = launch->stream;
    config.attrs = attribute;
    if (launch->overlap && ask_once(&process.overlap, "MOQEXT_PDL", true)) {
        attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch->cluster) {
        attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attribute[config.numAttrs].val.clusterDim.x = launch->cluster;
        attribute[config.numAttrs].val.clusterDim.y = 1;
        attribute[config.numAttrs++].val.clusterDim.z = 1;
    }
    if (launch->shared > SHARED_WITHOUT_ASKING)
        MOQ_TRY(moq_cuda_check(allow_shared(launch->kernel), launch->what, err));
    MOQ_TRY(moq_cuda_check(cudaLaunchKernelExC(&config, launch->kernel, args), launch->what, err));
    return moq_cuda_settle(launch->stream, launch->what, err);
}
