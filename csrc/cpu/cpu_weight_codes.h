/* Weights to codes and scales on the CPU: core/weight_codes.h has the formulas. */
#ifndef MOQ_CPU_WEIGHT_CODES_H
#define MOQ_CPU_WEIGHT_CODES_H

#include "core/weight_codes.h"

/* False where there is no memory for the scales of some rows. */
bool moq_cpu_weight_codes(const moq_weight_codes *w);

#endif
