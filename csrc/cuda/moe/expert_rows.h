/* Rows before, between and after the two products of experts: formats, makers, and the sum over
 * slots. */
#ifndef MOQ_CUDA_MOE_EXPERT_ROWS_H
#define MOQ_CUDA_MOE_EXPERT_ROWS_H

#include "cuda/device/load.h"
#include "cuda/moe/group.h"

namespace moq::moe {

/* Format of the rows of a product. */
typedef enum {
    ROWS_VALUES, /* values of the layer's dtype */
    ROWS_AMAX,   /* values, and the largest magnitude of each row */
    ROWS_TENSOR, /* e4m3 with the input_scale of the expert */
    ROWS_TOKEN,  /* e4m3 and a scale a row */
    ROWS_GROUP,  /* e4m3 and a scale a row and 128 columns, [columns / 128, scale_stride] */
    ROWS_NVFP4,  /* pairs of e2m1 and an e4m3 scale a row and 16 columns, [rows, columns / 16] */
    /* Values of codes without their scale, as float16: of e4m3 codes with per-tensor or token
     * scales, and of NVFP4 codes times their block scales with the input_scale of the expert. */
    ROWS_HALVES_TENSOR,
    ROWS_HALVES_TOKEN,
    ROWS_HALVES_NVFP4
} row_format;

/* Rows in the workspace, in the order of `groups`. Columns from K up to a multiple of 16 are
 * zeros. */
typedef struct {
    row_format format;
    void *data;   /* values, codes, or float16 values of codes */
    void *scales; /* float or e4m3 scales; or amax */
    int64_t scale_stride;
} expert_rows;

/* Return the bytes of a row, and of all scales or amax. */
int64_t row_bytes(row_format format, moq_dtype dtype, int64_t columns);
int64_t scale_bytes(row_format format, int64_t rows, int64_t columns);

/* Makes h, rows of x in the format of w13; if x is codes they stay codes. */
moq_status make_rows_of_x(const slot_chunk *chunk, const slot_groups *groups,
                          const expert_rows *rows, moq_err *err);
/* Makes rows of g = act(u) in the format of w2 from u, float32 [rows, P * I]. */
moq_status make_rows_of_u(const slot_chunk *chunk, const slot_groups *groups, const void *u,
                          const expert_rows *rows, moq_err *err);
/* Makes rows in the format of w2 from values of g, [rows, I] of the layer's dtype, each row at a
 * multiple of 16 values. */
moq_status make_rows_of_g(const slot_chunk *chunk, const slot_groups *groups, const void *g,
                          const expert_rows *rows, moq_err *err);
/* The outputs of the second product: d [rows, H], float32 or, H a multiple of 8, bfloat16. */
typedef struct {
    const void *data;
    moq_dtype dtype;
    bool early; /* the kernel that makes d lets this one start when the groups are complete */
} rows_of_d;

/* Adds the rows of d of each token to y (expert_sum.cu). */
moq_status combine_rows(const slot_chunk *chunk, const slot_groups *groups, rows_of_d d,
                        moq_err *err);

} // namespace moq::moe

#endif
