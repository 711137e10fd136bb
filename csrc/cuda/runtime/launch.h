/* Launching: the device made current and given back, one way to launch a kernel, and errors that
 * name the operation. For the launchers of this floor only. */
#ifndef MOQ_CUDA_RUNTIME_LAUNCH_H
#define MOQ_CUDA_RUNTIME_LAUNCH_H

#include "cuda/cuda.h"

#include <cuda_runtime.h>

typedef struct {
    const char *what; /* the operation, for messages: "linear FP8" */
    const void *kernel;
    dim3 grid;
    dim3 block;
    unsigned cluster; /* blocks of a cluster; 0 for none */
    size_t shared;    /* dynamic bytes */
    cudaStream_t stream;
    /* Programmatic dependent launch: the kernel may start while its predecessor in the stream still
     * runs, and must execute griddepcontrol.wait before it touches what others may write. Whether
     * it is launched so its predecessor decides: pdl.h. Code of before 9.0 cannot wait, and
     * never is. */
    bool pdl;
} moq_launch;

/* MOQ_ERR_INTERNAL naming the operation, where `status` is an error. */
moq_status moq_cuda_check(cudaError_t status, const char *what, moq_err *err);

/* With MOQEXT_SYNC=1, and outside of a capture, waits for what was launched last, so that an
 * asynchronous error names the operation it came from. */
moq_status moq_cuda_settle(cudaStream_t stream, const char *what, moq_err *err);

/* Whether any kernel is launched programmatically: not with MOQEXT_PDL=0. */
bool moq_cuda_overlaps(void);

/* Launches with `args`, pointers to the parameters in order, and settles. Of MOQEXT_PDL pdl.h
 * tells; it and MOQEXT_SYNC are read once. */
moq_status moq_cuda_launch(const moq_launch *launch, void **args, moq_err *err);

/* Whether the current device runs code of the kernel, and of those compiled with it, that was made
 * for compute capability 9.0 or later, and may have clusters and wait for its predecessor; false
 * where that cannot be told. */
bool moq_cuda_is_recent(const void *kernel);

#endif
