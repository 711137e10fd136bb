/* Weight processing on the device: copies that check what they copy; the device's form of
 * cpu/prepare.h. Callers have validated shapes. NVFP4 weights are packed by cuda/nvfp4_pack.h. */
#ifndef MOQ_CUDA_PREPARE_H
#define MOQ_CUDA_PREPARE_H

#include "core/status.h"
#include "core/tensor.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which codes no intact checkpoint holds. */
typedef enum {
    MOQ_CODES_ANY,        /* none */
    MOQ_CODES_E4M3,       /* NaN */
    MOQ_CODES_BLOCK_SCALE /* NaN, and negative but for minus zero */
} moq_code_rule;

/* Rows of one-byte codes on the device, contiguous each, and what becomes of them. */
typedef struct {
    const uint8_t *codes;
    int64_t stride; /* bytes from row to row */
    int64_t rows, columns;
    moq_code_rule rule;
    const float
        *factor;  /* [rows]; rows of factor 0 become zeros, unchecked. NULL: there are none */
    uint8_t *out; /* [rows, columns] without gaps, apart from codes or these; NULL: only to check */
    bool backwards; /* where the last codes were read a moment ago */
    int64_t first;  /* position of the first code, for `bad` */
    uint64_t *bad;  /* where the least position of a bad code is kept; NULL with MOQ_CODES_ANY */
} moq_code_copy;

moq_status moq_cuda_copy_codes(const moq_code_copy *copy, void *stream, moq_err *err);

/* What kernels have met, in the workspace of a layer; all bits are set before. */
typedef struct {
    uint64_t bad_code; /* the least position */
    uint32_t scales;   /* of these bits those are cleared that were met */
} moq_findings;

#define MOQ_ZERO_SCALE 1u
#define MOQ_BAD_SCALE  2u /* negative, infinite or NaN */

/* out[i] = scales[i], of float32, bfloat16 or float16, and what was met among them to `met`. */
moq_status moq_cuda_read_scales(const void *scales, moq_dtype dtype, int64_t count, float *out,
                                uint32_t *met, void *stream, moq_err *err);

/* out[i] = value, `count` times. */
moq_status moq_cuda_fill_floats(float *out, float value, int64_t count, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
