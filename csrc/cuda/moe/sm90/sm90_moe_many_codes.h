/* Rows of codes with a scale a row for products of experts with folded NVFP4 weights on Hopper. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_CODES_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_CODES_H

#include "cuda/moe/group.h"

namespace moq::moe_many {

/* Where rows of codes [rows, K] and their scales [rows] are. */
typedef struct {
    uint8_t *codes;
    float *scales;
} code_rows;

/* The codes of expert_rows.h's make_rows_of_x and make_rows_of_g of ROWS_TOKEN, K a multiple of 16,
 * in the order of moq_cuda_quantize.paired. Rows of g are K values apart. */
moq_status make_row_codes_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const code_rows *rows, moq_err *err);
moq_status make_row_codes_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const void *g, const code_rows *rows, moq_err *err);

} // namespace moq::moe_many

#endif
