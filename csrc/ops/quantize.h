/* Operation quantize: activations to FP8 or NVFP4 codes and scales, after silu_and_mul or rms_norm
 * where that is asked for; or these alone. */
#ifndef MOQ_OPS_QUANTIZE_H
#define MOQ_OPS_QUANTIZE_H

#include "core/activation.h"

typedef enum {
    MOQ_QUANTIZE_FP8_TENSOR,     /* one scale, given or amax / 448 */
    MOQ_QUANTIZE_FP8_TOKEN,      /* one scale for each row */
    MOQ_QUANTIZE_FP8_GROUP,      /* one scale for each group of 128 in a row */
    MOQ_QUANTIZE_NVFP4,          /* e4m3 scales for groups of 16 under one, given or amax / 2688 */
    MOQ_QUANTIZE_NVFP4_SWIZZLED, /* the same, the block scales of all rows in swizzled order */
    MOQ_QUANTIZE_NOTHING         /* the values of an activation, without codes; it has no name */
} moq_quantize_scheme;

/* True if codes are e2m1, and scales of two levels. */
static inline bool moq_quantizes_to_nvfp4(moq_quantize_scheme scheme) {
    return scheme == MOQ_QUANTIZE_NVFP4 || scheme == MOQ_QUANTIZE_NVFP4_SWIZZLED;
}

typedef struct {
    moq_quantize_scheme scheme;
    moq_activation activation; /* what makes the values of its x; kind NONE: nothing */
    moq_tensor x;              /* the values to quantize; of an activation no memory */
    moq_tensor given;   /* the given scale of FP8_TENSOR and NVFP4; ndim -1 where it is dynamic */
    int64_t group;      /* FP8_GROUP and NVFP4 */
    moq_tensor codes;   /* shapes and dtypes of the results; no memory */
    moq_tensor scale;   /* FP8_*: float32; NVFP4: the block scales; NOTHING: none */
    moq_tensor scale_2; /* NVFP4: float32, one element */
} moq_quantize_plan;

/* "fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled" */
moq_status moq_quantize_scheme_from_name(const char *name, moq_quantize_scheme *out, moq_err *err);
/* Checks x [..., K], on the CPU or a CUDA device, and resolves the shapes of the results. `scale`
 * may be NULL, `group_size` 0 for the scheme's own. */
moq_status moq_plan_quantize(moq_quantize_scheme scheme, const moq_tensor *x,
                             const moq_tensor *scale, int64_t group_size, moq_quantize_plan *plan,
                             moq_err *err);

/* Checks an activation, whose values are quantized in groups of 128, and resolves the shapes of the
 * results. Its residual_out is checked when the plan is run. */
moq_status moq_plan_activation(moq_quantize_scheme scheme, const moq_activation *activation,
                               const moq_tensor *scale, moq_quantize_plan *plan, moq_err *err);

/* The tensors, stream and memory that a plan is run with. */
typedef struct {
    const moq_tensor *codes;
    const moq_tensor *scale;        /* NULL for FP8_TENSOR with a given scale, and for NOTHING */
    const moq_tensor *scale_2;      /* NULL unless scales have two levels and none is given */
    const moq_tensor *residual_out; /* NULL unless there is a residual */
    const moq_tensor *value_out;    /* of an activation, quantized: where values go too, or NULL */
    void *stream;                   /* CUDA: cudaStream_t */
    void *workspace;                /* of moq_quantize_workspace bytes, on the device of x */
} moq_quantize_call;

int64_t moq_quantize_workspace(const moq_quantize_plan *plan);
/* Checks the results and runs a plan. On a CUDA device the work is queued on the stream; a given
 * scale in host memory is checked and read now, one on the device is neither. */
moq_status moq_run_quantize(const moq_quantize_plan *plan, const moq_quantize_call *call,
                            moq_err *err);

#endif
