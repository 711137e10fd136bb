/* Product of cuBLASLt: see cublaslt_api.h.
 *
 * The library sees matrices by columns: our y [m, n] is its D [n, m], w the transposed A, x is B.
 * Sums are promoted to float32 unless the caller asks for fast accumulation, and split-K sums are
 * added in float32, so that y is rounded once and is the same in every run.
 *
 * Asking the library for algorithms costs tens of microseconds. Its proposals are therefore kept,
 * by everything they depend on, with m rounded up to a bucket. */
#include "core/linear.h"
#include "cuda/runtime/cublaslt_api.h"

#include <pthread.h>
#include <string.h>

/* ---- descriptors ---- */

typedef struct {
    moq_cublaslt_product product;
    moq_cublaslt_matrix w, x, y;
} descriptors;

static int32_t type_of(moq_dtype dtype) {
    return dtype == MOQ_DT_BF16  ? MOQ_CUDA_R_16BF
           : dtype == MOQ_DT_F16 ? MOQ_CUDA_R_16F
           : dtype == MOQ_DT_I8  ? MOQ_CUDA_R_8I
           : dtype == MOQ_DT_I32 ? MOQ_CUDA_R_32I
                                 : MOQ_CUDA_R_32F;
}

/* Returns whether products are added in int32. */
static bool sums_integers(const moq_matmul *p) {
    return p->scaling == MOQ_UNSCALED && p->operands == MOQ_DT_I8;
}

static moq_status check(const moq_cublaslt_api *api, int32_t status, const char *what,
                        moq_err *err) {
    if (status == MOQ_CUBLAS_STATUS_SUCCESS)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s: %s", what, api->cublasLtGetStatusName(status));
}

static moq_status set(const moq_cublaslt_api *api, descriptors *d, int32_t which, const void *value,
                      size_t size, moq_err *err) {
    return check(api, api->cublasLtMatmulDescSetAttribute(&d->product, which, value, size),
                 "cublasLtMatmulDescSetAttribute", err);
}

static moq_status set_int(const moq_cublaslt_api *api, descriptors *d, int32_t which, int value,
                          moq_err *err) {
    int32_t word = value;
    return set(api, d, which, &word, sizeof word, err);
}

static moq_status describe_scales(const moq_cublaslt_api *api, const moq_matmul *p, descriptors *d,
                                  moq_err *err) {
    if (p->scaling == MOQ_UNSCALED)
        return MOQ_OK;
    static const struct {
        int32_t w, x;
    } MODE[] = {
        {MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F},
        {MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
         MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F},
        {MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
         MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F},
        {MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3,
         MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3},
    };
    MOQ_TRY(set_int(api, d, MOQ_CUBLASLT_MATMUL_DESC_A_SCALE_MODE, MODE[p->scaling].w, err));
    MOQ_TRY(set_int(api, d, MOQ_CUBLASLT_MATMUL_DESC_B_SCALE_MODE, MODE[p->scaling].x, err));
    MOQ_TRY(
        set(api, d, MOQ_CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p->w_scale, sizeof p->w_scale, err));
    return set(api, d, MOQ_CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p->x_scale, sizeof p->x_scale,
               err);
}

static moq_status describe_bias(const moq_cublaslt_api *api, const moq_matmul *p, descriptors *d,
                                moq_err *err) {
    if (!p->bias)
        return MOQ_OK;
    MOQ_TRY(set_int(api, d, MOQ_CUBLASLT_MATMUL_DESC_EPILOGUE, MOQ_CUBLASLT_EPILOGUE_BIAS, err));
    MOQ_TRY(set_int(api, d, MOQ_CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p->dtype), err));
    return set(api, d, MOQ_CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof p->bias, err);
}

static moq_status describe_matrix(const moq_cublaslt_api *api, moq_cublaslt_matrix *layout,
                                  int32_t type, int64_t rows, int64_t columns, int64_t stride,
                                  moq_err *err) {
    return check(api,
                 api->cublasLtMatrixLayoutInit_internal(layout, sizeof *layout, type,
                                                        (uint64_t)rows, (uint64_t)columns, stride),
                 "cublasLtMatrixLayoutInit", err);
}

static int32_t codes_of(const moq_matmul *p) {
    return p->scaling == MOQ_UNSCALED       ? type_of(p->operands)
           : p->scaling == MOQ_SCALED_NVFP4 ? MOQ_CUDA_R_4F_E2M1
                                            : MOQ_CUDA_R_8F_E4M3;
}

