/* The part of the CUDA floor that needs cuBLASLt, in a build without its header: every call says
 * so. See cublaslt.h. */
#include "cuda/cublaslt.h"
#include "cuda/linear.h"

#include <stdio.h>

#define REASON "moqext was built without cuBLASLt: " MOQ_CUBLASLT_WHY_NOT

const moq_cublaslt *moq_cublaslt_find(const char *directories, char *reason, size_t size) {
    (void)directories;
    snprintf(reason, size, REASON);
    return NULL;
}

int64_t moq_cublaslt_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cublaslt_linear(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return moq_fail(err, MOQ_ERR_INTERNAL, REASON);
}

uint64_t moq_cublaslt_variants(const moq_linear_call *call) {
    (void)call;
    return 0;
}
