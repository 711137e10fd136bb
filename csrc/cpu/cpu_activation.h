/* Activations before quantization on the CPU: portable, on all threads. See core/activation.h. */
#ifndef MOQ_CPU_CPU_ACTIVATION_H
#define MOQ_CPU_CPU_ACTIVATION_H

#include "core/activation.h"

/* The values v [..., K], without gaps, of the dtype of x; and z where there is a residual. */
moq_status moq_cpu_activate(const moq_activation *a, const moq_tensor *values, moq_err *err);

#endif
