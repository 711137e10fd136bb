/* Linear kernel for AVX2 with FMA and F16C, in float32. See cpu/cpu_linear.h.
 *
 * e4m3 shifted by seven bits is a float16 of 2^-8 times the value, subnormals included, so the
 * float16 conversion decodes it; e2m1 codes index a table of doubled values in a byte shuffle. Both
 * powers of two are left to the row's factor. In decoded e4m3 the even columns of each 32 come
 * before the odd ones, which spares a shuffle.
 * 16 registers hold 4 x 3 sums: 12 FMAs for 7 loads. Decoding a tile takes about 0.5 instructions a
 * weight for e4m3 and 0.8 for e2m1, which up to four rows of x do without: see below. */
#include "cpu/cpu_linear.h"

#include "core/formats.h"

#include <immintrin.h>
#include <string.h>

#define unit_t float
#define vec_t  __m256
#define acc_t  __m256
#define STEP   8
#define WIDE   3
#define NARROW 2
#define TALL   8

static inline __m256 acc_zero(void) {
    return _mm256_setzero_ps();
}

static inline __m256 load(const float *p) {
    return _mm256_loadu_ps(p);
}

static inline __m256 muladd(__m256 acc, __m256 a, __m256 b) {
    return _mm256_fmadd_ps(a, b, acc);
}

static inline float reduce(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

#include "cpu/cpu_linear_tile.h"

/* 32 codes to four vectors: columns 0 2 ..., 14, then 16 18 ..., then the odd ones. */
static inline void decode_32(const uint8_t *codes, __m256 *values) {
    const __m256i mask = _mm256_set1_epi16((short)0xbf80);
    __m256i code = _mm256_loadu_si256((const __m256i *)codes);
    __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(code, 8), 1), mask);
    __m256i odd = _mm256_and_si256(_mm256_srai_epi16(code, 1), mask);
    values[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(even));
    values[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
    values[2] = _mm256_cvtph_ps(_mm256_castsi256_si128(odd));
    values[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
}

static inline void store_32(const uint8_t *codes, float *out) {
    __m256 values[4];
    decode_32(codes, values);
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps(out + 8 * i, values[i]);
}

static void decode_e4m3(const uint8_t *codes, int64_t n, void *out) {
    float *values = out;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        store_32(codes + i, values + i);
    if (i < n) {
        uint8_t rest[32] = {0};
        memcpy(rest, codes + i, (size_t)(n - i));
        store_32(rest, values + i);
        i += 32;
    }
    moq_pad_floats(values, i);
}

static inline void store_scaled(float *out, __m128i doubled, __m256 scale) {
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(doubled));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(doubled, 8)));
    _mm256_storeu_ps(out, _mm256_mul_ps(low, scale));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(high, scale));
}

static void decode_e2m1(const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t group,
                        void *out) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i nibble = _mm_set1_epi8(15);
    float *values = out;
    for (int64_t i = 0; i < n; i += 16) { /* n is a multiple of the group, 16 or 32 */
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(codes + i / 2));
        __m128i even = _mm_and_si128(bytes, nibble);
        __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
        __m128i doubled = _mm_shuffle_epi8(table, _mm_unpacklo_epi8(even, odd));
        __m128i half = _mm_cvtsi32_si128((scales[i / group] & 0x7f) << 7);
        __m256 scale = _mm256_broadcastss_ps(_mm_cvtph_ps(half));
        store_scaled(values + i, doubled, scale);
    }
    moq_pad_floats(values, n);
}

/* ---- a few rows of x ---- */

/* Some columns of several rows of the weight, then the next columns: x stays in the first-level
 * cache, and each row is a stream from memory; several streams hide its latency. */
#define DECODE_SUMS 4
#define DECODE_ROWS 4
/* Bytes that are asked for before they are needed, of the row or, where it ends, of the row that
 * comes DECODE_ROWS later; rows that share a page confuse the hardware's own prefetching. */
