/* A pass of the CPU's linear kernels: up to MOQ_CPU_PANEL_ROWS rows of x with rows of one weight.
 *
 *   y[m, n] = round(f_x[m] * f_w[n] * sum_k X[m, k] * W[n, k] + bias[n])
 *
 * Factors that are constant along K stay out of the sums. 128 x 128 block scales and the scales of
 * 128 columns of x are applied to the sum of each 128 columns.
 *
 * Extreme values: no sum overflows, or loses bits, that the output has. Powers of two are taken out
 * of rows of x that are not quantized and out of rows of block scales, so that what is summed is of
 * ordinary size, and become part of f_x and f_w. The factors of a row and of a token meet in
 * float64 wherever their product would not be a normal float32.
 *
 * A driver (cpu_linear for a layer, cpu_moe for experts) says how its passes follow each other and
 * what its threads share:
 *
 *     moq_pass_open(&p, tiles, &call);
 *     moq_pass_place(&p, rows, memory);                 room for so many rows: moq_pass_bytes
 *     moq_pass_begin(&p, first, rows); p.y[m] = ...;    rows of x, rows of y
 *     p.input_scale = ...;
 *     moq_pass_load_rows(&p, begin, end);               any thread, any rows (cpu_panel.c)
 *     moq_pass_arrange(...);                            where `arranges`
 *     moq_pass_narrow_factors(&p);
 *     moq_pass_multiply_rows(&p, begin, end);           any thread, any rows of W (cpu_tiles.c) */
#ifndef MOQ_CPU_CPU_PASS_H
#define MOQ_CPU_CPU_PASS_H

#include "core/sizes.h"
#include "cpu/cpu_linear.h"

/* A panel of more rows than MOQ_STRIP_M does not stay in a cache: its columns are used for a strip
 * of tiles at a time, whose sums (8 x 32 x 256 floats are 256 KB) do. */
enum { MOQ_STRIP_M = 32, MOQ_STRIP = 8 };
/* Rows of a tile for many rows of x: large, so that the sums of a tile are gathered seldom. */
enum { MOQ_LARGE_ROWS = 32 };
/* The power of two taken out of scales of 128 columns leaves the largest with this exponent, for x
 * and the weight each: codes below 2^9 are between them. */
enum { MOQ_HIGHEST_SCALE = 20 };

/* The time that a value of x takes until it is in the panel, roughly. */
#define MOQ_NANOSECONDS_OF_X 1.0

/* The ways in which rows of x meet the weight: codes multiplied without being stored decoded, by
 * the kernel's multiply_decode or multiply_medium, or tiles decoded for all. */
typedef enum { MOQ_DECODE, MOQ_MEDIUM, MOQ_PREFILL } moq_regime;

typedef struct moq_pass moq_pass;

/* A row of x on its way to the panel. */
typedef struct {
    float *row;      /* [padded]: values */
    uint8_t *codes;  /* [padded]: of e4m3, or pairs of e2m1 */
    uint8_t *blocks; /* [padded / 16]: their block scales */
    float *scales;   /* [groups of 128], or one of the row */
} moq_pass_row;

/* Reads row m of a pass as float32 [k], as it is before it is quantized. */
typedef void (*moq_read_row)(const moq_pass *p, int64_t m, float *row);
/* Reads row m of a pass whose x is codes, with what scales lie beside them. */
typedef void (*moq_read_codes)(const moq_pass *p, int64_t m, const moq_pass_row *row);

struct moq_pass {
    const moq_linear_tiles *tiles;
    const moq_linear_call *call;
    moq_read_row read;         /* rows of the call's x, unless a driver has others, */
    moq_read_codes read_codes; /* or where x is codes these, else NULL */
    const void *reading;       /* what a driver's functions read */
    int64_t k, padded;
    int64_t tile_rows, tile_columns;
    int64_t tile_stride; /* a line more than the columns, so that rows fall into different sets */
    int64_t first, rows; /* of x: the panel */
    moq_arranging arranging;
    float input_scale;
    void *panel; /* what is multiplied: `arranged`, or `decoded` where nothing is arranged */
    void *arranged;
    void *decoded;  /* rows of x in the kernel's unit */
    char **y;       /* [rows]: the rows of the output */
    double *factor; /* [rows], and as float32: */
    float *narrow_factor;
    double least, most;  /* of the factors, those that are NaN left out */
    bool held;           /* they are normal numbers of float32 */
    double unit;         /* the power of two that panel and weight leave out together */
    float *group_scales; /* [groups of 128, rows], or NULL */
    int64_t groups;
    int64_t start; /* first row of the weight in this pass */
    int64_t strip; /* tiles that share the panel's columns in the cache */
    bool together; /* rows are arranged by the thread that decodes them */
    moq_regime regime;
    bool arranges;      /* what is multiplied is `arranged` */
    int failed;         /* a thread had no memory */
    double nanoseconds; /* of the call, on one thread */
};

moq_regime moq_regime_of(const moq_linear_tiles *tiles, const moq_linear_spec *spec, int64_t m);

/* Divides n values by the power of two that brings the largest finite one to an exponent, and
 * returns it. */
double moq_take_power(float *values, int64_t n, int exponent);

/* A pass of a call of call->m rows, whose tiles are made for that number. */
void moq_pass_open(moq_pass *p, const moq_linear_tiles *tiles, const moq_linear_call *call);
/* Bytes of memory, aligned to 64, for a panel of so many rows, and their place in it. */
size_t moq_pass_bytes(const moq_pass *p, int64_t rows);
void moq_pass_place(moq_pass *p, int64_t rows, char *memory);
/* The next panel: rows [first, first + rows) of the call. */
void moq_pass_begin(moq_pass *p, int64_t first, int64_t rows);

/* Reads, quantizes and decodes rows [begin, end) of the panel; context is the pass. Where it
 * arranges `together`, ranges begin at multiples of the kernel's arrange_rows and are arranged. */
void moq_pass_load_rows(void *context, int64_t begin, int64_t end);
/* Lays out rows [begin, end) and columns [first, last) of the panel. */
void moq_pass_arrange(const moq_pass *p, int64_t begin, int64_t end, int64_t first, int64_t last);
/* The factors of all rows once all are loaded. */
void moq_pass_narrow_factors(moq_pass *p);
/* Loads the whole panel by all threads. */
void moq_pass_load(moq_pass *p);

/* Rows start + [begin, end) of the weight with the whole panel, to y; context is the pass. */
void moq_pass_multiply_rows(void *context, int64_t begin, int64_t end);

#endif
