/* Linear kernels on the CPU: one driver, and for each instruction set the two things it does best,
 * decoding weights and multiplying tiles.
 *
 * A call goes panel by panel of up to MOQ_CPU_PANEL_ROWS rows of x, which are quantized, decoded
 * and kept in the kernel's unit (float32 or bfloat16). Threads share the rows of the weight; each
 * decodes a tile of a few rows and some hundred columns into its own cache and multiplies it with
 * the whole panel before it goes on, so the weight is read from memory once and never stored
 * decoded. Every output is the sum of one thread in one order: the number of threads changes
 * nothing. */
#ifndef MOQ_CPU_CPU_LINEAR_H
#define MOQ_CPU_CPU_LINEAR_H

#include "core/linear.h"
#include "cpu/isa.h"

/* Rows of x that share one decoding of the weight: enough to hide it, few enough that a panel of
 * bfloat16 stays in a second-level cache. */
#define MOQ_CPU_PANEL_ROWS 256
/* Decoded rows are padded with zeros to a multiple of this many values. */
#define MOQ_TILE_STEP 64

/* sums[n * sums_stride + m] += (or, when fresh, =) sum over k of weight[n, k] * x[m, first + k].
 * weight is [rows, weight_stride] in the kernel's unit; k is a multiple of MOQ_TILE_STEP. */
typedef struct {
    const void *weight;
    int64_t weight_stride;
    int64_t rows;
    const void *panel; /* from its first column on */
    int64_t panel_stride;
    int64_t panel_rows; /* m, padded */
    int64_t first;
    int64_t m;
    int64_t k;
    float *sums;
    int64_t sums_stride;
    bool fresh;
    bool arranged; /* the panel, by the kernel's `arrange` */
    /* Codes of the tile that is decoded next, for kernels that ask for them (`fetches`). */
    const uint8_t *next;
    int64_t next_rows, next_stride, next_bytes; /* of a row */
    const uint8_t *next_scales;                 /* of its groups, at most a line a row, or NULL */
    int64_t next_scales_stride;
} moq_tile;

/* Decoded rows of x, and the panel that a kernel makes of them. */
typedef struct {
    const void *rows; /* [panel_rows, padded] */
    int64_t padded;
    int64_t panel_rows;
    int64_t columns; /* of a tile; the last one has what is left */
    void *panel;
} moq_arranging;

/* Lays out rows [begin, end) and columns [first, last) of x as a panel. */
typedef void moq_arrange(const moq_arranging *a, int64_t begin, int64_t end, int64_t first,
                         int64_t last);

/* Scales of a tile in e4m3 blocks: x[group * stride + m] * weight[group], for each 128 columns. */
typedef struct {
    const float *x;
    int64_t stride;
    const float *weight;
} moq_tile_scales;

/* A few rows of x with some rows of the weight, straight from its codes:
 * sums[r * sums_stride + m] = the sum over k, block scales included. */
typedef struct {
    moq_weight_layout layout;
    const uint8_t *codes; /* of the first row */
    int64_t rows;
    int64_t k;
    const uint8_t *scales; /* e2m1: of the first row, k / group a row */
    int64_t group;
    const float *block_scales;  /* blocks: of the row of blocks, one for each 128 columns */
    const float *column_scales; /* blocks: of x, [groups of 128, column_stride] */
    int64_t column_stride;
    const void *panel;
    int64_t panel_stride; /* of a panel that is arranged: its rows, padded */
    int64_t m;
    float *sums; /* also past the last row and m, where multiply_medium comes in steps of 16 */
    int64_t sums_stride;
} moq_decode_job;

/* sums[n, m] += part[n, m] * (scales[m] * scale): the products of 128 columns get their scales. */
typedef struct {
    float *sums;
    const float *part;
    int64_t stride;
    int64_t rows; /* n */
    int64_t m;
    const float *scales;
    float scale;
} moq_scaled;

/* y[m, n] = round(sums[n, m] * (row_factor[m] * factor[n]) + bias[n]) for a tile. */
typedef struct {
    const float *sums;
    int64_t sums_stride;
    int64_t rows; /* n */
    int64_t m;
    const float *factor;
    const float *bias;
    const float *row_factor;
    moq_dtype dtype;
    char *const *row; /* where y[m] of this tile begins */
} moq_store;

