/* cuBLASLt, opened at first use: it is half a gigabyte, and most processes that need it have it
 * loaded.
 *
 * No header of the library is needed to build (cublaslt_abi.h), so every build with CUDA can use
 * it. A build without CUDA has the function too (absent.c), which fails with that reason. */
#ifndef MOQ_CUDA_RUNTIME_CUBLASLT_H
#define MOQ_CUDA_RUNTIME_CUBLASLT_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char path[4096];
    int version; /* 130100 for 13.1.0 */
} moq_cublaslt;

/* Returns the library, or NULL with a reason of at most `size` bytes. It is looked for in this
 * order: $MOQEXT_CUBLASLT alone if it is set (a path); a library that is loaded already, since two
 * in one process do not get on; `directories`, separated by colons, or NULL; the loader's path;
 * $CUDA_PATH and $CUDA_HOME. A library that was found stays open; one that was not is looked for
 * again. */
const moq_cublaslt *moq_cublaslt_find(const char *directories, char *reason, size_t size);

#ifdef __cplusplus
}
#endif
#endif
