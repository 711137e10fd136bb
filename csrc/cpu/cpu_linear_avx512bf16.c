/* Linear kernel for AVX512-BF16: dot products of bfloat16 pairs summed in float32. See
 * cpu/cpu_linear.h.
 *
 * For activations that bfloat16 holds exactly: bfloat16 itself, and everything quantized. Up to
 * four rows of x are multiplied with the codes, which come from memory; that bounds it. Some more
 * meet the codes of 16 rows of the weight in lanes: see cpu/lanes_bf16.h. Of many rows of x 16 lie
 * in lanes: a pair of the weight's decoded values is broadcast to their pairs. Then no sum is ever
 * taken across a vector, and products bound both. */
#include "cpu/cpu_linear.h"

#include "cpu/decode_bf16.h"
#include "cpu/lanes_bf16.h"
#include "cpu/panel_pairs.h"
#include "cpu/store_avx512.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

static inline __m512bh load(const uint16_t *p) {
    return (__m512bh)_mm512_loadu_si512(p);
}

/* ---- tiles of some rows of x ---- */

#define unit_t uint16_t
#define vec_t  __m512bh
#define acc_t  __m512
#define STEP   32
#define WIDE   6
#define NARROW 3
#define TALL   8

static inline __m512 acc_zero(void) {
    return _mm512_setzero_ps();
}

static inline __m512 muladd(__m512 acc, __m512bh a, __m512bh b) {
    return _mm512_dpbf16_ps(acc, a, b);
}

static inline float reduce(__m512 v) {
    return _mm512_reduce_add_ps(v);
}

#define multiply multiply_dots
#include "cpu/cpu_linear_tile.h"
#undef multiply

/* ---- tiles of more ---- */

/* Rows of x in a vector of sums, and vectors of sums; columns between two looks ahead. */
enum { LANES = MOQ_PAIRS_ROWS, MOST_SUMS = 16, VISIT = 32 };

/* Asks for codes of the next tile, those of rows [begin, end): memory is idle while products are
 * made, and decoding is done before a row has come. */
INLINE void ask_for_rows(const moq_tile *t, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end && row < t->next_rows; row++) {
        for (int64_t i = 0; i < t->next_bytes; i += 64)
            _mm_prefetch((const char *)t->next + row * t->next_stride + i, _MM_HINT_T1);
        if (t->next_scales)
            _mm_prefetch((const char *)t->next_scales + row * t->next_scales_stride, _MM_HINT_T1);
    }
}

/* VISIT columns from k on. */
INLINE void add_products(const moq_tile *t, const uint16_t *w, const uint16_t *x, int64_t k,
                         __m512 *acc, const int rows, const int blocks) {
    for (int64_t end = k + VISIT; k < end; k += 2) {
        __m512bh xs[2];
#pragma GCC unroll 2
        for (int j = 0; j < blocks; j++)
            xs[j] = load(x + j * LANES * t->k + k * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            int pair;
            memcpy(&pair, w + i * t->weight_stride + k, sizeof pair);
            __m512bh ws = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int j = 0; j < blocks; j++)
                acc[i * blocks + j] = _mm512_dpbf16_ps(acc[i * blocks + j], ws, xs[j]);
        }
    }
}

/* `rows` rows of the weight with `blocks` blocks of 16 rows of x: a pair of the weight's values is
 * broadcast to the pairs of 16 rows. */
INLINE void multiply_rows(const moq_tile *t, int64_t n, int64_t m, const int rows,
                          const int blocks) {
    const uint16_t *w = (const uint16_t *)t->weight + n * t->weight_stride;
    const uint16_t *x = pairs_of_tile(t, m);
    float *sums = t->sums + n * t->sums_stride + m;
    __m512 acc[MOST_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * blocks; i++)
        acc[i] = t->fresh
                     ? _mm512_setzero_ps()
                     : _mm512_loadu_ps(sums + i / blocks * t->sums_stride + i % blocks * LANES);
    for (int64_t k = 0; k < t->k; k += VISIT) {
        if (m == 0)
            ask_for_rows(t, n + k * rows / t->k, n + (k + VISIT) * rows / t->k);
        add_products(t, w, x, k, acc, rows, blocks);
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows * blocks; i++)
        _mm512_storeu_ps(sums + i / blocks * t->sums_stride + i % blocks * LANES, acc[i]);
}

