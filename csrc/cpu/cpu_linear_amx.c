/* Linear kernel for AMX: 16 x 16 tiles of float32 sums, 32 bfloat16 products deep. See
 * cpu/cpu_linear.h.
 *
 * The weight is the left operand, 16 decoded rows as they lie; the panel is the right one, laid out
 * in blocks of 16 rows of x in which every pair of columns stands side by side for the 16 rows, as
 * the instruction reads it. 2 x 2 tiles of sums use each operand twice: 4 products of 16 cycles for
 * 4 loads of 8. From about 16 rows of x on, decoding and products cost the same; with 256 the rate
 * of the loads bounds it, which come from the second-level cache for one operand or both.
 *
 * Block scales of e4m3: sums of 128 columns leave the tiles through a buffer in the first-level
 * cache, and vector instructions scale and add them while the next 128 columns are multiplied. */
#include "cpu/cpu_linear.h"

#include "cpu/decode_bf16.h"
#include "cpu/panel_pairs.h"
#include "cpu/store_avx512.h"

enum { TILE = MOQ_PAIRS_ROWS, DEPTH = MOQ_PAIRS_DEPTH }; /* of sums; values of one product */
enum { AHEAD = 2 }; /* products for which the panel is asked for ahead of time */

#define INLINE static inline __attribute__((always_inline))
/* GCC's tile loads do not say that they read memory. */
#define ORDER() __asm__ volatile("" ::: "memory")

/* Palette 1 of the architecture: 8 tiles of 16 rows of 64 bytes. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

static void configure(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = TILE;
    }
    _tile_loadconfig(&config);
}

/* 32 rows of the weight with 16 or 32 of x: where the operands and the sums lie. */
typedef struct {
    const uint16_t *w, *w_below; /* 16 rows, and the next 16 */
    int64_t w_bytes;             /* from row to row */
    const uint16_t *x, *x_right; /* blocks of 16 rows */
    float *sums;
    int64_t stride;
} operands;

/* Asks for 32 columns of a block of the panel, which lies in the second-level cache. */
INLINE void ask_for(const uint16_t *x) {
    for (int i = 0; i < TILE; i++)
        _mm_prefetch((const char *)(x + i * DEPTH), _MM_HINT_T0);
}

INLINE void multiply_depth(const operands *o, int64_t k, const int columns) {
    const uint16_t *x = o->x + k * TILE, *right = o->x_right + k * TILE;
    const int64_t ahead = AHEAD * TILE * DEPTH;
    _tile_loadd(4, o->w + k, o->w_bytes);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, o->w_below + k, o->w_bytes);
    ask_for(x + ahead);
    if (columns == 2) {
        _tile_loadd(7, right, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_dpbf16ps(2, 5, 6);
    if (columns == 2) {
        ask_for(right + ahead);
        _tile_dpbf16ps(3, 5, 7);
    }
}

INLINE void zero_sums(const int columns) {
    _tile_zero(0);
    _tile_zero(2);
    if (columns == 2) {
        _tile_zero(1);
        _tile_zero(3);
    }
}

INLINE void load_sums(const float *sums, int64_t stride, const int columns) {
    const float *below = sums + TILE * stride;
    _tile_loadd(0, sums, stride * 4);
    _tile_loadd(2, below, stride * 4);
    if (columns == 2) {
        _tile_loadd(1, sums + TILE, stride * 4);
        _tile_loadd(3, below + TILE, stride * 4);
    }
}

INLINE void store_sums(float *sums, int64_t stride, const int columns) {
    float *below = sums + TILE * stride;
    _tile_stored(0, sums, stride * 4);
    _tile_stored(2, below, stride * 4);
    if (columns == 2) {
        _tile_stored(1, sums + TILE, stride * 4);
        _tile_stored(3, below + TILE, stride * 4);
    }
}

INLINE void multiply_columns(const operands *o, int64_t depth, bool fresh, const int columns) {
    if (fresh)
        zero_sums(columns);
    else
        load_sums(o->sums, o->stride, columns);
    for (int64_t k = 0; k < depth; k += DEPTH)
        multiply_depth(o, k, columns);
    store_sums(o->sums, o->stride, columns);
}

/* ---- block scales ---- */

enum { BLOCK_DEPTHS = 128 / DEPTH, PART_STRIDE = 2 * TILE };

/* The products of 128 columns, whose scales are applied while the products of the next 128 columns
 * are made. */
typedef struct {
    const float *part; /* [32, PART_STRIDE] */
    __m512 scale[2];
    bool fresh;
} unscaled;

static inline __m512 scale_of(const moq_tile_scales *s, int64_t group, int64_t m, int64_t end) {
    __mmask16 mask = end - m >= TILE ? 0xffff : m >= end ? 0 : (__mmask16)((1u << (end - m)) - 1);
    return _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, s->x + group * s->stride + m),
                         _mm512_set1_ps(s->weight[group]));
}

