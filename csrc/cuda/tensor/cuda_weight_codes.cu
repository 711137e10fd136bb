/* Codes and scales of weights (cuda_weight_codes.h), with the formulas of core/weight_codes.h.
 *
 * encode_groups   E4M3 and E8M0 scales, over 16 or 32 columns: a thread has 16 values, and shares
 *                 the maximum of 32 with its neighbour
 * encode_bands    F32 scales, over a row or 128 x 128: a block has what shares one, and keeps up to
 *                 512 * 32 values in registers between the maximum and the codes
 * encode_all      one F32 scale, which is given: a thread has 16 values
 * find_amax       the largest magnitude of a tensor, which has to be known before a scale of all of
 *                 it: so such formats read the weight twice
 * any_groups, any_bands, any_all   the same for rows or memory that 16 values do not fit
 * search_groups, search_bands   the scale of the least squared error; the encoders find it written
 *
 * Bound: memory, but for the searches. Beside the 2 + 9/16 bytes of a value of NVFP4 an H200 has
 * time for 18 instructions, 7 of them of integers: hence rounding by sums, of which the least has
 * the code, and quotients by products with the reciprocal that exact remainders correct. */
#include "cuda/tensor/cuda_weight_codes.h"

#include "core/formats.h"
#include "cuda/device/load.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize_chunk.h"

#include <math.h>

namespace moq::weight_codes {

using quantization::chunk;
using quantization::chunk_amax;
using quantization::load_chunk;
using quantization::max_of_block;
using quantization::narrow;
using quantization::quantize_input;
using quantization::widen;

#define THREADS       256
#define BAND_THREADS  512
#define VALUES        16 /* of a thread, or a chunk of a band */
#define KEPT          2  /* chunks of a band that a thread keeps */
#define MAX_BLOCKS    0x7fffffff
#define AMAX_BLOCKS   1056 /* 8 for each multiprocessor of an H200 */
#define F32_TRIALS    (2 * MOQ_NEAR_F32 + 1)
#define SEARCH_PIECES 64 /* sums of a trial that a block of search_bands has room for */

typedef struct {
    quantize_input x; /* the weight; one row of all its values where rows do not matter */
    int64_t rows, columns;
    int64_t height, group;
    float second, given;
    bool rounds;
    bool found; /* scales are there already */
    uint8_t most;
    moq_scale_search search;
    moq_dtype dtype, code_dtype, scale_dtype;
    uint8_t *codes;
    void *scales;
    float factors[F32_TRIALS]; /* of a scale, of each trial */
} weight_args;

/* ---- quotients ---- */

/* Returns whether values up to a magnitude, over a scale, are divided by corrected products: none
 * of these overflows, and no remainder is subnormal unless the quotient is far below any code. NaN
 * is not in range. */
static __device__ __forceinline__ bool is_ordinary(uint32_t amax_bits, float step) {
    return amax_bits <= 0x5d800000u && step > 0x1p-60f && step < 0x1p60f; /* 2^60 */
}

/* Divides values; zeros become +0, or keep their sign where SIGNED. EXACT: rounded as a division.
 * One correction leaves a quotient that is rounded wrongly only where the exact one lies within
 * 2^-22 of the last place beside the middle between two floats. A code changes by that beside a tie
 * of E2M1 or E4M3 alone. A search over all 16-bit values found no such quotient there but that of a
 * power of two by 2 - 2^-23, which comes out right. */
template <bool EXACT, bool SIGNED, int N>
static __device__ __forceinline__ void divide_ordinary(float (&value)[N], float step) {
    float inverse = __frcp_rn(step);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float q = SIGNED ? __fmul_rn(value[i], inverse) : __fmaf_rn(value[i], inverse, 0.0f);
        q = __fmaf_rn(__fmaf_rn(q, step, -value[i]), -inverse, q);
        value[i] = EXACT ? __fmaf_rn(__fmaf_rn(q, step, -value[i]), -inverse, q) : q;
    }
}

/* ---- E4M3 codes ---- */

static __device__ __forceinline__ float round_to(float value, moq_dtype dtype) {
    return dtype == MOQ_DT_BF16  ? __bfloat162float(__float2bfloat16_rn(value))
           : dtype == MOQ_DT_F16 ? __half2float(__float2half_rn(value))
                                 : value;
}

