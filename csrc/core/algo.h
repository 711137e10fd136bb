/* The algorithms a ModelOpt configuration may name, and all facts of each: one table, which the
 * reader, the operations and, through `_C.algorithms()`, the Python package take them from.
 *
 * Exporters write some names in lower case or under a second name (an internal constant, an
 * engine's spelling); all are read without regard to case and named canonically afterwards. */
#ifndef MOQ_CORE_ALGO_H
#define MOQ_CORE_ALGO_H

#include "core/tensor.h"
#include "core/value.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    MOQ_ALGO_NONE, /* not quantized */
    MOQ_ALGO_FP8,
    MOQ_ALGO_FP8_PER_CHANNEL_PER_TOKEN,
    MOQ_ALGO_FP8_PB_WO,
    MOQ_ALGO_NVFP4,
    MOQ_ALGO_NVFP4_AWQ,
    MOQ_ALGO_NVFP4_SVD,
    MOQ_ALGO_W4A16_NVFP4,
    MOQ_ALGO_W4A8_NVFP4_FP8,
    MOQ_ALGO_MXFP4,
    MOQ_ALGO_W4A8_MXFP4_FP8,
    MOQ_ALGO_MXFP8,
    MOQ_ALGO_W4A16_AWQ,
    MOQ_ALGO_W4A8_AWQ,
    MOQ_ALGO_W8A8_SQ_PER_CHANNEL,
    MOQ_ALGO_W8A16,
    MOQ_ALGO_MIXED_PRECISION, /* of a whole checkpoint only: each layer has its own */
    MOQ_ALGO_COUNT
} moq_algo;

typedef enum {
    MOQ_KV_NONE,
    MOQ_KV_FP8,
    MOQ_KV_INT8,
    MOQ_KV_NVFP4,
    MOQ_KV_NVFP4_AFFINE,
    MOQ_KV_COUNT
} moq_kv;

/* The method that is meant, of those an engine has for ModelOpt checkpoints. */
typedef enum {
    MOQ_FAMILY_NONE,
    MOQ_FAMILY_FP8,   /* "modelopt" */
    MOQ_FAMILY_FP4,   /* "modelopt_fp4" */
    MOQ_FAMILY_MXFP8, /* "modelopt_mxfp8" */
    MOQ_FAMILY_MIXED  /* "modelopt_mixed" */
} moq_family;

/* The form in which the codes of a weight [N, K] are stored. */
typedef enum {
    MOQ_STORED_NONE, /* there is no weight of such an algorithm */
    MOQ_STORED_E4M3, /* [N, K] */
    MOQ_STORED_E2M1, /* [N, K / 2], columns 2j (low nibble) and 2j + 1 in a byte */
    MOQ_STORED_INT4, /* [N / 2, K], rows 2i (low nibble) and 2i + 1 in a byte */
    MOQ_STORED_INT8  /* [N, K] */
} moq_stored_codes;

/* The part of a weight that shares a value of weight_scale. */
typedef enum {
    MOQ_SCALES_TENSOR, /* the weight */
    MOQ_SCALES_ROWS,   /* a row */
    MOQ_SCALES_BLOCKS, /* a square of `group` rows and columns; edge blocks are smaller */
    MOQ_SCALES_GROUPS  /* `group` neighbours along K */
} moq_scale_layout;

/* The meaning of weight_scale_2. */
typedef enum {
    MOQ_SECOND_NONE,
    MOQ_SECOND_FACTOR, /* multiplies the weight */
    MOQ_SECOND_PARTS, /* multiplies it, and equal parts of an expert's outputs may have their own */
    MOQ_SECOND_UNUSED /* no part of the weight: the FP8 scale of W4A8_AWQ's GEMM */
} moq_second_level;

/* The presence of an input_scale in a layer. */
typedef enum {
    MOQ_STATIC_NONE,    /* its activations are not quantized, or by what they are */
    MOQ_STATIC_MAYBE,   /* with it or without */
    MOQ_STATIC_EXPECTED /* a calibrated checkpoint has one */
} moq_static_input;

