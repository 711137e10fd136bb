/* What a quantized linear layer is, independent of who computes it.
 *
 * y[m, n] = round(sum_k X[m, k] * W[n, k] + bias[n]), where W is what the checkpoint's codes and
 * scales mean, and X the activation after the treatment that the algorithm prescribes: smoothed by
 * pre_quant_scale where there is one, then quantized or not. Several
 * layers fused along rows ("partitions": q, k, v) keep their own scales: a factor per output row
 * carries every scale that is constant along K, so that nothing is requantized to a common one.
 *
 * A spec is resolved once from names and sizes; it tells which tensors the checkpoint holds for the
 * layer, which ones the prepared form holds, and what a kernel has to do. */
#ifndef MOQ_CORE_LINEAR_H
#define MOQ_CORE_LINEAR_H

#include "core/algo.h"
#include "core/tensor.h"
#include "core/way.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_MAX_PARTITIONS 64
#define MOQ_MAX_PARAMS     5

typedef enum { MOQ_COMPUTE_EXACT, MOQ_COMPUTE_FP8, MOQ_COMPUTE_FP4, MOQ_COMPUTE_AUTO } moq_compute;

typedef enum {
    MOQ_WEIGHT_E4M3_ROW,     /* e4m3 [N, K]; one factor per row */
    MOQ_WEIGHT_E4M3_BLOCK,   /* e4m3 [N, K]; float32 scale per 128 x 128 block of a partition */
    MOQ_WEIGHT_E2M1,         /* packed e2m1 [N, K / 2]; e4m3 scale per group of K; factor per row */
    MOQ_WEIGHT_E2M1_PACKED,  /* the same codes and scales as core/nvfp4_packed.h has them */
    MOQ_WEIGHT_E2M1_SWIZZLED /* the same codes; scales of each partition as core/swizzle.h has them
                              */
} moq_weight_layout;

/* The chip a layer runs on, as far as the choice of a kernel depends on it. */
typedef struct {
    int32_t capability; /* 10 * major + minor, 90 for Hopper; 0 for the CPU or no device */
    int32_t sm_count;
    int32_t chip;               /* its row in the table of chips (cuda/choice/chip.h), 0 for none */
    bool assumed;               /* named by the caller; nobody looked whether it is there */
    char missing[160];          /* why no CUDA kernel can run on it; empty if one can */
    char cublaslt_missing[160]; /* why cuBLASLt cannot be used; empty if it can */
} moq_target;

typedef struct {
    const char *algo; /* canonical name, static storage */
    moq_compute compute;
    moq_dtype dtype; /* of x and y: bfloat16, float16 or float32 */
    moq_device device;
    moq_target target;
    moq_weight_layout checkpoint; /* as the checkpoint stores the weight */
    moq_weight_layout weight;     /* as the kernel gets it */
    moq_input_mode input;
    bool per_row_scale;          /* the checkpoint's weight_scale has one value per row */
    bool fast_accum;             /* FP8 products may be summed as the tensor cores do */
    bool one_input_scale;        /* the partitions have the same */
    bool checkpoint_input_scale; /* the algorithm writes an input_scale (it may still be absent) */
    bool pre_quant_scale;        /* and, where none was folded elsewhere, a pre_quant_scale */
    int32_t group_size;          /* along K: 16 or 32 for e2m1, 128 for blocks, 0 for rows */
    int64_t in_features;
    int64_t out_features; /* sum of the partitions */
    int32_t partition_count;
    int64_t partition[MOQ_MAX_PARTITIONS];
} moq_linear_spec;

/* The tensors a layer may have, in the checkpoint or prepared. */
typedef enum {
    MOQ_PARAM_WEIGHT,
    MOQ_PARAM_WEIGHT_SCALE,
    MOQ_PARAM_WEIGHT_SCALE_2,
    MOQ_PARAM_OUTPUT_SCALE,
    MOQ_PARAM_FOLD_SCALE,
    MOQ_PARAM_INPUT_SCALE,
    MOQ_PARAM_PRE_QUANT_SCALE,
    MOQ_PARAM_COUNT
} moq_param;

typedef struct {
    moq_param id;
    const char *name;
    const char *role; /* "codes", "scale", "factor" */
    moq_dtype dtype;
    int32_t ndim;
    int64_t shape[3];
    bool required;
} moq_param_spec;

/* Resolves names and sizes. MOQ_ERR_UNSUPPORTED for a known algorithm or compute mode that
 * has no linear method, MOQ_ERR_VALUE for an unknown one or sizes no checkpoint can hold. Any
 * spelling of an algorithm will do. group_size 0 means the default. */
