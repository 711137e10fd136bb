/* Codes and scales of weights (cuda_weight_codes.h), with the formulas of core/weight_codes.h.
 *
 * encode_groups   E4M3 and E8M0 scales, over 16 or 32 columns: a thread has 16 values, and shares
 *                 the maximum of 32 with its neighbour
 * encode_bands    F32 scales, over a row or 128 x 128: a block has what shares one, and keeps up to
 *                 512 * 32 values in registers between the maximum and the codes
 * encode_all      one F32 scale, which is given: a thread has 16 values
 * find_amax       the largest magnitude of a tensor, which has to be known before a scale of all of
 *                 it: so such formats read the weight twice
 * search_groups, search_bands   the scale of the least squared error; the encoders find it written
 *
 * Bound: memory, but for the searches. Beside the 2 + 9/16 bytes of a value of NVFP4 an H200 has
 * time for 18 instructions, 7 of them of integers: hence rounding by sums, of which the least has
 * the code. Quotients are a product with the reciprocal and two exact corrections. */
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
using quantization::narrow;
using quantization::quantize_input;
using quantization::widen;

#define THREADS       256
#define BAND_THREADS  512
#define SHORT         8  /* values of a chunk of a band */
#define LONG          16 /* and of others */
#define KEPT          4  /* chunks of a band that a thread keeps */
#define MAX_BLOCKS    0x7fffffff
#define AMAX_BLOCKS   1056 /* 8 for each multiprocessor of an H200 */
#define F32_TRIALS    (2 * MOQ_NEAR_F32 + 1)
#define SEARCH_PIECES 64 /* sums of a trial that a block of search_bands has room for */

typedef struct {
    quantize_input x; /* the weight; one row of all its values where rows do not matter */
    int64_t rows, columns;
    int64_t height, group;
    float second, given;
    bool rounds, aligned;
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
    return amax_bits <= 0x71800000u && step > 0x1p-60f && step < 0x1p60f; /* 2^100 */
}

/* Divides values, rounded as a division; signs are such that a zero keeps its own. */
template <int N>
static __device__ __forceinline__ void divide_ordinary(float (&value)[N], float step) {
    float inverse = __frcp_rn(step);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float q = __fmul_rn(value[i], inverse);
        q = __fmaf_rn(__fmaf_rn(q, step, -value[i]), -inverse, q);
        value[i] = __fmaf_rn(__fmaf_rn(q, step, -value[i]), -inverse, q);
    }
}

/* ---- E4M3 codes ---- */

static __device__ __forceinline__ float round_to(float value, moq_dtype dtype) {
    return dtype == MOQ_DT_BF16  ? __bfloat162float(__float2bfloat16_rn(value))
           : dtype == MOQ_DT_F16 ? __half2float(__float2half_rn(value))
                                 : value;
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
            code = value != value ? 0x7f | (__float_as_uint(value) >> 24 & 0x80) : 0xff;
        a->codes[i] = (uint8_t)code;
    }
}

/* Returns E4M3 codes of values. */
template <int N> static __device__ __forceinline__ auto e4m3_words(const float (&value)[N]) {
    if constexpr (N == LONG)
        return moq_e4m3_codes(value);
    else
        return make_uint2(moq_e4m3_word(value), moq_e4m3_word(value + 4));
}

/* ---- E2M1 codes ---- */

#define MAGIC 0x1.8p23f /* a sum with it ends in the bits of an integer */

/* Returns a number that ends in the code of a magnitude: below 2, between 2 and 4, and from there
 * on codes are as far apart as halves, ones and twos, and the least of the three roundings is the
 * right one. Ties go to even, or DOWN. */
template <bool DOWN> static __device__ __forceinline__ float e2m1_magnitude(float value) {
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
    return fminf(fminf(halves, ones), fminf(twos, MAGIC + 7.0f));
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
        uint32_t code = __float_as_uint(e2m1_magnitude<DOWN>(quotient)) & 7;
        code = quotient != quotient ? 7 : code | (__float_as_uint(value) >> 28 & 8);
        byte = byte >> 4 | code << 4;
        if (i % 2)
            a->codes[(offset + i) / 2] = (uint8_t)byte;
    }
}

