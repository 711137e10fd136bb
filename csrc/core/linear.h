/* A quantized linear layer, independent of who computes it.
 *
 * y[m, n] = round(sum_k X[m, k] * W[n, k] + bias[n]), where W is what the checkpoint's codes and
 * scales mean, and X the activation after the treatment that the algorithm prescribes: smoothed by
 * pre_quant_scale where there is one, then quantized or not. Several layers may be fused along rows
 * (core/weight.h). A layer with low-rank pairs adds lora_b (lora_a x) of its row's partition, where
 * x is smoothed and not quantized, before the one rounding (core/low_rank.h).
 *
 * A spec is resolved once from names and sizes; it tells what a kernel has to do. */
#ifndef MOQ_CORE_LINEAR_H
#define MOQ_CORE_LINEAR_H

#include "core/kernel_config.h"
#include "core/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Compute capability from which tensor cores multiply FP4. */
#define MOQ_FP4_CAPABILITY 100

/* The chip a layer runs on, as far as the choice of a kernel depends on it. */
typedef struct {
    int32_t capability; /* 10 * major + minor, 90 for Hopper; 0 for the CPU or no device */
    int32_t sm_count;
    float memory, cores;        /* rates of its memory, and of a multiprocessor, of an H200's */
    bool assumed;               /* named by the caller; nobody looked whether it is there, */
    char missing[256];          /* why no CUDA kernel can run on it; empty if one can */
    char cublaslt_missing[156]; /* why cuBLASLt cannot be used; empty if it can */
    bool pretended;             /* and calls run on what is there, as tests ask for */
    float library;              /* rate of a multiprocessor in kernels of cuBLASLt, of an H200's */
} moq_target;

/* The weight is a matrix. Its facts are read as members of the spec: spec->in_features. */
typedef struct {
    union {
        moq_weight matrix;
        struct {
            MOQ_WEIGHT_FACTS
        };
    };
    moq_dtype dtype; /* of x and y: bfloat16, float16 or float32 */
    moq_target target;
    bool fast_accum; /* FP8 products may be summed as the tensor cores do */
    /* x is not of dtype but codes already, as `input` says: of a linear e4m3 with its one
     * input_scale, of w13 of experts any (core/moe.h) */
    bool quantized_input;
    bool batch_invariant; /* bits of a row of y depend on no other row of x and not on m */
} moq_linear_spec;

/* Resolves the names of a matrix and the dtype of x and y; fails as moq_weight_resolve does. The
 * spec refers to names->partitions, which have to live as long as it does. */
moq_status moq_linear_resolve(const moq_weight_names *names, const char *dtype,
                              moq_linear_spec *spec, moq_err *err);

/* Permissions and promises of a caller beyond the algorithm. */
typedef struct {
    bool fast_accum;
    bool one_input_scale;
    bool quantized_input;
    bool batch_invariant;
} moq_linear_options;

/* MOQ_ERR_UNSUPPORTED where an option means nothing for the layer. */
moq_status moq_linear_apply_options(const moq_linear_options *options, moq_linear_spec *spec,
                                    moq_err *err);

/* The dtype of x, and the number of elements in a row of it. */
static inline moq_dtype moq_linear_x_dtype(const moq_linear_spec *spec) {
    if (!spec->quantized_input)
        return spec->dtype;
    return spec->input == MOQ_INPUT_NVFP4 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3;
}
static inline int64_t moq_linear_x_columns(const moq_linear_spec *spec) {
    return moq_linear_x_dtype(spec) == MOQ_DT_E2M1X2 ? spec->in_features / 2 : spec->in_features;
}

/* The treatment of x in a call that brings no input_scale. */
static inline moq_input_mode moq_linear_input_without_scale(const moq_linear_spec *spec) {
    bool by_token = spec->by_token && spec->input == MOQ_INPUT_E4M3_TENSOR;
    return by_token ? MOQ_INPUT_E4M3_TOKEN : spec->input;
}

/* Facts of the layer's weight, defined in core/weight.h. */
static inline int64_t moq_linear_block_rows(const moq_linear_spec *spec) {
    return moq_weight_block_rows(&spec->matrix);
}
static inline int64_t moq_linear_scale_columns(const moq_linear_spec *spec) {
    return moq_weight_scale_columns(&spec->matrix);
}
static inline bool moq_linear_folds(const moq_linear_spec *spec) {
    return moq_weight_folds(&spec->matrix);
}
static inline bool moq_linear_has_choice(const moq_linear_spec *spec) {
    return moq_weight_has_choice(&spec->matrix);
}

/* Decides, once the target is known, between which ways "auto" chooses: from capability 10.0 on
 * exact and FP4 products, of weights that were calibrated for NVFP4 activations. */
void moq_linear_settle_choice(moq_linear_spec *spec);

/* True if packed weights become codes and swizzled scales in the workspace, for products of FP4. */
static inline bool moq_linear_unpacks(const moq_linear_spec *spec) {
    return spec->choice == MOQ_COMPUTE_FP4;
}

/* The tensors of the weight, in the checkpoint and prepared. input_scale is required where x is
 * codes, and where batch_invariant forbids a scale found from all of x. */
int moq_linear_checkpoint_params(const moq_linear_spec *spec, moq_param_spec *params);
int moq_linear_prepared_params(const moq_linear_spec *spec, moq_param_spec *params);

/* "NVFP4 4096x14336, compute exact, bfloat16", for messages and explanations. */
const char *moq_linear_text(const moq_linear_spec *spec, char *buffer, size_t size);

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
     * that was done before; others than kernels that smooth (core/kernel.h) get NULL. */
    const float *pre_quant_scale;
    const void *bias; /* [N] of bias_dtype, or NULL */
    moq_dtype bias_dtype;
    /* [m, N] without gaps: added like a bias; NULL but for kernels that add (core/kernel.h) */
    const float *addend;
    moq_kernel_config
        config;      /* in which the kernel does it: as chosen for m rows, for its workspace too */
    void *stream;    /* CUDA: cudaStream_t, NULL for the legacy default stream */
    void *workspace; /* of the bytes that the kernel's row of the plan table asks for, or NULL */
} moq_linear_call;

/* The tiling of the call's config. */
static inline uint8_t moq_tiling_of(const moq_linear_call *call) {
    return call->input_scale ? call->config.tiling : call->config.dynamic_tiling;
}

#ifdef __cplusplus
}
#endif
#endif
