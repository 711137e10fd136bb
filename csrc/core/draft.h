/* One configuration document, read field by field, before documents are merged.
 *
 * The seven shapes in circulation differ in three ways only: whether the fields stand at the top or
 * under `quantization` (a document may also be a whole config.json), what the exclusion list is
 * called, and how the KV cache is described. All of that is settled here. */
#ifndef MOQ_CORE_DRAFT_H
#define MOQ_CORE_DRAFT_H

#include "core/config.h"

typedef struct moq_remark {
    struct moq_remark *next;
    moq_conflict conflict; /* or a note, in .field, when .chosen.data is NULL */
} moq_remark;

/* Conflicts and notes in the order they were found. */
typedef struct {
    moq_arena *arena;
    moq_remark *first, **last;
    size_t conflicts, notes;
} moq_log;

void moq_log_setup(moq_log *log, moq_arena *arena);
moq_status moq_log_conflict(moq_log *log, const moq_conflict *conflict, moq_err *err);
moq_status moq_log_note(moq_log *log, moq_text note, moq_err *err);

typedef struct {
    const moq_document *document;
    moq_path root, wrapper, nest;
    const moq_path *inner_path;     /* of the mapping that holds the fields */
    const moq_value *inner, *outer; /* outer: where quant_method and producer stand */
    const moq_path *outer_path;
    bool nested;
    bool foreign; /* made by another quantizer; no other field is read */
    bool algo_stated, kv_stated, exclude_stated;
    moq_algo algo, moe_algo, native_algo;
    moq_kv kv;
    int64_t group_size; /* 0: not said */
    moq_flag has_zero_point, pre_quant_scale;
    moq_text *exclude;
    size_t exclude_count;
    const char *exclude_path;
    moq_layer_entry *layers;
    size_t layer_count;
    const char *layers_path;
    moq_text quant_method, producer_name, producer_version;
    bool weight_only; /* config_groups are there, and none quantizes activations */
} moq_draft;

/* `draft` must stay where it is: its paths point into it. */
moq_status moq_draft_read(moq_log *log, const moq_document *document, moq_draft *draft,
                          moq_err *err);
/* Finds the mapping that holds the fields, without reading any. */
moq_status moq_draft_open(const moq_document *document, moq_draft *draft, moq_err *err);
/* Fails at a field that should name an algorithm and is not there. */
moq_status moq_fail_no_algo(moq_err *err, const moq_path *path);

#endif
