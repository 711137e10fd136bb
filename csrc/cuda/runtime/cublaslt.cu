/* Search for cuBLASLt and its opening: see cublaslt.h and cublaslt_api.h. */
#include "cuda/cuda.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/cublaslt_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 64

static struct cublaslt_state {
    pthread_mutex_t lock;
    void *library;
    moq_cublaslt found;
    moq_cublaslt_api api;
    void *handle[MAX_DEVICES];
} state = {PTHREAD_MUTEX_INITIALIZER, NULL, {}, {}, {}};

/* ---- the library ---- */

/* Looks up the functions of an open library. */
static bool take(void *library, char *reason, size_t size) {
    static const char *const NAME[] = {
#define MOQ_CUBLASLT_NAME(name, result, parameters) #name,
        MOQ_CUBLASLT_FUNCTIONS(MOQ_CUBLASLT_NAME)
#undef MOQ_CUBLASLT_NAME
    };
    void *address[sizeof NAME / sizeof *NAME];
    static_assert(sizeof address == sizeof(moq_cublaslt_api), "the members are pointers alone");
    for (size_t i = 0; i < sizeof NAME / sizeof *NAME; i++) {
        address[i] = dlsym(library, NAME[i]);
        if (!address[i]) {
            snprintf(reason, size, "cuBLASLt has no %s", NAME[i]);
            return false;
        }
    }
    memcpy(&state.api, address, sizeof address);
    int version = state.found.version = (int)state.api.cublasLtGetVersion();
    if (version / 10000 == MOQ_CUBLASLT_MAJOR)
        return true;
    snprintf(reason, size, "cuBLASLt is version %d.%d.%d, moqext needs %d", version / 10000,
             version / 100 % 100, version % 100, MOQ_CUBLASLT_MAJOR);
    return false;
}

static bool open_library(const char *path, int how, char *reason, size_t size) {
    Dl_info info;
    void *library = dlopen(path, how | RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        const char *error = dlerror();
        snprintf(reason, size, "cuBLASLt cannot be opened: %s", error ? error : path);
        return false;
    }
    if (!take(library, reason, size)) {
        dlclose(library);
        return false;
    }
    bool known = dladdr((void *)state.api.cublasLtMatmul, &info) != 0;
    snprintf(state.found.path, sizeof state.found.path, "%s", known ? info.dli_fname : path);
    state.library = library;
    return true;
}

/* Opens the library in a directory of `length` bytes. */
static bool open_in(const char *directory, size_t length, char *reason, size_t size) {
    char path[4096];
    int wanted = snprintf(path, sizeof path, "%.*s/" MOQ_CUBLASLT_SONAME, (int)length, directory);
    return length > 0 && wanted < (int)sizeof path && open_library(path, 0, reason, size);
}

static bool open_below(const char *variable, char *reason, size_t size) {
    char path[4096];
    const char *home = getenv(variable);
    if (!home || !*home)
        return false;
    return snprintf(path, sizeof path, "%s/lib64", home) < (int)sizeof path &&
           open_in(path, strlen(path), reason, size);
}

static bool look_for(const char *directories, char *reason, size_t size) {
    const char *chosen = getenv("MOQEXT_CUBLASLT");
    char ignored[256];
    if (chosen && *chosen)
        return open_library(chosen, 0, reason, size);
    if (open_library(MOQ_CUBLASLT_SONAME, RTLD_NOLOAD, ignored, sizeof ignored))
        return true;
    while (directories && *directories) {
        size_t length = strcspn(directories, ":");
        if (open_in(directories, length, ignored, sizeof ignored))
            return true;
        directories += length + (directories[length] == ':');
    }
    return open_library(MOQ_CUBLASLT_SONAME, 0, reason, size) ||
           open_below("CUDA_PATH", ignored, sizeof ignored) ||
           open_below("CUDA_HOME", ignored, sizeof ignored);
}

extern "C" const moq_cublaslt *moq_cublaslt_find(const char *directories, char *reason,
                                                 size_t size) {
    pthread_mutex_lock(&state.lock);
    bool found = state.library || look_for(directories, reason, size);
    pthread_mutex_unlock(&state.lock);
    return found ? &state.found : NULL;
}

/* ---- handles ---- */

static moq_status make_handle(int32_t device, void *stream, moq_err *err) {
    if (moq_cuda_is_capturing(stream))
        return moq_fail(err, MOQ_ERR_INTERNAL,
                        "the first call of cuBLASLt on a device cannot be captured into a graph: "
                        "call once outside of the capture");
    /* Layers ask for algorithms while another stream is captured, which making a handle in the
     * usual mode would break off. */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    int32_t status = state.api.cublasLtCreate(&state.handle[device]);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status == MOQ_CUBLAS_STATUS_SUCCESS)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "cublasLtCreate: %s",
                    state.api.cublasLtGetStatusName(status));
}

moq_status moq_cublaslt_open(int32_t device, void *stream, const moq_cublaslt_api **api,
                             void **handle, moq_err *err) {
    char reason[256];
    if (!moq_cublaslt_find(NULL, reason, sizeof reason))
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "%s", reason);
    if (device < 0 || device >= MAX_DEVICES)
        return moq_fail(err, MOQ_ERR_UNSUPPORTED, "cuBLASLt is used on the first %d devices",
                        MAX_DEVICES);
    pthread_mutex_lock(&state.lock);
    moq_status status = state.handle[device] ? MOQ_OK : make_handle(device, stream, err);
    *api = &state.api;
    *handle = state.handle[device];
    pthread_mutex_unlock(&state.lock);
    return status;
}
