/* The products of dequantization, in plain C: included by every level of the row kernels, for which
 * the compiler makes vectors of it. Not a header for anybody else. Bound by conversions between
 * float32 and float64. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* +0 where a scale is 0, whatever the value. */
static inline double scaled(float value, float a, float b) {
    double product = (double)value * (double)a * (double)b;
    return ((a == 0.0f) | (b == 0.0f)) ? 0.0 : product;
}

/* Converts to float32 with the last bit set where anything was cut off ("round to odd"), so that
 * rounding the result to a type of at most 22 bits of precision is as good as rounding the double
 * itself. */
static inline float round_to_odd(double value) {
    float rounded = (float)value;
    double magnitude = fabs(value), found = fabs((double)rounded);
    uint32_t bits, above = found > magnitude, below = found < magnitude;
    memcpy(&bits, &rounded, sizeof bits);
    bits = (bits - above) | above | below; /* first to the neighbour towards zero */
    memcpy(&rounded, &bits, sizeof bits);
    return rounded;
}

static void scale(const float *restrict values, const float *restrict a, const float *restrict b,
                  int64_t n, bool odd, float *restrict out) {
    if (odd)
        for (int64_t i = 0; i < n; i++)
            out[i] = round_to_odd(scaled(values[i], a[i], b[i]));
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = (float)scaled(values[i], a[i], b[i]);
}