INLINE void multiply_lanes(const moq_tile *t, int64_t m, const int most, const int blocks) {
    int64_t n = 0;
    for (; n + most <= t->rows; n += most)
        multiply_rows(t, n, m, most, blocks);
    for (; n < t->rows; n++)
        multiply_rows(t, n, m, 1, blocks);
}

static void multiply(const moq_tile *t) {
    int64_t m = 0;
    if (!t->arranged) {
        multiply_dots(t);
        return;
    }
    for (; m + LANES < t->m; m += 2 * LANES)
        multiply_lanes(t, m, 8, 2);
    if (m < t->m)
        multiply_lanes(t, m, 16, 1);
}

/* ---- a few rows of x ---- */

/* R rows of the weight and M rows of x at a time: one row is one stream from memory, and several
 * streams hide its latency. `acc` holds their R * M sums. */
#define DECODE_SUMS 4
/* Bytes that are asked for before they are needed; rows that share a page confuse the hardware's
 * own prefetching. */
#define AHEAD 1024

/* The distance from byte `at` of a row to the bytes that are asked for: where the row ends, they
 * are in the row that its stream comes to next. */
INLINE int64_t ahead_of(int64_t at, int64_t in_row, const int rows) {
    return at + AHEAD < in_row ? AHEAD : AHEAD + (rows - 1) * in_row;
}

INLINE __m512 dot_64(__m512 acc, __m512i first, __m512i second, const uint16_t *x) {
    return _mm512_dpbf16_ps(_mm512_dpbf16_ps(acc, (__m512bh)first, load(x)), (__m512bh)second,
                            load(x + 32));
}

/* Four groups of 16, 32 bytes: their nibbles index a table, the products are summed in four lanes a
 * group, and the block scales, numbers i to i + 3 of 16, multiply those. 64 weights take 5
 * instructions and 3 for each row of x. */
INLINE void add_quad(__m512 *acc, __m256i bytes, __m512 scales, int i, const moq_decode_job *job,
                     const uint16_t *x, const int m) {
    const __m512i table = e2m1_table();
    const __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512i words = _mm512_cvtepu8_epi16(bytes);
    __m512i even = _mm512_permutexvar_epi16(words, table);
    __m512i odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    __m512 scale = _mm512_permutexvar_ps(_mm512_add_epi32(fours, _mm512_set1_epi32(i)), scales);
#pragma GCC unroll 4
    for (int j = 0; j < m; j++) {
        __m512 sum = dot_64(_mm512_setzero_ps(), even, odd, x + j * job->panel_stride);
        acc[j] = _mm512_fmadd_ps(sum, scale, acc[j]);
    }
}

INLINE void dot_e2m1(const moq_decode_job *job, int64_t row, __m512 *acc, const int rows,
                     const int m) {
    int64_t half = job->k / 2, in_row = job->k / job->group, repeat = job->group / 16;
    const uint8_t *codes = job->codes + row * half, *scales = job->scales + row * in_row;
    const uint16_t *x = job->panel;
    int64_t groups = job->k / 16, first = 0;
    for (; first + 16 <= groups; first += 16) {
        int64_t ahead = 8 * first + ahead_of(8 * first, half, rows);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            _mm_prefetch(codes + r * half + ahead, _MM_HINT_T0);
            _mm_prefetch(codes + r * half + ahead + 64, _MM_HINT_T0);
            __m512 scale = group_scales(scales + r * in_row, first, groups, repeat);
#pragma GCC unroll 4
            for (int i = 0; i < 16; i += 4) {
                const uint8_t *at = codes + r * half + 8 * (first + i);
                add_quad(acc + r * m, _mm256_loadu_si256((const __m256i *)at), scale, i, job,
                         x + 16 * (first + i), m);
            }
        }
    }
    for (int r = 0; r < rows && first < groups; r++) {
        __m512 scale = group_scales(scales + r * in_row, first, groups, repeat);
        for (int i = 0; first + i < groups; i += 4) {
            int64_t left = groups - first - i;
            __mmask32 mask = left >= 4 ? ~0u : (1u << (8 * left)) - 1;
            __m256i bytes = _mm256_maskz_loadu_epi8(mask, codes + r * half + 8 * (first + i));
            add_quad(acc + r * m, bytes, scale, i, job, x + 16 * (first + i), m);
        }
    }
}

