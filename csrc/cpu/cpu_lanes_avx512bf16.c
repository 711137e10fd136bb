/* Some rows of x with AVX512-BF16, more than a call of few tokens has and too few for tiles to be
 * worth decoding: 16 rows of the weight lie in the lanes of a vector, and pairs of values of x are
 * broadcast to them.
 *
 * Codes are multiplied without being stored decoded. A line of codes of each of the 16 rows is
 * transposed, so that a vector has four bytes of every row. e2m1 becomes pairs of bfloat16 by one
 * look-up for 16 pairs, without the block scale, which multiplies the sums of its group; e4m3 is
 * unpacked to pairs. For 64 weights and 16 rows of x that is 32 products, 4 scalings of e2m1 and
 * some 6 cycles of decoding on a Zen 4. Products bound it. Every 16 rows of x decode again. */
#include "cpu/lanes_bf16.h"

#include "cpu/decode_bf16.h"
#include "cpu/store_avx512.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Rows of the weight in a vector; columns of x that lie together; rows of x to whose number panels
 * are padded, and those whose sums are in registers at once. */
enum { WEIGHT_LANES = 16, TOGETHER = 16, MEDIUM_STEP = 4, MEDIUM_MOST = 16 };
/* Bytes of a row of codes that are transposed at once, and how far ahead they are asked for. */
enum { LINE = 64, LINES_AHEAD = 8 * LINE };

/* ---- the panel ---- */

/* For each TOGETHER columns all rows of x, so that x is read as one stream. The panel's rows are a
 * multiple of MEDIUM_STEP. */
void moq_arrange_together(const moq_arranging *a, int64_t begin, int64_t end, int64_t first,
                          int64_t last) {
    for (int64_t m = begin; m < (end + MEDIUM_STEP - 1) / MEDIUM_STEP * MEDIUM_STEP; m++) {
        const uint16_t *in = (const uint16_t *)a->rows + m * a->padded;
        for (int64_t k = first; k < last; k += TOGETHER)
            memcpy((uint16_t *)a->panel + k * a->panel_rows + m * TOGETHER, in + k,
                   TOGETHER * sizeof *in);
    }
}

/* ---- 16 rows of the weight ---- */

typedef struct {
    const moq_decode_job *job;
    const uint8_t *codes[WEIGHT_LANES]; /* where the rows begin; the last one again past the end */
    const uint8_t *scales[WEIGHT_LANES];
    const uint16_t *x;             /* the first of the rows of x */
    int64_t in_row, scales_in_row; /* bytes */
} lanes;

/* Bytes [at, at + 64) of 16 rows as they lie, and zeros past their end. Asks for those after. */
INLINE void load_lines(const lanes *l, int64_t at, __m512i *line) {
    int64_t ahead = at + LINES_AHEAD;
    if (ahead >= l->in_row)
        ahead += (WEIGHT_LANES - 1) * l->in_row; /* of the next 16 rows */
#pragma GCC unroll 16
    for (int r = 0; r < WEIGHT_LANES; r++) {
        _mm_prefetch(l->codes[r] + ahead, _MM_HINT_T1);
        line[r] = load_codes(l->codes[r] + at, l->in_row - at);
    }
}

/* Block scales number [at, at + 16) of 16 rows as float32, those of number at + i in out[i]; zeros
 * from the end of the row on. */
