/* Products of e4m3 of widths that device/wgmma.h does not have, for experts of many tokens. To be
 * included before the products of linears, which call them. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_WIDTHS_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_MANY_WIDTHS_H

#include "cuda/device/wgmma.h"

namespace moq {

#define NUMBERS_68     NUMBERS_64 ", %64, %65, %66, %67"
#define FLOATS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

/* d = or += a * b, 64 rows by 136 columns, both operands in shared memory. */
static __device__ __forceinline__ void wgmma_e4m3(float (&d)[68], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %70, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" NUMBERS_68 "}, "
                 "%68, %69, p, 1, 1;\n"
                 "}"
                 : FLOATS_64(d, 0), FLOATS_4(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}

} // namespace moq

#endif
