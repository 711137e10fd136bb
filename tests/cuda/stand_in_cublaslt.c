/* A stand-in for cuBLASLt, by the declarations of cublaslt_abi.h: it says which algorithms it has
 * as MOQEXT_STAND_IN_LACKS tells, writes down what it was asked in MOQEXT_STAND_IN_LOG, and
 * multiplies NVFP4 codes on the host, from and to memory of the device.
 *
 * It is stricter than the library need be: padding of block scales that is not zero, pointers that
 * are no multiples of 16 and attributes that FP4 is not described with are errors. */
#define _GNU_SOURCE
#include "cuda/runtime/cublaslt_abi.h"

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };

/* A product has an attribute at its number, and which were set in the last word; a layout has type,
 * rows, columns and step. */
#define SET 31
enum { TYPE, ROWS, COLUMNS, STEP };

static bool is_set(const moq_cublaslt_product *p, int which) {
    return p->data[SET] >> which & 1;
}

/* ---- descriptions ---- */

EXPORT int32_t cublasLtCreate(void **handle) {
    static int one;
    *handle = &one;
    return SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void) {
    return 130500;
}

EXPORT const char *cublasLtGetStatusName(int32_t status) {
    return status == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
           : status == SUCCESS     ? "CUBLAS_STATUS_SUCCESS"
                                   : "CUBLAS_STATUS_OF_A_STAND_IN";
}

EXPORT int32_t cublasLtMatmulDescInit_internal(moq_cublaslt_product *p, size_t size,
                                               int32_t compute, int32_t scale) {
    (void)compute, (void)scale;
    memset(p, 0, size);
    return SUCCESS;
}

EXPORT int32_t cublasLtMatmulDescSetAttribute(moq_cublaslt_product *p, int32_t which,
                                              const void *value, size_t size) {
    which -= which > 30 ? 2 : 0; /* scale modes, to places that no other attribute has */
    p->data[which] = 0;
    memcpy(&p->data[which], value, size);
    p->data[SET] |= 1ull << which;
    return SUCCESS;
}

EXPORT int32_t cublasLtMatmulPreferenceInit_internal(moq_cublaslt_preference *p, size_t size) {
    memset(p, 0, size);
    return SUCCESS;
}

EXPORT int32_t cublasLtMatmulPreferenceSetAttribute(moq_cublaslt_preference *p, int32_t which,
                                                    const void *value, size_t size) {
    (void)p, (void)which, (void)value, (void)size;
    return SUCCESS;
}

EXPORT int32_t cublasLtMatrixLayoutInit_internal(moq_cublaslt_matrix *m, size_t size, int32_t type,
                                                 uint64_t rows, uint64_t columns, int64_t step) {
    memset(m, 0, size);
    m->data[TYPE] = (uint64_t)type;
    m->data[ROWS] = rows;
    m->data[COLUMNS] = columns;
    m->data[STEP] = (uint64_t)step;
    return SUCCESS;
}

/* ---- which algorithms there are ---- */

/* Whether MOQEXT_STAND_IN_LACKS, "fp4 32 1024 bias", rules a product out: its codes, from so many
 * tokens to so many, with a bias or float32 results alone where a fourth word says so. */
static bool lacks(const char *codes, uint64_t m, bool bias, bool wide) {
    const char *rule = getenv("MOQEXT_STAND_IN_LACKS");
    char of[8] = "", form[8] = "";
    unsigned long least = 0, most = 0;
    if (!rule || sscanf(rule, "%7s %lu %lu %7s", of, &least, &most, form) < 3)
        return false;
    bool counts =
        !*form || (strcmp(form, "bias") == 0 && bias) || (strcmp(form, "wide") == 0 && wide);
    return strcmp(of, codes) == 0 && m >= least && m <= most && counts;
}