/* Returns the sign of a value as it is stored: that of a NaN in float16 is lost when it is widened.
 */
static __device__ __forceinline__ bool is_negative(const weight_args *a, int64_t at) {
    return a->dtype == MOQ_DT_F32 ? ((const int32_t *)a->x.data)[at] < 0
                                  : ((const int16_t *)a->x.data)[at] < 0;
}

/* Writes the codes of any values over any scale, one by one. A NaN that a division makes is
 * negative, as on x86 processors, one that is there keeps its sign. */
static __device__ __noinline__ void encode_any_e4m3(const weight_args *a, int64_t offset,
                                                    int64_t count, float step) {
#pragma unroll 1
    for (int64_t i = offset; i < offset + count; i++) {
        float value = moq_load_one(a->x.data, i, a->dtype), quotient = __fdiv_rn(value, step);
        uint32_t code = moq_e4m3_pair(a->rounds ? round_to(quotient, a->dtype) : quotient, 0.0f);
        if (quotient != quotient)
            code = value != value && !is_negative(a, i) ? 0x7f : 0xff;
        a->codes[i] = (uint8_t)code;
    }
}

/* ---- E2M1 codes ---- */

#define MAGIC 0x1.8p23f /* a sum with it ends in the bits of an integer */

/* Returns a number that ends in the code of a magnitude below 7: below 2, between 2 and 4, and from
 * there on codes are as far apart as halves, ones and twos, and the least of the three roundings is
 * the right one. Ties go to even, or DOWN. */
template <bool DOWN> static __device__ __forceinline__ uint32_t e2m1_magnitude(float value) {
    float a = fabsf(value), halves, ones, twos;
    if (DOWN) {
        halves = __fadd_ru(__fmaf_ru(a, 2.0f, -0.5f), MAGIC);
        ones = __fadd_ru(__fadd_ru(a, -0.5f), MAGIC + 2.0f);
        twos = __fadd_ru(__fmaf_ru(a, 0.5f, -0.5f), MAGIC + 4.0f);
    } else {
        halves = __fmaf_rn(a, 2.0f, MAGIC);
        ones = __fadd_rn(a, MAGIC + 2.0f);
        twos = __fmaf_rn(a, 0.5f, MAGIC + 4.0f);
    }
    return min(min(__float_as_uint(halves), __float_as_uint(ones)), __float_as_uint(twos));
}

static __device__ __forceinline__ float clamp_e2m1(float value) {
    return fminf(fmaxf(value, -MOQ_E2M1_MAX), MOQ_E2M1_MAX);
}

/* Returns the code of a quotient without its sign; of NaN +6. */
static __device__ __forceinline__ uint32_t any_e2m1_magnitude(float quotient, bool down) {
    float value = clamp_e2m1(quotient);
    uint32_t code = (down ? e2m1_magnitude<true>(value) : e2m1_magnitude<false>(value)) & 7;
    return quotient != quotient ? 7 : code;
}

/* Writes the codes of any values over any scale, by twos. NaN becomes +6; every zero has the code
 * of +0, under E8M0 scales of -0. */
template <bool DOWN>
static __device__ __noinline__ void encode_any_e2m1(const weight_args *a, int64_t offset, int count,
                                                    float step) {
    uint32_t byte = 0;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        float value = moq_load_one(a->x.data, offset + i, a->dtype);
        if (value == 0.0f)
            value = DOWN ? -0.0f : 0.0f;
        float quotient = __fdiv_rn(value, step);
        uint32_t code = any_e2m1_magnitude(quotient, DOWN);
        code |= quotient != quotient ? 0 : __float_as_uint(value) >> 28 & 8;
        byte = byte >> 4 | code << 4;
        if (i % 2)
            a->codes[(offset + i) / 2] = (uint8_t)byte;
    }
}

