/* Rows on their way to the two products of experts and from them: for launchers of this room. */
#ifndef MOQ_CUDA_MOE_EXPERT_ROWS_H
#define MOQ_CUDA_MOE_EXPERT_ROWS_H

#include "cuda/device/load.h"
#include "cuda/moe/group.h"

namespace moq::moe {

/* What a product is given of its rows. */
typedef enum {
    ROWS_VALUES, /* of the layer's dtype */
    ROWS_AMAX,   /* these, and of each row the largest magnitude */
    ROWS_TENSOR, /* e4m3 with the input_scale of the expert */
    ROWS_TOKEN,  /* e4m3 and a scale a row */
    ROWS_GROUP,  /* e4m3 and a scale a row and 128 columns, [columns / 128, scale_stride] */
    ROWS_NVFP4,  /* pairs of e2m1 and an e4m3 scale a row and 16 columns, [rows, columns / 16] */
    /* What codes mean without their scale, as float16: e4m3 as above, and NVFP4 codes times their
     * block scales with the input_scale of the expert. */
    ROWS_HALVES_TENSOR,
    ROWS_HALVES_TOKEN,
    ROWS_HALVES_NVFP4
} row_format;

/* Rows in the workspace, in the order of `groups`. Columns from K up to a multiple of 16 are zeros.
 */
typedef struct {
    row_format form;
    void *data;   /* values, codes, or what they mean */
    void *scales; /* of float, or of e4m3; or amax */
    int64_t scale_stride;
} expert_rows;

/* Bytes of a row, and of all scales or amax. */
int64_t row_bytes(row_format form, moq_dtype dtype, int64_t columns);
int64_t scale_bytes(row_format form, int64_t rows, int64_t columns);

/* h: rows of x as w13 takes them. Where x is codes they have the form of these. */
moq_status make_rows_of_x(const slot_chunk *chunk, const slot_groups *groups,
                          const expert_rows *rows, moq_err *err);
/* g: act(u), u float32 [rows, P * I], as w2 takes it. */
moq_status make_rows_of_u(const slot_chunk *chunk, const slot_groups *groups, const void *u,
                          const expert_rows *rows, moq_err *err);
/* g as w2 takes it where it is there already, [rows, I] of the layer's dtype, each row at a
 * multiple of 16 values. */
moq_status make_rows_of_g(const slot_chunk *chunk, const slot_groups *groups, const void *g,
                          const expert_rows *rows, moq_err *err);
/* d [rows, H], float32 or, H a multiple of 8, bfloat16. */
typedef struct {
    const void *data;
    moq_dtype dtype;
    bool early; /* what makes it lets others begin when it knows that the grouping is done */
} rows_of_d;

/* y from d: expert_sum.cu. */
moq_status combine_rows(const slot_chunk *chunk, const slot_groups *groups, rows_of_d d,
                        moq_err *err);

} // namespace moq::moe

#endif
