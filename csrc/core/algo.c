/* The table of algorithms: see algo.h. */
#include "core/algo.h"

#include "core/formats.h"
#include "core/nearest.h"

#include <stdio.h>
#include <string.h>

/* Groups of what shares a fact. A weight of NVFP4 has e4m3 scales under a second level; whether its
 * activations are quantized, and to what, is what tells the variants apart. */
#define NVFP4_WEIGHT                                                                               \
    .family = MOQ_FAMILY_FP4, .codes = MOQ_STORED_E2M1, .scales = MOQ_SCALES_GROUPS,               \
    .scale_dtype = MOQ_DT_E4M3, .groups = {MOQ_NVFP4_GROUP, MOQ_MX_GROUP}
#define MX_SCALES                                                                                  \
    .scales = MOQ_SCALES_GROUPS, .scale_dtype = MOQ_DT_E8M0, .group = MOQ_MX_GROUP,                \
    .groups = {MOQ_MX_GROUP}
#define FP8_WEIGHT .family = MOQ_FAMILY_FP8, .codes = MOQ_STORED_E4M3, .scale_dtype = MOQ_DT_F32
#define INT4_WEIGHT                                                                                \
    .codes = MOQ_STORED_INT4, .scales = MOQ_SCALES_GROUPS, .scale_dtype = MOQ_DT_F32,              \
    .group = MOQ_INT4_GROUP, .pre_quant_scale = true
#define INT8_WEIGHT .codes = MOQ_STORED_INT8, .scales = MOQ_SCALES_ROWS, .scale_dtype = MOQ_DT_F32
#define STATIC_INPUT(max) .input_scale = MOQ_STATIC_EXPECTED, .input_max = (max)

/* NVFP4 runs "exact" with activations as they are: e2m1 x e4m3 fits in bfloat16's significand, so
 * this is the most accurate reading of the checkpoint, and what engines run before Blackwell. */
