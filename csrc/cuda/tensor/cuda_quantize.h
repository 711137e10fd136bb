/* Quantization of activations on the device, with the formulas and bits of cpu/cpu_quantize.h, and
 * activations of a layer before it or alone.
 *
 * Nothing is read back: a scale given on the device is used unseen. Results are the same in every
 * run, and calls can be captured into graphs. */
#ifndef MOQ_CUDA_TENSOR_CUDA_QUANTIZE_H
#define MOQ_CUDA_TENSOR_CUDA_QUANTIZE_H

#include "core/activation.h"
#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A call: x [..., K] of 16 or 32-bit floats with any strides, [..., 2K] for silu_and_mul. Fastest
 * if rows are a constant stride apart, contiguous, and begin at multiples of 16 bytes. M is the
 * number of rows. */
typedef struct {
    const moq_tensor *x;
    /* Activation before quantization, with its x, weight and residual; NULL: none. */
    const moq_activation *activation;
    /* AS_IS: the activation's values are written to `codes`, [M, K] of the dtype of x without gaps;
     * code_stride and code_columns are K and its bytes, and scales are unused. */
    moq_input_mode mode;
    /* E4M3_TENSOR and NVFP4: the scale on the device. If `given` is NULL it is `scale`, or, if that
     * is 0, found from the amax of x. */
    const float *given;
    float scale;
    int group; /* E4M3_GROUP: values to a scale; 128 for the fast kernel and after an activation */
    /* [M, K] e4m3, or for NVFP4 [M, K / 2]. Rows are code_stride bytes apart, a multiple of 16 for
     * speed; bytes between codes and code_columns become 0. */
    uint8_t *codes;
    int64_t code_stride;
    int64_t code_columns;
    /* Scales. E4M3_TOKEN: [M]; E4M3_GROUP: row m and group g at m * scale_row + g * scale_group, so
     * that either axis may be dense; NVFP4: as E4M3_GROUP, in e4m3; dynamic E4M3_TENSOR: one. */
    void *scales;
    int64_t scale_row;
    int64_t scale_group;
    /* NVFP4: if not 0, block scales are in swizzled order, with so many tiles in a row of tiles;
     * tiles beyond the ends of x stay unwritten. */
    int64_t scale_tiles;
    float *scale_2;  /* NVFP4, dynamic: the second-level scale */
    void *workspace; /* moq_cuda_quantize_workspace bytes, or NULL if that is 0 */
    void *stream;    /* cudaStream_t */
    /* True if the next kernel has work that does not depend on this one, and may start at once. */
    bool next_is_busy;
    /* True if the kernels before and after are launched without PDL, and so is this one. */
    bool in_turn;
    /* True for E4M3_TOKEN codes in the order of operands of packed NVFP4 weights: of each 16 codes,
     * columns 2t, 2t + 1, 2t + 8 and 2t + 9 are neighbours, t = 0 to 3. x has 16 bits, contiguous
     * rows at multiples of 16 bytes, and K a multiple of 16 up to MOQ_CUDA_PAIRED_COLUMNS. */
    bool paired;
} moq_cuda_quantize;

/* The longest rows of rms_norm on the device. */
#define MOQ_CUDA_NORM_COLUMNS (1 << 21)

#define MOQ_CUDA_PAIRED_COLUMNS (1 << 16)

/* Returns the workspace bytes of a call: for one scale of a whole tensor, found from it. */
int64_t moq_cuda_quantize_workspace(const moq_cuda_quantize *q);
/* Launches on the current device, that of x: one kernel, two for a scale of the whole tensor. They
 * may overlap with their neighbours in the stream (PDL). */
moq_status moq_cuda_quantize_rows(const moq_cuda_quantize *q, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
