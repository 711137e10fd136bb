/* Smoothing on the CPU: what pre_quant_scale does to activations. */
#ifndef MOQ_CPU_CPU_SMOOTH_H
#define MOQ_CPU_CPU_SMOOTH_H

#include "core/tensor.h"

/* rows[m, k] = round(x[..., k] * scale[k]): the product in float32, rounded to the dtype of x,
 * which `rows`, of contiguous rows, has too. */
moq_status moq_cpu_smooth_rows(const moq_tensor *x, const float *scale, const moq_tensor *rows,
                               moq_err *err);

#endif