#define AHEAD 1024
/* Bytes of a visit to a row: 256 columns of e2m1, or the 128 of e4m3 that share a scale. */
#define VISIT 128
_Static_assert(VISIT == MOQ_FP8_BLOCK, "a visit in e4m3 is a block");
#define INLINE static inline __attribute__((always_inline))

/* 16 words of 16 bytes in each half: values of the low nibbles and of the high ones as bfloat16,
 * which are float32 once they stand in the upper half of a dword. Four products a lane are summed,
 * and `scale` is that of the lane's group. */
INLINE void add_words(__m256 *acc, __m256i even, __m256i odd, __m256 scale, const float *x,
                      int64_t stride, const int m) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(even, 16));
    __m256 w1 = _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16));
    __m256 w2 = _mm256_castsi256_ps(_mm256_and_si256(even, upper));
    __m256 w3 = _mm256_castsi256_ps(_mm256_and_si256(odd, upper));
#pragma GCC unroll 4
    for (int j = 0; j < m; j++) {
        const float *at = x + j * stride;
        __m256 sum = _mm256_mul_ps(w0, load(at));
        sum = muladd(sum, w1, load(at + 8));
        sum = muladd(sum, w2, load(at + 16));
        sum = muladd(sum, w3, load(at + 24));
        acc[j] = muladd(acc[j], sum, scale);
    }
}

/* Four groups of 16, 32 bytes: two shuffles find the bytes of a doubled value's bfloat16, and an
 * unpacking joins them, groups 0 and 2 (`first` has their scales), then 1 and 3 (`second`). 64
 * weights take 20 instructions, and 10 for each row of x. */
INLINE void add_quad(__m256 *acc, const uint8_t *codes, __m256 first, __m256 second, const float *x,
                     int64_t stride, const int m) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, (char)0x80, 0, 0x40, (char)0x80, (char)0xc0, 0, 0x40, 0, (char)0x80, 0,
                      0x40, (char)0x80, (char)0xc0, 0, 0x40));
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, (char)0x80, (char)0xbf,
                      (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc0, (char)0xc1, (char)0xc1));
    __m256i bytes = _mm256_loadu_si256((const __m256i *)codes);
    __m256i even = _mm256_and_si256(bytes, nibble);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    __m256i even_low = _mm256_shuffle_epi8(low, even), even_high = _mm256_shuffle_epi8(high, even);
    __m256i odd_low = _mm256_shuffle_epi8(low, odd), odd_high = _mm256_shuffle_epi8(high, odd);
    add_words(acc, _mm256_unpacklo_epi8(even_low, even_high),
              _mm256_unpacklo_epi8(odd_low, odd_high), first, x, stride, m);
    add_words(acc, _mm256_unpackhi_epi8(even_low, even_high),
              _mm256_unpackhi_epi8(odd_low, odd_high), second, x + 32, stride, m);
}

/* Scales of 16 groups of 16, times 2^-8, every four as 0 1 in one half and 2 3 in the other: where
 * add_quad wants one, it fills its half. 16 bytes are read, or 8 where two groups share a scale. */
INLINE void load_scales(const uint8_t *scales, int64_t group, __m256 *out) {
    const __m128i of_16 = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const __m128i of_32 = _mm_setr_epi8(0, 0, 2, 2, 1, 1, 3, 3, 4, 4, 6, 6, 5, 5, 7, 7);
    __m128i bytes = group == 16 ? _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)scales), of_16)
                                : _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)scales), of_32);
    __m256i words = _mm256_cvtepu8_epi16(_mm_and_si128(bytes, _mm_set1_epi8(0x7f)));
    words = _mm256_slli_epi16(words, 7);
    out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(words));
    out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
}

