/* Quantization of activations on the device, with the formulas of cpu/cpu_quantize.h and the same
 * bits; and what a layer does to them before, with or without it.
 *
 * Nothing is read back: a scale given on the device is used unseen, whatever it is. Results are
 * the same in every run, and calls can be captured into graphs. */
#ifndef MOQ_CUDA_TENSOR_CUDA_QUANTIZE_H
#define MOQ_CUDA_TENSOR_CUDA_QUANTIZE_H

#include "core/activation.h"
#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x [..., K] of 16 or 32-bit floats with any strides, [..., 2K] for silu_and_mul; fastest where its
 * rows are a constant stride apart, the values of a row next to each other, and every row begins at
 * a multiple of 16 bytes. M is the number of rows. */
typedef struct {
    const moq_tensor *x;
    /* What is done to x before, with x, weight and residual of it; NULL: nothing. */
    const moq_activation *activation;
    /* AS_IS: of an activation, whose values are written to `codes`, [M, K] of the dtype of x
     * without gaps; code_stride and code_columns are K and its bytes, and the scales are nothing.
     */
    moq_input_mode mode;
    /* E4M3_TENSOR and NVFP4: the scale on the device, or, where `given` is NULL and `scale` not 0,
     * as a number, or else the one that the amax of x asks for. */
    const float *given;
    float scale;
    int group; /* E4M3_GROUP: values to a scale; 128 for the fast kernel and after an activation */
    /* [M, K] e4m3, or for NVFP4 [M, K / 2]. Rows are code_stride bytes apart, a multiple of 16 for
     * speed; the bytes of a row from its codes up to code_columns, where that is more, become 0. */
    uint8_t *codes;
    int64_t code_stride;
    int64_t code_columns;
    /* E4M3_TOKEN: [M]; E4M3_GROUP: that of row m and group g at m * scale_row + g * scale_group, so
     * that either may be the dense axis; NVFP4 the same with e4m3. E4M3_TENSOR, dynamic: one. */
    void *scales;
    int64_t scale_row;
    int64_t scale_group;
    /* NVFP4: where not 0, block scales are in swizzled order instead, with so many tiles in a row
     * of them; what is beyond the ends of x stays as it is. */
    int64_t scale_tiles;
    float *scale_2;  /* NVFP4, dynamic: the second-level scale */
    void *workspace; /* of moq_cuda_quantize_workspace bytes, or NULL where that is 0 */
    void *stream;    /* cudaStream_t */
    /* The next kernel has work that does not depend on this one, and may start at once. */
    bool next_is_busy;
    /* The kernels before and after are launched without programmatic dependence, and so is this
     * one. */
    bool in_turn;
    /* E4M3_TOKEN, 16-bit x of contiguous rows at multiples of 16 bytes, K a multiple of 16 up to
     * MOQ_CUDA_PAIRED_COLUMNS: of each 16 codes those of columns 2t, 2t + 1, 2t + 8 and 2t + 9 are
     * next to each other, t = 0 to 3, as products with packed NVFP4 weights have them. */
    bool paired;
} moq_cuda_quantize;

/* The longest rows of rms_norm on the device. */
#define MOQ_CUDA_NORM_COLUMNS (1 << 21)

#define MOQ_CUDA_PAIRED_COLUMNS (1 << 16)

/* Bytes that a call needs beside its results: for one scale of a whole tensor, found from it. */
int64_t moq_cuda_quantize_workspace(const moq_cuda_quantize *q);
/* Launches on the current device, that of x, one kernel, two for a scale of the whole tensor. They
 * may overlap with their predecessor and successor in the stream (programmatic launch). */
moq_status moq_cuda_quantize_rows(const moq_cuda_quantize *q, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
