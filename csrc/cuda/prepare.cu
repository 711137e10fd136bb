/* Weight processing on the device: see prepare.h.
 *
 * Codes: out[row, column] = codes[row, column], or 0 where factor[row] is 0, and bad = the least
 * position of a code that the rule forbids. Bound by memory: a thread moves 16 bytes and looks at
 * them in between, or only looks at four times as many. Rows without gaps are one long row, so that
 * only its end is uneven. What is not aligned to 16 bytes goes byte by byte. A copy of what was
 * just looked at begins at its end, which the cache still has.
 *
 * Folding: a block has a row. It finds the row's largest value, and from it the power of two, and
 * meanwhile keeps what it has read, as far as there is room: 9/16 byte in and 1 byte out for each
 * weight. A group has eight magnitudes, so eight codes, of which bytes are picked four at a time.
 */
#include "cuda/prepare.h"

#include "cuda/launch.h"
#include "cuda/load.h"

#define THREADS    256
#define LOOKED_AT  4 /* pieces of a thread that only looks at them */
#define KEPT_UNITS 2 /* of 16 weights, between the two passes of folding */

/* ---- copies ---- */

/* 0xff in each byte of four codes that is bad. */
static __device__ __forceinline__ uint32_t bad_bytes(uint32_t codes, moq_code_rule rule) {
    if (rule == MOQ_CODES_E4M3)
        return __vcmpeq4(codes & 0x7f7f7f7fu, 0x7f7f7f7fu);
    if (rule == MOQ_CODES_BLOCK_SCALE)
        return __vcmpgeu4(codes, 0x7f7f7f7fu) & ~__vcmpeq4(codes, 0x80808080u);
    return 0;
}

/* The byte of the first bad code in a piece, or -1. */
static __device__ __forceinline__ int first_bad(uint8_t code, moq_code_rule rule) {
    return bad_bytes(code, rule) & 0xff ? 0 : -1;
}

static __device__ __forceinline__ int first_bad(const uint4 &codes, moq_code_rule rule) {
    uint32_t x = bad_bytes(codes.x, rule), y = bad_bytes(codes.y, rule);
    uint32_t z = bad_bytes(codes.z, rule), w = bad_bytes(codes.w, rule);
    if (!(x | y | z | w))
        return -1;
    uint32_t word = x ? x : y ? y : z ? z : w;
    return (x ? 0 : y ? 4 : z ? 8 : 12) + (__ffs((int)word) - 1) / 8;
}

static __device__ __forceinline__ void set_zero(uint8_t &piece) {
    piece = 0;
}

static __device__ __forceinline__ void set_zero(uint4 &piece) {
    piece = make_uint4(0, 0, 0, 0);
}

/* `chunks` blocks have a row, PIECES a thread, a block's width apart. */
template <typename Piece, int PIECES>
static __global__ void __launch_bounds__(THREADS) copy_codes(moq_code_copy c, unsigned chunks) {
    unsigned block = c.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    unsigned row = block / chunks, chunk = block % chunks;
    int64_t pieces = c.columns / (int64_t)sizeof(Piece);
    int64_t begin = (int64_t)chunk * THREADS * PIECES + threadIdx.x;
    const Piece *from = (const Piece *)(c.codes + row * c.stride);
    bool zero = c.factor && c.factor[row] == 0;
    Piece piece[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        set_zero(piece[i]);
        if (begin + i * THREADS < pieces && !zero)
            piece[i] = from[begin + i * THREADS];
    }
#pragma unroll
    for (int i = PIECES; i-- > 0;) {
        int at = first_bad(piece[i], c.rule);
        int64_t column = (begin + i * THREADS) * (int64_t)sizeof(Piece) + at;
        if (at >= 0)
            atomicMin((unsigned long long *)c.bad,
                      (unsigned long long)(c.first + row * c.columns + column));
    }
    if (!c.out)
        return;
    Piece *to = (Piece *)(c.out + row * c.columns);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        if (begin + i * THREADS < pieces)
            to[begin + i * THREADS] = piece[i];
    }
}

static bool is_aligned(const void *pointer, int64_t bytes) {
    return (uintptr_t)pointer % (uintptr_t)bytes == 0;
}

