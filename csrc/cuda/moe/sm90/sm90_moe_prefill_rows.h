/* Rows of codes or values for the products of experts of many tokens on Hopper. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_ROWS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_ROWS_H

#include "cuda/moe/expert_rows.h"

namespace moq::moe_prefill {

/* make_rows_of_x of ROWS_TENSOR, ROWS_TOKEN, ROWS_GROUP or ROWS_VALUES, values of 16 bits, K a
 * multiple of 16, where router weights are not on the input and x has no factors. What follows may
 * read the groups before it waits. `written` becomes 0 for rows of slots, of all forms but
 * ROWS_VALUES, or is NULL. */
moq_status make_rows_of_tokens(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const moe::expert_rows *rows, int32_t *written, moq_err *err);

/* make_rows_of_g of the same forms but ROWS_VALUES. */
moq_status make_codes_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                           const void *g, const moe::expert_rows *rows, moq_err *err);

/* make_rows_of_x and make_rows_of_g of ROWS_TOKEN, values of 16 bits, K a multiple of 16, in the
 * order of moq_cuda_quantize.paired; the rows of an expert begin where those before it end. */
moq_status make_paired_rows_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                                 const moe::expert_rows *rows, moq_err *err);
moq_status make_paired_rows_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                                 const void *g, const moe::expert_rows *rows, moq_err *err);

} // namespace moq::moe_prefill

#endif