/* Describes a product like `p` with m rows. */
static moq_status describe(const moq_cublaslt_api *api, const moq_matmul *p, int64_t m,
                           descriptors *d, moq_err *err) {
    bool integers = sums_integers(p);
    MOQ_TRY(check(api,
                  api->cublasLtMatmulDescInit_internal(&d->product, sizeof d->product,
                                                       integers ? MOQ_CUBLAS_COMPUTE_32I
                                                                : MOQ_CUBLAS_COMPUTE_32F,
                                                       integers ? MOQ_CUDA_R_32I : MOQ_CUDA_R_32F),
                  "cublasLtMatmulDescInit", err));
    MOQ_TRY(set_int(api, d, MOQ_CUBLASLT_MATMUL_DESC_TRANSA, MOQ_CUBLAS_OP_T, err));
    int8_t fast = 1; /* described for FP8 alone, and 0 unless it is set */
    if (p->fast_accum)
        MOQ_TRY(set(api, d, MOQ_CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast, err));
    if (p->alpha)
        MOQ_TRY(set_int(api, d, MOQ_CUBLASLT_MATMUL_DESC_POINTER_MODE,
                        MOQ_CUBLASLT_POINTER_MODE_DEVICE, err));
    MOQ_TRY(describe_scales(api, p, d, err));
    MOQ_TRY(describe_bias(api, p, d, err));
    MOQ_TRY(describe_matrix(api, &d->w, codes_of(p), p->k, p->n, p->k, err));
    MOQ_TRY(describe_matrix(api, &d->x, codes_of(p), p->k, m, p->x_stride, err));
    return describe_matrix(api, &d->y, type_of(p->dtype), p->n, m, p->y_stride, err);
}

/* ---- algorithms ---- */

/* Key of the library's proposals; compared as bytes, so without gaps. */
typedef struct {
    int64_t m, n, k, x_stride, y_stride, workspace;
    int32_t device, scaling, operands, dtype, bias, fast_accum, alpha, accumulate;
} algorithm_key;

typedef struct {
    algorithm_key key;
    bool asked;     /* else a free place */
    int32_t status; /* what the library said */
    int count;      /* 0: it has none */
    moq_cublaslt_algorithm algorithm[MOQ_MAX_ALGORITHMS];
} algorithm_list;

/* Table of lists: each list has one place, and another list of the same place replaces it. */
#define PLACES 1024

static struct kept_algorithms {
    pthread_mutex_t lock;
    algorithm_list list[PLACES];
} kept = {PTHREAD_MUTEX_INITIALIZER, {}};

static algorithm_key key_of(const moq_matmul *p) {
    int64_t m = moq_token_bucket(p->m), step = p->scaling == MOQ_SCALED_BLOCK ? 4 : 1;
    algorithm_key key = {(m + step - 1) / step * step,
                         p->n,
                         p->k,
                         p->x_stride,
                         p->y_stride,
                         (int64_t)p->workspace_bytes,
                         p->device,
                         (int32_t)p->scaling,
                         (int32_t)p->operands,
                         (int32_t)p->dtype,
                         p->bias != NULL,
                         p->fast_accum,
                         p->alpha != NULL,
                         p->accumulate};
    return key;
}

static algorithm_list *place_of(const algorithm_key *key) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ ((const uint8_t *)key)[i]) * 1099511628211u;
    return &kept.list[(hash >> 32) % PLACES];
}

