/* Products of 16-bit numbers of widths that device/wgmma.h does not have, for experts of many
 * tokens: A from registers, 64 rows by 24, 40 or 56 columns. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_WIDTHS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_NVFP4_WIDTHS_H

#include "cuda/device/wgmma.h"

namespace moq {

#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NUMBERS_4    "%0, %1, %2, %3"
#define NUMBERS_12   NUMBERS_4 ", %4, %5, %6, %7, %8, %9, %10, %11"
#define NUMBERS_20   NUMBERS_12 ", %12, %13, %14, %15, %16, %17, %18, %19"
#define NUMBERS_28   NUMBERS_20 ", %20, %21, %22, %23, %24, %25, %26, %27"
#define SUMS_12(d)   FLOATS_8(d, 0), SUMS_4(d, 8)
#define SUMS_20(d)   FLOATS_16(d, 0), SUMS_4(d, 16)
#define SUMS_28(d)   FLOATS_24(d, 0), SUMS_4(d, 24)

#define WGMMA_OF_EIGHTS(type, columns, sums, a0, a1, a2, a3, right)                                \
    static __device__ __forceinline__ void wgmma_##type(float (&d)[sums], const uint32_t (&a)[4],  \
                                                        uint64_t b) {                              \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.eq.u32 p, 0, 0;\n"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type       \
                     " {" NUMBERS_##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #right   \
                                         ", p, 1, 1, 0;\n"                                         \
                                         "}"                                                       \
                     : SUMS_##sums(d)                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
    }

WGMMA_OF_EIGHTS(bf16, 24, 12, 12, 13, 14, 15, 16)
WGMMA_OF_EIGHTS(bf16, 40, 20, 20, 21, 22, 23, 24)
WGMMA_OF_EIGHTS(bf16, 56, 28, 28, 29, 30, 31, 32)
WGMMA_OF_EIGHTS(f16, 24, 12, 12, 13, 14, 15, 16)
WGMMA_OF_EIGHTS(f16, 40, 20, 20, 21, 22, 23, 24)
WGMMA_OF_EIGHTS(f16, 56, 28, 28, 29, 30, 31, 32)

#undef WGMMA_OF_EIGHTS

} // namespace moq

#endif
