/* Algorithm names: see algo.h. */
#include "core/algo.h"

#include "core/formats.h"
#include "core/nearest.h"

typedef struct {
    const char *name;
    moq_family family;
    int group;
} algo_facts;

static const algo_facts FACTS[MOQ_ALGO_COUNT] = {
    [MOQ_ALGO_NONE] = {NULL, MOQ_FAMILY_NONE, 0},
    [MOQ_ALGO_FP8] = {"FP8", MOQ_FAMILY_FP8, 0},
    [MOQ_ALGO_FP8_PER_CHANNEL_PER_TOKEN] = {"FP8_PER_CHANNEL_PER_TOKEN", MOQ_FAMILY_FP8, 0},
    [MOQ_ALGO_FP8_PB_WO] = {"FP8_PB_WO", MOQ_FAMILY_FP8, MOQ_FP8_BLOCK},
    [MOQ_ALGO_NVFP4] = {"NVFP4", MOQ_FAMILY_FP4, MOQ_NVFP4_GROUP},
    [MOQ_ALGO_NVFP4_AWQ] = {"NVFP4_AWQ", MOQ_FAMILY_FP4, MOQ_NVFP4_GROUP},
    [MOQ_ALGO_NVFP4_SVD] = {"NVFP4_SVD", MOQ_FAMILY_FP4, MOQ_NVFP4_GROUP},
    [MOQ_ALGO_W4A16_NVFP4] = {"W4A16_NVFP4", MOQ_FAMILY_FP4, MOQ_NVFP4_GROUP},
    [MOQ_ALGO_W4A8_NVFP4_FP8] = {"W4A8_NVFP4_FP8", MOQ_FAMILY_FP4, MOQ_MX_GROUP},
    [MOQ_ALGO_MXFP4] = {"MXFP4", MOQ_FAMILY_FP4, MOQ_MX_GROUP},
    [MOQ_ALGO_W4A8_MXFP4_FP8] = {"W4A8_MXFP4_FP8", MOQ_FAMILY_FP4, MOQ_MX_GROUP},
    [MOQ_ALGO_MXFP8] = {"MXFP8", MOQ_FAMILY_MXFP8, MOQ_MX_GROUP},
    [MOQ_ALGO_W4A16_AWQ] = {"W4A16_AWQ", MOQ_FAMILY_NONE, MOQ_INT4_GROUP},
    [MOQ_ALGO_W4A8_AWQ] = {"W4A8_AWQ", MOQ_FAMILY_NONE, MOQ_INT4_GROUP},
    [MOQ_ALGO_W8A8_SQ_PER_CHANNEL] = {"W8A8_SQ_PER_CHANNEL", MOQ_FAMILY_NONE, 0},
    [MOQ_ALGO_W8A16] = {"W8A16", MOQ_FAMILY_NONE, 0},
    [MOQ_ALGO_MIXED_PRECISION] = {"MIXED_PRECISION", MOQ_FAMILY_MIXED, 0},
};

/* Other spellings: the exporter's internal constants, and names engines and hand-written files use
 * for the same tensors. */
static const struct {
    const char *name;
    moq_algo algo;
} ALIASES[] = {
    {"FP8_PC_PT", MOQ_ALGO_FP8_PER_CHANNEL_PER_TOKEN},
    {"FP8_PB", MOQ_ALGO_FP8_PB_WO},
    {"FP8_PB_REAL", MOQ_ALGO_FP8_PB_WO},
    {"FP8_BLOCK_SCALES", MOQ_ALGO_FP8_PB_WO},
    {"NVFP4_STATIC", MOQ_ALGO_NVFP4},
    {"NVFP4_SVDQUANT", MOQ_ALGO_NVFP4_SVD},
    {"INT4_AWQ", MOQ_ALGO_W4A16_AWQ},
    {"INT8_SQ", MOQ_ALGO_W8A8_SQ_PER_CHANNEL},
    {"INT8_WO", MOQ_ALGO_W8A16},
};

static const char *const KV_NAMES[MOQ_KV_COUNT] = {
    [MOQ_KV_NONE] = NULL,
    [MOQ_KV_FP8] = "FP8",
    [MOQ_KV_INT8] = "INT8",
    [MOQ_KV_NVFP4] = "NVFP4",
    [MOQ_KV_NVFP4_AFFINE] = "NVFP4_AFFINE",
};

bool moq_algo_parse(moq_text text, moq_algo *out) {
    for (int algo = MOQ_ALGO_NONE + 1; algo < MOQ_ALGO_COUNT; algo++) {
        if (moq_text_equal_folded(text, FACTS[algo].name)) {
            *out = (moq_algo)algo;
            return true;
        }
    }
    for (size_t i = 0; i < sizeof ALIASES / sizeof *ALIASES; i++) {
        if (moq_text_equal_folded(text, ALIASES[i].name)) {
            *out = ALIASES[i].algo;
            return true;
        }
    }
    return false;
}

bool moq_kv_parse(moq_text text, moq_kv *out) {
    for (int kv = MOQ_KV_NONE + 1; kv < MOQ_KV_COUNT; kv++) {
        if (moq_text_equal_folded(text, KV_NAMES[kv])) {
            *out = (moq_kv)kv;
            return true;
        }
    }
    return false;
}

const char *moq_algo_hint(moq_text text, char *buffer, size_t size) {
    moq_nearest nearest;
    moq_nearest_begin(&nearest, text);
    for (int algo = MOQ_ALGO_NONE + 1; algo < MOQ_ALGO_COUNT; algo++)
        moq_nearest_try(&nearest, FACTS[algo].name, FACTS[algo].name);
    for (size_t i = 0; i < sizeof ALIASES / sizeof *ALIASES; i++)
        moq_nearest_try(&nearest, ALIASES[i].name, FACTS[ALIASES[i].algo].name);
    return moq_nearest_hint(&nearest, buffer, size);
}

const char *moq_kv_hint(moq_text text, char *buffer, size_t size) {
    moq_nearest nearest;
    moq_nearest_begin(&nearest, text);
    for (int kv = MOQ_KV_NONE + 1; kv < MOQ_KV_COUNT; kv++)
        moq_nearest_try(&nearest, KV_NAMES[kv], KV_NAMES[kv]);
    return moq_nearest_hint(&nearest, buffer, size);
}

const char *moq_algo_name(moq_algo algo) {
    return FACTS[algo].name;
}

const char *moq_kv_name(moq_kv kv) {
    return KV_NAMES[kv];
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

const char *moq_algo_choices(void) {
    return "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, NVFP4_AWQ, NVFP4_SVD, W4A16_NVFP4, "
           "W4A8_NVFP4_FP8, MXFP4, W4A8_MXFP4_FP8, MXFP8, W4A16_AWQ, W4A8_AWQ, "
           "W8A8_SQ_PER_CHANNEL, W8A16, MIXED_PRECISION";
}

const char *moq_kv_choices(void) {
    return "FP8, INT8, NVFP4, NVFP4_AFFINE";
}
