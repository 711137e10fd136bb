/* Limits and row makers that the prefill kernels of experts on Hopper share. */
#ifndef MOQ_CUDA_MOE_SM90_PREFILL_PREFILL_H
#define MOQ_CUDA_MOE_SM90_PREFILL_PREFILL_H

#include "cuda/moe/expert_rows.h"
#include "cuda/moe/pipeline.h"

namespace moq::moe_prefill {

/* What the first row of an expert has to be a multiple of where rows have scales of groups. */
#define MOQ_MOE_PREFILL_ALIGN 4

/* The same where d leaves by the copy engine, in boxes of so many rows. */
#define MOQ_MOE_PREFILL_ROWS_OF_D 8

/* Tiles of rows of FP8 that have each tile of W one after the other. */
#define MOQ_MOE_PREFILL_TOGETHER 8

/* What is written of g: values of the layer's dtype, or e4m3 codes by the scale of the expert or
 * with scales of groups. */
typedef enum { G_VALUES, G_TENSOR, G_GROUP } g_format;

/* Rows that FP8 products of a layer take. */
static inline moe::row_format fp8_format(const moq_linear_spec *spec) {
    return spec->input == MOQ_INPUT_E4M3_GROUP   ? moe::ROWS_GROUP
           : spec->input == MOQ_INPUT_E4M3_TOKEN ? moe::ROWS_TOKEN
                                                 : moe::ROWS_TENSOR;
}

/* Output of the first FP8 product: codes if their scale is known within a block. */
static inline g_format g_format_of(const moq_moe_spec *spec) {
    moe::row_format format = fp8_format(&spec->w2);
    if (format == moe::ROWS_TENSOR)
        return G_TENSOR;
    return format == moe::ROWS_GROUP && spec->gated ? G_GROUP : G_VALUES;
}

moq_status multiply_fp8_large(const moe::expert_product *p, moq_err *err);

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