static moq_status prefer(const moq_cublaslt_api *api, const algorithm_key *key,
                         moq_cublaslt_preference *preference, moq_err *err) {
    const uint32_t aligned = 16, reductions = MOQ_CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint64_t workspace = (uint64_t)key->workspace;
    const struct {
        int32_t which;
        const void *value;
        size_t size;
    } wish[] = {
        {MOQ_CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {MOQ_CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {MOQ_CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned, sizeof aligned},
        {MOQ_CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned, sizeof aligned},
        {MOQ_CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned, sizeof aligned},
        {MOQ_CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned, sizeof aligned},
    };
    MOQ_TRY(check(api, api->cublasLtMatmulPreferenceInit_internal(preference, sizeof *preference),
                  "cublasLtMatmulPreferenceInit", err));
    for (size_t i = 0; i < sizeof wish / sizeof *wish; i++)
        MOQ_TRY(check(api,
                      api->cublasLtMatmulPreferenceSetAttribute(preference, wish[i].which,
                                                                wish[i].value, wish[i].size),
                      "cublasLtMatmulPreferenceSetAttribute", err));
    return MOQ_OK;
}

static moq_status ask(const moq_cublaslt_api *api, void *handle, const moq_matmul *p,
                      const algorithm_key *key, algorithm_list *list, moq_err *err) {
    moq_cublaslt_preference preference;
    moq_cublaslt_proposal result[MOQ_MAX_ALGORITHMS];
    descriptors d;
    int found = 0;
    MOQ_TRY(describe(api, p, key->m, &d, err));
    MOQ_TRY(prefer(api, key, &preference, err));
    int32_t status =
        api->cublasLtMatmulAlgoGetHeuristic(handle, &d.product, &d.w, &d.x, &d.y, &d.y, &preference,
                                            MOQ_MAX_ALGORITHMS, result, &found);
    list->key = *key;
    list->asked = true;
    list->status = status;
    list->count = 0;
    for (int i = 0; status == MOQ_CUBLAS_STATUS_SUCCESS && i < found; i++)
        if (result[i].state == MOQ_CUBLAS_STATUS_SUCCESS)
            list->algorithm[list->count++] = result[i].algorithm;
    return MOQ_OK;
}

static moq_status refuse(const moq_cublaslt_api *api, const moq_matmul *p, int32_t status,
                         moq_err *err) {
    int version = (int)api->cublasLtGetVersion();
    return moq_fail(
        err, MOQ_ERR_UNSUPPORTED,
        "cuBLASLt %d.%d.%d has no algorithm for %lld tokens times weight [%lld, %lld] (%s)",
        version / 10000, version / 100 % 100, version % 100, (long long)p->m, (long long)p->n,
        (long long)p->k, api->cublasLtGetStatusName(status));
}

/* Returns algorithm `variant`, or the last one; `count` is the number of algorithms. */
static moq_status find_algorithm(const moq_cublaslt_api *api, void *handle, const moq_matmul *p,
                                 moq_cublaslt_algorithm *algorithm, int *count, moq_err *err) {
    algorithm_key key = key_of(p);
    moq_status status = MOQ_OK;
    pthread_mutex_lock(&kept.lock);
    algorithm_list *list = place_of(&key);
    if (!list->asked || memcmp(&list->key, &key, sizeof key) != 0) {
        list->asked = false;
        status = ask(api, handle, p, &key, list, err);
    }
    *count = list->asked ? list->count : 0;
    if (status == MOQ_OK && !list->count)
        status = refuse(api, p, list->status, err);
    if (status == MOQ_OK)
        *algorithm = list->algorithm[p->variant < list->count ? p->variant : list->count - 1];
    pthread_mutex_unlock(&kept.lock);
    return status;
}

/* ---- the product ---- */

static moq_status count_algorithms(const moq_matmul *p, int *count, moq_err *err) {
    const moq_cublaslt_api *api;
    void *handle;
    moq_cublaslt_algorithm algorithm;
    *count = 0;
    MOQ_TRY(moq_cublaslt_open(p->device, p->stream, &api, &handle, err));
    return find_algorithm(api, handle, p, &algorithm, count, err);
}

int moq_matmul_variants(const moq_matmul *p) {
    moq_err err;
    int count;
    count_algorithms(p, &count, &err);
    return count;
}

moq_status moq_matmul_ask(const moq_matmul *p, moq_err *err) {
    int count;
    return count_algorithms(p, &count, err);
}

moq_status moq_matmul_run(const moq_matmul *p, moq_err *err) {
    const float floats[2] = {1, (float)p->accumulate};
    const int32_t integers[2] = {1, p->accumulate};
    const uint8_t *alpha = sums_integers(p) ? (const uint8_t *)integers
                           : p->alpha       ? (const uint8_t *)p->alpha
                                            : (const uint8_t *)floats;
    const moq_cublaslt_api *api;
    void *handle;
    moq_cublaslt_algorithm algorithm;
    descriptors d;
    int count;
    MOQ_TRY(moq_cublaslt_open(p->device, p->stream, &api, &handle, err));
    MOQ_TRY(find_algorithm(api, handle, p, &algorithm, &count, err));
    MOQ_TRY(describe(api, p, p->m, &d, err));
    return check(api,
                 api->cublasLtMatmul(handle, &d.product, alpha, p->w, &d.w, p->x, &d.x, alpha + 4,
                                     p->y, &d.y, p->y, &d.y, &algorithm, p->workspace,
                                     p->workspace_bytes, p->stream),
                 "cublasLtMatmul", err);
}
