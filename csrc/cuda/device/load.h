/* Loads, quantization and stores that device code of linears and tensors shares: rows of
 * activations 16 values at a time, FP8 codes and scales, outputs with bias, and partitions of a
 * layer.
 *
 * The arithmetic is that of cpu/cpu_quantize.h, operation for operation, so that codes and scales
 * have the same bits on both. */
#ifndef MOQ_CUDA_DEVICE_LOAD_H
#define MOQ_CUDA_DEVICE_LOAD_H

#include "core/linear.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

namespace moq {

/* ---- activations ---- */

typedef struct {
    const void *data;
    int64_t stride; /* elements from row to row; the values of a row are contiguous */
    moq_dtype dtype;
} moq_rows;

/* Chunk of 16 values as stored in memory; 16-bit values fill half of it. */
typedef struct {
    uint4 word[4];
} moq_chunk;

/* Loads values column to column + 15 of a row, from an address that is a multiple of 16. */
static __device__ __forceinline__ moq_chunk moq_load_chunk(const moq_rows *x, int64_t row,
                                                           int column) {
    moq_chunk chunk;
    int64_t at = row * x->stride + column;
    bool wide = x->dtype == MOQ_DT_F32;
    const uint4 *from = (const uint4 *)((const uint8_t *)x->data + at * (wide ? 4 : 2));
    chunk.word[0] = from[0];
    chunk.word[1] = from[1];
    if (wide) {
        chunk.word[2] = from[2];
        chunk.word[3] = from[3];
    }
    return chunk;
}

static __device__ __forceinline__ float2 moq_widen_pair(uint32_t pair, moq_dtype dtype) {
    if (dtype == MOQ_DT_BF16)
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    __half2 h;
    memcpy(&h, &pair, sizeof h);
    return __half22float2(h);
}

static __device__ __forceinline__ void moq_widen(const moq_rows *x, const moq_chunk *chunk,
                                                 float (&value)[16]) {
    if (x->dtype == MOQ_DT_F32) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            value[i] = __uint_as_float((&chunk->word[i / 4].x)[i % 4]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 pair = moq_widen_pair((&chunk->word[i / 4].x)[i % 4], x->dtype);
        value[2 * i] = pair.x;
        value[2 * i + 1] = pair.y;
    }
}

static __device__ __forceinline__ float moq_load_one(const void *data, int64_t at,
                                                     moq_dtype dtype) {
    if (dtype == MOQ_DT_F32)
        return ((const float *)data)[at];
    if (dtype == MOQ_DT_BF16)
        return __bfloat162float(((const __nv_bfloat16 *)data)[at]);
    return __half2float(((const __half *)data)[at]);
}

/* Loads values column to column + 15 of a row from an address that is a multiple of 16, zeros from
 * k on. */
static __device__ __forceinline__ void
moq_load_values(const moq_rows *x, int64_t row, int64_t column, int64_t k, float (&value)[16]) {
    if (column + 16 <= k) {
        moq_chunk chunk = moq_load_chunk(x, row, (int)column);
        moq_widen(x, &chunk, value);
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] =
            column + i < k ? moq_load_one(x->data, row * x->stride + column + i, x->dtype) : 0.0f;
}

/* ---- amax and scales ---- */

/* Returns the bits of the largest magnitude; NaN is above all others. */
template <int N> static __device__ __forceinline__ uint32_t moq_amax_bits(const float (&value)[N]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        most = max(most, __float_as_uint(value[i]) & 0x7fffffffu);
    return most;
}

/* Returns moq_amax_bits of a stored chunk, `wide` for float32; 16-bit values are compared two at a
 * time. */
static __device__ __forceinline__ uint32_t moq_chunk_amax_bits(const moq_chunk *chunk, bool wide,
                                                               moq_dtype dtype) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < (wide ? 16 : 8); i++) {
        uint32_t word = (&chunk->word[i / 4].x)[i % 4];
        most = wide ? max(most, word & 0x7fffffffu) : __vmaxu2(most, word & 0x7fff7fffu);
    }
    return wide ? most : __float_as_uint(moq_widen_pair(max(most & 0xffffu, most >> 16), dtype).x);
}

/* Returns the largest bits of `lanes` neighbouring lanes, a power of two. */
static __device__ __forceinline__ uint32_t moq_max_of_lanes(uint32_t bits, int lanes) {
    for (int i = 1; i < lanes; i *= 2)
        bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, i));
    return bits;
}

