/* The products of experts of many tokens on Hopper, and what they take: for sm90_many.cu. */
#ifndef MOQ_CUDA_MOE_SM90_MANY_H
#define MOQ_CUDA_MOE_SM90_MANY_H

#include "cuda/moe/expert_product.h"

namespace moq::moe_many {

/* Rows of a tile, and what the first row of an expert has to be a multiple of where rows have
 * scales of groups. */
#define MOQ_MOE_MANY_ROWS  128
#define MOQ_MOE_MANY_ALIGN 4

/* As expert_product.h has it, but for what comes out: g of the layer's dtype [rows, I], rows at
 * multiples of 16 values, or d float32 [rows, H]. */
typedef struct {
    moe::expert_product product;
    const moq_moe_spec *moe;
    void *g; /* of the first product; NULL for d, which is product.out */
} many_product;

moq_status multiply_fp8(const many_product *p, moq_err *err);
moq_status multiply_nvfp4(const many_product *p, moq_err *err);

} // namespace moq::moe_many

#endif