/* Packs the codes of 8 magnitudes, sums of e2m1_magnitude(), with the signs of 8 other numbers. */
static __device__ __forceinline__ uint32_t pack_e2m1(const uint32_t *sum, const float *sign) {
    uint32_t byte[4], even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        byte[i] = sum[2 * i + 1] * 16 + sum[2 * i];
        even[i] = __float_as_uint(sign[2 * i]);
        odd[i] = __float_as_uint(sign[2 * i + 1]);
    }
    uint32_t codes = __byte_perm(__byte_perm(byte[0], byte[1], 0x0040),
                                 __byte_perm(byte[2], byte[3], 0x0040), 0x5410);
    uint32_t low = __byte_perm(__byte_perm(even[0], even[1], 0x0073),
                               __byte_perm(even[2], even[3], 0x0073), 0x5410);
    uint32_t high = __byte_perm(__byte_perm(odd[0], odd[1], 0x0073),
                                __byte_perm(odd[2], odd[3], 0x0073), 0x5410);
    return codes | (low >> 4 & 0x08080808u) | (high & 0x80808080u);
}

/* ---- scales ---- */

/* Returns the E4M3 code of a block scale: its least is that of 2^-9, and a block of zeros has 1. */
static __device__ __forceinline__ uint32_t e4m3_scale(float ratio) {
    if (ratio == 0.0f)
        return MOQ_E4M3_ONE;
    return max(moq_e4m3_pair(ratio, 0.0f) & 0xff, 1u);
}

/* Returns the E8M0 code of the least power of two that brings amax to the largest code: 1.75 * 2^8
 * of E4M3, 1.5 * 2^2 of E2M1. */
static __device__ __forceinline__ uint32_t e8m0_scale(uint32_t amax, bool e4m3) {
    int code = (int)(amax >> 23) - (e4m3 ? 8 : 2);
    code += (amax & 0x7fffffu) > (e4m3 ? 0x600000u : 0x400000u);
    code = min(max(code, 0), MOQ_POWER_MOST);
    return amax == 0x7f800000u ? MOQ_POWER_ONE : amax > 0x7f800000u ? 0 : code;
}

static __device__ __forceinline__ float e8m0_step(uint32_t code) {
    return __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}

static __device__ __forceinline__ float e4m3_step(uint32_t code, float second) {
    return __fmul_rn(__half2float(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, __NV_E4M3)),
                     second);
}

static __device__ __forceinline__ float f32_step(uint32_t amax_bits) {
    float amax = __uint_as_float(amax_bits);
    return amax > 0.0f ? __fdiv_rn(amax, MOQ_E4M3_MAX) : 1.0f;
}

/* Returns the first scale of a group as its code. */
static __device__ __forceinline__ uint32_t group_scale(const weight_args *a, uint32_t amax,
                                                       float factor) {
    if (a->scale_dtype == MOQ_DT_E8M0)
        return e8m0_scale(amax, a->code_dtype == MOQ_DT_E4M3);
    float most = __fmul_rn(factor, __uint_as_float(amax));
    return e4m3_scale(__fdiv_rn(most, __fmul_rn(MOQ_E2M1_MAX, a->second)));
}

static __device__ __forceinline__ float group_step(const weight_args *a, uint32_t code) {
    return a->scale_dtype == MOQ_DT_E8M0 ? e8m0_step(code) : e4m3_step(code, a->second);
}

static __device__ __forceinline__ uint32_t magnitude_at(const weight_args *a, int64_t offset) {
    return __float_as_uint(moq_load_one(a->x.data, offset, a->dtype)) & 0x7fffffffu;
}

/* ---- groups of 16 or 32 ---- */

typedef enum { NVFP4, MXFP4, MXFP8 } group_format;

/* Returns E2M1 codes of a thread's values, ordinary ones. Every zero has the code of +0, under E8M0
 * scales (DOWN) of -0. These have exact products for quotients unless they are far below any
 * code. */
