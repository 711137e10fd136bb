/* Rearranging of codes and scales on the device, with the results of cpu/cpu_layout.h. Calls are
 * queued on `stream` of the current device; `out` is row-major and apart from the input. */
#ifndef MOQ_CUDA_TENSOR_CUDA_LAYOUT_H
#define MOQ_CUDA_TENSOR_CUDA_LAYOUT_H

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Packs codes [..., K], one to a byte, into bytes [..., K / 2], and unpacks them; any strides, K
 * even. */
moq_status moq_cuda_pack_fp4(const moq_tensor *codes, uint8_t *packed, void *stream, moq_err *err);
moq_status moq_cuda_unpack_fp4(const moq_tensor *packed, uint8_t *codes, void *stream,
                               moq_err *err);

/* The table of moq_cuda_translate: out = table[codes], for bytes [..., K] of any strides. */
typedef struct {
    uint8_t to[256];
} moq_code_table;

moq_status moq_cuda_translate(const moq_tensor *codes, const moq_code_table *table, uint8_t *out,
                              void *stream, moq_err *err);

/* Swizzle and unswizzle one-byte scales: [M, K] or [B, M, K] of any strides to tiles of 128 x 4
 * padded with zeros, and back to the row-major matrices `out`. `swizzled` is only read. */
moq_status moq_cuda_swizzle(const moq_tensor *scale, uint8_t *out, void *stream, moq_err *err);
/* Swizzles matrices whose tiles begin `span` bytes apart, a multiple of 16. */
moq_status moq_cuda_swizzle_apart(const moq_tensor *scale, uint8_t *out, int64_t span, void *stream,
                                  moq_err *err);
moq_status moq_cuda_unswizzle(const moq_tensor *out, uint8_t *swizzled, void *stream, moq_err *err);

#ifdef __cplusplus
}
#endif
#endif
