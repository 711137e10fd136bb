/* The CUDA floor of a build without CUDA: every call says so, and why. See cuda.h. */
#include "cuda/cuda.h"
#include "cuda/linear/cuda_linear.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/tensor/cuda_gate.h"
#include "cuda/tensor/cuda_heads.h"
#include "cuda/tensor/cuda_layout.h"
#include "cuda/tensor/cuda_nvfp4_pack.h"
#include "cuda/tensor/cuda_prepare.h"
#include "cuda/tensor/cuda_quantize.h"
#include "cuda/tensor/cuda_rotary.h"
#include "cuda/tensor/cuda_route.h"
#include "cuda/tensor/cuda_rows.h"
#include "cuda/tensor/cuda_smooth.h"

#include <stdio.h>

#define REASON "moqext was built without CUDA: " MOQ_CUDA_WHY_NOT
#define REBUILD                                                                                    \
    "rebuild it where the GPU and nvcc are: MOQEXT_CUDA=1 MOQEXT_CUDA_ARCHS=native pip install ."

static moq_status absent(moq_err *err) {
    return moq_fail(err, MOQ_ERR_INTERNAL, "%s; %s", REASON, REBUILD);
}

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

moq_status moq_cuda_query_device(int index, moq_cuda_device *out, moq_err *err) {
    (void)index;
    (void)out;
    return absent(err);
}

moq_status moq_cuda_enter(int32_t device, bool *entered, moq_err *err) {
    (void)device;
    *entered = false;
    return absent(err);
}

void moq_cuda_leave(bool entered) {
    (void)entered;
}

moq_status moq_cuda_order(void *before, void *after, moq_err *err) {
    (void)before;
    (void)after;
    return absent(err);
}

void moq_cuda_versions(int *runtime, int *driver) {
    *runtime = *driver = 0;
}

bool moq_cuda_is_capturing(void *stream) {
    (void)stream;
    return false;
}

void moq_graph_break_pdl(void) {
}