INLINE void load_lane_scales(const lanes *l, int64_t at, __m512 *out) {
    /* Gathers byte i of each of four rows of 16 bytes. */
    const __m512i fours = _mm512_set_epi8(
        63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58, 42, 26,
        10, 57, 41, 25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20,
        4, 51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
    __mmask16 mask = first_of(l->scales_in_row - at);
    __m512i part[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        __m128i row[4];
#pragma GCC unroll 8
        for (int r = 0; r < 4; r++) {
            const uint8_t *scales = l->scales[4 * i + r] + at;
            row[r] = _mm_maskz_loadu_epi8(mask, scales);
            _mm_prefetch(scales + WEIGHT_LANES * l->scales_in_row, _MM_HINT_T0);
        }
        __m512i rows = _mm512_inserti32x4(_mm512_castsi128_si512(row[0]), row[1], 1);
        rows = _mm512_inserti32x4(_mm512_inserti32x4(rows, row[2], 2), row[3], 3);
        part[i] = _mm512_permutexvar_epi8(fours, rows);
    }
    __m512i low[2] = {_mm512_unpacklo_epi32(part[0], part[1]),
                      _mm512_unpacklo_epi32(part[2], part[3])};
    __m512i high[2] = {_mm512_unpackhi_epi32(part[0], part[1]),
                       _mm512_unpackhi_epi32(part[2], part[3])};
    uint8_t bytes[4][4 * WEIGHT_LANES]; /* of scales i, i + 4, i + 8, i + 12 */
    _mm512_storeu_si512(bytes[0], _mm512_unpacklo_epi64(low[0], low[1]));
    _mm512_storeu_si512(bytes[1], _mm512_unpackhi_epi64(low[0], low[1]));
    _mm512_storeu_si512(bytes[2], _mm512_unpacklo_epi64(high[0], high[1]));
    _mm512_storeu_si512(bytes[3], _mm512_unpackhi_epi64(high[0], high[1]));
    for (int i = 0; i < 16; i++)
        out[i] = scales_of(bytes[i % 4] + i / 4 * WEIGHT_LANES, 0xffff);
}

INLINE __m512 add_pair(__m512 acc, __m512i pairs_of_w, const uint16_t *x) {
    int pair;
    memcpy(&pair, x, sizeof pair);
    return _mm512_dpbf16_ps(acc, (__m512bh)pairs_of_w, (__m512bh)_mm512_set1_epi32(pair));
}

/* 8 codes of each of 16 rows to pairs of columns 0 and 4, 1 and 5, 2 and 6, 3 and 7. Of a word the
 * low five bits are an index, the highest of them without effect. */
INLINE void decode_lanes_e2m1(__m512i codes, __m512i *pairs) {
    const __m512i table = e2m1_table();
    pairs[0] = _mm512_permutexvar_epi16(codes, table);
    pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    pairs[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
}

/* 16 columns, whose block scale is one. */
INLINE void add_group(__m512 *acc, const __m512i *codes, __m512 scale, const uint16_t *x,
                      const int m) {
    __m512i pairs[8];
    decode_lanes_e2m1(codes[0], pairs);
    decode_lanes_e2m1(codes[1], pairs + 4);
#pragma GCC unroll 8
    for (int first = 0; first < m; first += MEDIUM_STEP) {
        __m512 sum[MEDIUM_STEP];
#pragma GCC unroll 8
        for (int j = 0; j < MEDIUM_STEP; j++)
            sum[j] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < MEDIUM_STEP; j++)
                sum[j] = add_pair(sum[j], pairs[i], x + (first + j) * TOGETHER + 2 * i);
        }
#pragma GCC unroll 8
        for (int j = 0; j < MEDIUM_STEP; j++)
            acc[first + j] = _mm512_fmadd_ps(sum[j], scale, acc[first + j]);
    }
}

INLINE void lanes_e2m1(const lanes *l, __m512 *acc, const int m) {
    const int64_t k_end = l->job->k, step = TOGETHER * l->job->panel_stride;
    const int shared = l->job->group == 32; /* whether two groups of 16 columns have one scale */
    const uint16_t *x = l->x;
    __m512 scales[16];
    for (int64_t k = 0; k < k_end; k += 2 * LINE) {
        __m512i codes[WEIGHT_LANES];
        int64_t first = k / 16, groups = k_end - k < 2 * LINE ? (k_end - k) / 16 : 8;
        if ((first >> shared) % 16 == 0)
            load_lane_scales(l, first >> shared, scales);
        load_lines(l, k / 2, codes);
        transpose_16x16((__m512 *)codes);
        for (int64_t g = 0; g < groups; g++, x += step)
            add_group(acc, codes + 2 * g, scales[((first + g) >> shared) % 16], x, m);
    }
}

/* Transposes: a lane holds two codes of each of four rows, then the next two, so that unpacking
 * puts the low and high bytes of pairs of columns side by side. */
INLINE void transpose_for_e4m3(__m512i *r) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        __m512i low = _mm512_unpacklo_epi16(r[i], r[i + 1]);
        __m512i high = _mm512_unpackhi_epi16(r[i], r[i + 1]);
        __m512i low_2 = _mm512_unpacklo_epi16(r[i + 2], r[i + 3]);
        __m512i high_2 = _mm512_unpackhi_epi16(r[i + 2], r[i + 3]);
        r[i] = _mm512_unpacklo_epi32(low, low_2);
        r[i + 1] = _mm512_unpackhi_epi32(low, low_2);
        r[i + 2] = _mm512_unpacklo_epi32(high, high_2);
        r[i + 3] = _mm512_unpackhi_epi32(high, high_2);
    }
    transpose_quarters((__m512 *)r);
}

