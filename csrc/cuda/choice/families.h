/* The rows of all CUDA kernels, in the order of tables: among equal estimates the first is chosen.
 *
 * A kernel is a C file that defines its row, a .cu file that runs it, and its name here. */
#ifndef MOQ_CUDA_CHOICE_FAMILIES_H
#define MOQ_CUDA_CHOICE_FAMILIES_H

#include "core/kernel.h"

/* X(name of the kernel in capitals): its row is MOQ_LINEAR_ and that name. */
#define MOQ_LINEAR_FAMILIES(X)                                                                     \
    X(SIMT)                                                                                        \
    X(SM90_FP8_DECODE)                                                                             \
    X(SM89_FP8)                                                                                    \
    X(SM80_FP8)                                                                                    \
    X(SM90_FP8_PREFILL)                                                                            \
    X(SM90_INT8_PREFILL)                                                                           \
    X(SM90_NVFP4_DECODE)                                                                           \
    X(SM80_GENERAL)                                                                                \
    X(SM80_NVFP4)                                                                                  \
    X(SM90_GENERAL)                                                                                \
    X(SM90_NVFP4_MEDIUM)                                                                           \
    X(SM90_NVFP4_PREFILL)                                                                          \
    X(SM90_GENERAL_PREFILL)                                                                        \
    X(SM90_NVFP4_FP8_PREFILL)                                                                      \
    X(SM90_NVFP4_FP8_MEDIUM)                                                                       \
    X(CUBLASLT)                                                                                    \
    X(CUBLASLT_GENERAL)                                                                            \
    X(CUBLASLT_FP4)                                                                                \
    X(SM120_NVFP4_BLOCK)

/* X(name of the kernel in capitals): its row is MOQ_MOE_ and that name. */
#define MOQ_MOE_FAMILIES(X)                                                                        \
    X(SIMT)                                                                                        \
    X(SM89_FP8)                                                                                    \
    X(SM80_FP8)                                                                                    \
    X(SM80_NVFP4)                                                                                  \
    X(SM80_NVFP4_FP8)                                                                              \
    X(SM80_GENERAL)                                                                                \
    X(SM90_FP8_DECODE)                                                                             \
    X(SM90_NVFP4_DECODE)                                                                           \
    X(SM90_FP8_PREFILL)                                                                            \
    X(SM90_NVFP4_PREFILL)                                                                          \
    X(SM90_NVFP4_FP8_PREFILL)

#define MOQ_LINEAR_ROW(name) extern const moq_linear_kernel MOQ_LINEAR_##name;
#define MOQ_MOE_ROW(name)    extern const moq_moe_kernel MOQ_MOE_##name;
MOQ_LINEAR_FAMILIES(MOQ_LINEAR_ROW)
MOQ_MOE_FAMILIES(MOQ_MOE_ROW)
#undef MOQ_LINEAR_ROW
#undef MOQ_MOE_ROW

#endif