/* `quads` of 64 columns, at most four. */
INLINE void add_quads(__m256 *acc, const uint8_t *codes, const uint8_t *scales, int64_t group,
                      int quads, const float *x, int64_t stride, const int m) {
    __m256 scale[2];
    load_scales(scales, group, scale);
#pragma GCC unroll 4
    for (int i = 0; i < quads; i++) {
        __m256 s = i % 2 ? _mm256_permute_ps(scale[i / 2], 0xee) : scale[i / 2];
        add_quad(acc, codes + 32 * i, _mm256_permute_ps(s, 0x00), _mm256_permute_ps(s, 0x55),
                 x + 64 * i, stride, m);
    }
}

/* `count` times 32 columns, in two sums for each row of x, as one would wait for itself. */
INLINE void add_columns(__m256 *acc, const uint8_t *codes, int64_t count, const float *x,
                        int64_t stride, const int m) {
    __m256 second[DECODE_SUMS];
    for (int j = 0; j < m; j++)
        second[j] = acc_zero();
    for (int64_t i = 0; i < 32 * count; i += 32) {
        __m256 values[4];
        decode_32(codes + i, values);
#pragma GCC unroll 4
        for (int j = 0; j < m; j++) {
            const float *at = x + j * stride + i;
            acc[j] = muladd(acc[j], values[0], load(at));
            second[j] = muladd(second[j], values[1], load(at + 8));
            acc[j] = muladd(acc[j], values[2], load(at + 16));
            second[j] = muladd(second[j], values[3], load(at + 24));
        }
    }
    for (int j = 0; j < m; j++)
        acc[j] = _mm256_add_ps(acc[j], second[j]);
}

/* `count` times 32 columns of a visit, times the block's scale where the layout has blocks. */
INLINE void add_block(__m256 *acc, const moq_decode_job *job, const uint8_t *codes, int64_t count,
                      int64_t k, const int m) {
    const float *x = (const float *)job->panel + k;
    if (job->layout != MOQ_WEIGHT_E4M3_BLOCK) {
        add_columns(acc, codes, count, x, job->panel_stride, m);
        return;
    }
    const float *of_x = job->column_scales + k / MOQ_FP8_BLOCK * job->column_stride;
    float of_weight = job->block_scales[k / MOQ_FP8_BLOCK];
    __m256 sum[DECODE_SUMS];
    for (int j = 0; j < m; j++)
        sum[j] = acc_zero();
    add_columns(sum, codes, count, x, job->panel_stride, m);
    for (int j = 0; j < m; j++)
        acc[j] = muladd(acc[j], sum[j], _mm256_set1_ps(of_weight * of_x[j]));
}

/* A visit to row r: its columns from k on. */
INLINE void visit(__m256 *sums, const moq_decode_job *job, int64_t r, int64_t k, const bool e2m1,
                  const int m) {
    int64_t in_row = e2m1 ? job->k / 2 : job->k, at = e2m1 ? k / 2 : k;
    int64_t ahead = at + AHEAD < in_row ? AHEAD : AHEAD + (DECODE_ROWS - 1) * in_row;
    const uint8_t *codes = job->codes + r * in_row + at;
    __m256 acc[DECODE_SUMS];
    for (int j = 0; j < m; j++)
        acc[j] = sums[j];
    _mm_prefetch((const char *)codes + ahead, _MM_HINT_T0);
    _mm_prefetch((const char *)codes + ahead + 64, _MM_HINT_T0);
    if (e2m1)
        add_quads(acc, codes, job->scales + ((r * job->k + k) >> (job->group == 16 ? 4 : 5)),
                  job->group, VISIT / 32, (const float *)job->panel + k, job->panel_stride, m);
    else
        add_block(acc, job, codes, VISIT / 32, k, m);
    for (int j = 0; j < m; j++)
        sums[j] = acc[j];
}

