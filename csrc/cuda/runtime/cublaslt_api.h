/* cuBLASLt for the launchers of this floor: its functions, a handle for each device, and the one
 * product they need. */
#ifndef MOQ_CUDA_RUNTIME_CUBLASLT_API_H
#define MOQ_CUDA_RUNTIME_CUBLASLT_API_H

#include "core/status.h"
#include "core/tensor.h"
#include "cuda/runtime/cublaslt_abi.h"

/* Returns the functions, once the library was found, and the handle of the current device. A handle
 * is made at first use, which a stream that is being captured refuses. */
moq_status moq_cublaslt_open(int32_t device, void *stream, const moq_cublaslt_api **api,
                             void **handle, moq_err *err);

typedef enum {
    MOQ_SCALED_TENSOR, /* one scale of x, one of w, or NULL for 1 */
    MOQ_SCALED_VECTOR, /* one a row of x, one a row of w; only on sm_90 */
    MOQ_SCALED_BLOCK,  /* x: [K / 128][m]; w: [n / 128][K / 128], both rounded up, the last to 4 */
    MOQ_SCALED_NVFP4,  /* e4m3 for 16 columns, swizzled (core/swizzle.h), and alpha; from sm_100 on
                        */
    MOQ_UNSCALED       /* x and w of 16 bits or, with sums of int32 as y, int8 */
} moq_scaling;

/* Multiplies y[m, n] = round(alpha sum_k sx x[m, k] sw w[n, k] + bias[n]). w is contiguous
 * e4m3, or e2m1 for MOQ_SCALED_NVFP4, and x too but for its stride; all pointers, k, n and rows of
 * y are multiples of 16 bytes (k of e2m1 a multiple of 32), and m is a multiple of 4 for
 * MOQ_SCALED_BLOCK. The bias is of y's dtype, float16 or bfloat16, or NULL. */
typedef struct {
    int32_t device; /* the current one */
    moq_scaling scaling;
    bool fast_accum; /* sums of FP8 stay in the tensor cores; with scales of tensors and vectors */
    moq_dtype operands; /* of x and w, for MOQ_UNSCALED: bfloat16, float16 or int8 */
    bool accumulate;    /* adds to y */
    int64_t m, n, k;
    const uint8_t *x, *w;
    int64_t x_stride;              /* elements */
    const void *x_scale, *w_scale; /* float32 unless noted above */
    const float *alpha;            /* on the device, followed by a zero; NULL for 1 */
    void *y;
    moq_dtype dtype;
    int64_t y_stride; /* elements */
    const void *bias;
    /* Workspace of the library; the choice among its algorithms depends on the size. */
    void *workspace;
    size_t workspace_bytes;
    /* Number among the algorithms that the library proposes, best first. */
    int32_t variant;
    void *stream;
} moq_matmul;

/* Most algorithms that are asked for. */
#define MOQ_MAX_ALGORITHMS 8

/* Returns the number of algorithms for a product; 0 if the library has none or is absent. */
int moq_matmul_variants(const moq_matmul *p);
/* Asks the library for algorithms: MOQ_ERR_UNSUPPORTED if it has none. What it says is kept, so
 * that moq_matmul_run of a product like this one finds it. The memory of the product is not
 * touched. */
moq_status moq_matmul_ask(const moq_matmul *p, moq_err *err);
moq_status moq_matmul_run(const moq_matmul *p, moq_err *err);

#endif
