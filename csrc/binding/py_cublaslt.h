/* The places where Python has cuBLASLt: the floors below look for it, this one knows sys.path. */
#ifndef MOQ_BINDING_PY_CUBLASLT_H
#define MOQ_BINDING_PY_CUBLASLT_H

#include "binding/state.h"
#include "cuda/runtime/cublaslt.h"

/* moq_cublaslt_find, with the directories of pip's packages below each entry of sys.path: the
 * library, or NULL with a reason. No exception is set. */
const moq_cublaslt *moq_cublaslt_find_in_path(char *reason, size_t size);

#endif
