/* Linear kernel for AMX: 16 x 16 tiles of float32 sums, 32 bfloat16 products deep. See
 * cpu/linear.h.
 *
 * The weight is the left operand, 16 decoded rows as they lie; the panel is the right one, laid out
 * in blocks of 16 rows of x in which every pair of columns stands side by side for the 16 rows, as
 * the instruction reads it. 2 x 2 tiles of sums use each operand twice: 4 products of 16 cycles for
 * 4 loads of 8. From about 16 rows of x on, decoding and products cost the same. */
#include "cpu/linear.h"

#include "cpu/decode_bf16.h"
#include "cpu/store_avx512.h"

enum { TILE = 16, DEPTH = 32 }; /* rows and columns of sums, values of one product */

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

/* Pair (k, k + 1) of row m goes to block m / 16, pair k / 2, place m % 16: 16 x 16 pairs at a time
 * are transposed. `rows` is row-major, with rows of zeros up to a multiple of 16. */
static void arrange(const void *rows, int64_t padded, int64_t m, int64_t first, int64_t end,
                    void *panel) {
    for (int64_t block = 0; block < m; block += TILE) {
        const uint16_t *in = (const uint16_t *)rows + block * padded;
        uint16_t *out = (uint16_t *)panel + block * padded;
        for (int64_t k = first; k < end; k += DEPTH) {
            __m512 tile[TILE];
            for (int i = 0; i < TILE; i++)
                tile[i] = _mm512_loadu_ps((const float *)(in + i * padded + k));
            transpose_16x16(tile);
            for (int i = 0; i < TILE; i++)
                _mm512_storeu_ps((float *)(out + k * TILE + i * DEPTH), tile[i]);
        }
    }
}

static void multiply_2x2(const moq_tile *t, const uint16_t *w, const uint16_t *x, float *sums) {
    const int64_t w_bytes = t->weight_stride * 2, s_bytes = t->sums_stride * 4;
    const int64_t block = TILE * t->panel_stride;
    float *below = sums + TILE * t->sums_stride;
    if (t->fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, s_bytes);
        _tile_loadd(1, sums + TILE, s_bytes);
        _tile_loadd(2, below, s_bytes);
        _tile_loadd(3, below + TILE, s_bytes);
    }
    for (int64_t k = 0; k < t->k; k += DEPTH) {
        _tile_loadd(4, w + k, w_bytes);
        _tile_loadd(5, w + TILE * t->weight_stride + k, w_bytes);
        _tile_loadd(6, x + k * TILE, 64);
        _tile_loadd(7, x + block + k * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, s_bytes);
    _tile_stored(1, sums + TILE, s_bytes);
    _tile_stored(2, below, s_bytes);
    _tile_stored(3, below + TILE, s_bytes);
}

static void multiply_2x1(const moq_tile *t, const uint16_t *w, const uint16_t *x, float *sums) {
    const int64_t w_bytes = t->weight_stride * 2, s_bytes = t->sums_stride * 4;
    float *below = sums + TILE * t->sums_stride;
    if (t->fresh) {
        _tile_zero(0);
        _tile_zero(2);
    } else {
        _tile_loadd(0, sums, s_bytes);
        _tile_loadd(2, below, s_bytes);
    }
    for (int64_t k = 0; k < t->k; k += DEPTH) {
        _tile_loadd(4, w + k, w_bytes);
        _tile_loadd(5, w + TILE * t->weight_stride + k, w_bytes);
        _tile_loadd(6, x + k * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, sums, s_bytes);
    _tile_stored(2, below, s_bytes);
}

static void multiply(const moq_tile *t) {
    const uint16_t *weight = t->weight;
    const uint16_t *panel = (const uint16_t *)t->panel + t->first * TILE;
    configure();
    for (int64_t n = 0; n < t->rows; n += 2 * TILE) {
        const uint16_t *w = weight + n * t->weight_stride;
        int64_t m = 0;
        for (; m + TILE < t->m; m += 2 * TILE)
            multiply_2x2(t, w, panel + m * t->panel_stride, t->sums + n * t->sums_stride + m);
        if (m < t->m)
            multiply_2x1(t, w, panel + m * t->panel_stride, t->sums + n * t->sums_stride + m);
    }
    _tile_release();
}

const moq_linear_tiles moq_linear_amx = {
    .name = "amx",
    .isa = MOQ_ISA_AMX,
    .unit = sizeof(uint16_t),
    .e4m3_unit = 1.0f,
    .e2m1_unit = 0x1p8f,
    .pad_rows = 2 * TILE,
    .decode_e4m3 = decode_e4m3,
    .decode_e2m1 = decode_e2m1,
    .convert = convert,
    .arrange = arrange,
    .multiply = multiply,
    .add_scaled = add_scaled_avx512,
    .store = store_avx512,
};