/* The order of the columns in decoded weights and panels is a kernel's own: */
typedef enum {
    MOQ_ORDER_E4M3,   /* of decode_e4m3 */
    MOQ_ORDER_E2M1,   /* of decode_e2m1 */
    MOQ_ORDER_DECODE, /* of multiply_decode on e2m1 */
    MOQ_ORDER_MEDIUM  /* of multiply_medium on e2m1 */
} moq_order;

/* Estimated seconds of one core for each weight, from instruction counts at 3 GHz and 3 a cycle, or
 * what one thread of a Zen 4 took where that says more. */
typedef struct {
    double decode;  /* once a panel */
    double few;     /* instead, where a few rows need no tiles */
    double some;    /* instead, once for every 16 rows, where multiply_medium takes them */
    double product; /* with each row of x */
} moq_linear_speed;

typedef struct {
    const char *name;
    moq_isa isa;
    size_t unit;     /* bytes of a decoded value: 4 float32, 2 bfloat16 */
    float e4m3_unit; /* powers of two that decode_e4m3 and decode_e2m1 leave out */
    float e2m1_unit;
    int64_t pad_rows;     /* rows of tiles and of panels are padded to a multiple of this */
    int64_t tile_columns; /* of a tile that many rows of x share */
    /* n codes to values in the kernel's unit and order of columns, and zeros up to the next
     * multiple of MOQ_TILE_STEP. */
    void (*decode_e4m3)(const uint8_t *codes, int64_t n, void *out);
    void (*decode_e2m1)(const uint8_t *codes, const uint8_t *scales, int64_t n, int64_t group,
                        void *out);
    /* Activations that are not quantized, in the same unit and order. */
    void (*convert)(const float *row, int64_t padded, moq_order order, void *out);
    /* Arranges rows from a multiple of arrange_rows on; NULL: rows are the panel. */
    moq_arrange *arrange;
    int64_t arrange_rows;
    int64_t arrange_from; /* with fewer rows of x, rows are the panel */
    bool fetches;         /* multiply asks for the codes of the next tile while it multiplies */
    void (*multiply)(const moq_tile *tile);
    /* Multiplies a tile of e4m3 codes with block scales; NULL: tiles have 128 columns, whose sums
     * go through add_scaled. */
    void (*multiply_blocks)(const moq_tile *tile, const moq_tile_scales *scales);
    /* NULL: the portable functions of cpu_linear.c. */
    void (*add_scaled)(const moq_scaled *scaled);
    void (*store)(const moq_store *store);
    /* Multiplies up to `few` rows of x without decoding first; or NULL. */
    void (*multiply_decode)(const moq_decode_job *job);
    int64_t few;
    /* Multiplies more than `few` and up to `some` rows of x without decoding first, on a panel that
     * arrange_medium laid out; or NULL. */
    void (*multiply_medium)(const moq_decode_job *job);
    moq_arrange *arrange_medium;
    int64_t some;
    moq_linear_speed speed;
} moq_linear_tiles;

/* Zeros from value n to the next multiple of MOQ_TILE_STEP. */
static inline void moq_pad_floats(float *values, int64_t n) {
    for (; n % MOQ_TILE_STEP; n++)
        values[n] = 0;
}

/* The kernel of an instruction set; NULL where it was not compiled. */
const moq_linear_tiles *moq_linear_tiles_of(moq_isa isa);

/* Estimated seconds of one core for m tokens: decoding each weight once a panel, and its products.
 */
double moq_cpu_linear_seconds(const moq_linear_tiles *tiles, const moq_linear_spec *spec,
                              int64_t m);

/* Runs a call on the given instruction set, which the CPU must have. */
moq_status moq_cpu_linear(const moq_linear_tiles *tiles, const moq_linear_call *call, moq_err *err);

extern const moq_linear_tiles moq_linear_portable;
#if defined(__x86_64__)
extern const moq_linear_tiles moq_linear_avx2;
extern const moq_linear_tiles moq_linear_avx512;
extern const moq_linear_tiles moq_linear_avx512bf16;
extern const moq_linear_tiles moq_linear_amx;
#endif

#endif