/* The columns from k on, fewer than a visit has. */
INLINE void visit_last(__m256 *sums, const moq_decode_job *job, int64_t r, int64_t k,
                       const bool e2m1, const int m) {
    uint8_t codes[VISIT] = {0}, scales[16] = {0};
    int64_t left = job->k - k, first = r * job->k + k;
    if (e2m1) {
        memcpy(codes, job->codes + first / 2, (size_t)left / 2);
        memcpy(scales, job->scales + first / job->group, (size_t)(left / job->group));
        add_quads(sums, codes, scales, job->group, (int)(left + 63) / 64,
                  (const float *)job->panel + k, job->panel_stride, m);
    } else {
        memcpy(codes, job->codes + first, (size_t)left);
        add_block(sums, job, codes, (left + 31) / 32, k, m);
    }
}

/* `count` rows of the weight, at most DECODE_ROWS. */
INLINE void decode_rows(const moq_decode_job *job, int64_t row, int64_t count, const bool e2m1,
                        const int m) {
    const int64_t columns = e2m1 ? 2 * VISIT : VISIT;
    __m256 sums[DECODE_ROWS * DECODE_SUMS];
    for (int64_t i = 0; i < count * m; i++)
        sums[i] = acc_zero();
    int64_t k = 0;
    for (; k + columns <= job->k; k += columns) {
        for (int64_t r = 0; r < count; r++)
            visit(sums + r * m, job, row + r, k, e2m1, m);
    }
    for (int64_t r = 0; r < count && k < job->k; r++)
        visit_last(sums + r * m, job, row + r, k, e2m1, m);
    for (int64_t i = 0; i < count * m; i++)
        job->sums[(row + i / m) * job->sums_stride + i % m] = reduce(sums[i]);
}

INLINE void decode_all(const moq_decode_job *job, const bool e2m1, const int m) {
    for (int64_t row = 0; row < job->rows; row += DECODE_ROWS)
        decode_rows(job, row, job->rows - row < DECODE_ROWS ? job->rows - row : DECODE_ROWS, e2m1,
                    m);
}

INLINE void decode_of(const moq_decode_job *job, const bool e2m1) {
    switch (job->m) {
    case 1:
        decode_all(job, e2m1, 1);
        break;
    case 2:
        decode_all(job, e2m1, 2);
        break;
    case 3:
        decode_all(job, e2m1, 3);
        break;
    default:
        decode_all(job, e2m1, 4);
    }
}

static void multiply_decode(const moq_decode_job *job) {
    if (job->layout == MOQ_WEIGHT_E2M1)
        decode_of(job, true);
    else
        decode_of(job, false);
}

/* ---- activations as they are ---- */

/* The order that add_quad decodes 64 columns in: of each half of 32, the 16 of a group are a matrix
 * of 4 x 4, transposed, and the rows of two groups lie side by side. */
static void reorder_64(const float *row, float *out) {
    for (int group = 0; group < 4; group++) {
        const float *from = row + 16 * group;
        float *to = out + 32 * (group % 2) + 4 * (group / 2);
        __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + 4);
        __m128 c = _mm_loadu_ps(from + 8), d = _mm_loadu_ps(from + 12);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(to, a);
        _mm_storeu_ps(to + 8, b);
        _mm_storeu_ps(to + 16, c);
        _mm_storeu_ps(to + 24, d);
    }
}

static void convert(const float *row, int64_t padded, moq_order order, void *out) {
    float *values = out;
    if (order != MOQ_ORDER_DECODE) {
        memcpy(values, row, (size_t)padded * sizeof *row);
        return;
    }
    for (int64_t i = 0; i < padded; i += 64)
        reorder_64(row + i, values + i);
}

const moq_linear_tiles moq_linear_avx2 = {
    .name = "avx2",
    .isa = MOQ_ISA_AVX2,
    .unit = sizeof(float),
    .e4m3_unit = 0x1p8f,
    .e2m1_unit = 0x1p7f,
    .pad_rows = 1,
    .tile_columns = 512,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .multiply = multiply,
    .multiply_decode = multiply_decode,
    .few = DECODE_SUMS,
    .speed = {.decode = 2e-10, .few = 3.5e-11, .product = 2.5e-11},
};