extern "C" moq_status moq_cuda_copy_codes(const moq_code_copy *copy, void *stream, moq_err *err) {
    moq_code_copy c = *copy;
    if (!c.factor && (c.stride == c.columns || c.rows == 1)) {
        c.columns *= c.rows;
        c.rows = 1;
        c.stride = 0;
    }
    bool wide = c.columns % 16 == 0 && c.stride % 16 == 0 && is_aligned(c.codes, 16) &&
                is_aligned(c.out, 16);
    int64_t per_block = THREADS * (c.out ? 1 : LOOKED_AT) * (wide ? 16 : 1);
    unsigned chunks = (unsigned)((c.columns + per_block - 1) / per_block);
    const void *copying =
        wide ? (const void *)copy_codes<uint4, 1> : (const void *)copy_codes<uint8_t, 1>;
    const void *looking = wide ? (const void *)copy_codes<uint4, LOOKED_AT>
                               : (const void *)copy_codes<uint8_t, LOOKED_AT>;
    moq_launch launch = {.what = "prepare: copying codes",
                         .kernel = c.out ? copying : looking,
                         .grid = dim3(chunks * (unsigned)c.rows),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&c, &chunks};
    return moq_cuda_launch(&launch, args, err);
}

static __global__ void __launch_bounds__(THREADS)
    fill_floats(float *out, float value, int64_t count) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count)
        out[i] = value;
}

extern "C" moq_status moq_cuda_fill_floats(float *out, float value, int64_t count, void *stream,
                                           moq_err *err) {
    moq_launch launch = {.what = "prepare: factors of rows",
                         .kernel = (const void *)fill_floats,
                         .grid = dim3((unsigned)((count + THREADS - 1) / THREADS)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&out, &value, &count};
    return moq_cuda_launch(&launch, args, err);
}

static __global__ void __launch_bounds__(THREADS)
    read_scales(const void *scales, moq_dtype dtype, int64_t count, float *out, uint32_t *met) {
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float scale = i < count ? moq_load_one(scales, i, dtype) : 1.0f;
    uint32_t found = scale == 0 ? MOQ_ZERO_SCALE : 0;
    if (!(scale >= 0) || __float_as_uint(scale) == 0x7f800000u)
        found = MOQ_BAD_SCALE;
    if (i < count)
        out[i] = scale;
    found = __reduce_or_sync(0xffffffffu, found);
    if (found && threadIdx.x % 32 == 0)
        atomicAnd(met, ~found);
}

extern "C" moq_status moq_cuda_read_scales(const void *scales, moq_dtype dtype, int64_t count,
                                           float *out, uint32_t *met, void *stream, moq_err *err) {
    moq_launch launch = {.what = "prepare: reading scales",
                         .kernel = (const void *)read_scales,
                         .grid = dim3((unsigned)((count + THREADS - 1) / THREADS)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&scales, &dtype, &count, &out, &met};
    return moq_cuda_launch(&launch, args, err);
}

/* ---- folding ---- */

/* Both formats are the upper part of a half with another bias. */
static __device__ __forceinline__ float decode_e2m1(uint32_t nibble) {
    return __half2float(
               __ushort_as_half((unsigned short)((nibble & 7) << 9 | (nibble & 8) << 12))) *
           0x1p14f;
}

static __device__ __forceinline__ float decode_e4m3(uint32_t code) {
    return __half2float(
               __ushort_as_half((unsigned short)((code & 0x7f) << 7 | (code & 0x80) << 8))) *
           0x1p8f;
}

/* 16 codes, the first in the lowest nibble. */
template <bool ALIGNED> static __device__ __forceinline__ uint2 load_codes(const uint8_t *from) {
    if (ALIGNED)
        return *(const uint2 *)from;
    uint2 codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes.x |= (uint32_t)from[i] << 8 * i;
        codes.y |= (uint32_t)from[4 + i] << 8 * i;
    }
    return codes;
}

/* The largest of 16 magnitudes, as a nibble: their codes are in their order. */
static __device__ __forceinline__ uint32_t largest_code(uint2 codes) {
    uint32_t x = __vmaxu4(codes.x & 0x07070707u, codes.x >> 4 & 0x07070707u);
    uint32_t y = __vmaxu4(codes.y & 0x07070707u, codes.y >> 4 & 0x07070707u);
    uint32_t two = __vmaxu4(x, y);
    two = __vmaxu4(two, two >> 16);
    return max(two & 0xff, two >> 8 & 0xff);
}

/* The e4m3 codes of the eight magnitudes times `scale`. */
static __device__ __forceinline__ uint2 folded_codes(float scale) {
    const float low[4] = {0.0f, 0.5f * scale, scale, 1.5f * scale};
    const float high[4] = {2.0f * scale, 3.0f * scale, 4.0f * scale, 6.0f * scale};
    return make_uint2(moq_e4m3_word(low), moq_e4m3_word(high));
}

/* Four codes, the first in the lowest nibble, to those of `table`, with their signs. */
static __device__ __forceinline__ uint32_t pick_four(uint32_t codes, uint2 table) {
    uint32_t sign = __byte_perm(0x8000u, 0, codes >> 3 & 0x1111u);
    return __byte_perm(table.x, table.y, codes & 0x7777u) | sign;
}

/* 16 codes under one block scale, times a power of two. */
static __device__ __forceinline__ uint4 fold_codes(uint2 codes, uint32_t scale, float inverse) {
    uint2 table = folded_codes(decode_e4m3(scale & 0x7f) * inverse);
    uint32_t flip = scale & 0x80 ? 0x88888888u : 0; /* a block scale of minus zero */
    uint32_t x = codes.x ^ flip, y = codes.y ^ flip;
    return make_uint4(pick_four(x & 0xffff, table), pick_four(x >> 16, table),
                      pick_four(y & 0xffff, table), pick_four(y >> 16, table));
}

/* 2^ceil(log2(largest / 448)), 1 for a row of zeros. */
static __device__ __forceinline__ float power_of_two(float largest) {
    uint32_t bits = __float_as_uint(__fdiv_rn(largest, 448.0f));
    uint32_t up = bits & 0x7fffffu ? 1 : 0; /* no power of two itself: the next one */
    return largest > 0 ? __uint_as_float(((bits >> 23) + up) << 23) : 1.0f;
}

static __device__ __forceinline__ uint32_t block_max(uint32_t bits) {
    __shared__ uint32_t warp_max[THREADS / 32];
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % 32 == 0)
        warp_max[threadIdx.x / 32] = bits;
    __syncthreads();
    bits = 0;
    for (int i = 0; i < THREADS / 32; i++)
        bits = max(bits, warp_max[i]);
    return bits;
}

