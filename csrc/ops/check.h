/* The checks every operation makes on its tensors before anything is written; each failure names
 * the argument, what was expected and what came. */
#ifndef MOQ_OPS_CHECK_H
#define MOQ_OPS_CHECK_H

#include "core/tensor.h"

/* True when the tensor holds `dtype`: declared so, or as raw bytes (uint8) or raw 16-bit integers.
 * int8 is no carrier: codes of that type are those of another algorithm. */
bool moq_holds(const moq_tensor *t, moq_dtype dtype);
/* MOQ_OK for memory of `device` with a size that can be counted. */
moq_status moq_check_device(const moq_tensor *t, const char *name, moq_device device, moq_err *err);
/* MOQ_OK for memory of the host with a size that can be counted. */
moq_status moq_check_host(const moq_tensor *t, const char *name, moq_err *err);
/* MOQ_OK for memory of the host or of a usable device, with a size that can be counted. */
moq_status moq_check_usable(const moq_tensor *t, const char *name, moq_err *err);
/* `dtype`, or raw integers of its width, wherever they are. */
moq_status moq_check_holds(const moq_tensor *t, const char *name, moq_dtype dtype, moq_err *err);
/* Host memory holding `dtype`. */
moq_status moq_check_dtype(const moq_tensor *t, const char *name, moq_dtype dtype, moq_err *err);
/* Memory of float32, bfloat16 or float16, on the host or on a device that can be used. */
moq_status moq_check_activation(const moq_tensor *x, const char *name, moq_err *err);
bool moq_same_shape(const moq_tensor *a, const moq_tensor *b);
/* 0, for not given, or a size. */
moq_status moq_check_group_size(int64_t group_size, moq_err *err);
/* A result: memory that can be written, without gaps, of the shape, device and dtype (or its raw
 * carrier) of `expected`, apart from each of the `count` inputs (NULL entries are passed over). */
moq_status moq_check_output(const moq_tensor *out, const char *name, const moq_tensor *expected,
                            const moq_tensor *const *inputs, int count, moq_err *err);
/* Reads a scale of one float32 element, of any rank, that is positive and finite. */
moq_status moq_read_scale(const moq_tensor *scale, const char *name, float *out, moq_err *err);
/* A row-major tensor without memory: what moq_check_output compares with. */
moq_tensor moq_describe(moq_dtype dtype, int32_t ndim, const int64_t *shape);

#endif
