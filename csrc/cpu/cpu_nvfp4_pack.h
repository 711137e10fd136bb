/* NVFP4 weights to the packed layout (core/nvfp4_packed.h) and back on the CPU. */
#ifndef MOQ_CPU_CPU_NVFP4_PACK_H
#define MOQ_CPU_CPU_NVFP4_PACK_H

#include <stdint.h>

/* Codes [rows, columns / 2] and block scales [rows, columns / group], each row contiguous; strides
 * are bytes from row to row, steps from expert to expert of a stack. columns is a multiple of
 * group, which is 16 or 32. */
typedef struct {
    int64_t experts;       /* matrices of a stack, or 1 */
    int64_t rows, columns; /* of a matrix */
    int32_t group;
    uint8_t *codes, *scales;
    int64_t code_stride, scale_stride;
    int64_t code_step, scale_step;
    uint8_t *packed; /* units of all experts */
} moq_nvfp4_rows;

void moq_cpu_pack_nvfp4(const moq_nvfp4_rows *rows);
void moq_cpu_unpack_nvfp4(const moq_nvfp4_rows *rows);

#endif
