/* The low-rank part of a linear: addend[m, n] = sum_i lora_b[n, i] * (sum_k x[m, k] * lora_a[p r +
 * i, k]), with r the rank and p the partition of row n.
 *
 * x is smoothed and not quantized. Both sums are float32, and so is what lies between them. The
 * linear's kernel adds the result before it rounds its outputs. */
#ifndef MOQ_CORE_LOW_RANK_H
#define MOQ_CORE_LOW_RANK_H

#include "core/linear.h"

typedef struct {
    const moq_linear_spec *spec;
    int64_t m;
    const moq_tensor *x; /* [..., K]; on CUDA [m, K] as kernels read it */
    const float *lora_a; /* [partitions * r, K] */
    const float *lora_b; /* [N, r] */
    float *inner;        /* the inner sums, on the CPU [m, partitions * r] */
    float *addend;       /* [m, N] */
    void *stream;        /* CUDA */
} moq_low_rank;

#endif