/* Packs 8 codes; those of sums end in 4 bits that count. */
static __device__ __forceinline__ uint32_t pack_e2m1(const uint32_t (&code)[8]) {
    uint32_t byte[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        byte[i] = code[2 * i + 1] * 16 + code[2 * i];
    return __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040),
                       0x5410);
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

/* ---- groups of 16 or 32 ---- */

static __device__ __forceinline__ void store_words(uint8_t *codes, bool aligned, uint2 word,
                                                   int64_t bytes) {
    if (aligned && bytes >= 8)
        *(uint2 *)codes = word;
    for (int i = 0; !(aligned && bytes >= 8) && i < 8 && i < bytes; i++)
        codes[i] = (uint8_t)((i < 4 ? word.x : word.y) >> i % 4 * 8);
}

static __device__ __forceinline__ void store_words(uint8_t *codes, bool aligned, uint4 word,
                                                   int64_t bytes) {
    if (aligned && bytes >= 16) {
        *(uint4 *)codes = word;
        return;
    }
    store_words(codes, aligned, make_uint2(word.x, word.y), bytes);
    store_words(codes + 8, aligned, make_uint2(word.z, word.w), bytes - 8);
}

typedef enum { NVFP4, MXFP4, MXFP8 } group_format;

/* Returns E2M1 codes of a thread's values, ordinary ones. Every zero has the code of +0, under E8M0
 * scales (DOWN) of -0. These have exact products for quotients unless they are far below any
 * code. */
template <bool DOWN>
static __device__ __forceinline__ uint2 make_e2m1(const float (&value)[LONG], float step) {
    float quotient[LONG];
    uint32_t code[2][LONG / 2];
    float factor = e8m0_step(2 * MOQ_POWER_ONE - (__float_as_uint(step) >> 23));
#pragma unroll
    for (int i = 0; i < LONG; i++)
        quotient[i] = DOWN ? __fmul_rn(value[i], factor) : __fadd_rn(value[i], 0.0f);
    if (!DOWN)
        divide_ordinary(quotient, step);
#pragma unroll
    for (int i = 0; i < LONG; i++) {
        float sign = DOWN ? __fmaf_rn(value[i], 0x1p30f, -0x1p-130f) : quotient[i];
        code[i / 8][i % 8] =
            __float_as_uint(e2m1_magnitude<DOWN>(quotient[i])) | (__float_as_uint(sign) >> 28 & 8);
    }
    return make_uint2(pack_e2m1(code[0]), pack_e2m1(code[1]));
}

/* Returns the first scale of a group or band, of E4M3 and E8M0 the code. */
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

template <int DT, int FORMAT>
static __global__ void __launch_bounds__(THREADS)
    encode_groups(const __grid_constant__ weight_args a) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, total = a.rows * a.columns;
    bool inside = at < total / LONG;
    int twice = a.group == 2 * LONG;
    chunk<DT, LONG> c = load_chunk<DT, LONG, false>(&a.x, 0, inside ? at * LONG : 0, total);
    uint32_t most = chunk_amax(c), other = __shfl_xor_sync(0xffffffffu, most, 1);
    if (twice)
        most = max(most, other);
    if (!inside)
        return;
    uint8_t *scale = (uint8_t *)a.scales + (at >> twice);
    uint32_t code = a.found ? *scale : group_scale(&a, most, 1.0f);
    float step = group_step(&a, code), value[LONG];
    if (!a.found && (at & twice) == 0)
        *scale = (uint8_t)code;
    widen(c, value);
    constexpr bool DOWN = FORMAT == MXFP4;
    bool ordinary = FORMAT == NVFP4 ? is_ordinary(most, step) : most <= 0x7f800000u;
    if (!ordinary && FORMAT == MXFP8) {
        encode_any_e4m3(&a, at * LONG, LONG, step);
    } else if (!ordinary) {
        encode_any_e2m1<DOWN>(&a, at * LONG, LONG, step);
    } else if (FORMAT == MXFP8) {
        float factor = e8m0_step(2 * MOQ_POWER_ONE - code);
#pragma unroll
        for (int i = 0; i < LONG; i++)
            value[i] = __fmul_rn(value[i], factor);
        store_words(a.codes + at * LONG, a.aligned, e4m3_words(value), LONG);
    } else {
        store_words(a.codes + at * (LONG / 2), a.aligned, make_e2m1<DOWN>(value, step), LONG / 2);
    }
}

