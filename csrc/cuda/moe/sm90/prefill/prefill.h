/* Rows of the prefill kernels of experts on Hopper (rows.cu). */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_PREFILL_H
#define MOQ_CUDA_MOE_SM90_PREFILL_PREFILL_H

#include "cuda/moe/pipeline.h"

namespace moq::moe_prefill {

/* Multiple at which the rows of an expert begin if rows have scales of groups. */
#define MOQ_MOE_PREFILL_ALIGN 4

/* Multiple at which the rows of an expert begin if d leaves by TMA, in boxes of so many rows. */
#define MOQ_MOE_PREFILL_ROWS_OF_D 8

/* Makes rows of x like make_rows_of_x, if neither router weights nor factors change x: ROWS_TENSOR,
 * ROWS_TOKEN, ROWS_GROUP or ROWS_VALUES of 16-bit x or its codes, K a multiple of 16. The next
 * kernel may read the groups before it waits. `written`, unless NULL, becomes 0 for rows of slots
 * in all formats but ROWS_VALUES. */
moq_status make_rows_of_tokens(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                               const moe::expert_rows *rows, int32_t *written, moq_err *err);

/* Makes rows of g like make_rows_of_g, for ROWS_TOKEN or ROWS_GROUP. */
moq_status make_codes_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                           const void *g, const moe::expert_rows *rows, moq_err *err);

/* Make rows like make_rows_of_x and make_rows_of_g, for ROWS_TOKEN of 16-bit values or codes of x,
 * K a multiple of 16, in the order of moq_cuda_quantize.paired. The rows of an expert follow those
 * before without a gap. The next kernel may read the groups before it waits, but not if router
 * weights or factors change x. */
moq_status make_paired_rows_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                                 const moe::expert_rows *rows, moq_err *err);
moq_status make_paired_rows_of_g(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                                 const void *g, const moe::expert_rows *rows, moq_err *err);

} // namespace moq::moe_prefill

#endif
