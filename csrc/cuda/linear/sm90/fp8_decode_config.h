/* Ways to do the FP8 linear for a few tokens on Hopper (fp8_decode.cu). */
#ifndef MOQ_CUDA_LINEAR_SM90_FP8_DECODE_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_FP8_DECODE_CONFIG_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_FP8_DECODE_STEP 512 /* columns of K */

/* A config of a call: the kernel's shape, how many blocks share K, and how many of them share N,
 * which the launcher finds. */
typedef struct {
    int groups, tokens, ranks, clusters;
} moq_fp8_decode_config;

/* Expands the call's config; clusters are 0. */
moq_fp8_decode_config moq_fp8_decode_expand_config(const moq_linear_call *call);

#ifdef __cplusplus
}
#endif
#endif