/* ---- one scale, which is given ---- */

template <int DT>
static __global__ void __launch_bounds__(THREADS)
    encode_all(const __grid_constant__ weight_args a) {
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * LONG, total = a.rows * a.columns;
    if (at >= total)
        return;
    chunk<DT, LONG> c = load_chunk<DT, LONG, false>(&a.x, 0, at, total);
    float value[LONG];
    if (!is_ordinary(chunk_amax(c), a.given)) {
        encode_any_e4m3(&a, at, min((int64_t)LONG, total - at), a.given);
        return;
    }
    widen(c, value);
    divide_ordinary(value, a.given);
    if (a.rounds)
        widen(narrow<DT>(value), value);
    store_words(a.codes + at, a.aligned, e4m3_words(value), total - at);
}

/* ---- bands ---- */

/* Returns the maximum over a block. Two calls need another barrier between them. */
static __device__ __forceinline__ uint32_t max_of_block(uint32_t bits) {
    __shared__ uint32_t room[32];
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % 32 == 0)
        room[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = threadIdx.x % 32 < (blockDim.x + 31) / 32 ? room[threadIdx.x % 32] : 0;
    return __reduce_max_sync(0xffffffffu, bits);
}

/* What a scale stands over, of a weight whose scales are numbered. */
typedef struct {
    int64_t row, column;
    int height, width;
} band;

static __device__ __forceinline__ band find_band(const weight_args *a, int64_t index) {
    int64_t across = (a->columns + a->group - 1) / a->group;
    band b = {index / across * a->height, index % across * a->group};
    b.height = (int)min(a->rows - b.row, a->height);
    b.width = (int)min(a->columns - b.column, a->group);
    return b;
}

/* A chunk of a band by its number; it is where the tensor ends, not the band, that zeros begin. */
typedef struct {
    int64_t row, column;
} place;

static __device__ __forceinline__ place find_place(const band *b, int across, int index) {
    int row = b->height > 1 ? index / across : 0;
    return {b->row + row, b->column + (index - row * across) * SHORT};
}

template <int DT>
static __device__ __forceinline__ void encode_chunk(const weight_args *a, const band *b, place at,
                                                    const chunk<DT, SHORT> &c, float step,
                                                    bool ordinary) {
    int64_t offset = at.row * a->columns + at.column, left = b->column + b->width - at.column;
    if (!ordinary) {
        encode_any_e4m3(a, offset, min(left, (int64_t)SHORT), step);
        return;
    }
    float value[SHORT];
    widen(c, value);
    divide_ordinary(value, step);
    store_words(a->codes + offset, a->aligned, e4m3_words(value), left);
}

template <int DT>
static __global__ void __launch_bounds__(BAND_THREADS, 2)
    encode_bands(const __grid_constant__ weight_args a) {
    band b = find_band(&a, blockIdx.x);
    int across = (b.width + SHORT - 1) / SHORT, chunks = b.height * across;
    uint32_t most = 0;
    chunk<DT, SHORT> kept[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) { /* the last chunk more than once */
        place p = find_place(&b, across, min((int)(threadIdx.x + j * blockDim.x), chunks - 1));
        kept[j] = load_chunk<DT, SHORT, false>(&a.x, p.row, p.column, a.columns);
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++)
        most = max(most, chunk_amax(kept[j]));
    for (int i = threadIdx.x + KEPT * blockDim.x; i < chunks; i += blockDim.x) {
        place p = find_place(&b, across, i);
        most =
            max(most, chunk_amax(load_chunk<DT, SHORT, false>(&a.x, p.row, p.column, a.columns)));
    }
    most = max_of_block(most);
    float *scale = (float *)a.scales + blockIdx.x;
    float step = a.found ? *scale : f32_step(most);
    bool ordinary = is_ordinary(most, step);
    if (threadIdx.x == 0 && !a.found)
        *scale = step;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        int i = threadIdx.x + j * blockDim.x;
        if (i < chunks)
            encode_chunk<DT>(&a, &b, find_place(&b, across, i), kept[j], step, ordinary);
    }
    for (int i = threadIdx.x + KEPT * blockDim.x; i < chunks; i += blockDim.x) {
        place p = find_place(&b, across, i);
        encode_chunk<DT>(&a, &b, p, load_chunk<DT, SHORT, false>(&a.x, p.row, p.column, a.columns),
                         step, ordinary);
    }
}

