/* Chunks of neighbouring values of a row in registers, for the kernels of cuda_quantize_rows.h:
 * load, round, add, multiply, largest magnitude, quotients and codes.
 *
 * 16-bit values stay two a register, as in memory. Maxima, sums and products of pairs equal those
 * of float32: a product of two such values is exact in float32, and a sum rounded to 24 bits first
 * rounds to the same 11 bits. */
#ifndef MOQ_CUDA_TENSOR_CUDA_QUANTIZE_CHUNK_H
#define MOQ_CUDA_TENSOR_CUDA_QUANTIZE_CHUNK_H

#include "cuda/device/load.h"
#include "cuda/device/ptx.h"

namespace moq::quantization {

/* Rows of a tensor as kernels read them. */
typedef struct {
    const void *data;
    int64_t stride; /* stride of the rows, if they have one */
    int64_t inner;  /* step from value to value */
    int outer;      /* axes before the last if the rows have no single stride; else 0 */
    bool aligned;   /* inner is 1 and every row begins at a multiple of 16 bytes */
    int64_t shape[MOQ_MAX_NDIM];
    int64_t step[MOQ_MAX_NDIM];
} quantize_input;

/* N values, 8 or 16. */
template <int DT, int N> struct chunk {
    static constexpr int words = DT == MOQ_DT_F32 ? N : N / 2;
    uint32_t word[words];
};

/* A pair of 16-bit values. */
template <int DT> struct pair_type {
    typedef __half2 type;
};
template <> struct pair_type<MOQ_DT_BF16> {
    typedef __nv_bfloat162 type;
};
template <int DT> using pair = typename pair_type<DT>::type;

template <int DT> static __device__ __forceinline__ pair<DT> pair_of(uint32_t word) {
    pair<DT> p;
    memcpy(&p, &word, sizeof p);
    return p;
}

template <class PAIR> static __device__ __forceinline__ uint32_t word_of(PAIR p) {
    uint32_t word;
    memcpy(&word, &p, sizeof word);
    return word;
}

/* ---- loading ---- */

static __device__ __forceinline__ int64_t row_offset(const quantize_input *x, int64_t row) {
    if (x->outer == 0)
        return row * x->stride;
    int64_t offset = 0;
    for (int i = x->outer - 1; i >= 0; i--) {
        offset += row % x->shape[i] * x->step[i];
        row /= x->shape[i];
    }
    return offset;
}

/* Loads value by value: the end of a row, or rows of other strides. Values beyond the row are 0. */
template <int DT, int N>
static __device__ __noinline__ chunk<DT, N> gather_chunk(const quantize_input *x, int64_t row,
                                                         int64_t column, int64_t k) {
    chunk<DT, N> c = {};
    int64_t at = row_offset(x, row) + column * x->inner;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (column + i >= k)
            continue;
        if (DT == MOQ_DT_F32)
            c.word[i] = ((const uint32_t *)x->data)[at + i * x->inner];
        else
            c.word[i / 2] |= (uint32_t)((const uint16_t *)x->data)[at + i * x->inner]
                             << (i % 2 * 16);
    }
    return c;
}

/* Loads values column to column + N - 1 of a row. WHOLE: all exist, at a multiple of 16 bytes of a
 * tensor with one stride. */
template <int DT, int N, bool WHOLE>
static __device__ __forceinline__ chunk<DT, N> load_chunk(const quantize_input *x, int64_t row,
                                                          int64_t column, int64_t k) {
    if (!WHOLE && !(x->aligned && column + N <= k))
        return gather_chunk<DT, N>(x, row, column, k);
    chunk<DT, N> c;
    const uint8_t *from =
        (const uint8_t *)x->data + (row * x->stride + column) * (DT == MOQ_DT_F32 ? 4 : 2);
#pragma unroll
    for (int i = 0; i < c.words; i += 4) {
        uint4 four = ((const uint4 *)from)[i / 4];
        c.word[i] = four.x;
        c.word[i + 1] = four.y;
        c.word[i + 2] = four.z;
        c.word[i + 3] = four.w;
    }
    return c;
}

/* ---- arithmetic ---- */

template <int DT, int N>
static __device__ __forceinline__ void widen(const chunk<DT, N> &c, float (&value)[N]) {
#pragma unroll
    for (int i = 0; i < c.words; i++) {
        if (DT == MOQ_DT_F32) {
            value[i] = __uint_as_float(c.word[i]);
            continue;
        }
        float2 two = moq_widen_pair(c.word[i], (moq_dtype)DT);
        value[2 * i % N] = two.x; /* the remainder only matters to the dead branch */
        value[(2 * i + 1) % N] = two.y;
    }
}

static __device__ __forceinline__ __nv_bfloat162 narrow_pair(float low, float high,
                                                             __nv_bfloat162) {
    return __floats2bfloat162_rn(low, high);
}

static __device__ __forceinline__ __half2 narrow_pair(float low, float high, __half2) {
    return __floats2half2_rn(low, high);
}

/* Rounds values to a dtype. */
template <int DT, int N>
static __device__ __forceinline__ chunk<DT, N> narrow(const float (&value)[N]) {
    chunk<DT, N> c;
#pragma unroll
    for (int i = 0; i < c.words; i++)
        c.word[i] =
            DT == MOQ_DT_F32
                ? __float_as_uint(value[i])
                : word_of(narrow_pair(value[2 * i % N], value[(2 * i + 1) % N], pair<DT>()));
    return c;
}