static const moq_algo_facts FACTS[MOQ_ALGO_COUNT] = {
    [MOQ_ALGO_FP8] = {.name = "FP8",
                      FP8_WEIGHT,
                      .scales = MOQ_SCALES_TENSOR,
                      STATIC_INPUT(MOQ_E4M3_MAX),
                      .input = MOQ_INPUT_E4M3_TENSOR},
    [MOQ_ALGO_FP8_PER_CHANNEL_PER_TOKEN] = {.name = "FP8_PER_CHANNEL_PER_TOKEN",
                                            .aliases = {"FP8_PC_PT"},
                                            FP8_WEIGHT,
                                            .scales = MOQ_SCALES_ROWS,
                                            .input = MOQ_INPUT_E4M3_TOKEN},
    [MOQ_ALGO_FP8_PB_WO] = {.name = "FP8_PB_WO",
                            .aliases = {"FP8_PB", "FP8_PB_REAL", "FP8_BLOCK_SCALES"},
                            FP8_WEIGHT,
                            .scales = MOQ_SCALES_BLOCKS,
                            .group = MOQ_FP8_BLOCK,
                            .groups = {MOQ_FP8_BLOCK},
                            .input = MOQ_INPUT_E4M3_GROUP},
    [MOQ_ALGO_NVFP4] = {.name = "NVFP4",
                        .aliases = {"NVFP4_STATIC"},
                        NVFP4_WEIGHT,
                        .group = MOQ_NVFP4_GROUP,
                        .second = MOQ_SECOND_PARTS,
                        STATIC_INPUT(MOQ_NVFP4_MAX),
                        .input = MOQ_INPUT_AS_IS},
    [MOQ_ALGO_NVFP4_AWQ] = {.name = "NVFP4_AWQ",
                            NVFP4_WEIGHT,
                            .group = MOQ_NVFP4_GROUP,
                            .second = MOQ_SECOND_PARTS,
                            .pre_quant_scale = true,
                            STATIC_INPUT(MOQ_NVFP4_MAX),
                            .input = MOQ_INPUT_AS_IS},
    [MOQ_ALGO_NVFP4_SVD] = {.name = "NVFP4_SVD",
                            .aliases = {"NVFP4_SVDQUANT"},
                            NVFP4_WEIGHT,
                            .group = MOQ_NVFP4_GROUP,
                            .second = MOQ_SECOND_PARTS,
                            .pre_quant_scale = true,
                            .low_rank = true,
                            STATIC_INPUT(MOQ_NVFP4_MAX),
                            .input = MOQ_INPUT_AS_IS},
    /* An input_scale left in such a file is that of NVFP4. */
    [MOQ_ALGO_W4A16_NVFP4] = {.name = "W4A16_NVFP4",
                              NVFP4_WEIGHT,
                              .group = MOQ_NVFP4_GROUP,
                              .second = MOQ_SECOND_PARTS,
                              .input_max = MOQ_NVFP4_MAX,
                              .input = MOQ_INPUT_AS_IS},
    /* Stacked, it may have its outputs along either axis, so parts of them are not told apart. */
    [MOQ_ALGO_W4A8_NVFP4_FP8] = {.name = "W4A8_NVFP4_FP8",
                                 NVFP4_WEIGHT,
                                 .group = MOQ_MX_GROUP,
                                 .second = MOQ_SECOND_FACTOR,
                                 STATIC_INPUT(MOQ_E4M3_MAX),
                                 .input = MOQ_INPUT_E4M3_TENSOR},
    [MOQ_ALGO_MXFP4] = {.name = "MXFP4",
                        .family = MOQ_FAMILY_FP4,
                        .codes = MOQ_STORED_E2M1,
                        MX_SCALES,
                        .input = MOQ_INPUT_AS_IS},
    [MOQ_ALGO_W4A8_MXFP4_FP8] = {.name = "W4A8_MXFP4_FP8",
                                 .family = MOQ_FAMILY_FP4,
                                 .codes = MOQ_STORED_E2M1,
                                 MX_SCALES,
                                 .input_scale = MOQ_STATIC_MAYBE,
                                 .input_max = MOQ_E4M3_MAX,
                                 .input = MOQ_INPUT_E4M3_TENSOR,
                                 .by_token = true},
    [MOQ_ALGO_MXFP8] = {.name = "MXFP8",
                        .family = MOQ_FAMILY_MXFP8,
                        .codes = MOQ_STORED_E4M3,
                        MX_SCALES,
                        .input = MOQ_INPUT_AS_IS},
    [MOQ_ALGO_W4A16_AWQ] = {.name = "W4A16_AWQ",
                            .aliases = {"INT4_AWQ"},
                            INT4_WEIGHT,
                            .input = MOQ_INPUT_AS_IS},
    [MOQ_ALGO_W4A8_AWQ] = {.name = "W4A8_AWQ",
                           INT4_WEIGHT,
                           .second = MOQ_SECOND_UNUSED,
                           STATIC_INPUT(MOQ_E4M3_MAX),
                           .input = MOQ_INPUT_E4M3_TENSOR},
    [MOQ_ALGO_W8A8_SQ_PER_CHANNEL] = {.name = "W8A8_SQ_PER_CHANNEL",
                                      .aliases = {"INT8_SQ"},
                                      INT8_WEIGHT,
                                      .pre_quant_scale = true,
                                      STATIC_INPUT(MOQ_INT8_MAX),
                                      .input = MOQ_INPUT_INT8,
                                      .by_token = true},
    [MOQ_ALGO_W8A16] = {.name = "W8A16",
                        .aliases = {"INT8_WO"},
                        INT8_WEIGHT,
                        .input = MOQ_INPUT_AS_IS},
    [MOQ_ALGO_MIXED_PRECISION] = {.name = "MIXED_PRECISION", .family = MOQ_FAMILY_MIXED},
};

static const struct {
    const char *name;
    bool has_method;
} KV_FACTS[MOQ_KV_COUNT] = {
    [MOQ_KV_NONE] = {NULL, true},
    [MOQ_KV_FP8] = {"FP8", true},
    [MOQ_KV_INT8] = {"INT8", false},
    [MOQ_KV_NVFP4] = {"NVFP4", true},
    [MOQ_KV_NVFP4_AFFINE] = {"NVFP4_AFFINE", false},
};

const moq_algo_facts *moq_algo_facts_of(moq_algo algo) {
    return &FACTS[algo];
}

bool moq_algo_takes_group(const moq_algo_facts *facts, int64_t group) {
    bool grouped = facts->group > 0;
    if (!grouped || group < 1)
        return !grouped && group == 0;
    return facts->groups[0] == 0 || group == facts->groups[0] || group == facts->groups[1];
}