/* 16 codes and their block scale. */
typedef struct {
    uint2 codes;
    uint32_t scale;
} fold_unit;

template <bool ALIGNED>
static __device__ __forceinline__ fold_unit load_unit(const moq_fold *f, int64_t row, int unit) {
    return {load_codes<ALIGNED>(f->codes + row * f->code_stride + unit * 8),
            f->scales[row * f->scale_stride + (f->group == 32 ? unit / 2u : (unsigned)unit)]};
}

static __device__ __forceinline__ float largest_weight(const fold_unit &u) {
    return decode_e2m1(largest_code(u.codes)) * decode_e4m3(u.scale & 0x7f);
}

template <bool ALIGNED>
static __device__ __forceinline__ void store_unit(const moq_fold *f, int64_t row, int unit,
                                                  const fold_unit &u, float inverse) {
    uint4 codes = fold_codes(u.codes, u.scale, inverse);
    uint8_t *to = f->out + row * f->columns + unit * 16;
    if (ALIGNED)
        *(uint4 *)to = codes;
    else
        for (int i = 0; i < 16; i++)
            to[i] = (uint8_t)((&codes.x)[i / 4] >> 8 * (i % 4));
}

template <bool ALIGNED> static __global__ void __launch_bounds__(THREADS) fold_e2m1(moq_fold f) {
    int64_t row = blockIdx.x;
    int units = (int)(f.columns / 16);
    fold_unit kept[KEPT_UNITS];
    float most = 0;
#pragma unroll
    for (int i = 0; i < KEPT_UNITS; i++)
        kept[i] = load_unit<ALIGNED>(&f, row, min(i * THREADS + (int)threadIdx.x, units - 1));
#pragma unroll
    for (int i = 0; i < KEPT_UNITS; i++)
        most = fmaxf(most, largest_weight(kept[i]));
    for (int unit = KEPT_UNITS * THREADS + threadIdx.x; unit < units; unit += THREADS)
        most = fmaxf(most, largest_weight(load_unit<ALIGNED>(&f, row, unit)));
    float r = power_of_two(__uint_as_float(block_max(__float_as_uint(most))));
    float inverse = 1 / r; /* exact: r is from 2^-18 to 8 */
#pragma unroll
    for (int i = 0; i < KEPT_UNITS; i++) {
        int unit = i * THREADS + threadIdx.x;
        if (unit < units)
            store_unit<ALIGNED>(&f, row, unit, kept[i], inverse);
    }
    for (int unit = KEPT_UNITS * THREADS + threadIdx.x; unit < units; unit += THREADS)
        store_unit<ALIGNED>(&f, row, unit, load_unit<ALIGNED>(&f, row, unit), inverse);
    if (threadIdx.x == 0)
        f.out_factor[row] = f.factor * r;
}

extern "C" moq_status moq_cuda_fold_e2m1(const moq_fold *fold, void *stream, moq_err *err) {
    moq_fold f = *fold;
    bool aligned = is_aligned(f.codes, 8) && f.code_stride % 8 == 0 && is_aligned(f.out, 16);
    moq_launch launch = {.what = "prepare: folding block scales",
                         .kernel = aligned ? (const void *)fold_e2m1<true>
                                           : (const void *)fold_e2m1<false>,
                         .grid = dim3((unsigned)f.rows),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&f};
    return moq_cuda_launch(&launch, args, err);
}
