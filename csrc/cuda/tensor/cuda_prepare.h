/* Weight processing on the device: copies that check what they copy, like cpu/cpu_prepare.h.
 * Callers have validated shapes; cuda_nvfp4_pack.h packs NVFP4 weights. */
#ifndef MOQ_CUDA_TENSOR_CUDA_PREPARE_H
#define MOQ_CUDA_TENSOR_CUDA_PREPARE_H

#include "core/status.h"
#include "core/tensor.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The rule for codes that no intact checkpoint holds. */
typedef enum {
    MOQ_CODES_ANY,        /* all codes are valid */
    MOQ_CODES_E4M3,       /* NaN */
    MOQ_CODES_BLOCK_SCALE /* NaN, and negative but for minus zero */
} moq_code_rule;

/* Findings of kernels: not zero if a kernel found one. Kernels only write ones, so any number of
 * them may. */
typedef struct {
    uint32_t bad_code, bad_scale, zero_scale; /* bad: NaN, or negative, or an infinite scale */
    uint32_t bad_input_scale;                 /* also zero, or no reciprocal in float32 */
} moq_findings;

/* A note: findings in the host's memory, all zero, which kernels of any device may write and the
 * host reads after a wait, without a copy. To be returned when no queued work writes it any
 * more. */
moq_status moq_cuda_take_note(moq_findings **note, moq_err *err);
void moq_cuda_return_note(moq_findings *note);

/* Rows of one-byte codes on the device, each contiguous, and what becomes of them: of one matrix,
 * or of a part of each matrix of a stack. */
typedef struct {
    const uint8_t *codes;
    int64_t stride; /* bytes from row to row */
    int64_t rows, columns;
    int64_t experts; /* matrices of the stack, or 1 */
    int64_t step;    /* bytes from an expert's codes to those of the next one */
    int64_t span;    /* codes of a whole matrix: from expert to expert in `out` and in positions */
    moq_code_rule rule;
    uint8_t *out; /* [rows, columns] without gaps, apart from codes or these; NULL: only to check */
    bool backwards;             /* the last codes were read a moment ago */
    moq_findings *found;        /* place that reports a bad code */
    const moq_findings *unless; /* if not all zero, only they are written, to `found`; or NULL */
    uint64_t *bad;              /* place of the least position of a bad code instead; NULL: none */
    int64_t first;              /* position of the first code, for `bad` */
} moq_code_copy;

moq_status moq_cuda_copy_codes(const moq_code_copy *copy, void *stream, moq_err *err);

/* out[i] = scales[i * step] as float32, for each of the experts. */
typedef struct {
    const void *scales; /* float32, bfloat16 or float16 */
    moq_dtype dtype;
    int64_t count, step;  /* a step of 0: one scale for all */
    int64_t experts;      /* matrices of a stack, or 1 */
    int64_t from_step;    /* bytes from an expert's scales to those of the next one */
    float *out;           /* NULL: only to check */
    int64_t out_step;     /* floats from expert to expert */
    float above;          /* others are bad, too, except zero */
    float most;           /* larger ones are bad, too; 0: no limit */
    uint32_t *bad, *zero; /* of findings: place that reports them; NULL: none */
    moq_findings *found;  /* as in moq_code_copy */
    const moq_findings *unless;
} moq_scale_copy;

moq_status moq_cuda_copy_scales(const moq_scale_copy *copy, void *stream, moq_err *err);

/* out[i] = value, `count` times. */
moq_status moq_cuda_fill_floats(float *out, float value, int64_t count, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
/* Returns true if an earlier kernel has found something, which is then reported to `found`, too. */
static __device__ __forceinline__ bool moq_has_met(const moq_findings *unless,
                                                   moq_findings *found) {
    if (!unless ||
        !(unless->bad_code | unless->bad_scale | unless->zero_scale | unless->bad_input_scale))
        return false;
    if (unless->bad_code)
        found->bad_code = 1;
    if (unless->bad_scale)
        found->bad_scale = 1;
    if (unless->zero_scale)
        found->zero_scale = 1;
    if (unless->bad_input_scale)
        found->bad_input_scale = 1;
    return true;
}
#endif
#endif