const char *moq_algo_groups_text(const moq_algo_facts *facts, char *buffer, size_t size) {
    if (facts->groups[0] == 0)
        snprintf(buffer, size, "%s", facts->group ? "any" : "none");
    else if (facts->groups[1] == 0)
        snprintf(buffer, size, "%d", (int)facts->groups[0]);
    else
        snprintf(buffer, size, "%d or %d", (int)facts->groups[0], (int)facts->groups[1]);
    return buffer;
}

/* True if the text is the name or an alias, in any case: the exporter's internal constants, and
 * names that engines and hand-written files use for the algorithm's tensors. */
static bool is_spelling(moq_text text, const moq_algo_facts *facts) {
    if (moq_text_equal_folded(text, facts->name))
        return true;
    for (int i = 0; i < MOQ_ALIASES_MAX && facts->aliases[i]; i++) {
        if (moq_text_equal_folded(text, facts->aliases[i]))
            return true;
    }
    return false;
}

bool moq_algo_parse(moq_text text, moq_algo *out) {
    for (int algo = MOQ_ALGO_NONE + 1; algo < MOQ_ALGO_COUNT; algo++) {
        if (is_spelling(text, &FACTS[algo])) {
            *out = (moq_algo)algo;
            return true;
        }
    }
    return false;
}

bool moq_kv_parse(moq_text text, moq_kv *out) {
    for (int kv = MOQ_KV_NONE + 1; kv < MOQ_KV_COUNT; kv++) {
        if (moq_text_equal_folded(text, KV_FACTS[kv].name)) {
            *out = (moq_kv)kv;
            return true;
        }
    }
    return false;
}

const char *moq_algo_hint(moq_text text, char *buffer, size_t size) {
    moq_nearest nearest;
    moq_nearest_begin(&nearest, text);
    for (int algo = MOQ_ALGO_NONE + 1; algo < MOQ_ALGO_COUNT; algo++) {
        const moq_algo_facts *facts = &FACTS[algo];
        moq_nearest_try(&nearest, facts->name, facts->name);
        for (int i = 0; i < MOQ_ALIASES_MAX && facts->aliases[i]; i++)
            moq_nearest_try(&nearest, facts->aliases[i], facts->name);
    }
    return moq_nearest_hint(&nearest, buffer, size);
}

const char *moq_kv_hint(moq_text text, char *buffer, size_t size) {
    moq_nearest nearest;
    moq_nearest_begin(&nearest, text);
    for (int kv = MOQ_KV_NONE + 1; kv < MOQ_KV_COUNT; kv++)
        moq_nearest_try(&nearest, KV_FACTS[kv].name, KV_FACTS[kv].name);
    return moq_nearest_hint(&nearest, buffer, size);
}

const char *moq_algo_name(moq_algo algo) {
    return FACTS[algo].name;
}

const char *moq_kv_name(moq_kv kv) {
    return KV_FACTS[kv].name;
}

bool moq_kv_has_method(moq_kv kv) {
    return KV_FACTS[kv].has_method;
}

const char *moq_family_name(moq_family family) {
    switch (family) {
    case MOQ_FAMILY_FP8:
        return "modelopt";
    case MOQ_FAMILY_FP4:
        return "modelopt_fp4";
    case MOQ_FAMILY_MXFP8:
        return "modelopt_mxfp8";
    case MOQ_FAMILY_MIXED:
        return "modelopt_mixed";
    case MOQ_FAMILY_NONE:
        break;
    }
    return NULL;
}

moq_family moq_algo_family(moq_algo algo) {
    return FACTS[algo].family;
}

int64_t moq_algo_default_group(moq_algo algo) {
    return FACTS[algo].group;
}

/* Appends a name to a list that ends in its NUL. */
static void add_name(const char *name, char *list, size_t size) {
    size_t used = strlen(list);
    snprintf(list + used, size - used, "%s%s", used ? ", " : "", name);
}

const char *moq_algo_list(bool (*accepts)(const moq_algo_facts *), char *buffer, size_t size) {
    buffer[0] = '\0';
    for (int algo = MOQ_ALGO_NONE + 1; algo < MOQ_ALGO_COUNT; algo++) {
        if (!accepts || accepts(&FACTS[algo]))
            add_name(FACTS[algo].name, buffer, size);
    }
    return buffer;
}

const char *moq_kv_list(char *buffer, size_t size) {
    buffer[0] = '\0';
    for (int kv = MOQ_KV_NONE + 1; kv < MOQ_KV_COUNT; kv++)
        add_name(KV_FACTS[kv].name, buffer, size);
    return buffer;
}
