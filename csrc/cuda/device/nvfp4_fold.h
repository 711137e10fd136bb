/* Folding of packed NVFP4 weights into e4m3 codes, for FP8 products.
 *
 * The code of a weight is e4m3(e2m1 * scale * fold), to the bit that of cpu/cpu_prepare.h, where
 * fold is the row's power of two, at most 16 (moq_used_fold). Products in float16 are exact where
 * the code is not 0, with six significant bits between 2^-10 and 448, so that a code is rounded
 * once. They are finite for every scale, at most 6 * 448 * 16. */
#ifndef MOQ_CUDA_DEVICE_NVFP4_FOLD_H
#define MOQ_CUDA_DEVICE_NVFP4_FOLD_H

#include "core/nvfp4_packed.h"
#include "cuda/device/nvfp4_decode.h"
#include "cuda/device/ptx.h"

#include <cuda_fp16.h>
#include <string.h>

namespace moq {

/* Unit as a lane reads it: its vector of codes, and the scales of its rows. */
typedef struct {
    uint4 codes;
    uint2 scales;
} moq_packed_unit;

static __device__ __forceinline__ moq_packed_unit moq_load_unit(uint32_t unit) {
    int lane = threadIdx.x % 32;
    return {load_shared(unit + moq_pack_word_at(lane / 4, lane % 4, 0)),
            load_shared_pair(unit + moq_pack_scale_at(lane / 4, 0))};
}

/* Returns the factor of a row's codes: its power of two, at most 16, for which the least product of
 * e2m1 and a scale, 2^-10, is a normal number of e4m3 already. */
static __device__ __forceinline__ float moq_used_fold(float fold) {
    return fminf(fold, 16.0f);
}

/* Returns the factor of outputs of a row's codes: the reciprocal of the power of two, exact. */
static __device__ __forceinline__ float moq_unfold(float fold) {
    return __frcp_rn(moq_used_fold(fold));
}

static __device__ __forceinline__ uint32_t moq_e4m3_four(uint32_t low, uint32_t high) {
    uint32_t four;
    asm("{\n"
        ".reg .b16 a, b;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 a, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 b, %2;\n"
        "mov.b32 %0, {a, b};\n"
        "}"
        : "=r"(four)
        : "r"(low), "r"(high));
    return four;
}

/* Folds a word of rows g and g + 8, whose scales are in the high or the low halves. */
static __device__ __forceinline__ void moq_fold_word(uint32_t word, uint32_t upper, uint32_t lower,
                                                     bool high, uint32_t *a) {
    uint32_t pair[4];
    moq_nvfp4_codes<MOQ_NVFP4_F16>(word, pair);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pair[i] = moq_nvfp4_multiply<MOQ_NVFP4_F16>(pair[i], 0x74007400u); /* 2^14 */
        pair[i] = moq_nvfp4_multiply<MOQ_NVFP4_F16>(pair[i],
                                                    moq_nvfp4_twice(i % 2 ? lower : upper, high));
    }
    a[0] = moq_e4m3_four(pair[0], pair[2]);
    a[1] = moq_e4m3_four(pair[1], pair[3]);
}

/* Returns the scales of two groups times the powers of two of their rows, row g's first. Even bytes
 * belong to row g, odd ones to row g + 8; `folds` are 256 times the powers of two in float16, as a
 * byte is scale / 256. Only seven bits of a byte are used: units beyond K may hold anything, meet
 * zeros of x, and must not be NaN. */
static __device__ __forceinline__ uint2 moq_fold_scales(uint32_t bytes, uint32_t folds) {
    return {
        moq_nvfp4_multiply<MOQ_NVFP4_F16>((bytes & 0x007f007fu) * 128,
                                          moq_nvfp4_twice(folds, false)),
        moq_nvfp4_multiply<MOQ_NVFP4_F16>(bytes >> 1 & 0x3f803f80u, moq_nvfp4_twice(folds, true))};
}

/* Folds the codes of a unit under the scales of moq_fold_scales. Group s of row g is in a[s / 2][s
 * % 2 * 2], of row g + 8 in the next word: columns 2t, 2t + 1, 2t + 8 and 2t + 9 of the group. */
static __device__ __forceinline__ void moq_fold_codes(uint4 codes, uint4 scales,
                                                      uint32_t (&a)[2][4]) {
#pragma unroll
    for (int s = 0; s < MOQ_PACK_GROUPS; s++)
        moq_fold_word((&codes.x)[s], (&scales.x)[s / 2 * 2], (&scales.x)[s / 2 * 2 + 1], s % 2 != 0,
                      a[s / 2] + s % 2 * 2);
}

static __device__ __forceinline__ void moq_fold_unit(uint4 codes, uint2 scales, uint32_t folds,
                                                     uint32_t (&a)[2][4]) {
    uint2 low = moq_fold_scales(scales.x, folds), high = moq_fold_scales(scales.y, folds);
    moq_fold_codes(codes, make_uint4(low.x, low.y, high.x, high.y), a);
}

/* Packs the powers of two of a lane's two rows, as moq_fold_scales takes them. */
static __device__ __forceinline__ uint32_t moq_pack_folds(float upper, float lower) {
    __half2 pair = __floats2half2_rn(256.0f * moq_used_fold(upper), 256.0f * moq_used_fold(lower));
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
}

} // namespace moq

#endif
