/* Checks of the environment: see variables.h. */
#define _GNU_SOURCE
#include "ops/variables.h"

#include "core/nearest.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PREFIX "MOQEXT_"

static bool is_isa(const char *text) {
    moq_isa isa;
    return moq_isa_parse(text, &isa);
}

static bool is_thread_count(const char *text) {
    int count;
    return moq_parse_thread_count(text, &count);
}

static bool is_switch(const char *text) {
    return (text[0] == '0' || text[0] == '1') && text[1] == '\0';
}

/* A bare name is the loader's to find. */
static bool is_library(const char *text) {
    return !strchr(text, '/') || access(text, F_OK) == 0;
}

static bool is_any(const char *text) {
    (void)text;
    return true;
}

static const struct {
    const char *name;
    bool (*is_right)(const char *text);
    const char *wrong; /* what is expected, and what a wrong value does */
} VARIABLES[] = {
    {"MOQEXT_ISA", is_isa, "expected portable, avx2, avx512, avx512bf16 or amx; it is ignored"},
    {"MOQEXT_NUM_THREADS", is_thread_count, "expected a number from 0 to 1024; it is ignored"},
    {"MOQEXT_KERNEL", is_any, NULL},
    {"MOQEXT_CUBLASLT", is_library, "expected the path of cuBLASLt; there is no such file"},
    {"MOQEXT_PDL", is_switch, "expected 0 or 1; what does not begin with 0 counts as 1"},
    {"MOQEXT_SYNC", is_switch, "expected 0 or 1; what does not begin with 0 counts as 1"},
};

enum { COUNT = sizeof VARIABLES / sizeof *VARIABLES };
_Static_assert(MOQ_MAX_THREADS == 1024, "the message has the number");

/* Variables that builds, tests and plug-ins of engines read. */
static const char *const OTHERS[] = {"MOQEXT_CUDA",
                                     "MOQEXT_CUDA_ARCHS",
                                     "MOQEXT_CUDA_HOME",
                                     "MOQEXT_SANITIZE",
                                     "MOQEXT_RACECHECK",
                                     "MOQEXT_WERROR",
                                     "MOQEXT_VERBOSE",
                                     "MOQEXT_SEED",
                                     "MOQEXT_EXAMPLES",
                                     "MOQEXT_VLLM",
                                     "MOQEXT_VLLM_EXCLUSION",
                                     "MOQEXT_VLLM_COMPUTE",
                                     "MOQEXT_VLLM_OPS",
                                     "MOQEXT_VLLM_CHECK",
                                     "MOQEXT_VLLM_FAST_ACCUM",
                                     "MOQEXT_SGLANG",
                                     "MOQEXT_SGLANG_COMPUTE",
                                     "MOQEXT_VLLM_FORCE",
                                     "MOQEXT_VLLM_COMPRESSED_TENSORS",
                                     "MOQEXT_SGLANG_FORCE",
                                     "MOQEXT_TUNE"};

static bool is_known(moq_text name) {
    for (int i = 0; i < COUNT; i++) {
        if (moq_text_equal(name, (moq_text){VARIABLES[i].name, strlen(VARIABLES[i].name)}))
            return true;
    }
    for (size_t i = 0; i < sizeof OTHERS / sizeof *OTHERS; i++) {
        if (moq_text_equal(name, (moq_text){OTHERS[i], strlen(OTHERS[i])}))
            return true;
    }
    return false;
}

/* "MOQEXT_THREADS: nothing reads it; what is read are ...". */
static void describe_unknown(moq_text name, char *text, size_t size) {
    char hint[64], all[160] = "";
    moq_nearest nearest;
    moq_nearest_begin(&nearest, name);
    for (int i = 0; i < COUNT; i++) {
        size_t used = strlen(all);
        moq_nearest_try(&nearest, VARIABLES[i].name, VARIABLES[i].name);
        snprintf(all + used, sizeof all - used, "%s%s", used ? ", " : "", VARIABLES[i].name);
    }
    snprintf(text, size, "%.*s%s: no variable of moqext; there are %s%s", MOQ_TEXT_ARGS(name), all,
             moq_nearest_hint(&nearest, hint, sizeof hint));
}

void moq_check_variables(void (*report)(void *context, const char *text), void *context) {
    char text[512];
    for (int i = 0; i < COUNT; i++) {
        const char *value = getenv(VARIABLES[i].name);
        if (!value || !*value || VARIABLES[i].is_right(value))
            continue;
        snprintf(text, sizeof text, "%s=%.200s: %s", VARIABLES[i].name, value, VARIABLES[i].wrong);
        report(context, text);
    }
    for (char **entry = environ; entry && *entry; entry++) {
        moq_text name = {*entry, strcspn(*entry, "=")};
        if (!moq_text_starts(name, MOQ_TEXT(PREFIX)) || is_known(name))
            continue;
        describe_unknown(name, text, sizeof text);
        report(context, text);
    }
}