/* Columns [first, end), added to acc. */
INLINE void dot_e4m3(const moq_decode_job *job, int64_t row, int64_t first, int64_t end,
                     __m512 *acc, const int rows, const int m) {
    const e4m3_tables tables = load_e4m3_tables();
    const uint8_t *codes = job->codes + row * job->k;
    const uint16_t *x = job->panel;
    for (int64_t k = first; k < end; k += 64) {
        int64_t ahead = k + ahead_of(k, job->k, rows);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m512i low, high;
            _mm_prefetch(codes + r * job->k + ahead, _MM_HINT_T0);
            decode_64(&tables, load_codes(codes + r * job->k + k, end - k), &low, &high);
#pragma GCC unroll 4
            for (int j = 0; j < m; j++)
                acc[r * m + j] = dot_64(acc[r * m + j], low, high, x + j * job->panel_stride + k);
        }
    }
}

INLINE void dot_blocks(const moq_decode_job *job, int64_t row, __m512 *acc, const int rows,
                       const int m) {
    for (int64_t k = 0, g = 0; k < job->k; k += 128, g++) {
        __m512 sum[DECODE_SUMS];
        for (int i = 0; i < rows * m; i++)
            sum[i] = _mm512_setzero_ps();
        dot_e4m3(job, row, k, job->k - k < 128 ? job->k : k + 128, sum, rows, m);
        for (int i = 0; i < rows * m; i++) {
            const float *of_x = job->column_scales + g * job->column_stride + i % m;
            acc[i] = _mm512_fmadd_ps(sum[i], _mm512_set1_ps(job->block_scales[g] * *of_x), acc[i]);
        }
    }
}

INLINE void decode_rows(const moq_decode_job *job, int64_t row, const int rows, const int m) {
    __m512 acc[DECODE_SUMS];
    for (int i = 0; i < rows * m; i++)
        acc[i] = _mm512_setzero_ps();
    if (job->layout == MOQ_WEIGHT_E2M1)
        dot_e2m1(job, row, acc, rows, m);
    else if (job->layout == MOQ_WEIGHT_E4M3_BLOCK)
        dot_blocks(job, row, acc, rows, m);
    else
        dot_e4m3(job, row, 0, job->k, acc, rows, m);
    for (int i = 0; i < rows * m; i++)
        job->sums[(row + i / m) * job->sums_stride + i % m] = _mm512_reduce_add_ps(acc[i]);
}

INLINE void decode_all(const moq_decode_job *job, const int rows, const int m) {
    int64_t row = 0;
    for (; row + rows <= job->rows; row += rows)
        decode_rows(job, row, rows, m);
    for (; row < job->rows; row++)
        decode_rows(job, row, 1, m);
}

static void multiply_decode(const moq_decode_job *job) {
    switch (job->m) {
    case 1:
        decode_all(job, 4, 1);
        break;
    case 2:
        decode_all(job, 2, 2);
        break;
    case 3:
        decode_all(job, 1, 3);
        break;
    default:
        decode_all(job, 1, 4);
    }
}

const moq_linear_tiles moq_linear_avx512bf16 = {
    .name = "avx512bf16",
    .isa = MOQ_ISA_AVX512BF16,
    .unit = sizeof(uint16_t),
    .e4m3_unit = 1.0f,
    .e2m1_unit = 0x1p8f,
    .pad_rows = MOQ_PAIRS_ROWS,
    .tile_columns = 512,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .arrange = arrange_pairs,
    .arrange_rows = MOQ_PAIRS_ROWS,
    .arrange_from = 9,
    .fetches = true,
    .multiply = multiply,
    .add_scaled = add_scaled_avx512,
    .store = store_avx512,
    .multiply_decode = multiply_decode,
    .few = DECODE_SUMS,
    .arrange_medium = moq_arrange_together,
    .multiply_medium = moq_multiply_lanes_bf16,
    .some = 28,
    .speed = {.decode = 4e-11, .few = 4e-11, .some = 4.5e-11, .product = 9.4e-12},
};
