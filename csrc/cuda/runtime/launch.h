/* Kernel launches for the launchers of this floor: one way to launch a kernel, and errors that name
 * the operation. */
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
    /* Programmatic dependent launch (PDL): the kernel may start while its predecessor in the stream
     * still runs, and must execute griddepcontrol.wait before it touches memory that others may
     * write. pdl.h decides by the predecessor; code from before 9.0 cannot wait and is never
     * launched so. */
    bool pdl;
} moq_launch;

/* Returns MOQ_ERR_INTERNAL naming the operation if `status` is an error. */
moq_status moq_cuda_check(cudaError_t status, const char *what, moq_err *err);

/* Waits for the last launch with MOQEXT_SYNC=1, outside of a capture, so that an asynchronous error
 * names the operation it came from. */
moq_status moq_cuda_settle(cudaStream_t stream, const char *what, moq_err *err);

/* Returns whether kernels may be launched programmatically: not with MOQEXT_PDL=0. */
bool moq_cuda_overlaps(void);

/* Launches with `args`, pointers to the parameters in order, and settles. MOQEXT_PDL (see pdl.h)
 * and MOQEXT_SYNC are read once. */
moq_status moq_cuda_launch(const moq_launch *launch, void **args, moq_err *err);

/* Returns whether the current device runs code of the kernel, and of those compiled with it, that
 * was made for compute capability 9.0 or later, with clusters and PDL; false if that cannot be
 * told. */
bool moq_cuda_is_recent(const void *kernel);

#endif