EXPORT int32_t cublasLtMatmulAlgoGetHeuristic(void *handle, moq_cublaslt_product *p,
                                              moq_cublaslt_matrix *a, moq_cublaslt_matrix *b,
                                              moq_cublaslt_matrix *c, moq_cublaslt_matrix *d,
                                              moq_cublaslt_preference *preference, int wanted,
                                              moq_cublaslt_proposal *proposal, int *found) {
    (void)handle, (void)c, (void)preference, (void)wanted;
    const char *codes = a->data[TYPE] == MOQ_CUDA_R_4F_E2M1   ? "fp4"
                        : a->data[TYPE] == MOQ_CUDA_R_8F_E4M3 ? "fp8"
                                                              : "other";
    bool bias = p->data[MOQ_CUBLASLT_MATMUL_DESC_EPILOGUE] == MOQ_CUBLASLT_EPILOGUE_BIAS;
    bool wide = d->data[TYPE] == MOQ_CUDA_R_32F;
    const char *path = getenv("MOQEXT_STAND_IN_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s m=%lu n=%lu k=%lu bias=%d wide=%d fast=%d pointers=%d\n", codes,
                (unsigned long)b->data[COLUMNS], (unsigned long)a->data[COLUMNS],
                (unsigned long)a->data[ROWS], bias, wide,
                is_set(p, MOQ_CUBLASLT_MATMUL_DESC_FAST_ACCUM),
                is_set(p, MOQ_CUBLASLT_MATMUL_DESC_POINTER_MODE));
        fclose(log);
    }
    *found = 0;
    if (lacks(codes, b->data[COLUMNS], bias, wide))
        return NOT_SUPPORTED;
    memset(proposal, 0, sizeof *proposal);
    *found = 1;
    return SUCCESS;
}

/* ---- the product of NVFP4 ---- */

static struct {
    int (*wait)(void *stream);
    int (*down)(void *host, uint64_t from, size_t bytes);
    int (*up)(uint64_t to, const void *host, size_t bytes);
} driver;

static bool open_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return false;
    *(void **)&driver.wait = dlsym(library, "cuStreamSynchronize");
    *(void **)&driver.down = dlsym(library, "cuMemcpyDtoH_v2");
    *(void **)&driver.up = dlsym(library, "cuMemcpyHtoD_v2");
    return driver.wait && driver.down && driver.up;
}

/* Memory of the device on the host; NULL where it cannot be read. */
static void *fetch(const void *from, size_t bytes) {
    void *host = malloc(bytes);
    if (host && driver.down(host, (uint64_t)from, bytes) == 0)
        return host;
    free(host);
    return NULL;
}

static double e4m3(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    return exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
}

