/* Operation transfer: tensors between the host and a CUDA device, as they are. */
#ifndef MOQ_OPS_TRANSFER_H
#define MOQ_OPS_TRANSFER_H

#include "core/tensor.h"

/* Copies x to `out`, which is row-major and of x's shape and dtype, and waits for it; what comes
 * from a device is read in the order of `stream`. One of them is on the host. x is contiguous. */
moq_status moq_run_transfer(const moq_tensor *x, void *stream, const moq_tensor *out, moq_err *err);

/* Copies x, which messages call `name` and which may have any strides, to `out` of the same shape,
 * which is row-major: codes as they are, numbers of another type as float32, on the host; as it is,
 * to a device. */
moq_status moq_check_copy(const moq_tensor *x, const char *name, const moq_tensor *out,
                          moq_err *err);
moq_status moq_run_copy(const moq_tensor *x, const char *name, const moq_tensor *out, moq_err *err);

#endif
