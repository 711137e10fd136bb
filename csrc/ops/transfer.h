/* Operation transfer: tensors between the host and a CUDA device, as they are. */
#ifndef MOQ_OPS_TRANSFER_H
#define MOQ_OPS_TRANSFER_H

#include "core/tensor.h"

/* Copies x to `out`, which is row-major and of x's shape and dtype, and waits for it; what comes
 * from a device is read in the order of `stream`. One of them is on the host. x is contiguous. */
moq_status moq_run_transfer(const moq_tensor *x, void *stream, const moq_tensor *out, moq_err *err);

#endif