template <int DT, int N>
static __device__ __forceinline__ chunk<DT, N> multiply(const chunk<DT, N> &a,
                                                        const chunk<DT, N> &b) {
    chunk<DT, N> c;
#pragma unroll
    for (int i = 0; i < c.words; i++)
        c.word[i] =
            DT == MOQ_DT_F32
                ? __float_as_uint(__fmul_rn(__uint_as_float(a.word[i]), __uint_as_float(b.word[i])))
                : word_of(__hmul2_rn(pair_of<DT>(a.word[i]), pair_of<DT>(b.word[i])));
    return c;
}

template <int DT, int N>
static __device__ __forceinline__ chunk<DT, N> add(const chunk<DT, N> &a, const chunk<DT, N> &b) {
    chunk<DT, N> c;
#pragma unroll
    for (int i = 0; i < c.words; i++)
        c.word[i] =
            DT == MOQ_DT_F32
                ? __float_as_uint(__fadd_rn(__uint_as_float(a.word[i]), __uint_as_float(b.word[i])))
                : word_of(__hadd2_rn(pair_of<DT>(a.word[i]), pair_of<DT>(b.word[i])));
    return c;
}

/* Replaces values below `least`, a value of the dtype, by it; NaN stays. */
template <int DT, int N>
static __device__ __forceinline__ chunk<DT, N> at_least(const chunk<DT, N> &a, float least) {
    const pair<DT> two = narrow_pair(least, least, pair<DT>());
    chunk<DT, N> c;
#pragma unroll
    for (int i = 0; i < c.words; i++)
        c.word[i] = DT == MOQ_DT_F32
                        ? __float_as_uint(moq_at_least(__uint_as_float(a.word[i]), least))
                        : word_of(__hmax2_nan(pair_of<DT>(a.word[i]), two));
    return c;
}

/* Returns the largest magnitude as the bits of a float; NaN is above all others. */
template <int DT, int N>
static __device__ __forceinline__ uint32_t chunk_amax(const chunk<DT, N> &c) {
    if (DT == MOQ_DT_F32) {
        float value[N];
        widen<DT, N>(c, value);
        return moq_amax_bits(value);
    }
    pair<DT> most = __habs2(pair_of<DT>(c.word[0]));
#pragma unroll
    for (int i = 1; i < c.words; i++)
        most = __hmax2_nan(most, __habs2(pair_of<DT>(c.word[i])));
    uint32_t two = word_of(most);
    return __float_as_uint(moq_widen_pair(max(two & 0xffffu, two >> 16), (moq_dtype)DT).x);
}

/* ---- scales and quotients ---- */

/* A divisor or factor of values. */
typedef struct {
    float scale;
    float high, low; /* for 16-bit values: their sum is the reciprocal, low is not negative */
} divisor;

/* Returns amax / 448, for 16-bit values in two operations, exact unless it is subnormal. */
template <int DT> static __device__ __forceinline__ float part_of_amax(float amax) {
    if (DT == MOQ_DT_F32)
        return __fdiv_rn(amax, 448.0f);
    const float high = 0x1.249248p-9f, low = (float)(1.0 / 448.0 - (double)high); /* positive */
    return __fmaf_rn(amax, high, __fmul_rn(amax, low));
}

template <int DT> static __device__ __forceinline__ float token_scale(float amax) {
    return moq_at_least(part_of_amax<DT>(amax), 1.0f / (448.0f * 512.0f));
}

template <int DT> static __device__ __forceinline__ float group_scale(float amax) {
    return part_of_amax<DT>(moq_at_least(amax, 1e-10f));
}

/* Returns the divisor for a scale of token_scale or group_scale. */
template <int DT> static __device__ __forceinline__ divisor divide_by(float scale) {
    divisor d = {scale, 0.0f, 0.0f};
    if (DT == MOQ_DT_F32)
        return d;
    float fast = scale > 1e30f ? __fmul_rn(scale, 0x1p-64f) : scale;
    d.high = __fmul_rn(reciprocal_approx(fast), 1.0f - 0x1p-22f);
    d.low = d.high == 0.0f ? 0.0f : __fmul_rn(__fmaf_rn(-d.high, fast, 1.0f), d.high);
    return d;
}

/* Divides values by a scale, or makes quotients with the same codes: for 16-bit values from which
 * the scale was found. tests/cuda/test_quantize.py goes through all of them. */
template <int DT, int N>
static __device__ __forceinline__ void divide(float (&value)[N], const divisor &d) {
    if (DT == MOQ_DT_F32) {
        moq_divide(value, d.scale, d.scale > 1e-12f && d.scale < 1e30f);
        return;
    }
    if (DT == MOQ_DT_BF16 && d.scale > 1e30f) { /* `low` would be subnormal */
#pragma unroll
        for (int i = 0; i < N; i++)
            value[i] = __fmul_rn(value[i], 0x1p-64f);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        value[i] = __fmaf_rn(value[i], d.high, __fmul_rn(value[i], d.low));
}

/* Returns the maximum over a block. */
static __device__ __forceinline__ uint32_t max_of_block(uint32_t bits) {
    __shared__ uint32_t room[32];
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % 32 == 0)
        room[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0;
    return __reduce_max_sync(0xffffffffu, bits);
}

} // namespace moq::quantization

#endif