/* The treatment that a linear gives its activations. */
typedef enum {
    MOQ_INPUT_AS_IS,       /* activations are not quantized */
    MOQ_INPUT_E4M3_TENSOR, /* one scale: the layer's input_scale, or amax / 448 without one */
    MOQ_INPUT_E4M3_TOKEN,  /* one scale per row of x, from its amax */
    MOQ_INPUT_E4M3_GROUP,  /* one scale per row and 128 columns */
    MOQ_INPUT_NVFP4,       /* e2m1 codes, e4m3 scale per 16 columns, second-level input_scale */
    MOQ_INPUT_INT8         /* the layer's input_scale, or one scale per row of x without one */
} moq_input_mode;

/* True for treatments that use a layer's input_scale. */
static inline bool moq_input_has_scale(moq_input_mode input) {
    return input == MOQ_INPUT_E4M3_TENSOR || input == MOQ_INPUT_NVFP4 || input == MOQ_INPUT_INT8;
}

enum { MOQ_ALIASES_MAX = 3 };

typedef struct {
    const char *name; /* canonical; NULL for MOQ_ALGO_NONE */
    const char *aliases[MOQ_ALIASES_MAX];
    moq_family family;
    moq_stored_codes codes;
    moq_scale_layout scales;
    moq_dtype scale_dtype; /* of weight_scale; F32 stands for every float, and e8m0 for blocks */
    moq_second_level second;
    int32_t group;     /* values along K that share a scale, where a file does not say; 0: all */
    int32_t groups[2]; /* the sizes there are, in rising order; 0 for no further one, or for any */
    bool pre_quant_scale; /* factors for the activations; a producer may fold them into a norm */
    bool low_rank;        /* lora_a and lora_b, which linears alone have */
    moq_static_input input_scale;
    float input_max; /* input_scale = amax of the activations / input_max; 0 where there is none */
    moq_input_mode input; /* of a linear with compute "exact" */
    bool by_token;        /* and where there is no input_scale, x has one scale a row */
} moq_algo_facts;

/* True for an algorithm of weights, which runs as linears: all but MOQ_ALGO_MIXED_PRECISION. */
static inline bool moq_algo_has_weight(const moq_algo_facts *facts) {
    return facts->codes != MOQ_STORED_NONE;
}

/* The facts of any algorithm; those of MOQ_ALGO_NONE are all zero. */
const moq_algo_facts *moq_algo_facts_of(moq_algo algo);
/* True if `group` is a size of groups or blocks that the algorithm has; 0 where it has neither. */
bool moq_algo_takes_group(const moq_algo_facts *facts, int64_t group);
/* Names the sizes of groups, for a message: "16 or 32", "128", "any", "none". `size` of 32 is
 * enough. */
const char *moq_algo_groups_text(const moq_algo_facts *facts, char *buffer, size_t size);

/* False when the text names no algorithm. MOQ_ALGO_NONE has no name. */
bool moq_algo_parse(moq_text text, moq_algo *out);
bool moq_kv_parse(moq_text text, moq_kv *out);
/* "; did you mean NVFP4?" for a text that names none but nearly does, else ""; `size` of 64 is
 * enough. */
const char *moq_algo_hint(moq_text text, char *buffer, size_t size);
const char *moq_kv_hint(moq_text text, char *buffer, size_t size);
/* Canonical name; NULL for NONE. */
const char *moq_algo_name(moq_algo algo);
const char *moq_kv_name(moq_kv kv);
/* True if there is a method for the cache. */
bool moq_kv_has_method(moq_kv kv);
const char *moq_family_name(moq_family family);
moq_family moq_algo_family(moq_algo algo);
/* Elements along K that share a scale when a file does not say; 0 where there are no groups. */
int64_t moq_algo_default_group(moq_algo algo);

#define MOQ_ALGO_LIST_SIZE 320
/* The canonical names that `accepts` takes, or all of them, comma-separated, for messages;
 * `size` of MOQ_ALGO_LIST_SIZE is enough. */
const char *moq_algo_list(bool (*accepts)(const moq_algo_facts *), char *buffer, size_t size);
/* The names of all KV-cache algorithms, comma-separated; `size` of 64 is enough. */
const char *moq_kv_list(char *buffer, size_t size);

#ifdef __cplusplus
}
#endif
#endif
