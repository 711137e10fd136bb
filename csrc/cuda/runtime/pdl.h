/* Which kernels of a captured graph are launched programmatically: those behind a kernel of the
 * library that knows programmatic launch.
 *
 * Behind another kernel it is a loss: that one says nothing of when its successor may begin, and
 * going from ordinary edges to programmatic ones and back costs half a microsecond
 * (docs/lab/pdl.md). Outside of a capture nobody knows what is ahead, and an ordinary launch
 * costs the host as much more as the device would gain, so that all are launched programmatically.
 * So are all with MOQEXT_PDL=1, and none with MOQEXT_PDL=0. */
#ifndef MOQ_CUDA_RUNTIME_PDL_H
#define MOQ_CUDA_RUNTIME_PDL_H

#include "cuda/runtime/driver.h"

#include <stdbool.h>

/* Whether a kernel that knows programmatic launch is launched so on this stream: outside of a
 * capture, or where all that is ahead is the kernel that this thread launched there last, and that
 * one knows it, too. */
bool moq_pdl_allows(const moq_driver *driver, CUstream stream);

/* A kernel has been launched; whether it knows programmatic launch. */
void moq_pdl_launched(const moq_driver *driver, CUstream stream, bool knows);

#endif