/* Columns [k, k + 64), which lie in the order of decode_e4m3. */
INLINE void add_line_e4m3(const lanes *l, const e4m3_tables *tables, int64_t k, __m512 *acc,
                          const int m) {
    const int64_t step = TOGETHER * l->job->panel_stride;
    const uint16_t *x = l->x + k / TOGETHER * step;
    __m512i codes[WEIGHT_LANES];
    load_lines(l, k, codes);
    transpose_for_e4m3(codes);
    for (int i = 0; i < WEIGHT_LANES; i++) { /* columns k + 4 i and three more */
        int at = (i / 2 % 2) * 32 + i / 4 * 8 + i % 2 * 4;
        const uint16_t *of_x = x + at / TOGETHER * step + at % TOGETHER;
        __m512i first, second;
        decode_64(tables, codes[i], &first, &second);
#pragma GCC unroll 16
        for (int j = 0; j < m; j++)
            acc[j] = add_pair(acc[j], first, of_x + j * TOGETHER);
#pragma GCC unroll 16
        for (int j = 0; j < m; j++)
            acc[j] = add_pair(acc[j], second, of_x + j * TOGETHER + 2);
    }
}

INLINE void lanes_e4m3(const lanes *l, __m512 *acc, const int m) {
    const e4m3_tables tables = load_e4m3_tables();
    for (int64_t k = 0; k < l->job->k; k += LINE)
        add_line_e4m3(l, &tables, k, acc, m);
}

/* column_scales: of the first of the rows of x. */
INLINE void lanes_blocks(const lanes *l, const float *column_scales, int64_t rows, __m512 *acc,
                         const int m) {
    const moq_decode_job *job = l->job;
    const e4m3_tables tables = load_e4m3_tables();
    for (int64_t first = 0, g = 0; first < job->k; first += 128, g++) {
        int64_t end = job->k - first < 128 ? job->k : first + 128;
        __m512 sum[MEDIUM_MOST];
#pragma GCC unroll 16
        for (int j = 0; j < m; j++)
            sum[j] = _mm512_setzero_ps();
        for (int64_t k = first; k < end; k += LINE)
            add_line_e4m3(l, &tables, k, sum, m);
#pragma GCC unroll 16
        for (int j = 0; j < m; j++) {
            float scale = j < rows ? column_scales[g * job->column_stride + j] : 0;
            acc[j] = _mm512_fmadd_ps(sum[j], _mm512_set1_ps(job->block_scales[g] * scale), acc[j]);
        }
    }
}

/* The 16 rows from `row` on with m rows of x, m0 the first. */
INLINE void lanes_of_rows(const moq_decode_job *job, int64_t row, int64_t m0, const int m) {
    bool e2m1 = job->layout == MOQ_WEIGHT_E2M1;
    lanes l = {.job = job,
               .x = (const uint16_t *)job->panel + m0 * TOGETHER,
               .in_row = e2m1 ? job->k / 2 : job->k,
               .scales_in_row = e2m1 ? job->k / job->group : 0};
    for (int64_t r = 0; r < WEIGHT_LANES; r++) {
        int64_t at = row + r < job->rows ? row + r : job->rows - 1;
        l.codes[r] = job->codes + at * l.in_row;
        l.scales[r] = e2m1 ? job->scales + at * l.scales_in_row : NULL;
    }
    __m512 acc[MEDIUM_MOST];
#pragma GCC unroll 16
    for (int i = 0; i < MEDIUM_MOST; i++)
        acc[i] = _mm512_setzero_ps();
    if (e2m1)
        lanes_e2m1(&l, acc, m);
    else if (job->layout == MOQ_WEIGHT_E4M3_BLOCK)
        lanes_blocks(&l, job->column_scales + m0, job->m - m0, acc, m);
    else
        lanes_e4m3(&l, acc, m);
    transpose_16x16(acc);
    for (int i = 0; i < WEIGHT_LANES; i++)
        _mm512_storeu_ps(job->sums + (row + i) * job->sums_stride + m0, acc[i]);
}

void moq_multiply_lanes_bf16(const moq_decode_job *job) {
    for (int64_t row = 0; row < job->rows; row += WEIGHT_LANES) {
        for (int64_t m = 0; m < job->m; m += MEDIUM_MOST) {
            int64_t left = job->m - m;
            if (left > 3 * MEDIUM_STEP)
                lanes_of_rows(job, row, m, MEDIUM_MOST);
            else if (left > 2 * MEDIUM_STEP)
                lanes_of_rows(job, row, m, 3 * MEDIUM_STEP);
            else if (left > MEDIUM_STEP)
                lanes_of_rows(job, row, m, 2 * MEDIUM_STEP);
            else
                lanes_of_rows(job, row, m, MEDIUM_STEP);
        }
    }
}
