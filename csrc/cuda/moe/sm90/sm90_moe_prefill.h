/* The products of experts of many tokens on Hopper, and what they take: for sm90_moe_prefill.cu. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_H

#include "cuda/moe/expert_product.h"

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

typedef struct {
    g_format form;
    void *data;    /* codes [rows, I], */
    float *scales; /* of groups [I / 128, scale_stride], or of experts [E] */
    int64_t scale_stride;
} g_codes;

/* As expert_product.h has it, but for what comes out: g of the layer's dtype [rows, I], rows at
 * multiples of 16 values, or its codes, or d [rows, H], float32 or rounded. */
typedef struct {
    moe::expert_product product;
    const moq_moe_spec *moe;
    bool gathered; /* rows are tokens, row_stride bytes apart, that slots ask for */
    int64_t row_stride;
    bool first;       /* of the two products: g comes out; otherwise d, which is product.out */
    bool rounds_d;    /* to bfloat16 */
    bool deep;        /* tiles of fewer rows of W by more columns a step */
    bool early;       /* the groups are there before the predecessor has ended */
    int32_t *written; /* [rows], zeros: counts what is written of g, where products are linked
                         (sm90_moe_prefill_fp8.cu), or NULL */
    void *g;
    g_codes codes;
} prefill_product;

moq_status multiply_fp8(const prefill_product *p, moq_err *err);
moq_status multiply_fp8_large(const prefill_product *p, moq_err *err);
moq_status multiply_nvfp4(const prefill_product *p, moq_err *err);
moq_status multiply_nvfp4_fp8(const prefill_product *p, moq_err *err);

} // namespace moq::moe_prefill

#endif
