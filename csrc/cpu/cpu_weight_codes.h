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
 * All arithmetic is float32, each operation rounded once. E2M1 under E8M0 rounds ties toward zero
 * and codes every zero as -0, as the exporter does. */
#ifndef MOQ_CPU_WEIGHT_CODES_H
#define MOQ_CPU_WEIGHT_CODES_H

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

/* False where there is no memory for the scales of some rows. */
bool moq_cpu_weight_codes(const moq_weight_codes *w);

#endif
