/* The linear operation: weight processing and the call, validated and planned, still without
 * Python. Everything is checked before the first byte is written. */
#ifndef MOQ_OPS_LINEAR_H
#define MOQ_OPS_LINEAR_H

#include "core/linear.h"
#include "ops/plan.h"

/* A tensor of the checkpoint: absent (count 0), one tensor for the whole layer (count 1), or one
 * per partition. */
typedef struct {
    int32_t count;
    const moq_tensor *part; /* [count] */
} moq_source;

typedef struct {
    moq_source weight;
    moq_source weight_scale;
    moq_source weight_scale_2;
    moq_source input_scale;
    moq_source pre_quant_scale;
} moq_linear_sources;

/* The prepared tensors of a layer: contiguous, of the shapes moq_linear_prepared_params gives.
 * dtype MOQ_DT_NONE marks one that is absent. */
typedef struct {
    moq_tensor weight;
    moq_tensor weight_scale;
    moq_tensor output_scale;
    moq_tensor fold_scale;
    moq_tensor input_scale;
    moq_tensor pre_quant_scale;
} moq_linear_params;

/* The tensor of a prepared parameter. */
moq_tensor *moq_linear_param(moq_linear_params *params, moq_param id);

/* Dtypes, shapes and layouts of prepared tensors; `mapping` is the argument that holds them. */
moq_status moq_linear_check_params(const moq_linear_spec *spec, const moq_linear_params *params,
                                   const char *mapping, moq_err *err);

/* How weights are processed: `fresh` outputs, which nobody else has seen, may have been written
 * when it fails, others are not. On CUDA the work goes to `stream`, which is waited for (so not
 * within a capture). `workspace` has the bytes that moq_prepare_workspace asks for, on the device.
 */
typedef struct {
    bool fresh;
    void *stream;
    void *workspace;
} moq_prepare_way;

int64_t moq_prepare_workspace(const moq_linear_spec *spec, bool fresh);

/* Turns checkpoint tensors into prepared ones. On CUDA, codes are on the layer's device, scales of
 * any other kind there or on the host. */
moq_status moq_linear_prepare(const moq_linear_spec *spec, const moq_linear_sources *sources,
                              moq_prepare_way way, moq_linear_params *params, moq_err *err);

/* A call and the kernel that is to run it. Points into itself: not to be copied. */
typedef struct {
    moq_linear_call call;
    const moq_linear_kernel *kernel;
    /* x and y as matrices on CUDA, and x smoothed where the kernel does not do it. One that is not
     * of the caller's memory lies in the workspace, at x_at or y_at. */
    const moq_tensor *x, *y;
    moq_tensor x_rows, y_rows;
    bool copies_x, copies_y;
    const float *smoothing; /* [K], or NULL */
    int64_t x_at, y_at, workspace;
    /* Set where the workspace, or a new y, is memory in the order of another stream than that of
     * the call: the two wait for each other. */
    bool orders;
    void *memory_stream;
} moq_linear_job;

/* Checks y = x W^T + bias and picks the kernel. x is [..., in_features] with any strides, y [...,
 * out_features] with contiguous rows; bias, of x's dtype or float32, may be NULL. The job refers to
 * spec, x and y. */
moq_status moq_linear_open(const moq_linear_spec *spec, moq_linear_plan *plan,
                           const moq_linear_params *params, const moq_tensor *x,
                           const moq_tensor *bias, const moq_tensor *y, moq_linear_job *job,
                           moq_err *err);

/* Bytes of memory on the layer's device that the job works in; 0 for none. */
int64_t moq_linear_workspace(const moq_linear_job *job);

/* Runs it. On CUDA the work is queued on call.stream; call.workspace has the bytes that
 * moq_linear_workspace asks for. Both are the caller's to set. */
moq_status moq_linear_run(moq_linear_job *job, moq_err *err);

/* The shape of y for an x; fails as moq_linear_run would. */
moq_status moq_linear_output_shape(const moq_linear_spec *spec, const moq_tensor *x, int64_t *shape,
                                   moq_err *err);

#endif
