/* Detection of vector extensions: see isa.h. The compiler's run-time library asks CPUID and checks
 * that the operating system saves the registers. */
#include "cpu/isa.h"

#include <stddef.h>

#if defined(__x86_64__)
typedef struct {
    const char *name;
    int supported;
} isa_row;

const char *moq_cpu_isa_name(int i) {
    const isa_row rows[] = {
        {"avx2", __builtin_cpu_supports("avx2")},
        {"fma", __builtin_cpu_supports("fma")},
        {"avx512f", __builtin_cpu_supports("avx512f")},
        {"avx512bw", __builtin_cpu_supports("avx512bw")},
        {"avx512vnni", __builtin_cpu_supports("avx512vnni")},
        {"avx512bf16", __builtin_cpu_supports("avx512bf16")},
    };
    for (size_t at = 0; at < sizeof rows / sizeof *rows; at++) {
        if (rows[at].supported && i-- == 0)
            return rows[at].name;
    }
    return NULL;
}
#else
const char *moq_cpu_isa_name(int i) {
    (void)i;
    return NULL;
}
#endif
