/* Modes of weight processing, and the functions that do it on each kind of device. */
#ifndef MOQ_OPS_WEIGHT_MODE_H
#define MOQ_OPS_WEIGHT_MODE_H

#include "ops/params.h"
#include "ops/weight_sources.h"

/* `fresh` outputs, which nobody else has seen, may have been written when processing fails, others
 * are not. On CUDA the work goes to `stream`, which is waited for (so not within a capture), and
 * `workspace` has the bytes that moq_prepare_workspace asks for, on the device. */
typedef struct {
    bool fresh;
    bool only_checks; /* nothing is written but the workspace; not of fresh outputs */
    bool checked;     /* so it was, just now: codes need not be looked at again */
    const float
        *row_factor; /* of all rows, beside the codes: multiplies their output_scale; NULL: 1 */
    void *stream;
    void *workspace;
} moq_prepare_mode;

/* Weight processing of sources whose shapes were checked. */
moq_status moq_prepare_on_cpu(const moq_weight *weight, const moq_weight_sources *sources,
                              moq_prepare_mode mode, moq_params *params, moq_err *err);
/* Processes them on the current device, and waits until all is done. */
moq_status moq_prepare_on_cuda(const moq_weight *weight, const moq_weight_sources *sources,
                               moq_prepare_mode mode, moq_params *params, moq_err *err);
/* Processes those of layouts that only general kernels read, by way of the host. */
moq_status moq_prepare_general_on_cuda(const moq_weight *weight, const moq_weight_sources *sources,
                                       moq_prepare_mode mode, moq_params *params, moq_err *err);
/* Bytes of the workspace of moq_prepare_on_cuda. */
int64_t moq_prepare_workspace_on_cuda(const moq_weight *weight, bool fresh);

#endif