template <int DT, bool DOWN>
static __device__ __forceinline__ uint2 make_e2m1(float (&value)[VALUES], float amax, float step) {
    uint32_t sum[VALUES];
    float sign[VALUES];
    float factor = e8m0_step(2 * MOQ_POWER_ONE - (__float_as_uint(step) >> 23));
#pragma unroll
    for (int i = 0; DOWN && i < VALUES; i++) {
        sign[i] = __fmaf_rn(value[i], 0x1p30f, -0x1p-130f);
        value[i] = __fmul_rn(value[i], factor);
    }
    if (!DOWN)
        divide_ordinary<DT == MOQ_DT_F32, false>(value, step);
    if (!(amax < 6.9f * step)) { /* the scale was searched for, or the least or the largest one */
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            value[i] = clamp_e2m1(value[i]);
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        sum[i] = e2m1_magnitude<DOWN>(value[i]);
    const float *signs = DOWN ? sign : value;
    return make_uint2(pack_e2m1(sum, signs), pack_e2m1(sum + 8, signs + 8));
}

template <int DT, int FORMAT>
static __global__ void __launch_bounds__(THREADS)
    encode_groups(const __grid_constant__ weight_args a, int64_t count) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int twice = FORMAT == NVFP4 ? a.group == 2 * VALUES : 1;
    chunk<DT, VALUES> c = load_chunk<DT, VALUES, true>(&a.x, 0, min(at, count - 1) * VALUES, 0);
    uint32_t most = chunk_amax(c);
    if (twice)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    if (at >= count)
        return;
    uint8_t *scale = (uint8_t *)a.scales + (at >> twice);
    uint32_t code = FORMAT == NVFP4 || FORMAT == MXFP4 ? (a.found ? *scale : 256) : 256;
    if (code == 256) {
        code = FORMAT == NVFP4 ? group_scale(&a, most, 1.0f) : e8m0_scale(most, FORMAT == MXFP8);
        if ((at & twice) == 0)
            *scale = (uint8_t)code;
    }
    float step = FORMAT == NVFP4 ? e4m3_step(code, a.second) : e8m0_step(code), value[VALUES];
    constexpr bool DOWN = FORMAT == MXFP4;
    bool ordinary = FORMAT == NVFP4 ? is_ordinary(most, step) : most <= 0x7f800000u;
    widen(c, value);
    if (!ordinary && FORMAT == MXFP8) {
        encode_any_e4m3(&a, at * VALUES, VALUES, step);
    } else if (!ordinary) {
        encode_any_e2m1<DOWN>(&a, at * VALUES, VALUES, step);
    } else if (FORMAT == MXFP8) {
        float factor = e8m0_step(2 * MOQ_POWER_ONE - code);
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            value[i] = __fmul_rn(value[i], factor);
        ((uint4 *)a.codes)[at] = moq_e4m3_codes(value);
    } else {
        ((uint2 *)a.codes)[at] = make_e2m1<DT, DOWN>(value, __uint_as_float(most), step);
    }
}

/* Makes codes and scales of groups, a thread a group. */
static __global__ void __launch_bounds__(THREADS)
    any_groups(const __grid_constant__ weight_args a, int64_t count) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, offset = at * a.group;
    uint32_t most = 0;
    if (at >= count)
        return;
    for (int i = 0; i < a.group; i++)
        most = max(most, magnitude_at(&a, offset + i));
    uint8_t *scale = (uint8_t *)a.scales + at;
    uint32_t code = a.found ? *scale : group_scale(&a, most, 1.0f);
    float step = group_step(&a, code);
    *scale = (uint8_t)code;
    if (a.code_dtype == MOQ_DT_E4M3)
        encode_any_e4m3(&a, offset, a.group, step);
    else if (a.scale_dtype == MOQ_DT_E8M0)
        encode_any_e2m1<true>(&a, offset, (int)a.group, step);
    else
        encode_any_e2m1<false>(&a, offset, (int)a.group, step);
}

/* ---- one scale, which is given ---- */

template <int DT>
static __global__ void __launch_bounds__(THREADS)
    encode_all(const __grid_constant__ weight_args a, int64_t total) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, left = total - at * VALUES;
    if (left < VALUES) {
        encode_any_e4m3(&a, at * VALUES, left, a.given);
        return;
    }
    chunk<DT, VALUES> c = load_chunk<DT, VALUES, true>(&a.x, 0, at * VALUES, 0);
    float value[VALUES];
    if (!is_ordinary(chunk_amax(c), a.given)) {
        encode_any_e4m3(&a, at * VALUES, VALUES, a.given);
        return;
    }
    widen(c, value);
    divide_ordinary<true, true>(value, a.given);
    if (a.rounds)
        widen(narrow<DT>(value), value);
    ((uint4 *)a.codes)[at] = moq_e4m3_codes(value);
}