/* A quarter of the rows, scaled and added to the sums. */
INLINE void add_quarter(const operands *o, const unscaled *u, int64_t quarter, const int columns) {
#pragma GCC unroll 8
    for (int64_t i = quarter * 8; i < quarter * 8 + 8; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < columns; j++) {
            float *sum = o->sums + i * o->stride + j * TILE;
            __m512 old = u->fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sum);
            __m512 part = _mm512_load_ps(u->part + i * PART_STRIDE + j * TILE);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(part, u->scale[j], old));
        }
    }
}

INLINE void multiply_columns_scaled(const moq_tile *t, const moq_tile_scales *s, int64_t m,
                                    const operands *o, const int columns) {
    _Alignas(64) float parts[2][2 * TILE * PART_STRIDE];
    unscaled before = {NULL};
    for (int64_t first = 0, group = 0; first < t->k; first += 128, group++) {
        float *part = parts[group % 2];
        zero_sums(columns);
        for (int64_t i = 0; i < BLOCK_DEPTHS; i++) {
            if (first + i * DEPTH < t->k)
                multiply_depth(o, first + i * DEPTH, columns);
            if (before.part)
                add_quarter(o, &before, i, columns);
            ORDER();
        }
        store_sums(part, PART_STRIDE, columns);
        before =
            (unscaled){.part = part,
                       .scale = {scale_of(s, group, m, t->m), scale_of(s, group, m + TILE, t->m)},
                       .fresh = t->fresh && group == 0};
    }
    for (int64_t i = 0; i < BLOCK_DEPTHS; i++)
        add_quarter(o, &before, i, columns);
}

/* ---- all rows ---- */

INLINE void multiply_all(const moq_tile *t, const moq_tile_scales *scales) {
    configure();
    ORDER();
    for (int64_t n = 0; n < t->rows; n += 2 * TILE) {
        const uint16_t *w = (const uint16_t *)t->weight + n * t->weight_stride;
        for (int64_t m = 0; m < t->m; m += 2 * TILE) {
            const uint16_t *x = pairs_of_tile(t, m);
            const operands o = {.w = w,
                                .w_below = w + TILE * t->weight_stride,
                                .w_bytes = t->weight_stride * 2,
                                .x = x,
                                .x_right = x + TILE * t->k,
                                .sums = t->sums + n * t->sums_stride + m,
                                .stride = t->sums_stride};
            bool two = t->m - m > TILE;
            if (scales && two)
                multiply_columns_scaled(t, scales, m, &o, 2);
            else if (scales)
                multiply_columns_scaled(t, scales, m, &o, 1);
            else if (two)
                multiply_columns(&o, t->k, t->fresh, 2);
            else
                multiply_columns(&o, t->k, t->fresh, 1);
        }
    }
    ORDER();
    _tile_release();
}

static void multiply(const moq_tile *t) {
    multiply_all(t, NULL);
}

static void multiply_blocks(const moq_tile *t, const moq_tile_scales *scales) {
    multiply_all(t, scales);
}

const moq_linear_tiles moq_linear_amx = {
    .name = "amx",
    .isa = MOQ_ISA_AMX,
    .unit = sizeof(uint16_t),
    .e4m3_unit = 1.0f,
    .e2m1_unit = 0x1p8f,
    .pad_rows = 2 * TILE,
    .tile_columns = 1024,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .arrange = arrange_pairs,
    .arrange_rows = TILE,
    .arrange_from = 1,
    .multiply = multiply,
    .multiply_blocks = multiply_blocks,
    .store = store_avx512,
    .speed = {.decode = 5e-11, .few = 5e-11, .product = 1e-12},
};
