/* Detection of vector extensions: see isa.h. The compiler's run-time library asks CPUID and checks
 * that the operating system saves the registers; the tiles of AMX also need the kernel's leave. */
#define _GNU_SOURCE
#include "cpu/isa.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const char *const NAMES[MOQ_ISA_COUNT] = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Intel SDM, CPUID leaf 7: EDX bit 22 AMX-BF16, bit 24 AMX-TILE. */
static int has_amx_bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

/* Linux keeps the 8 KB of tile state off until a process asks for it: arch_prctl
 * ARCH_REQ_XCOMP_PERM (0x1023) with feature 18, XTILEDATA. */
static int may_use_tiles(void) {
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

/* Leaf 1, ECX bit 29. Its registers are those of AVX; clang before 19 cannot be asked by name. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

static moq_isa detect(void) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return MOQ_ISA_PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vbmi"))
        return MOQ_ISA_AVX2;
    if (!__builtin_cpu_supports("avx512bf16"))
        return MOQ_ISA_AVX512;
    return has_amx_bf16() && may_use_tiles() ? MOQ_ISA_AMX : MOQ_ISA_AVX512BF16;
}
#else
static moq_isa detect(void) {
    return MOQ_ISA_PORTABLE;
}
#endif

static moq_isa level;

static void initialize(void) {
    const char *text = getenv("MOQEXT_ISA");
    moq_isa wish;
    level = detect();
    if (text && moq_isa_parse(text, &wish) && wish < level)
        level = wish;
}

moq_isa moq_cpu_isa(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, initialize);
    return level;
}

bool moq_isa_parse(const char *name, moq_isa *out) {
    for (int i = 0; i < MOQ_ISA_COUNT; i++) {
        if (strcmp(name, NAMES[i]) == 0) {
            *out = (moq_isa)i;
            return true;
        }
    }
    return false;
}

const char *moq_isa_name(int isa) {
    return isa >= 0 && isa < MOQ_ISA_COUNT ? NAMES[isa] : NULL;
}
