/* Weights to codes and scales as ModelOpt's exporter stores them.
 *
 * A scale stands over `height` rows and `group` columns. With amax the largest magnitude there, and
 * s2 the second-level scale:
 *
 *   F32    scale = amax / 448, 1 for zeros; one that is given stands over the whole weight
 *   E4M3   scale = e4m3(amax / float32(6 * s2)), from 2^-9 to 448, 1 for zeros; step = scale * s2
 *   E8M0   scale = the least power of two that is no less than amax over the largest code
 *   code = encode(w / step)
 *
 * Where a value is NaN, so is amax: F32 scales are 1 then, E8M0 scales the least.
 *
 * All arithmetic is float32, each operation rounded once, but for errors, which are sums of squares
 * in float64. E2M1 under E8M0 rounds ties toward zero and codes every zero as -0, as the exporter
 * does. */
#ifndef MOQ_CORE_WEIGHT_CODES_H
#define MOQ_CORE_WEIGHT_CODES_H

#include "core/tensor.h"

typedef enum {
    MOQ_SEARCH_NONE,         /* scales of the largest magnitude */
    MOQ_SEARCH_MSE,          /* of those near it the scale of the least squared error */
    MOQ_SEARCH_FOUR_OVER_SIX /* E4M3 scales that bring amax to 6 or to 4, by squared error */
} moq_scale_search;

typedef struct {
    const void *weight; /* [rows, columns] without gaps */
    moq_dtype dtype;    /* F32, BF16 or F16 */
    int64_t rows, columns;
    int64_t height, group;
    moq_dtype code_dtype;  /* E4M3, or E2M1X2 with an even group */
    moq_dtype scale_dtype; /* F32, E4M3 or E8M0 */
    float second;          /* s2; of E4M3 scales */
    float given;           /* F32: the scale of everything, height 1, group columns; 0: none */
    bool rounds;           /* quotients to the type of the weight before they are encoded */
    uint8_t most;          /* E4M3: the largest code that a search tries */
    moq_scale_search search;
    void *codes;  /* [rows, columns], two E2M1 in a byte */
    void *scales; /* [ceil(rows / height), ceil(columns / group)]; unused where one is given */
} moq_weight_codes;

/* Steps to either side of the scale of the largest magnitude that a search tries, nearest first and
 * the larger scale before the smaller. Steps are E4M3 codes (2^(6 / 8) is 1.7 times a scale),
 * eighths of a power of two in float32, and powers of two. */
#define MOQ_NEAR_E4M3 6
#define MOQ_NEAR_F32  4
#define MOQ_NEAR_E8M0 1
/* The values of a row whose squared errors are added up before they are added to others: as many
 * whole groups as fit, or a part of one. */
#define MOQ_WEIGHT_PIECE 1024
/* E8M0 code of 1, and its largest that is a number. */
#define MOQ_POWER_ONE  127
#define MOQ_POWER_MOST 254
/* E4M3 code of 1. */
#define MOQ_E4M3_ONE 0x38

#endif
