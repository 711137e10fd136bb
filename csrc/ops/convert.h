/* Operation convert: elementwise between number formats, the work of encode and decode. */
#ifndef MOQ_OPS_CONVERT_H
#define MOQ_OPS_CONVERT_H

#include "core/tensor.h"

/* Describes the result of converting `x` to `dtype`: the same shape, except that packed fp4 halves
 * or doubles the last extent, which must be even to be halved. */
moq_status moq_describe_convert(const moq_tensor *x, const char *name, moq_dtype dtype,
                                moq_tensor *result, moq_err *err);
/* Writes it to `result`, which is contiguous, in host memory and apart from x; x may be strided. */
moq_status moq_run_convert(const moq_tensor *x, const char *name, const moq_tensor *result,
                           moq_err *err);

#endif
