/* The quantization of a ModelOpt checkpoint, as its configuration files state it.
 *
 * A configuration is read from one or more documents in order of precedence (config.json's
 * quantization_config, then hf_quant_config.json, then quant_cfg.json). A field comes from the
 * first document that states it; a later one that says otherwise is recorded as a conflict.
 * Anything not understood is a MOQ_ERR_CONFIG failure with the JSON path of the field: a layer is
 * never left unquantized because its algorithm is not known. */
#ifndef MOQ_CORE_CONFIG_H
#define MOQ_CORE_CONFIG_H

#include "core/algo.h"
#include "core/exclude.h"

typedef struct {
    const char *file; /* name for messages and conflicts, or "" */
    const char *root; /* what its JSON paths begin with, e.g. "$" or "$.quantization_config" */
    moq_value value;  /* the mapping */
} moq_document;

/* An entry of quantized_layers. */
typedef struct {
    moq_text name;
    moq_algo algo; /* NONE: listed with a null algorithm */
    int64_t group_size;
} moq_layer_entry;

/* A conflict: two statements that disagree; what was said is spelled as text. */
typedef struct {
    moq_text field, chosen, other;
    const char *chosen_file, *other_file;
} moq_conflict;

typedef enum { MOQ_UNSAID = -1, MOQ_NO = 0, MOQ_YES = 1 } moq_flag;

typedef struct {
    moq_algo algo;
    moq_kv kv;
    int64_t group_size; /* 0: the algorithm has no groups */
    moq_flag has_zero_point, pre_quant_scale;
    const moq_text *exclude;
    size_t exclude_count;
    const char *exclude_path; /* JSON path of the list, for messages */
    moq_exclusion *excluded;  /* the list, compiled */
    const moq_layer_entry *layers;
    size_t layer_count;
    const char *layers_path;
    /* data is NULL where nothing was said */
    moq_text quant_method, producer_name, producer_version;
    moq_algo moe_algo;    /* moe_quant_algo, or NONE */
    moq_algo native_algo; /* of layers ModelOpt left as the model's maker stored them, or NONE */
    const moq_conflict *conflicts;
    size_t conflict_count;
    const moq_text *notes; /* readable remarks on how a field was understood */
    size_t note_count;
} moq_config;

/* Reads the documents into *out, whose text lives in the arena beside that of the documents. */
moq_status moq_config_read(moq_arena *arena, const moq_document *documents, size_t count,
                           moq_config *out, moq_err *err);

/* The family of methods that a single document asks for; NONE for anything that is not ModelOpt's
 * or not understood. */
moq_family moq_config_detect(const moq_value *document);

#endif
