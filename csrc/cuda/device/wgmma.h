/* Warpgroup products: d = A B^T, or d += A B^T, for 64 rows of A and N rows of B. Operands of e4m3
 * have 32 columns and lie in shared memory (wgmma_operand in ptx.h). The size of d tells N.
 *
 * Thread t of the warpgroup has rows r = 16 * (t / 32) + t % 32 / 4 and r + 8 of d. It has there
 * columns 8 * j + t % 4 * 2 and the next: d[4 * j] and d[4 * j + 1] are of row r, d[4 * j + 2] and
 * d[4 * j + 3] of row r + 8.
 *
 * Sums of e4m3 products keep about 14 bits: add them to float32 sums every 128 columns or so. */
#ifndef MOQ_CUDA_DEVICE_WGMMA_H
#define MOQ_CUDA_DEVICE_WGMMA_H

#include <stdint.h>

namespace moq {

#define NUMBERS_4  "%0, %1, %2, %3"
#define NUMBERS_8  "%0, %1, %2, %3, %4, %5, %6, %7"
#define NUMBERS_16 NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_24 NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NUMBERS_32                                                                                 \
    NUMBERS_16 ", "                                                                                \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_48                                                                                 \
    NUMBERS_32 ", "                                                                                \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_64                                                                                 \
    NUMBERS_32 ", "                                                                                \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_128                                                                                \
    NUMBERS_64 ", "                                                                                \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "  \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "  \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "  \
               "%110, %111, "                                                                      \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "    \
               "%125, %126, %127"
#define NUMBERS_68 NUMBERS_64 ", %64, %65, %66, %67"
#define NUMBERS_72                                                                                 \
    NUMBERS_64 ", "                                                                                \
               "%64, %65, %66, %67, %68, %69, %70, %71"
#define NUMBERS_96                                                                                 \
    NUMBERS_64 ", "                                                                                \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "  \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLOATS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLOATS_8(d, i)                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_16(d, i)  FLOATS_8(d, i), FLOATS_8(d, i + 8)
#define FLOATS_24(d, i)  FLOATS_16(d, i), FLOATS_8(d, i + 16)
#define FLOATS_32(d, i)  FLOATS_16(d, i), FLOATS_16(d, i + 16)
#define FLOATS_48(d, i)  FLOATS_32(d, i), FLOATS_16(d, i + 32)
#define FLOATS_64(d, i)  FLOATS_32(d, i), FLOATS_32(d, i + 32)
#define FLOATS_68(d, i)  FLOATS_64(d, i), FLOATS_4(d, i + 64)
#define FLOATS_72(d, i)  FLOATS_64(d, i), FLOATS_8(d, i + 64)
#define FLOATS_96(d, i)  FLOATS_64(d, i), FLOATS_32(d, i + 64)
#define FLOATS_128(d, i) FLOATS_64(d, i), FLOATS_64(d, i + 64)

#define WGMMA_E4M3(columns, sums, left, right, more)                                               \
    static __device__ __forceinline__ void wgmma_e4m3(float (&d)[sums], uint64_t a, uint64_t b,    \
                                                      int add) {                                   \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.ne.b32 p, %" #more ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3"              \
                     " {" NUMBERS_##sums "}, %" #left ", %" #right ", p, 1, 1;\n"                  \
                                         "}"                                                       \
                     : FLOATS_##sums(d, 0)                                                         \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }

WGMMA_E4M3(8, 4, 4, 5, 6)
WGMMA_E4M3(16, 8, 8, 9, 10)
WGMMA_E4M3(32, 16, 16, 17, 18)
WGMMA_E4M3(64, 32, 32, 33, 34)
WGMMA_E4M3(96, 48, 48, 49, 50)
WGMMA_E4M3(128, 64, 64, 65, 66)
WGMMA_E4M3(136, 68, 68, 69, 70)
WGMMA_E4M3(144, 72, 72, 73, 74)

#undef WGMMA_E4M3

/* ---- int8, from shared memory: exact ---- */

#define INTS_16(d, i)                                                                              \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]),    \
        "+r"(d[i + 6]), "+r"(d[i + 7]), "+r"(d[i + 8]), "+r"(d[i + 9]), "+r"(d[i + 10]),           \
        "+r"(d[i + 11]), "+r"(d[i + 12]), "+r"(d[i + 13]), "+r"(d[i + 14]), "+r"(d[i + 15])
#define INTS_32(d, i) INTS_16(d, i), INTS_16(d, i + 16)
#define INTS_64(d, i) INTS_32(d, i), INTS_32(d, i + 32)

#define WGMMA_S8(columns, sums, left, right, more)                                                 \
    static __device__ __forceinline__ void wgmma_s8(int (&d)[sums], uint64_t a, uint64_t b,        \
                                                    int add) {                                     \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.ne.b32 p, %" #more ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k32.s32.s8.s8"                  \
                     " {" NUMBERS_##sums "}, %" #left ", %" #right ", p;\n"                        \
                                         "}"                                                       \
                     : INTS_##sums(d, 0)                                                           \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }

WGMMA_S8(32, 16, 16, 17, 18)
WGMMA_S8(64, 32, 32, 33, 34)
WGMMA_S8(128, 64, 64, 65, 66)

#undef WGMMA_S8

/* ---- 16-bit matrices, A from registers: d += A B^T for 16 columns. A thread has the rows of A
 * that it has of d: a[0] columns t % 4 * 2 (+ 1) of the upper row, a[1] of the lower, a[2] and a[3]
 * the columns 8 further. Neither a nor d may be touched before the product has ended. ---- */

#define WGMMA_OF_REGISTERS(type, columns, sums, a0, a1, a2, a3, right)                             \
    static __device__ __forceinline__ void wgmma_##type(float (&d)[sums], const uint32_t (&a)[4],  \
                                                        uint64_t b) {                              \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.eq.u32 p, 0, 0;\n"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type       \
                     " {" NUMBERS_##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #right   \
                                         ", p, 1, 1, 0;\n"                                         \
                                         "}"                                                       \
                     : FLOATS_##sums(d, 0)                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
    }

WGMMA_OF_REGISTERS(bf16, 16, 8, 8, 9, 10, 11, 12)
WGMMA_OF_REGISTERS(bf16, 32, 16, 16, 17, 18, 19, 20)
WGMMA_OF_REGISTERS(bf16, 48, 24, 24, 25, 26, 27, 28)
WGMMA_OF_REGISTERS(bf16, 64, 32, 32, 33, 34, 35, 36)
WGMMA_OF_REGISTERS(bf16, 96, 48, 48, 49, 50, 51, 52)
WGMMA_OF_REGISTERS(bf16, 128, 64, 64, 65, 66, 67, 68)
WGMMA_OF_REGISTERS(bf16, 144, 72, 72, 73, 74, 75, 76)
WGMMA_OF_REGISTERS(bf16, 192, 96, 96, 97, 98, 99, 100)
WGMMA_OF_REGISTERS(bf16, 256, 128, 128, 129, 130, 131, 132)
WGMMA_OF_REGISTERS(f16, 16, 8, 8, 9, 10, 11, 12)
WGMMA_OF_REGISTERS(f16, 32, 16, 16, 17, 18, 19, 20)
WGMMA_OF_REGISTERS(f16, 48, 24, 24, 25, 26, 27, 28)
WGMMA_OF_REGISTERS(f16, 64, 32, 32, 33, 34, 35, 36)
WGMMA_OF_REGISTERS(f16, 96, 48, 48, 49, 50, 51, 52)
WGMMA_OF_REGISTERS(f16, 128, 64, 64, 65, 66, 67, 68)
WGMMA_OF_REGISTERS(f16, 144, 72, 72, 73, 74, 75, 76)
WGMMA_OF_REGISTERS(f16, 192, 96, 96, 97, 98, 99, 100)
WGMMA_OF_REGISTERS(f16, 256, 128, 128, 129, 130, 131, 132)

#undef WGMMA_OF_REGISTERS

/* ---- e4m3, A from registers: d = A B^T, or d += A B^T, for 32 columns. A thread has the 4 columns
 * of A from t % 4 * 4 on, of the upper row in a[0] and the lower in a[1], and the columns 16
 * further in a[2] and a[3]. ---- */

#define WGMMA_E4M3_OF_REGISTERS(columns, sums, a0, a1, a2, a3, right, more)                        \
    static __device__ __forceinline__ void wgmma_e4m3(float (&d)[sums], const uint32_t (&a)[4],    \
                                                      uint64_t b, int add) {                       \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.ne.b32 p, %" #more ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3"              \
                     " {" NUMBERS_##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #right   \
                                         ", p, 1, 1;\n"                                            \
                                         "}"                                                       \
                     : FLOATS_##sums(d, 0)                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }

WGMMA_E4M3_OF_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_E4M3_OF_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_E4M3_OF_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)

#undef WGMMA_E4M3_OF_REGISTERS

} // namespace moq

#endif
