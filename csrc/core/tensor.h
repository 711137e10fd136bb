/* The tensor view every floor passes around: borrowed memory with a dtype, a device and strides.
 *
 * A view owns nothing. `data` already includes any byte offset, strides are counted in elements and
 * are always present, and an element is one addressable unit: for MOQ_DT_E2M1X2 (two packed fp4
 * values) that is a byte, so the last extent of such a tensor counts bytes. */
#ifndef MOQ_CORE_TENSOR_H
#define MOQ_CORE_TENSOR_H

#include "core/status.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_MAX_NDIM 8

typedef enum {
    MOQ_DT_NONE = 0,
    MOQ_DT_BOOL,
    MOQ_DT_U8,
    MOQ_DT_I8,
    MOQ_DT_U16,
    MOQ_DT_I16,
    MOQ_DT_I32,
    MOQ_DT_I64,
    MOQ_DT_F16,
    MOQ_DT_BF16,
    MOQ_DT_F32,
    MOQ_DT_F64,
    MOQ_DT_E4M3,   /* float8_e4m3fn */
    MOQ_DT_E5M2,   /* float8_e5m2 */
    MOQ_DT_E8M0,   /* float8_e8m0fnu: 2^(byte - 127) */
    MOQ_DT_E2M1X2, /* two float4_e2m1fn in a byte, the even column in the low nibble */
    MOQ_DT_COUNT
} moq_dtype;

typedef enum { MOQ_CPU = 0, MOQ_CUDA = 1 } moq_device_kind;

typedef struct {
    moq_device_kind kind;
    int32_t index;
} moq_device;

typedef struct {
    void *data;
    moq_dtype dtype;
    moq_device device;
    int32_t ndim;
    bool readonly;
    int64_t shape[MOQ_MAX_NDIM];
    int64_t stride[MOQ_MAX_NDIM];
} moq_tensor;

/* Bytes of one element; 0 for MOQ_DT_NONE. */
size_t moq_dtype_size(moq_dtype dtype);
/* Canonical name ("bfloat16", "float8_e4m3fn", ...), "invalid" when out of range. */
const char *moq_dtype_name(moq_dtype dtype);
/* Names the types that may hold the dtype beside itself, for messages: " or raw uint8", "" where
 * nothing may. */
const char *moq_dtype_carrier_text(moq_dtype dtype);
/* The dtype of a name; also accepts the short spellings "bf16", "e4m3", ...; MOQ_DT_NONE if
 * unknown. */
moq_dtype moq_dtype_from_name(const char *name);

/* Product of the extents, or -1 when it or its size in bytes overflows int64. */
int64_t moq_tensor_numel(const moq_tensor *t);
/* Row-major without gaps; extents of 1 have no stride worth looking at, empty tensors pass. */
bool moq_tensor_is_contiguous(const moq_tensor *t);
/* Gives a view the strides of a row-major tensor of its own shape. */
void moq_tensor_set_contiguous(moq_tensor *t);
/* The tensor as a matrix of its rows: leading dimensions become one. False where they do not step
 * through memory as one would. With a single row, the stride is that of rows without gaps. */
bool moq_tensor_as_rows(const moq_tensor *t, moq_tensor *rows);
/* First and one-past-last byte a view can touch; equal when it is empty. */
void moq_tensor_extent(const moq_tensor *t, uintptr_t *first, uintptr_t *end);
/* True when the byte ranges of two views on the same device intersect. */
bool moq_tensor_overlap(const moq_tensor *a, const moq_tensor *b);
/* Writes "cpu" or "cuda:0"; always NUL-terminated. Returns `buffer`. */
const char *moq_device_text(moq_device device, char *buffer, size_t size);
/* Writes "[2, 128]" for messages; always NUL-terminated. Returns `buffer`. */
const char *moq_shape_text(const moq_tensor *t, char *buffer, size_t size);

#ifdef __cplusplus
}
#endif
#endif