static double e2m1(const uint8_t *row, uint64_t k) {
    static const double VALUE[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    int code = row[k / 2] >> k % 2 * 4 & 15;
    return code & 8 ? -VALUE[code & 7] : VALUE[code & 7];
}

/* The place of a block scale, by cuBLAS' documentation of the layout for 16 elements. */
static uint64_t place(uint64_t outer, uint64_t inner, uint64_t inner_count) {
    uint64_t tile = outer / 128 * ((inner_count + 3) / 4) + inner / 4;
    return tile * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + inner % 4;
}

static uint64_t scale_bytes(uint64_t rows, uint64_t groups) {
    return (rows + 127) / 128 * ((groups + 3) / 4) * 512;
}

/* Values of a matrix of codes and scales, or NULL; padding has to be zero. */
static double *decode(const moq_cublaslt_matrix *m, const void *codes, const void *scales) {
    uint64_t rows = m->data[COLUMNS], k = m->data[ROWS], groups = k / 16;
    if (k % 32 || m->data[STEP] != k || (uintptr_t)codes % 16 || (uintptr_t)scales % 16)
        return NULL;
    uint8_t *code = fetch(codes, rows * k / 2), *scale = fetch(scales, scale_bytes(rows, groups));
    double *value = code && scale ? malloc(rows * k * sizeof *value) : NULL;
    for (uint64_t r = 0; value && r < (rows + 127) / 128 * 128; r++)
        for (uint64_t g = 0; value && g < (groups + 3) / 4 * 4; g++) {
            uint8_t s = scale[place(r, g, groups)];
            if ((r >= rows || g >= groups) && s) {
                free(value);
                value = NULL;
            }
            for (int i = 0; value && r < rows && g < groups && i < 16; i++)
                value[r * k + g * 16 + i] = e4m3(s & 0x7f) * e2m1(code + r * k / 2, g * 16 + i);
        }
    free(code);
    free(scale);
    return value;
}

/* Rounds to the nearest, ties to even, and stores: the upper half of a float, a half, a float. */
static void store(uint8_t *to, uint64_t at, uint64_t type, double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (type == MOQ_CUDA_R_32F) {
        memcpy(to + 4 * at, &single, 4);
    } else if (type == MOQ_CUDA_R_16BF) {
        uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(to + 2 * at, &half, 2);
    } else {
        _Float16 half = (_Float16)single;
        memcpy(to + 2 * at, &half, 2);
    }
}

EXPORT int32_t cublasLtMatmul(void *handle, moq_cublaslt_product *p, const void *alpha,
                              const void *a, moq_cublaslt_matrix *a_matrix, const void *b,
                              moq_cublaslt_matrix *b_matrix, const void *beta, const void *c,
                              moq_cublaslt_matrix *c_matrix, void *d, moq_cublaslt_matrix *d_matrix,
                              const moq_cublaslt_algorithm *algorithm, void *workspace,
                              size_t workspace_bytes, void *stream) {
    (void)handle, (void)c, (void)c_matrix, (void)algorithm, (void)workspace, (void)workspace_bytes;
    uint64_t n = a_matrix->data[COLUMNS], m = b_matrix->data[COLUMNS], k = a_matrix->data[ROWS];
    uint64_t type = d_matrix->data[TYPE], step = d_matrix->data[STEP], size = type == 0 ? 4 : 2;
    if (a_matrix->data[TYPE] != MOQ_CUDA_R_4F_E2M1)
        return NOT_SUPPORTED;
    if (is_set(p, MOQ_CUBLASLT_MATMUL_DESC_FAST_ACCUM) ||
        is_set(p, MOQ_CUBLASLT_MATMUL_DESC_EPILOGUE) ||
        p->data[MOQ_CUBLASLT_MATMUL_DESC_POINTER_MODE] != MOQ_CUBLASLT_POINTER_MODE_DEVICE ||
        p->data[MOQ_CUBLASLT_MATMUL_DESC_A_SCALE_MODE - 2] !=
            MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 ||
        p->data[MOQ_CUBLASLT_MATMUL_DESC_B_SCALE_MODE - 2] !=
            MOQ_CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 ||
        (uintptr_t)d % 16 || step * size % 16 ||
        (type && type != MOQ_CUDA_R_16BF && type != MOQ_CUDA_R_16F))
        return INVALID_VALUE;
    if (!open_driver() || driver.wait(stream) != 0)
        return EXECUTION_FAILED;
    double *w = decode(a_matrix, a, (void *)p->data[MOQ_CUBLASLT_MATMUL_DESC_A_SCALE_POINTER]);
    double *x = decode(b_matrix, b, (void *)p->data[MOQ_CUBLASLT_MATMUL_DESC_B_SCALE_POINTER]);
    float *factor = fetch(alpha, 4), *none = fetch(beta, 4);
    uint8_t *row = malloc(n * size);
    bool right = w && x && factor && none && *none == 0 && row;
    for (uint64_t i = 0; right && i < m; i++) {
        for (uint64_t j = 0; j < n; j++) {
            double sum = 0;
            for (uint64_t l = 0; l < k; l++)
                sum += x[i * k + l] * w[j * k + l];
            store(row, j, type, sum * (double)*factor);
        }
        right = driver.up((uint64_t)d + i * step * size, row, n * size) == 0;
    }
    free(w), free(x), free(factor), free(none), free(row);
    return right ? SUCCESS : EXECUTION_FAILED;
}
