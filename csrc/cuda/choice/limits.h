/* Limits of the linear kernels of Hopper. The predicates of ops/linear_kernels.c check them;
 * estimates and kernels count on them. */
#ifndef MOQ_CUDA_CHOICE_LIMITS_H
#define MOQ_CUDA_CHOICE_LIMITS_H

/* Rows of x. */
#define MOQ_FP8_DECODE_TOKENS    16
#define MOQ_FP8_PREFILL_TOKENS   (1 << 24)
#define MOQ_NVFP4_DECODE_TOKENS  16
#define MOQ_NVFP4_MEDIUM_TOKENS  (1 << 22)
#define MOQ_NVFP4_PREFILL_TOKENS (1 << 24)

/* Outputs of the kernels for some tokens, which count tiles in 32 bits. */
#define MOQ_NVFP4_MEDIUM_OUTPUTS (1ll << 40)

/* Columns of NVFP4 weights that are multiplied as FP8 codes. */
#define MOQ_NVFP4_FP8_COLUMNS (1 << 16)

#endif
