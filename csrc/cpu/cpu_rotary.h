/* Rotary embedding on the CPU: portable, on all threads. See core/rotary.h. */
#ifndef MOQ_CPU_CPU_ROTARY_H
#define MOQ_CPU_CPU_ROTARY_H

#include "core/rotary.h"

/* Writes y [B, T, H, D] of the dtype of x without gaps, apart from what is read. */
moq_status moq_cpu_rotate(const moq_rotary *rotary, void *out, moq_err *err);

#endif
