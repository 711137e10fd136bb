/* Stored codes and scales back to numbers, on the CPU: one kernel for every weight format.
 *
 * value[e, r, c] = code[e, r, c] * scale[0][e, r, c] * scale[1][e, r, c]
 *
 * with the exact product rounded once to the output type, and +0 wherever a scale is 0, whatever
 * the code: an exporter divides zeros by zero and writes NaN codes, or NaN block scales under a
 * second-level scale of 0, for a weight of zeros. */
#ifndef MOQ_CPU_CPU_DEQUANTIZE_H
#define MOQ_CPU_CPU_DEQUANTIZE_H

#include "core/tensor.h"

typedef enum {
    MOQ_CODE_E4M3,
    MOQ_CODE_INT8,
    MOQ_CODE_E2M1_COLUMNS, /* byte [r, j]: columns 2j (low nibble) and 2j + 1 */
    MOQ_CODE_E2M1_ROWS,    /* byte [i, c]: rows 2i (low nibble) and 2i + 1 */
    MOQ_CODE_INT4_ROWS     /* the same packing, two's complement */
} moq_code_kind;

/* A scale for blocks of block[1] rows and block[2] columns of block[0] experts each; stride 0
 * repeats a value. */
typedef struct {
    const void *data;
    moq_dtype dtype; /* one that moq_decode_scales takes */
    int64_t stride[3];
    int64_t block[3];
} moq_block_scale;

typedef struct {
    const void *codes;
    int64_t code_stride[3]; /* in bytes, of the stored array: experts, rows, columns */
    moq_code_kind kind;
    moq_block_scale scale[2]; /* the second repeats 1 where a format has one scale */
    int64_t shape[3];         /* experts, rows and columns of the values */
} moq_dequantize_job;

/* Writes shape[0] * shape[1] * shape[2] values, row-major, as `dtype` (F32, BF16 or F16). */
void moq_cpu_dequantize(const moq_dequantize_job *job, moq_dtype dtype, void *out);

#endif