/* Returns a, or `least` where a is smaller; NaN stays. */
static __device__ __forceinline__ float moq_at_least(float a, float least) {
    return a < least ? least : a;
}

static __device__ __forceinline__ float moq_token_scale(float amax) {
    return moq_at_least(__fdiv_rn(amax, 448.0f), 1.0f / (448.0f * 512.0f));
}

static __device__ __forceinline__ float moq_group_scale(float amax) {
    return __fdiv_rn(moq_at_least(amax, 1e-10f), 448.0f);
}

static __device__ __forceinline__ float moq_tensor_scale(float amax) {
    float scale = __fdiv_rn(amax, 448.0f);
    return scale < 1.17549435e-38f ? 1.0f : scale; /* FLT_MIN */
}

/* ---- codes ---- */

#if __CUDA_ARCH__ >= 890
static __device__ __forceinline__ uint32_t moq_e4m3_pair(float low, float high) {
    uint16_t code;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(high), "f"(low));
    return code;
}
#else
/* Returns the code that cvt.rn.satfinite gives, for chips without it. From 2^-6 on, a float's bits
 * are rounded to three of significand; below, values are multiples of 2^-9, to which adding 2^14
 * rounds. */
static __device__ __forceinline__ uint32_t moq_e4m3_code(float value) {
    float magnitude = fminf(fabsf(value), 448.0f);
    uint32_t bits = __float_as_uint(magnitude);
    uint32_t code = (bits + 0x7ffffu + (bits >> 20 & 1) - (120u << 23)) >> 20;
    if (magnitude < 0.015625f)
        code = __float_as_uint(__fadd_rn(magnitude, 16384.0f)) - __float_as_uint(16384.0f);
    return value != value ? 0x7f : code | (__float_as_uint(value) >> 24 & 0x80);
}

static __device__ __forceinline__ uint32_t moq_e4m3_pair(float low, float high) {
    return moq_e4m3_code(low) | moq_e4m3_code(high) << 8;
}
#endif

static __device__ __forceinline__ uint32_t moq_e4m3_word(const float *value) {
    return moq_e4m3_pair(value[0], value[1]) | moq_e4m3_pair(value[2], value[3]) << 16;
}

static __device__ __forceinline__ uint4 moq_e4m3_codes(const float (&value)[16]) {
    return make_uint4(moq_e4m3_word(value), moq_e4m3_word(value + 4), moq_e4m3_word(value + 8),
                      moq_e4m3_word(value + 12));
}

/* Returns e4m3(value * factor). */
static __device__ __forceinline__ uint4 moq_codes_multiplied(float (&value)[16], float factor) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        value[i] = __fmul_rn(value[i], factor);
    return moq_e4m3_codes(value);
}

/* Divides values by a scale, rounded as a division. If scale and values are `ordinary`, and no
 * quotient is beyond 1e38, it multiplies by the reciprocal and corrects once by the exact
 * remainder, with signs such that a zero keeps its own. */
template <int N>
static __device__ __forceinline__ void moq_divide(float (&value)[N], float scale, bool ordinary) {
    if (ordinary) {
        float inverse = __frcp_rn(scale);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float q = __fmul_rn(value[i], inverse);
            value[i] = __fmaf_rn(__fmaf_rn(q, scale, -value[i]), -inverse, q);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        value[i] = __fdiv_rn(value[i], scale);
}

/* Returns e4m3(value / scale) for scales of moq_token_scale and moq_group_scale, for which no
 * quotient is far beyond 448. */
static __device__ __forceinline__ uint4 moq_codes_divided(float (&value)[16], float scale) {
    moq_divide(value, scale, scale > 1e-12f && scale < 1e30f);
    return moq_e4m3_codes(value);
}

/* ---- outputs ---- */

typedef struct {
    void *data;
    int64_t stride; /* elements from row to row */
    moq_dtype dtype;
    moq_dtype bias_dtype;
    const void *bias;      /* [N], or NULL */
    const float *addend;   /* [m, N] without gaps, or NULL */
    int64_t addend_stride; /* N */
} moq_output;

/* Packs two outputs of 16 bits, rounded to nearest even; the first is in the lower half. */
static __device__ __forceinline__ uint32_t moq_narrow_pair(moq_dtype dtype, float low, float high) {
    uint32_t word;
    if (dtype == MOQ_DT_BF16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&word, &pair, 4);
    } else {
        __half2 pair = __floats2half2_rn(low, high);
        memcpy(&word, &pair, 4);
    }
    return word;
}