static __global__ void __launch_bounds__(THREADS)
    any_all(const __grid_constant__ weight_args a, int64_t total) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at < total)
        encode_any_e4m3(&a, at, 1, a.given);
}

/* ---- bands ---- */

/* Values under one scale. */
typedef struct {
    int64_t offset; /* of its first value */
    int height, width;
} band;

static __device__ __forceinline__ band find_band(const weight_args *a, int index) {
    int across = (int)((a->columns + a->group - 1) / a->group), down = index;
    if (across > 1)
        down = index / across;
    int64_t row = down * a->height, column = (index - down * across) * a->group;
    band b = {row * a->columns + column};
    b.height = (int)min(a->rows - row, a->height);
    b.width = (int)min(a->columns - column, a->group);
    return b;
}

/* Returns where a chunk of a band begins, from where the band does. */
static __device__ __forceinline__ int chunk_offset(const band *b, int columns, int index) {
    if (b->height == 1)
        return index * VALUES;
    int across = b->width / VALUES, row = across == 8 ? index / 8 : index / across;
    return row * columns + (index - row * across) * VALUES;
}

template <int DT>
static __device__ __forceinline__ chunk<DT, VALUES> load_of_band(const weight_args *a,
                                                                 const band *b, int index) {
    return load_chunk<DT, VALUES, true>(&a->x, 0,
                                        b->offset + chunk_offset(b, (int)a->columns, index), 0);
}

template <int DT>
static __device__ __forceinline__ void encode_chunk(const weight_args *a, const band *b, int index,
                                                    const chunk<DT, VALUES> &c, float step) {
    float value[VALUES];
    widen(c, value);
    divide_ordinary<DT == MOQ_DT_F32, true>(value, step);
    *(uint4 *)(a->codes + b->offset + chunk_offset(b, (int)a->columns, index)) =
        moq_e4m3_codes(value);
}

/* Writes the scale of a band and returns it. */
static __device__ __forceinline__ float take_scale(const weight_args *a, uint32_t most) {
    float *scale = (float *)a->scales + blockIdx.x;
    float step = a->found ? *scale : f32_step(most);
    if (threadIdx.x == 0 && !a->found)
        *scale = step;
    return step;
}

template <int DT>
static __global__ void __launch_bounds__(BAND_THREADS, 2)
    encode_bands(const __grid_constant__ weight_args a) {
    band b = find_band(&a, blockIdx.x);
    int chunks = b.height * (b.width / VALUES), kept_by_all = KEPT * blockDim.x;
    uint32_t most = 0;
    chunk<DT, VALUES> c[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) /* the last chunk more than once */
        c[j] = load_of_band<DT>(&a, &b, min((int)(threadIdx.x + j * blockDim.x), chunks - 1));
#pragma unroll
    for (int j = 0; j < KEPT; j++)
        most = max(most, chunk_amax(c[j]));
    for (int i = threadIdx.x + kept_by_all; i < chunks; i += blockDim.x)
        most = max(most, chunk_amax(load_of_band<DT>(&a, &b, i)));
    most = max_of_block(most);
    float step = take_scale(&a, most);
    if (!is_ordinary(most, step)) {
        for (int i = threadIdx.x; i < chunks; i += blockDim.x)
            encode_any_e4m3(&a, b.offset + chunk_offset(&b, (int)a.columns, i), VALUES, step);
        return;
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        int i = threadIdx.x + j * blockDim.x;
        if (i < chunks)
            encode_chunk<DT>(&a, &b, i, c[j], step);
    }
#pragma unroll 1
    for (int i = threadIdx.x + kept_by_all; i < chunks; i += blockDim.x)
        encode_chunk<DT>(&a, &b, i, load_of_band<DT>(&a, &b, i), step);
}

static __device__ __forceinline__ uint32_t amax_of_band(const weight_args *a, const band *b) {
    uint32_t most = 0;
    for (int row = 0; row < b->height; row++) {
        for (int i = threadIdx.x; i < b->width; i += blockDim.x)
            most = max(most, magnitude_at(a, b->offset + row * a->columns + i));
    }
    return max_of_block(most);
}

