/* The vector extensions of the CPU this runs on, as levels that kernels are compiled for.
 *
 * A level includes all below it. MOQEXT_ISA=portable|avx2|avx512|avx512bf16|amx, read once, lowers
 * the level, so that every variant can be tested on a machine that has more. */
#ifndef MOQ_CPU_ISA_H
#define MOQ_CPU_ISA_H

#include <stdbool.h>

typedef enum {
    MOQ_ISA_PORTABLE,
    MOQ_ISA_AVX2,       /* with FMA and F16C */
    MOQ_ISA_AVX512,     /* F, BW, DQ, VL and VBMI: Ice Lake, Zen 4 */
    MOQ_ISA_AVX512BF16, /* bfloat16 dot products: Cooper Lake, Zen 4 */
    MOQ_ISA_AMX,        /* bfloat16 tiles: Sapphire Rapids */
    MOQ_ISA_COUNT
} moq_isa;

/* The highest level that CPU and operating system support and MOQEXT_ISA allows. */
moq_isa moq_cpu_isa(void);
/* "portable", "avx2", ...; NULL out of range. */
const char *moq_isa_name(int isa);
/* The level of that name; false where there is none. */
bool moq_isa_parse(const char *name, moq_isa *out);

#endif
