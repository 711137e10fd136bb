/* Decoding of the layouts that only general kernels read (core/weight.h). */
#ifndef MOQ_CPU_CPU_GENERAL_H
#define MOQ_CPU_CPU_GENERAL_H

#include "core/linear.h"

/* Writes columns [first, first + count) of row n of the call's weight as float32: codes of int8,
 * and codes times the scales of their groups of e4m3 and int4, rounded once. */
void moq_cpu_decode_general(const moq_linear_call *call, int64_t n, int64_t first, int64_t count,
                            float *out);

#endif
