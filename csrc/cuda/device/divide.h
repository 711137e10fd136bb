/* Division by a number that a launch knows. */
#ifndef MOQ_CUDA_DEVICE_DIVIDE_H
#define MOQ_CUDA_DEVICE_DIVIDE_H

#include <stdint.h>

namespace moq {

/* A divisor and floor((2^32 - 1) / by). */
typedef struct {
    int by;
    uint32_t inverse;
} divisor;

static inline divisor divisor_of(int by) {
    divisor d = {by, 0xffffffffu / (uint32_t)by};
    return d;
}

/* Returns n / d->by for n below 2^31. */
static __device__ __forceinline__ int divide(int n, const divisor *d) {
    int quotient = (int)__umulhi((uint32_t)n, d->inverse); /* at most one too small */
    return quotient + (n - quotient * d->by >= d->by);
}

} // namespace moq

#endif