static __global__ void __launch_bounds__(THREADS) any_bands(const __grid_constant__ weight_args a) {
    band b = find_band(&a, blockIdx.x);
    float step = take_scale(&a, amax_of_band(&a, &b));
    for (int row = 0; row < b.height; row++) {
        for (int i = threadIdx.x; i < b.width; i += blockDim.x)
            encode_any_e4m3(&a, b.offset + row * a.columns + i, 1, step);
    }
}

/* ---- the largest magnitude ---- */

template <int DT>
static __global__ void __launch_bounds__(THREADS)
    find_amax(const __grid_constant__ quantize_input x, int64_t total, uint32_t *bits) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    int64_t chunks = x.aligned ? total / VALUES : 0;
    uint32_t most = 0;
#pragma unroll 2
    for (int64_t i = at; i < chunks; i += step)
        most = max(most, chunk_amax(load_chunk<DT, VALUES, true>(&x, 0, i * VALUES, 0)));
    for (int64_t i = chunks * VALUES + at; i < total; i += step)
        most = max(most, __float_as_uint(moq_load_one(x.data, i, (moq_dtype)DT)) & 0x7fffffffu);
    most = max_of_block(most);
    if (threadIdx.x == 0)
        atomicMax(bits, most);
}

/* ---- searches ---- */

/* Returns what a value becomes over a scale. */
static __device__ __forceinline__ float decoded_e2m1(float value, float step, bool down) {
    float quotient = __fdiv_rn(value, step);
    uint32_t code = any_e2m1_magnitude(quotient, down);
    float magnitude = code < 2 ? 0.5f * code : __uint_as_float((126u << 23) + (code << 22));
    return quotient != quotient ? magnitude : copysignf(magnitude, quotient);
}

static __device__ __forceinline__ float decoded_e4m3(float value, float step) {
    uint32_t code = moq_e4m3_pair(__fdiv_rn(value, step), 0.0f) & 0xff;
    return __half2float(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, __NV_E4M3));
}

/* Returns the squared errors of consecutive values under a scale, added up in their order. */
static __device__ __forceinline__ double add_squares(const weight_args *a, int64_t offset,
                                                     int count, float step) {
    bool fp4 = a->code_dtype == MOQ_DT_E2M1X2, down = a->scale_dtype == MOQ_DT_E8M0;
    double sum = 0.0;
    for (int i = 0; i < count; i++) {
        float value = moq_load_one(a->x.data, offset + i, a->dtype);
        float decoded = fp4 ? decoded_e2m1(value, step, down) : decoded_e4m3(value, step);
        double off = __dsub_rn((double)value, __dmul_rn((double)decoded, (double)step));
        sum = __dadd_rn(sum, __dmul_rn(off, off));
    }
    return sum;
}

/* Returns the code that a search tries in turn, the first of which is group_scale(). */
static __device__ __forceinline__ uint32_t trial_code(const weight_args *a, uint32_t first,
                                                      uint32_t amax, int trial) {
    int by = trial % 2 ? (trial + 1) / 2 : -trial / 2;
    if (trial == 0)
        return first;
    if (a->search == MOQ_SEARCH_FOUR_OVER_SIX)
        return group_scale(a, amax, 1.5f);
    if (a->scale_dtype == MOQ_DT_E8M0)
        return min(max((int)first + by, 0), MOQ_POWER_MOST);
    return min(max((int)first + by, 1), max((int)first, (int)a->most));
}

/* Writes the scale of each group, a thread a group. */
static __global__ void __launch_bounds__(THREADS)
    search_groups(const __grid_constant__ weight_args a, int64_t count) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, offset = at * a.group;
    int near = a.scale_dtype == MOQ_DT_E8M0 ? MOQ_NEAR_E8M0 : MOQ_NEAR_E4M3;
    int trials = a.search == MOQ_SEARCH_FOUR_OVER_SIX ? 2 : 1 + 2 * near;
    uint32_t most = 0;
    if (at >= count)
        return;
    for (int i = 0; i < a.group; i++)
        most = max(most, magnitude_at(&a, offset + i));
    uint32_t first = group_scale(&a, most, 1.0f), best = first;
    double least = 0.0;
    for (int trial = 0; trial < trials; trial++) {
        uint32_t code = trial_code(&a, first, most, trial);
        double error = add_squares(&a, offset, (int)a.group, group_step(&a, code));
        if (trial > 0 && !(error < least))
            continue;
        least = error;
        best = code;
    }
    ((uint8_t *)a.scales)[at] = (uint8_t)best;
}

