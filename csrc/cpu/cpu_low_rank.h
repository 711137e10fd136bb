/* The low-rank part of a linear on the CPU: core/low_rank.h. */
#ifndef MOQ_CPU_CPU_LOW_RANK_H
#define MOQ_CPU_CPU_LOW_RANK_H

#include "core/low_rank.h"

/* Bytes of low_rank->inner: its sums, and rows of x as float32. */
int64_t moq_cpu_low_rank_bytes(const moq_low_rank *low_rank);
moq_status moq_cpu_low_rank(const moq_low_rank *low_rank, moq_err *err);

#endif
