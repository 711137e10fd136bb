/* Weight processing: the tensors of a checkpoint to the ones that kernels read, for a matrix or for
 * all experts of a stack at once. Everything is checked before the first byte is written. */
#ifndef MOQ_OPS_WEIGHT_PREPARE_H
#define MOQ_OPS_WEIGHT_PREPARE_H

#include "core/weight.h"
#include "ops/params.h"

/* A tensor of the checkpoint: absent (count 0), one tensor for all partitions (count 1), or one per
 * partition. Views are of one matrix; those of a stack are of its first expert, with the distance
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
} moq_weight_sources;

/* Makes the view of a stack's tensor, experts first, the view of its first expert, and tells the
 * bytes from expert to expert, which may be anything the view's strides say. A scale of one value,
 * and a pre_quant_scale [K], serve all experts. `id` is of a tensor of the checkpoint. */
moq_status moq_stack_open(const moq_weight *weight, moq_param id, const char *name,
                          moq_tensor *view, int64_t *step, moq_err *err);

/* How weights are processed: `fresh` outputs, which nobody else has seen, may have been written
 * when it fails, others are not. On CUDA the work goes to `stream`, which is waited for (so not
 * within a capture). `workspace` has the bytes that moq_prepare_workspace asks for, on the device.
 */
typedef struct {
    bool fresh;
    bool only_checks; /* nothing is written but the workspace; not of fresh outputs */
    bool checked;     /* so it was, just now: codes need not be looked at again */
    void *stream;
    void *workspace;
} moq_prepare_mode;

int64_t moq_prepare_workspace(const moq_weight *weight, bool fresh);

/* Turns checkpoint tensors into prepared ones. On CUDA, codes are on the weight's device, scales of
 * any other kind there or on the host. What lies in one expert of a stack is refused with its
 * number. */
moq_status moq_weight_prepare(const moq_weight *weight, const moq_weight_sources *sources,
                              moq_prepare_mode mode, moq_params *params, moq_err *err);

#endif
