/* Shapes of tiles of the linear of MXFP8, int8 and int4 weights on Hopper (general.cu). */
#ifndef MOQ_CUDA_LINEAR_SM90_GENERAL_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_GENERAL_CONFIG_H

#include "cuda/linear/sm90/nvfp4_medium_config.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a row of W in a step of 128 columns; int4 has two rows in one of codes. */
#define MOQ_GENERAL_STEP      128
#define MOQ_GENERAL_INT4_STEP 64

/* Bytes of a block beside the ring: what sums begin with, and barriers of sorted tokens, at most.
 */
#define MOQ_GENERAL_ROOM 2048

/* The shapes of tiles, as MOQ_NVFP4_MEDIUM_SHAPES has them. */
#define MOQ_GENERAL_SHAPES(X)                                                                      \
    X(8, 4, 1, false, true)                                                                        \
    X(8, 2, 2, true, false)                                                                        \
    X(8, 1, 2, true, false)                                                                        \
    X(16, 4, 1, false, true)                                                                       \
    X(16, 3, 1, false, true)                                                                       \
    X(16, 2, 2, true, false)                                                                       \
    X(16, 1, 2, true, false)                                                                       \
    X(32, 4, 1, false, true)                                                                       \
    X(32, 2, 2, true, false)                                                                       \
    X(32, 1, 2, true, false)                                                                       \
    X(64, 4, 1, false, true)                                                                       \
    X(64, 3, 1, false, true)                                                                       \
    X(64, 2, 2, true, false)                                                                       \
    X(64, 1, 2, true, false)                                                                       \
    X(128, 2, 1, false, true)                                                                      \
    X(128, 2, 1, true, false)

/* More shapes of 8-bit weights: sums of int4 take twice the registers. */
#define MOQ_GENERAL_WIDE_SHAPES(X)                                                                 \
    X(128, 4, 1, false, true)                                                                      \
    X(256, 2, 1, false, true)

/* Expands the call's config. */
moq_nvfp4_medium_config moq_general_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
