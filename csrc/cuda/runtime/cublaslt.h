/* cuBLASLt, opened when it is first needed: it is half a gigabyte, and most processes that need it
 * have it already.
 *
 * No header of it is needed to build (cublaslt_abi.h), so every build with CUDA can use it. A build
 * without CUDA has the same functions (absent.c), which fail with that reason. */
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

/* The library, or NULL with a reason of at most `size` bytes. Looked for in this order:
 * $MOQEXT_CUBLASLT alone if it is set (a path); the one that is loaded already, since two in one
 * process do not get on; `directories`, separated by colons, or NULL; where the loader looks;
 * $CUDA_PATH and $CUDA_HOME. What was found stays open; what was not is looked for again. */
const moq_cublaslt *moq_cublaslt_find(const char *directories, char *reason, size_t size);

#ifdef __cplusplus
}
#endif
#endif