/* Writes the scale of each band, a block a band: threads have pieces of its rows under one trial,
 * whose sums are added up in their order. */
static __global__ void __launch_bounds__(THREADS)
    search_bands(const __grid_constant__ weight_args a) {
    __shared__ double sum[SEARCH_PIECES][F32_TRIALS], error[F32_TRIALS];
    band b = find_band(&a, blockIdx.x);
    int length = min(b.width, MOQ_WEIGHT_PIECE), across = (b.width + length - 1) / length;
    int pieces = b.height * across;
    float step = f32_step(amax_of_band(&a, &b));
    double added = 0.0;
    for (int begin = 0; begin < pieces; begin += SEARCH_PIECES) {
        int count = min(pieces - begin, SEARCH_PIECES);
        for (int i = threadIdx.x; i < count * F32_TRIALS; i += blockDim.x) {
            int piece = begin + i / F32_TRIALS, row = piece / across;
            int column = (piece - row * across) * length;
            sum[i / F32_TRIALS][i % F32_TRIALS] =
                add_squares(&a, b.offset + row * a.columns + column, min(length, b.width - column),
                            __fmul_rn(step, a.factors[i % F32_TRIALS]));
        }
        __syncthreads();
        for (int i = 0; i < count && threadIdx.x < F32_TRIALS; i++)
            added = __dadd_rn(added, sum[i][threadIdx.x]);
        __syncthreads();
    }
    if (threadIdx.x < F32_TRIALS)
        error[threadIdx.x] = added;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    int best = 0;
    for (int trial = 1; trial < F32_TRIALS; trial++)
        best = error[trial] < error[best] ? trial : best;
    ((float *)a.scales)[blockIdx.x] = __fmul_rn(step, a.factors[best]);
}

/* ---- launch ---- */

static int64_t parts(int64_t count, int64_t of) {
    return (count + of - 1) / of;
}

/* Launches a kernel with the arguments and a count, one block for each of `blocks`. */
static moq_status launch(const void *kernel, int64_t blocks, unsigned threads, const weight_args *a,
                         int64_t count, void *stream, moq_err *err) {
    void *args[] = {(void *)a, &count};
    moq_launch launch = {.what = "quantize_weight",
                         .kernel = kernel,
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(threads),
                         .stream = (cudaStream_t)stream};
    if (blocks > MAX_BLOCKS)
        return moq_fail(err, MOQ_ERR_VALUE, "weight: too large for one call: %lld blocks",
                        (long long)blocks);
    return moq_cuda_launch(&launch, args, err);
}