/* Exchanges words among four neighbouring lanes: lane i gets word i of each. */
static __device__ __forceinline__ uint4 moq_exchange_words(uint4 w, int lane) {
    uint32_t a = __shfl_xor_sync(0xffffffffu, lane & 1 ? w.x : w.y, 1);
    uint32_t b = __shfl_xor_sync(0xffffffffu, lane & 1 ? w.z : w.w, 1);
    w = lane & 1 ? make_uint4(a, w.y, b, w.w) : make_uint4(w.x, a, w.z, b);
    a = __shfl_xor_sync(0xffffffffu, lane & 2 ? w.x : w.z, 2);
    b = __shfl_xor_sync(0xffffffffu, lane & 2 ? w.y : w.w, 2);
    return lane & 2 ? make_uint4(a, b, w.z, w.w) : make_uint4(w.x, w.y, a, b);
}

/* Returns the bias of a column, 0 without one. */
static __device__ __forceinline__ float moq_load_bias(const moq_output *out, int n) {
    return out->bias ? moq_load_one(out->bias, n, out->bias_dtype) : 0.0f;
}

/* Returns what is added to y[m, n] besides the bias, where there is something. */
static __device__ __forceinline__ float moq_load_addend(const moq_output *out, int64_t m, int n) {
    return out->addend[m * out->addend_stride + n];
}

/* Stores y[m, n] = round(value + addend + bias). */
static __device__ __forceinline__ void moq_store_output(const moq_output *out, int64_t m, int n,
                                                        float value, float bias) {
    int64_t at = m * out->stride + n;
    if (out->addend)
        value = __fadd_rn(value, moq_load_addend(out, m, n));
    if (out->bias)
        value = __fadd_rn(value, bias);
    if (out->dtype == MOQ_DT_F32)
        ((float *)out->data)[at] = value;
    else if (out->dtype == MOQ_DT_BF16)
        ((__nv_bfloat16 *)out->data)[at] = __float2bfloat16_rn(value);
    else
        ((__half *)out->data)[at] = __float2half_rn(value);
}

/* ---- a call's tensors for kernels ---- */

static inline moq_rows moq_rows_of(const moq_tensor *x) {
    moq_rows rows = {x->data, x->stride[0], x->dtype};
    return rows;
}

static inline moq_output moq_output_of(const moq_linear_call *call) {
    const moq_tensor *y = call->y;
    moq_output out = {y->data,
                      y->stride[0],
                      y->dtype,
                      call->bias_dtype,
                      call->bias,
                      call->addend,
                      call->spec->out_features};
    return out;
}

/* ---- partitions ---- */

/* Partitions of a fused layer: the row at which each ends, and its first row of 128 x 128 block
 * scales. */
typedef struct {
    int end[MOQ_MAX_PARTITIONS];
    int first_block[MOQ_MAX_PARTITIONS];
} moq_partitions;

/* Returns a row's number where each partition is padded to whole blocks of 128 rows. */
static __device__ __forceinline__ int64_t moq_padded_row(const moq_partitions *p, int partition,
                                                         int row) {
    int begin = partition ? p->end[partition - 1] : 0;
    return (int64_t)p->first_block[partition] * 128 + row - begin;
}

static __device__ __forceinline__ int moq_block_row(const moq_partitions *p, int partition,
                                                    int row) {
    return (int)(moq_padded_row(p, partition, row) / 128);
}

static inline moq_partitions moq_partitions_of(const moq_linear_spec *spec) {
    moq_partitions p;
    int row = 0, block = 0;
    for (int i = 0; i < spec->partition_count; i++) {
        p.first_block[i] = block;
        p.end[i] = row += (int)spec->partition[i];
        block += ((int)spec->partition[i] + 127) / 128;
    }
    return p;
}

/* Rows [begin, end) of W of a tile, all in one partition. */
typedef struct {
    int begin, end, partition;
} moq_tile;

/* Returns tile `index`, where each partition has tiles of its own, one for every `rows` rows. */
static __device__ __forceinline__ moq_tile moq_find_tile(const moq_partitions *p, int count,
                                                         int64_t index, int rows) {
    moq_tile t = {0, 0, 0};
    for (; t.partition < count; t.partition++) {
        int end = p->end[t.partition];
        int64_t tiles = ((int64_t)end - t.begin + rows - 1) / rows;
        if (index < tiles) {
            t.begin += (int)(index * rows);
            t.end = (int)min((int64_t)t.begin + rows, (int64_t)end);
            break;
        }
        index -= tiles;
        t.begin = end;
    }
    return t;
}

} // namespace moq

#endif
