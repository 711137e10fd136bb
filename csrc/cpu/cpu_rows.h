/* Rows of strided tensors as float32: the way every portable CPU kernel reads its input.
 *
 * A tensor of any rank is a list of rows: the last axis is the row, the axes before it are counted
 * in row-major order. A tensor without axes is one row of one element. */
#ifndef MOQ_CPU_CPU_ROWS_H
#define MOQ_CPU_CPU_ROWS_H

#include "core/tensor.h"

/* Elements of a row, and the number of rows. */
int64_t moq_row_length(const moq_tensor *t);
int64_t moq_row_count(const moq_tensor *t);
/* Offset in elements of the first element of row `row`. */
int64_t moq_row_offset(const moq_tensor *t, int64_t row);
/* Copies n elements of `size` bytes that lie `stride` elements apart next to each other. */
void moq_gather(const void *src, int64_t stride, size_t size, int64_t n, void *dst);
/* Copies the elements of row `row` next to each other. */
void moq_gather_row(const moq_tensor *t, int64_t row, void *dst);
/* Reads row `row` of a tensor of 16 or 32-bit floats into dst, one float for each element. */
void moq_load_row(const moq_tensor *t, int64_t row, float *dst);
/* Largest magnitude of n values, 0 for none; NaN when one of them is. */
float moq_row_amax(const float *x, int64_t n);

#endif
