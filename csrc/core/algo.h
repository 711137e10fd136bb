/* The names a ModelOpt configuration uses for its algorithms, and what follows from each.
 *
 * Exporters write some names in lower case or under a second name (an internal constant, an
 * engine's spelling); all are read without regard to case and named canonically afterwards. */
#ifndef MOQ_CORE_ALGO_H
#define MOQ_CORE_ALGO_H

#include "core/value.h"

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

/* Which of the methods an engine has for ModelOpt checkpoints is meant. */
typedef enum {
    MOQ_FAMILY_NONE,
    MOQ_FAMILY_FP8,   /* "modelopt" */
    MOQ_FAMILY_FP4,   /* "modelopt_fp4" */
    MOQ_FAMILY_MXFP8, /* "modelopt_mxfp8" */
    MOQ_FAMILY_MIXED  /* "modelopt_mixed" */
} moq_family;

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
const char *moq_family_name(moq_family family);
moq_family moq_algo_family(moq_algo algo);
/* Elements along K that share a scale when a file does not say; 0 where there are no groups. */
int64_t moq_algo_default_group(moq_algo algo);
/* The canonical names, comma-separated, for messages. */
const char *moq_algo_choices(void);
const char *moq_kv_choices(void);

#endif