/* The instance for a dtype. */
#define MOQ_OF_DTYPE(dtype, kernel, ...)                                                           \
    ((dtype) == MOQ_DT_BF16  ? (const void *)kernel<MOQ_DT_BF16, ##__VA_ARGS__>                    \
     : (dtype) == MOQ_DT_F16 ? (const void *)kernel<MOQ_DT_F16, ##__VA_ARGS__>                     \
                             : (const void *)kernel<MOQ_DT_F32, ##__VA_ARGS__>)

static quantize_input input_of(const void *data) {
    quantize_input x = {.data = data, .inner = 1, .aligned = (uintptr_t)data % 16 == 0};
    return x;
}

static weight_args args_of(const moq_weight_codes *w) {
    weight_args a = {.x = input_of(w->weight),
                     .rows = w->rows,
                     .columns = w->columns,
                     .height = w->height,
                     .group = w->group,
                     .second = w->second,
                     .given = w->given,
                     .rounds = w->rounds,
                     .most = w->most,
                     .search = w->search,
                     .dtype = w->dtype,
                     .code_dtype = w->code_dtype,
                     .scale_dtype = w->scale_dtype,
                     .codes = (uint8_t *)w->codes,
                     .scales = w->scales};
    for (int i = 0; i < F32_TRIALS; i++) { /* eighths: 0, 1, -1, 2, -2, 3, ... */
        int by = i % 2 ? (i + 1) / 2 : -i / 2;
        a.factors[i] = exp2f((float)by / 8.0f);
    }
    return a;
}

static moq_status encode_by_groups(const moq_weight_codes *w, weight_args *a, bool whole,
                                   void *stream, moq_err *err) {
    int64_t total = w->rows * w->columns, groups = total / w->group;
    bool e8m0 = w->scale_dtype == MOQ_DT_E8M0;
    if (w->search != MOQ_SEARCH_NONE) {
        MOQ_TRY(launch((const void *)search_groups, parts(groups, THREADS), THREADS, a, groups,
                       stream, err));
        a->found = true;
    }
    if (!whole)
        return launch((const void *)any_groups, parts(groups, THREADS), THREADS, a, groups, stream,
                      err);
    const void *kernel = !e8m0 ? MOQ_OF_DTYPE(w->dtype, encode_groups, NVFP4)
                         : w->code_dtype == MOQ_DT_E4M3
                             ? MOQ_OF_DTYPE(w->dtype, encode_groups, MXFP8)
                             : MOQ_OF_DTYPE(w->dtype, encode_groups, MXFP4);
    int64_t count = total / VALUES;
    return launch(kernel, parts(count, THREADS), THREADS, a, count, stream, err);
}

/* Returns whole warps for so many items, `each` a thread. */
static unsigned threads_for(int64_t items, int64_t each, unsigned most) {
    int64_t threads = parts(parts(items, each), 32) * 32;
    return threads < most ? (unsigned)threads : most;
}

static moq_status encode_by_bands(const moq_weight_codes *w, weight_args *a, bool whole,
                                  void *stream, moq_err *err) {
    int64_t height = w->height < w->rows ? w->height : w->rows;
    int64_t width = w->group < w->columns ? w->group : w->columns;
    int64_t bands = parts(w->rows, w->height) * parts(w->columns, w->group);
    if (width > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "weight: expected rows of at most %d values, got %lld",
                        INT32_MAX, (long long)width);
    if (w->search != MOQ_SEARCH_NONE) {
        int64_t pieces = height * parts(width, MOQ_WEIGHT_PIECE);
        unsigned threads = threads_for(pieces * F32_TRIALS, 1, THREADS);
        MOQ_TRY(launch((const void *)search_bands, bands, threads, a, 0, stream, err));
        a->found = true;
    }
    if (!whole || w->columns % VALUES != 0 || height * w->columns > INT32_MAX)
        return launch((const void *)any_bands, bands, threads_for(width, 1, THREADS), a, 0, stream,
                      err);
    unsigned threads = threads_for(height * (width / VALUES), KEPT, BAND_THREADS);
    return launch(MOQ_OF_DTYPE(w->dtype, encode_bands), bands, threads, a, 0, stream, err);
}

extern "C" moq_status moq_cuda_weight_codes(const moq_weight_codes *w, void *stream, moq_err *err) {
    weight_args a = args_of(w);
    int64_t total = w->rows * w->columns;
    bool whole = a.x.aligned && (uintptr_t)w->codes % 16 == 0;
    if (w->given == 0.0f)
        return w->scale_dtype == MOQ_DT_F32 ? encode_by_bands(w, &a, whole, stream, err)
                                            : encode_by_groups(w, &a, whole, stream, err);
    if (!whole)
        return launch((const void *)any_all, parts(total, THREADS), THREADS, &a, total, stream,
                      err);
    return launch(MOQ_OF_DTYPE(w->dtype, encode_all), parts(total, VALUES * THREADS), THREADS, &a,
                  total, stream, err);
}

extern "C" moq_status moq_cuda_find_amax(const void *values, moq_dtype dtype, int64_t count,
                                         uint32_t *bits, void *stream, moq_err *err) {
    quantize_input x = input_of(values);
    int64_t blocks = parts(count, VALUES * THREADS);
    void *args[] = {&x, &count, &bits};
    moq_launch launch = {.what = "weight_amax",
                         .kernel = MOQ_OF_DTYPE(dtype, find_amax),
                         .grid = dim3((unsigned)(blocks < AMAX_BLOCKS ? blocks : AMAX_BLOCKS)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    MOQ_TRY(moq_cuda_fill(bits, 0, sizeof *bits, stream, err));
    return moq_cuda_launch(&launch, args, err);
}

} // namespace moq::weight_codes
