/* The last kernel of a linear whose product a library writes to the workspace. */
#ifndef MOQ_CUDA_LINEAR_FINISH_SUMS_H
#define MOQ_CUDA_LINEAR_FINISH_SUMS_H

#include "core/status.h"
#include "cuda/device/load.h"

namespace moq {

/* Sums [m, n], rows without gaps at multiples of 16 bytes, and what makes y of them. */
typedef struct {
    const void *sums;
    moq_dtype dtype; /* of the sums: float32, int32, float16 or bfloat16 */
    int64_t m;
    int n;                /* a multiple of 8 */
    const float *x_scale; /* [m], or one if x_stride is 0; NULL for 1 */
    const float *w_scale; /* [n], or NULL for 1 */
    int x_stride;
    moq_output out; /* of 16 bits */
} moq_sums;

/* Writes y = round(sums * x_scale * w_scale + addend + bias). */
moq_status moq_finish_sums(const moq_sums *sums, const char *what, void *stream, moq_err *err);

} // namespace moq

#endif