moq_status moq_linear_resolve(const char *algo, const char *compute, const char *dtype,
                              moq_device device, int64_t in_features, const int64_t *partitions,
                              int32_t partition_count, int64_t group_size, moq_linear_spec *spec,
                              moq_err *err);

/* What a caller allows or promises beyond the algorithm: MOQ_ERR_UNSUPPORTED where it means nothing
 * for the layer. */
moq_status moq_linear_apply_options(bool fast_accum, bool one_input_scale, moq_linear_spec *spec,
                                    moq_err *err);

/* Number of rows of 128 x 128 block scales: every partition starts a new row of blocks. */
int64_t moq_linear_block_rows(const moq_linear_spec *spec);
/* Columns of the scale that runs along K: ceil(K / group_size). */
int64_t moq_linear_scale_columns(const moq_linear_spec *spec);

/* Whether kernels fold block scales into e4m3 codes as they read them: with v[k] = e2m1[k] *
 * scale[k / group] of row n, the weight is e4m3(v[k] * fold_scale[n]). fold_scale is the power of
 * two that brings the row's largest |v| above 224 and no further than 448 (moq_cpu_fold_e2m1_row
 * returns 1 / fold_scale), and outputs are scaled by output_scale / fold_scale. The product scale *
 * fold_scale of a group whose codes are all zero may be large, up to 448 * 2^18: it must not become
 * an infinity before it meets the codes. */
bool moq_linear_folds(const moq_linear_spec *spec);

/* Whether each call may be done as compute "exact" or as "fp8" has it, whichever kernel is expected
 * to be faster: compute "auto" where there are both. They read the same prepared tensors but for
 * fold_scale, which exact ones do not. `input` is then that of "fp8"; exact kernels take x as it
 * is. Elsewhere "auto" is "exact". */
bool moq_linear_has_choice(const moq_linear_spec *spec);

/* The tensors of the checkpoint for this layer, and those of its prepared form; returns the count,
 * at most MOQ_MAX_PARAMS. */
int moq_linear_checkpoint_params(const moq_linear_spec *spec, moq_param_spec *params);
int moq_linear_prepared_params(const moq_linear_spec *spec, moq_param_spec *params);

/* "NVFP4 4096x14336, compute exact, bfloat16", for messages and explanations. */
const char *moq_linear_text(const moq_linear_spec *spec, char *buffer, size_t size);
const char *moq_compute_name(moq_compute compute);

/* The number of tokens that stands for m where something is chosen once for several: m rounded up,
 * to one of at most eight between powers of two. */
int64_t moq_token_bucket(int64_t m);

/* One call of a prepared linear: everything a kernel reads and writes, already checked. On the CPU
 * x may have any strides, and the rows of y are contiguous. On CUDA both are matrices of contiguous
 * rows, and those of x, like the weight, begin at addresses that are multiples of 16. */
typedef struct {
    const moq_linear_spec *spec;
    int64_t m;                 /* rows of x and y */
    const moq_tensor *x;       /* [..., K]; [m, K] on CUDA */
    const moq_tensor *y;       /* [..., N]; [m, N] on CUDA */
    const uint8_t *weight;     /* [N, K], [N, K / 2] or packed units */
    const void *weight_scale;  /* e4m3 [N, K / group], swizzled or not, float32 [block rows, K
                                * blocks], or NULL */
    const float *output_scale; /* [N], or NULL for blocks */
    const float *fold_scale;   /* [N] where moq_linear_folds, else NULL */
    const float *input_scale;  /* [partitions], or NULL: dynamic */
    /* [K]: x is first round(x * pre_quant_scale), float32 rounded to its dtype. NULL: it is not, or
     * that was done before; others than kernels that smooth (ops/linear_kernels.h) get NULL. */
    const float *pre_quant_scale;
    const void *bias; /* [N] of bias_dtype, or NULL */
    moq_dtype bias_dtype;
    moq_way way;     /* in which the kernel does it: as chosen for m rows, for its workspace too */
    void *stream;    /* CUDA: cudaStream_t, NULL for the legacy default stream */
    void *workspace; /* of the bytes that the kernel's row of the plan table asks for, or NULL */
} moq_linear_call;

/* The form of the call's way. */
static inline uint8_t moq_form_of(const moq_linear_call *call) {
    return call->input_scale ? call->way.form : call->way.dynamic;
}

#ifdef __cplusplus
}
#endif
#endif
