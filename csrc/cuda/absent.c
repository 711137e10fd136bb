/* The CUDA floor of a build without CUDA: every call says so, and why. Entries of kernels are not
 * here: rows have NULL for them (core/kernel.h). */
#include "cuda/cuda.h"
#include "cuda/linear/cuda_low_rank.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/tensor/cuda_gate.h"
#include "cuda/tensor/cuda_heads.h"
#include "cuda/tensor/cuda_layout.h"
#include "cuda/tensor/cuda_mx_scales.h"
#include "cuda/tensor/cuda_nvfp4_pack.h"
#include "cuda/tensor/cuda_prepare.h"
#include "cuda/tensor/cuda_quantize.h"
#include "cuda/tensor/cuda_rotary.h"
#include "cuda/tensor/cuda_route.h"
#include "cuda/tensor/cuda_rows.h"
#include "cuda/tensor/cuda_smooth.h"
#include "cuda/tensor/cuda_weight_codes.h"

#include <stdio.h>

#define REASON "moqext was built without CUDA: " MOQ_CUDA_WHY_NOT
#define REBUILD                                                                                    \
    "rebuild it where the GPU and nvcc are: MOQEXT_CUDA=1 MOQEXT_CUDA_ARCHS=native pip install ."

/* Stand-ins have the parameters of what they stand for, and use few of them. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

static moq_status absent(moq_err *err) {
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s; %s", REASON, REBUILD);
}

/* ---- functions that fail: their parameters but for the last, the error ---- */

#define FAILS(name, ...)                                                                           \
    moq_status name(__VA_ARGS__, moq_err *err) {                                                   \
        return absent(err);                                                                        \
    }

FAILS(moq_cuda_query_device, int index, moq_cuda_device *out)
FAILS(moq_cuda_order, void *before, void *after)
FAILS(moq_cuda_allocate, size_t bytes, void *stream, void **out)
FAILS(moq_cuda_upload, void *out, const void *host, size_t bytes, void *stream)
FAILS(moq_cuda_download, void *host, const void *memory, size_t bytes, void *stream)
FAILS(moq_cuda_copy, void *out, const void *memory, size_t bytes, void *stream)
FAILS(moq_cuda_fill, void *out, int byte, size_t bytes, void *stream)
FAILS(moq_cuda_copy_codes, const moq_code_copy *copy, void *stream)
FAILS(moq_cuda_convert_mx_scales, const moq_mx_rows *rows, moq_findings *found, void *stream)
FAILS(moq_cuda_pack_nvfp4, const moq_nvfp4_pack *pack, void *stream)
FAILS(moq_cuda_unpack_nvfp4, const moq_nvfp4_unpack *unpack, void *stream)
FAILS(moq_cuda_smooth_rows, const moq_tensor *x, const float *scale, const moq_tensor *rows,
      void *stream)
FAILS(moq_cuda_low_rank, const moq_low_rank *low_rank)
FAILS(moq_cuda_gather_rows, const moq_tensor *tensor, const moq_tensor *rows, void *stream)
FAILS(moq_cuda_scatter_rows, const moq_tensor *rows, const moq_tensor *tensor, void *stream)
FAILS(moq_cuda_quantize_rows, const moq_cuda_quantize *q)
FAILS(moq_cuda_find_amax, const void *values, moq_dtype dtype, int64_t count, uint32_t *bits,
      void *stream)
FAILS(moq_cuda_weight_codes, const moq_weight_codes *w, void *stream)
FAILS(moq_cuda_gate, const moq_gate *gate, void *out, void *stream)
FAILS(moq_cuda_qk_norm_rope, const moq_heads *heads, void *stream)
FAILS(moq_cuda_rotate, const moq_rotary *rotary, void *out, void *stream)
FAILS(moq_cuda_route, const moq_route *route, float *weights, int32_t *ids, void *stream)
FAILS(moq_cuda_make_stream, void **stream)
FAILS(moq_cuda_record, void *stream, moq_status (*work)(void *data, moq_err *err), void *data,
      void **graph)
FAILS(moq_cuda_replay, void *graph, void *stream, double *seconds)
FAILS(moq_cuda_wait, void *stream)
FAILS(moq_cuda_new, int32_t device, size_t bytes, void **out)
FAILS(moq_cuda_new_pinned, int32_t device, size_t bytes, void **out)
FAILS(moq_cuda_take_note, moq_findings **note)
FAILS(moq_cuda_copy_scales, const moq_scale_copy *copy, void *stream)
FAILS(moq_cuda_fill_floats, float *out, float value, int64_t count, void *stream)
FAILS(moq_cuda_pack_fp4, const moq_tensor *codes, uint8_t *packed, void *stream)
FAILS(moq_cuda_unpack_fp4, const moq_tensor *packed, uint8_t *codes, void *stream)
FAILS(moq_cuda_translate, const moq_tensor *codes, const moq_code_table *table, uint8_t *out,
      void *stream)
FAILS(moq_cuda_swizzle_apart, const moq_tensor *scale, uint8_t *out, int64_t span, void *stream)
FAILS(moq_cuda_swizzle, const moq_tensor *scale, uint8_t *out, void *stream)
FAILS(moq_cuda_unswizzle, const moq_tensor *out, uint8_t *swizzled, void *stream)

/* ---- functions that answer ---- */

bool moq_cuda_built(void) {
    return false;
}

const char *moq_cuda_archs(void) {
    return "";
}

moq_status moq_cuda_device_count(int *count, moq_err *err) {
    *count = 0;
    return absent(err);
}

moq_status moq_cuda_enter(int32_t device, bool *entered, moq_err *err) {
    *entered = false;
    return absent(err);
}

void moq_cuda_leave(bool entered) {
}

void moq_cuda_versions(int *runtime, int *driver) {
    *runtime = *driver = 0;
}

bool moq_cuda_is_capturing(void *stream) {
    return false;
}

void moq_graph_break_pdl(void) {
}

void moq_cuda_release(void *memory, void *stream) {
}

int64_t moq_cuda_quantize_workspace(const moq_cuda_quantize *q) {
    return 0;
}

int64_t moq_cuda_low_rank_bytes(const moq_low_rank *low_rank) {
    return 0;
}

void moq_cuda_end_stream(void *stream) {
}

void moq_cuda_forget(void *graph) {
}

void moq_cuda_delete(int32_t device, void *memory) {
}

void moq_cuda_delete_pinned(int32_t device, void *memory) {
}

void moq_cuda_return_note(moq_findings *note) {
}

const moq_cublaslt *moq_cublaslt_find(const char *directories, char *reason, size_t size) {
    snprintf(reason, size, REASON);
    return NULL;
}
