/* Rounds activations to the values of their codes on the device, for products of 16-bit numbers or
 * of int8. */
#ifndef MOQ_CUDA_TENSOR_CUDA_ROUND_H
#define MOQ_CUDA_TENSOR_CUDA_ROUND_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const moq_linear_call *call; /* x is e4m3 by tensor or int8; K is a multiple of 16 */
    moq_dtype to;                /* of the values: bfloat16, float16, or int8 of int8 codes */
    uint8_t *memory;             /* of moq_cuda_round_bytes, at a multiple of 16 */
} moq_cuda_round;

int64_t moq_cuda_round_bytes(const moq_cuda_round *r);

/* Rounded rows, and the scale of each. */
typedef struct {
    const uint8_t *values; /* [m, K] */
    const float *scales;   /* [m] */
} moq_rounded;

/* Returns where the rows of a partition are: partitions of one input_scale share them, others
 * follow each other without gaps. */
moq_rounded moq_cuda_rounded(const moq_cuda_round *r, int partition);

/* Queues the rounding on the call's stream; `what` names the operation in errors. */
moq_status moq_cuda_round_rows(const moq_cuda_round *r, const char *what, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
