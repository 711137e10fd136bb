/* Linear kernels on the CPU. */
#ifndef MOQ_CPU_LINEAR_H
#define MOQ_CPU_LINEAR_H

#include "core/linear.h"

/* Rows of x that share one decoding of a weight row; 32 rows of K = 4096 floats are 512 KB, about
 * a second-level cache. */
#define MOQ_CPU_PANEL_ROWS 32

/* Every layout and input mode, any CPU: the oracle of every other kernel. */
moq_status moq_cpu_linear_portable(const moq_linear_call *call, moq_err *err);

#endif