moq_status moq_cuda_fp8_decode(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

moq_status moq_cuda_fp8_prefill(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_fp8_prefill_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_nvfp4_medium(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_nvfp4_medium_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_nvfp4_prefill(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_nvfp4_prefill_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_nvfp4_fp8_prefill(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_nvfp4_fp8_prefill_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_nvfp4_fp8_medium(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_nvfp4_fp8_medium_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_simt_linear(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_simt_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_mma_fp8_as_f16(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

moq_status moq_cuda_mma_fp8_as_e4m3(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_mma_fp8_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_nvfp4_decode(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

moq_status moq_cuda_mma_nvfp4(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_mma_nvfp4_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_nvfp4_decode(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_nvfp4_decode_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_fp8_decode(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_fp8_decode_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_fp8_prefill(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_fp8_prefill_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_nvfp4_prefill(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_nvfp4_prefill_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_nvfp4_fp8_prefill(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_nvfp4_fp8_prefill_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_simt(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_simt_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_mma_fp8_as_f16(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_mma_fp8_as_f16_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_mma_fp8_as_e4m3(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_mma_fp8_as_e4m3_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_mma_nvfp4(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_mma_nvfp4_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_moe_mma_nvfp4_folded(const moq_moe_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

int64_t moq_cuda_moe_mma_nvfp4_folded_workspace(const moq_moe_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cuda_allocate(size_t bytes, void *stream, void **out, moq_err *err) {
    (void)bytes;
    (void)stream;
    (void)out;
    return absent(err);
}

void moq_cuda_release(void *memory, void *stream) {
    (void)memory;
    (void)stream;
}

moq_status moq_cuda_upload(void *out, const void *host, size_t bytes, void *stream, moq_err *err) {
    (void)out;
    (void)host;
    (void)bytes;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_download(void *host, const void *memory, size_t bytes, void *stream,
                             moq_err *err) {
    (void)host;
    (void)memory;
    (void)bytes;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_copy(void *out, const void *memory, size_t bytes, void *stream, moq_err *err) {
    (void)out;
    (void)memory;
    (void)bytes;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_fill(void *out, int byte, size_t bytes, void *stream, moq_err *err) {
    (void)out;
    (void)byte;
    (void)bytes;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_copy_codes(const moq_code_copy *copy, void *stream, moq_err *err) {
    (void)copy;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_pack_nvfp4(const moq_nvfp4_pack *pack, void *stream, moq_err *err) {
    (void)pack;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_unpack_nvfp4(const moq_nvfp4_unpack *unpack, void *stream, moq_err *err) {
    (void)unpack;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_smooth_rows(const moq_tensor *x, const float *scale, const moq_tensor *rows,
                                void *stream, moq_err *err) {
    (void)x;
    (void)scale;
    (void)rows;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_gather_rows(const moq_tensor *tensor, const moq_tensor *rows, void *stream,
                                moq_err *err) {
    (void)tensor;
    (void)rows;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_scatter_rows(const moq_tensor *rows, const moq_tensor *tensor, void *stream,
                                 moq_err *err) {
    (void)rows;
    (void)tensor;
    (void)stream;
    return absent(err);
}

int64_t moq_cuda_quantize_workspace(const moq_cuda_quantize *q) {
    (void)q;
    return 0;
}

moq_status moq_cuda_quantize_rows(const moq_cuda_quantize *q, moq_err *err) {
    (void)q;
    return absent(err);
}

moq_status moq_cuda_gate(const moq_gate *gate, void *out, void *stream, moq_err *err) {
    (void)gate;
    (void)out;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_qk_norm_rope(const moq_heads *heads, void *stream, moq_err *err) {
    (void)heads;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_rotate(const moq_rotary *rotary, void *out, void *stream, moq_err *err) {
    (void)rotary;
    (void)out;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_route(const moq_route *route, float *weights, int32_t *ids, void *stream,
                          moq_err *err) {
    (void)route;
    (void)weights;
    (void)ids;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_make_stream(void **stream, moq_err *err) {
    (void)stream;
    return absent(err);
}

void moq_cuda_end_stream(void *stream) {
    (void)stream;
}

moq_status moq_cuda_record(void *stream, moq_status (*work)(void *data, moq_err *err), void *data,
                           void **graph, moq_err *err) {
    (void)stream;
    (void)work;
    (void)data;
    (void)graph;
    return absent(err);
}

moq_status moq_cuda_replay(void *graph, void *stream, double *seconds, moq_err *err) {
    (void)graph;
    (void)stream;
    (void)seconds;
    return absent(err);
}

void moq_cuda_forget(void *graph) {
    (void)graph;
}

moq_status moq_cuda_wait(void *stream, moq_err *err) {
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_new(int32_t device, size_t bytes, void **out, moq_err *err) {
    (void)device;
    (void)bytes;
    (void)out;
    return absent(err);
}

void moq_cuda_delete(int32_t device, void *memory) {
    (void)device;
    (void)memory;
}

moq_status moq_cuda_take_note(moq_findings **note, moq_err *err) {
    (void)note;
    return absent(err);
}

void moq_cuda_return_note(moq_findings *note) {
    (void)note;
}

moq_status moq_cuda_copy_scales(const moq_scale_copy *copy, void *stream, moq_err *err) {
    (void)copy;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_fill_floats(float *out, float value, int64_t count, void *stream,
                                moq_err *err) {
    (void)out;
    (void)value;
    (void)count;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_pack_fp4(const moq_tensor *codes, uint8_t *packed, void *stream, moq_err *err) {
    (void)codes;
    (void)packed;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_unpack_fp4(const moq_tensor *packed, uint8_t *codes, void *stream,
                               moq_err *err) {
    (void)packed;
    (void)codes;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_translate(const moq_tensor *codes, const moq_code_table *table, uint8_t *out,
                              void *stream, moq_err *err) {
    (void)codes;
    (void)table;
    (void)out;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_swizzle_apart(const moq_tensor *scale, uint8_t *out, int64_t span, void *stream,
                                  moq_err *err) {
    (void)scale;
    (void)out;
    (void)span;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_swizzle(const moq_tensor *scale, uint8_t *out, void *stream, moq_err *err) {
    (void)scale;
    (void)out;
    (void)stream;
    return absent(err);
}

moq_status moq_cuda_unswizzle(const moq_tensor *out, uint8_t *swizzled, void *stream,
                              moq_err *err) {
    (void)out;
    (void)swizzled;
    (void)stream;
    return absent(err);
}

const moq_cublaslt *moq_cublaslt_find(const char *directories, char *reason, size_t size) {
    (void)directories;
    snprintf(reason, size, REASON);
    return NULL;
}

int64_t moq_cublaslt_workspace(const moq_linear_call *call) {
    (void)call;
    return 0;
}

moq_status moq_cublaslt_linear(const moq_linear_call *call, moq_err *err) {
    (void)call;
    return absent(err);
}

uint64_t moq_cublaslt_variants(const moq_linear_call *call) {
    (void)call;
    return 0;
}