/* ---- the largest magnitude ---- */

template <int DT>
static __global__ void __launch_bounds__(THREADS)
    find_amax(const __grid_constant__ quantize_input x, int64_t total, uint32_t *bits) {
    int64_t step = (int64_t)gridDim.x * THREADS * LONG;
    uint32_t most = 0;
#pragma unroll 2
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * LONG; at < total; at += step)
        most = max(most, chunk_amax(load_chunk<DT, LONG, false>(&x, 0, at, total)));
    most = max_of_block(most);
    if (threadIdx.x == 0)
        atomicMax(bits, most);
}

/* ---- searches ---- */

/* Returns what a value becomes over a scale. */
static __device__ __forceinline__ float decoded_e2m1(float value, float step, bool down) {
    float quotient = __fdiv_rn(value, step);
    float sum = down ? e2m1_magnitude<true>(quotient) : e2m1_magnitude<false>(quotient);
    uint32_t code = quotient != quotient ? 7 : __float_as_uint(sum) & 7;
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

static __device__ __forceinline__ uint32_t magnitude_at(const weight_args *a, int64_t offset) {
    return __float_as_uint(moq_load_one(a->x.data, offset, a->dtype)) & 0x7fffffffu;
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
    search_groups(const __grid_constant__ weight_args a, int trials) {
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, offset = at * a.group;
    uint32_t most = 0;
    if (offset >= a.rows * a.columns)
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
    uint32_t most = 0;
    for (int row = 0; row < b.height; row++) {
        for (int i = threadIdx.x; i < b.width; i += blockDim.x)
            most = max(most, magnitude_at(&a, (b.row + row) * a.columns + b.column + i));
    }
    float step = f32_step(max_of_block(most));
    double added = 0.0;
    for (int begin = 0; begin < pieces; begin += SEARCH_PIECES) {
        int count = min(pieces - begin, SEARCH_PIECES);
        for (int i = threadIdx.x; i < count * F32_TRIALS; i += blockDim.x) {
            int piece = begin + i / F32_TRIALS, row = piece / across;
            int column = (piece - row * across) * length;
            sum[i / F32_TRIALS][i % F32_TRIALS] = add_squares(
                &a, (b.row + row) * a.columns + b.column + column, min(length, b.width - column),
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

/* Launches a kernel with the arguments, one block for each of `blocks`. */
static moq_status launch(const void *kernel, int64_t blocks, unsigned threads, void **args,
                         void *stream, moq_err *err) {
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

static quantize_input input_of(const void *data, int64_t columns, int64_t row_bytes) {
    quantize_input x = {.data = data, .stride = columns, .inner = 1};
    x.aligned = (uintptr_t)data % 16 == 0 && row_bytes % 16 == 0;
    return x;
}

static weight_args args_of(const moq_weight_codes *w) {
    bool bands = w->scale_dtype == MOQ_DT_F32 && w->given == 0.0f;
    int64_t row_bytes = bands ? w->columns * (int64_t)moq_dtype_size(w->dtype) : 0;
    weight_args a = {.x = input_of(w->weight, w->columns, row_bytes),
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
    a.aligned = (uintptr_t)w->codes % 16 == 0 && (!bands || w->columns % SHORT == 0);
    for (int i = 0; i < F32_TRIALS; i++) { /* 0, 1, -1, 2, -2 and so on eighths */
        int by = i % 2 ? (i + 1) / 2 : -i / 2;
        a.factors[i] = exp2f((float)by / 8.0f);
    }
    return a;
}

static moq_status launch_groups(const moq_weight_codes *w, weight_args *a, void *stream,
                                moq_err *err) {
    int64_t total = w->rows * w->columns;
    bool e8m0 = w->scale_dtype == MOQ_DT_E8M0;
    int trials =
        w->search == MOQ_SEARCH_FOUR_OVER_SIX ? 2 : 1 + 2 * (e8m0 ? MOQ_NEAR_E8M0 : MOQ_NEAR_E4M3);
    void *args[] = {a, &trials};
    if (w->search != MOQ_SEARCH_NONE) {
        MOQ_TRY(launch((const void *)search_groups, parts(total / w->group, THREADS), THREADS, args,
                       stream, err));
        a->found = true;
    }
    const void *kernel = !e8m0 ? MOQ_OF_DTYPE(w->dtype, encode_groups, NVFP4)
                         : w->code_dtype == MOQ_DT_E4M3
                             ? MOQ_OF_DTYPE(w->dtype, encode_groups, MXFP8)
                             : MOQ_OF_DTYPE(w->dtype, encode_groups, MXFP4);
    return launch(kernel, parts(total / LONG, THREADS), THREADS, args, stream, err);
}

/* Returns whole warps for so many items, `each` a thread. */
static unsigned threads_for(int64_t items, int64_t each, unsigned most) {
    int64_t threads = parts(parts(items, each), 32) * 32;
    return threads < most ? (unsigned)threads : most;
}

static moq_status launch_bands(const moq_weight_codes *w, weight_args *a, void *stream,
                               moq_err *err) {
    int64_t height = w->height < w->rows ? w->height : w->rows;
    int64_t width = w->group < w->columns ? w->group : w->columns;
    int64_t bands = parts(w->rows, w->height) * parts(w->columns, w->group);
    void *args[] = {a};
    if (width > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "weight: expected rows of at most %d values, got %lld",
                        INT32_MAX, (long long)width);
    if (w->search != MOQ_SEARCH_NONE) {
        int64_t pieces = height * parts(width, MOQ_WEIGHT_PIECE);
        unsigned threads = threads_for(pieces * F32_TRIALS, 1, THREADS);
        MOQ_TRY(launch((const void *)search_bands, bands, threads, args, stream, err));
        a->found = true;
    }
    unsigned threads = threads_for(height * parts(width, SHORT), KEPT, BAND_THREADS);
    return launch(MOQ_OF_DTYPE(w->dtype, encode_bands), bands, threads, args, stream, err);
}

extern "C" moq_status moq_cuda_weight_codes(const moq_weight_codes *w, void *stream, moq_err *err) {
    weight_args a = args_of(w);
    void *args[] = {&a};
    if (w->given > 0.0f)
        return launch(MOQ_OF_DTYPE(w->dtype, encode_all),
                      parts(w->rows * w->columns, LONG * THREADS), THREADS, args, stream, err);
    return w->scale_dtype == MOQ_DT_F32 ? launch_bands(w, &a, stream, err)
                                        : launch_groups(w, &a, stream, err);
}

extern "C" moq_status moq_cuda_find_amax(const void *values, moq_dtype dtype, int64_t count,
                                         uint32_t *bits, void *stream, moq_err *err) {
    quantize_input x = input_of(values, count, 0);
    int64_t blocks = parts(count, LONG * THREADS);
    void *args[] = {&x, &count, &bits};
    MOQ_TRY(moq_cuda_fill(bits, 0, sizeof *bits, stream, err));
    return launch(MOQ_OF_DTYPE(dtype, find_amax), blocks < AMAX_BLOCKS ? blocks : AMAX_BLOCKS,
                  THREADS, args, stream, err);
}

} // namespace moq::weight_codes
