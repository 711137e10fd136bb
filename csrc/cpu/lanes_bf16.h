/* Some rows of x with 16 rows of the weight in lanes of AVX512-BF16: a file of its own, which
 * compiles beside the kernel that it belongs to. */
#ifndef MOQ_CPU_LANES_BF16_H
#define MOQ_CPU_LANES_BF16_H

#include "cpu/cpu_linear.h"

/* `arrange_medium` and `multiply_medium` of a kernel. */
moq_arrange moq_arrange_together;
void moq_multiply_lanes_bf16(const moq_decode_job *job);

#endif
