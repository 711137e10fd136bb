/* Which kernels are launched programmatically: only behind a kernel that knows programmatic launch.
 *
 * Behind another one it is a loss: that says nothing of when its successor may begin, and going
 * from ordinary edges to programmatic ones and back costs half a microsecond
 * (docs/lab/neighbours.md). MOQEXT_PDL=1 launches all so that can be, MOQEXT_PDL=0 none. */
#ifndef MOQ_CUDA_RUNTIME_OVERLAP_H
#define MOQ_CUDA_RUNTIME_OVERLAP_H

#include "cuda/runtime/driver.h"

#include <stdbool.h>

/* A call of the library begins in this thread: of what is on its stream, nothing is known outside
 * of a capture, since others may have launched meanwhile. */
void moq_overlap_begin(void);

/* Whether a kernel that knows programmatic launch is launched so: behind one of the same call, or
 * in a capture behind one that an earlier call launched on this stream, where nothing stands
 * between. */
bool moq_overlap_allows(const moq_driver *driver, CUstream stream);

/* A kernel has been launched; whether it knows programmatic launch. */
void moq_overlap_launched(const moq_driver *driver, CUstream stream, bool knows);

#endif
