/* The tensors of a checkpoint that weight processing is given, for a matrix or for all experts of a
 * stack: found by partition and expert, and their shapes checked. */
#ifndef MOQ_OPS_WEIGHT_SOURCES_H
#define MOQ_OPS_WEIGHT_SOURCES_H

#include "core/weight.h"

/* A tensor of the checkpoint: absent (count 0), one tensor for all partitions (count 1), or one per
 * partition. Views are of one matrix; views of a stack are of its first expert, with the distance
 * to the next one. */
typedef struct {
    int32_t count;
    int64_t expert;         /* whose tensors these are: 0 from outside */
    const moq_tensor *part; /* [count], of expert 0 */
    const int64_t *step;    /* [count]: bytes from expert to expert, NULL for a matrix */
} moq_source;

typedef struct {
    moq_source weight;
    moq_source weight_scale;
    moq_source weight_scale_2;
    moq_source input_scale;
    moq_source pre_quant_scale;
    moq_source lora_a, lora_b; /* of a matrix */
} moq_weight_sources;

/* Makes the view of a stack's tensor, experts first, the view of its first expert, and tells the
 * bytes from expert to expert, which may be anything the view's strides say. A scale of one value,
 * and a pre_quant_scale [K], serve all experts. `id` is of a tensor of the checkpoint. */
moq_status moq_stack_open(const moq_weight *weight, moq_param id, const char *name,
                          moq_tensor *view, int64_t *step, moq_err *err);

/* The tensor of partition p, or of all partitions, of the source's expert. */
moq_tensor moq_source_part(const moq_source *source, int32_t p);
/* Bytes from expert to expert; 0 for a matrix. */
int64_t moq_source_step(const moq_source *source, int32_t p);
/* The tensors of one expert. */
moq_weight_sources moq_sources_of(const moq_weight_sources *sources, int64_t expert);
/* The scales of rows, blocks or partitions of the weight. */
const moq_source *moq_scale_source(const moq_weight *weight, const moq_weight_sources *sources);

/* Rows of codes: the first, and bytes from one to the next, and from the rows of an expert to the
 * rows of the next one. */
typedef struct {
    const uint8_t *data;
    int64_t stride, step;
} moq_code_rows;

/* The rows of partition p of the source's expert; they start at row `first` of the matrix. */
moq_code_rows moq_prepare_rows(const moq_source *source, int32_t p, int64_t first);

/* Checks that there is one tensor for all partitions, or one for each. */
moq_status moq_check_parts(const moq_weight *weight, const moq_source *source, const char *name,
                           moq_err *err);
/* Checks dtypes, shapes and strides of codes and of the scales that lie beside them. */
moq_status moq_check_sources(const moq_weight *weight, const moq_weight_sources *sources,
                             moq_err *err);

#endif
