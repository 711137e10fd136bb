/* Programmatic dependent launch (PDL) in captured graphs: only behind a kernel of the library that
 * itself uses PDL.
 *
 * Behind another kernel PDL is a loss: that kernel does not say when its successor may begin, and
 * each change between ordinary and programmatic edges costs half a microsecond (docs/lab/pdl.md).
 * Outside of a capture the predecessor is unknown, and an ordinary launch costs the host as much
 * more as the device would gain, so that all launches are programmatic there. MOQEXT_PDL=1 makes
 * all launches programmatic, MOQEXT_PDL=0 none. */
#ifndef MOQ_CUDA_RUNTIME_PDL_H
#define MOQ_CUDA_RUNTIME_PDL_H

#include "cuda/runtime/driver.h"

#include <stdbool.h>

/* Returns whether a kernel that uses PDL is launched programmatically on this stream: outside of a
 * capture, or if the only predecessor is this thread's last launch there and used PDL, too. */
bool moq_pdl_allows(const moq_driver *driver, CUstream stream);

/* Records that a kernel has been launched, and whether it uses PDL. */
void moq_pdl_launched(const moq_driver *driver, CUstream stream, bool knows);

#endif
