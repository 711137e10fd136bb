/* Merging configuration documents, and what must hold across fields: see config.h. */
#include "core/config.h"

#include "core/draft.h"
#include "core/textmap.h"

#include <inttypes.h>
#include <string.h>

typedef struct {
    moq_log log;
    moq_draft *drafts; /* those that are read, in order of precedence */
    size_t count;
    moq_config *out;
} merger;

static moq_text plain(const char *text) {
    return (moq_text){text, strlen(text)};
}

static moq_status conflict(merger *m, const char *what, moq_text chosen, const moq_draft *by,
                           moq_text other, const moq_draft *against, moq_err *err) {
    return moq_log_conflict(&m->log,
                            &(moq_conflict){.field = plain(what),
                                            .chosen = chosen,
                                            .other = other,
                                            .chosen_file = by->document->file,
                                            .other_file = against->document->file},
                            err);
}

static moq_text algo_text(moq_algo algo) {
    return plain(algo == MOQ_ALGO_NONE ? "null" : moq_algo_name(algo));
}

static moq_text kv_text(moq_kv kv) {
    return plain(kv == MOQ_KV_NONE ? "null" : moq_kv_name(kv));
}

/* The statement of a document about one field, as canonical text; data stays NULL where it says
 * nothing. */
typedef moq_status (*say_field)(merger *m, const moq_draft *draft, moq_text *out, moq_err *err);

static moq_status say_algo(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    if (draft->algo_stated)
        *out = algo_text(draft->algo);
    return MOQ_OK;
}

static moq_status say_kv(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    if (draft->kv_stated)
        *out = kv_text(draft->kv);
    return MOQ_OK;
}

static moq_status say_group(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    if (draft->group_size == 0)
        return MOQ_OK;
    return moq_text_print(m->log.arena, out, err, "%" PRId64, draft->group_size);
}

static moq_text flag_text(moq_flag flag) {
    return flag == MOQ_UNSAID ? (moq_text){0} : plain(flag == MOQ_YES ? "true" : "false");
}

static moq_status say_zero_point(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    *out = flag_text(draft->has_zero_point);
    return MOQ_OK;
}

static moq_status say_pre_quant(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    *out = flag_text(draft->pre_quant_scale);
    return MOQ_OK;
}

static moq_status say_method(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    *out = draft->quant_method;
    return MOQ_OK;
}

static moq_status say_producer(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    *out = draft->producer_name;
    return MOQ_OK;
}

static moq_status say_version(merger *m, const moq_draft *draft, moq_text *out, moq_err *err) {
    (void)m, (void)err;
    *out = draft->producer_version;
    return MOQ_OK;
}

/* The first draft that states a field, NULL when none does; each later one that says otherwise is a
 * conflict. */
static moq_status merge_field(merger *m, const char *name, say_field say, const moq_draft **by,
                              moq_err *err) {
    moq_text chosen = {0};
    *by = NULL;
    for (size_t i = 0; i < m->count; i++) {
        moq_text said = {0};
        MOQ_TRY(say(m, &m->drafts[i], &said, err));
        if (!said.data)
            continue;
        if (!*by) {
            *by = &m->drafts[i];
            chosen = said;
        } else if (!moq_text_equal(said, chosen)) {
            MOQ_TRY(conflict(m, name, chosen, *by, said, &m->drafts[i], err));
        }
    }
    return MOQ_OK;
}

/* The flat shape states the KV algorithm by the mere presence of a scheme, so one document without
 * and one with a KV algorithm is a disagreement; the gap is filled all the same. */
static moq_status report_absent_kv(merger *m, const moq_draft *by, moq_err *err) {
    for (size_t i = 0; i < m->count && by && by->kv != MOQ_KV_NONE; i++) {
        if (!m->drafts[i].kv_stated && m->drafts[i].algo_stated)
            MOQ_TRY(conflict(m, "kv_cache_quant_algo", kv_text(by->kv), by, plain("absent"),
                             &m->drafts[i], err));
    }
    return MOQ_OK;
}

/* Index of a name of `b` that `a` lacks; SIZE_MAX when there is none. */
static moq_status find_missing(moq_arena *arena, const moq_draft *a, const moq_draft *b,
                               size_t *out, moq_err *err) {
    moq_textmap map;
    MOQ_TRY(moq_textmap_setup(&map, arena, a->exclude_count, err));
    for (size_t i = 0; i < a->exclude_count; i++)
        moq_textmap_insert(&map, a->exclude[i], (uint32_t)i);
    *out = SIZE_MAX;
    for (size_t i = 0; i < b->exclude_count && *out == SIZE_MAX; i++) {
        if (moq_textmap_find(&map, b->exclude[i]) == MOQ_TEXTMAP_NONE)
            *out = i;
    }
    return MOQ_OK;
}

/* Describes a list by its length and, where there is one, a name the other list lacks. */
static moq_status describe_list(merger *m, const moq_draft *draft, const moq_draft *against,
                                moq_text *out, moq_err *err) {
    size_t extra;
    MOQ_TRY(find_missing(m->log.arena, against, draft, &extra, err));
    if (extra == SIZE_MAX)
        return moq_text_print(m->log.arena, out, err, "%zu entries", draft->exclude_count);
    return moq_text_print(m->log.arena, out, err, "%zu entries, with '%.*s%s'",
                          draft->exclude_count, MOQ_TEXT_ARGS(draft->exclude[extra]));
}

static moq_status merge_exclude(merger *m, moq_err *err) {
    const moq_draft *by = NULL;
    for (size_t i = 0; i < m->count; i++) {
        const moq_draft *draft = &m->drafts[i];
        size_t missing, extra;
        if (!draft->exclude_stated)
            continue;
        if (!by) {
            by = draft;
            continue;
        }
        MOQ_TRY(find_missing(m->log.arena, draft, by, &missing, err));
        MOQ_TRY(find_missing(m->log.arena, by, draft, &extra, err));
        if (missing != SIZE_MAX || extra != SIZE_MAX) {
            moq_text chosen, other;
            MOQ_TRY(describe_list(m, by, draft, &chosen, err));
            MOQ_TRY(describe_list(m, draft, by, &other, err));
            MOQ_TRY(conflict(m, "exclude_modules", chosen, by, other, draft, err));
        }
    }
    if (by) {
        m->out->exclude = by->exclude;
        m->out->exclude_count = by->exclude_count;
    }
    m->out->exclude_path = by ? by->exclude_path : "$.exclude_modules";
    return MOQ_OK;
}

static moq_status layer_text(merger *m, const moq_draft *draft, const moq_layer_entry *entry,
                             moq_text *out, moq_err *err) {
    if (!entry)
        return moq_text_print(m->log.arena, out, err, "%zu layers", draft->layer_count);
    const moq_text algo = algo_text(entry->algo);
    return moq_text_print(
        m->log.arena, out, err, "%zu layers, with '%.*s%s': %.*s%s, group size %" PRId64,
        draft->layer_count, MOQ_TEXT_ARGS(entry->name), MOQ_TEXT_ARGS(algo), entry->group_size);
}

/* The first entry of `b` that `a` has otherwise or not at all. */
static moq_status find_other_layer(moq_arena *arena, const moq_draft *a, const moq_draft *b,
                                   const moq_layer_entry **out, moq_err *err) {
    moq_textmap map;
    MOQ_TRY(moq_textmap_setup(&map, arena, a->layer_count, err));
    for (size_t i = 0; i < a->layer_count; i++)
        moq_textmap_insert(&map, a->layers[i].name, (uint32_t)i);
    *out = NULL;
    for (size_t i = 0; i < b->layer_count && !*out; i++) {
        const uint32_t at = moq_textmap_find(&map, b->layers[i].name);
        if (at == MOQ_TEXTMAP_NONE || a->layers[at].algo != b->layers[i].algo ||
            a->layers[at].group_size != b->layers[i].group_size)
            *out = &b->layers[i];
    }
    return MOQ_OK;
}

static moq_status merge_layers(merger *m, moq_err *err) {
    const moq_draft *by = NULL;
    for (size_t i = 0; i < m->count; i++) {
        const moq_draft *draft = &m->drafts[i];
        const moq_layer_entry *mine, *theirs;
        if (draft->layer_count == 0)
            continue;
        if (!by) {
            by = draft;
            continue;
        }
        MOQ_TRY(find_other_layer(m->log.arena, draft, by, &mine, err));
        MOQ_TRY(find_other_layer(m->log.arena, by, draft, &theirs, err));
        if (mine || theirs) {
            moq_text chosen, other;
            MOQ_TRY(layer_text(m, by, mine, &chosen, err));
            MOQ_TRY(layer_text(m, draft, theirs, &other, err));
            MOQ_TRY(conflict(m, "quantized_layers", chosen, by, other, draft, err));
        }
    }
    if (by) {
        m->out->layers = by->layers;
        m->out->layer_count = by->layer_count;
    }
    m->out->layers_path = by ? by->layers_path : "$.quantized_layers";
    return MOQ_OK;
}

/* Reads all documents; those of other quantizers are dropped, which is an error when none is left.
 */
static moq_status read_drafts(merger *m, const moq_document *documents, size_t count,
                              moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(m->log.arena, count + 1, sizeof(moq_draft), &memory, err));
    m->drafts = memory;
    const moq_draft *foreign = NULL;
    moq_draft *spare = &m->drafts[count]; /* so that a dropped document keeps a place */
    for (size_t i = 0; i < count; i++) {
        moq_draft *draft = &m->drafts[m->count];
        MOQ_TRY(moq_draft_read(&m->log, &documents[i], draft, err));
        if (!draft->foreign) {
            m->count++;
        } else if (!foreign) {
            MOQ_TRY(moq_draft_read(&m->log, &documents[i], spare, err));
            foreign = spare;
        }
    }
    if (!foreign)
        return MOQ_OK;
    const moq_path path = {.up = foreign->outer_path, .key = MOQ_TEXT("quant_method")};
    if (m->count == 0)
        return moq_fail_at(
            err, &path,
            "'%.*s%s' is not a ModelOpt checkpoint; expected modelopt, modelopt_fp4, "
            "modelopt_mxfp8 or modelopt_mixed",
            MOQ_TEXT_ARGS(foreign->quant_method));
    return conflict(m, "quant_method", plain("modelopt"), &m->drafts[0], foreign->quant_method,
                    foreign, err);
}

/* NVFP4 whose groups all leave the activations alone is weight-only: engines run it so. */
static moq_status apply_weight_only(merger *m, const moq_draft *by, moq_err *err) {
    if (!by || by->algo != MOQ_ALGO_NVFP4 || !by->weight_only)
        return MOQ_OK;
    m->out->algo = MOQ_ALGO_W4A16_NVFP4;
    return moq_log_note(&m->log,
                        MOQ_TEXT("quant_algo NVFP4 read as W4A16_NVFP4: no group of config_groups "
                                 "quantizes activations"),
                        err);
}

static moq_status check_fields(const merger *m, const moq_draft *by, moq_err *err) {
    const moq_draft *first = &m->drafts[0];
    const moq_path algo_path = {.up = (by ? by : first)->inner_path, .key = MOQ_TEXT("quant_algo")};
    const moq_path layers_path = {.up = (by ? by : first)->inner_path,
                                  .key = MOQ_TEXT("quantized_layers")};
    if (!by && m->out->kv == MOQ_KV_NONE)
        return moq_fail_no_algo(err, &algo_path);
    if (m->out->algo == MOQ_ALGO_NONE && m->out->layer_count > 0)
        return moq_fail_at(err, &algo_path,
                           "%s, but quantized_layers lists %zu layers; expected MIXED_PRECISION",
                           by ? "null" : "missing", m->out->layer_count);
    if (m->out->algo == MOQ_ALGO_MIXED_PRECISION && m->out->layer_count == 0)
        return moq_fail_at(err, &layers_path,
                           "MIXED_PRECISION needs an object that lists the quantized layers, found "
                           "none");
    return MOQ_OK;
}

/* A layer listed under its own name stays quantized whatever the patterns say, but not silently. */
static moq_status report_listed_and_excluded(merger *m, moq_err *err) {
    const moq_layer_entry *first = NULL;
    uint32_t pattern = 0;
    size_t count = 0;
    for (size_t i = 0; i < m->out->layer_count; i++) {
        uint32_t id = moq_exclusion_find(m->out->excluded, m->out->layers[i].name);
        if (id == MOQ_NAME_NONE || m->out->layers[i].algo == MOQ_ALGO_NONE)
            continue;
        count++;
        if (!first) {
            first = &m->out->layers[i];
            pattern = id;
        }
    }
    if (!first)
        return MOQ_OK;
    const moq_text algo = algo_text(first->algo);
    moq_text chosen, other;
    MOQ_TRY(moq_text_print(m->log.arena, &chosen, err,
                           "'%.*s%s': %.*s%s, as listed (%zu such layers)",
                           MOQ_TEXT_ARGS(first->name), MOQ_TEXT_ARGS(algo), count));
    MOQ_TRY(moq_text_print(m->log.arena, &other, err, "exclude_modules: '%.*s%s'",
                           MOQ_TEXT_ARGS(m->out->exclude[pattern])));
    return conflict(m, "quantized_layers", chosen, &m->drafts[0], other, &m->drafts[0], err);
}

static moq_status collect_remarks(merger *m, moq_err *err) {
    void *conflicts, *notes;
    MOQ_TRY(moq_arena_take(m->log.arena, m->log.conflicts, sizeof(moq_conflict), &conflicts, err));
    MOQ_TRY(moq_arena_take(m->log.arena, m->log.notes, sizeof(moq_text), &notes, err));
    for (const moq_remark *remark = m->log.first; remark; remark = remark->next) {
        if (remark->conflict.chosen.data)
            ((moq_conflict *)conflicts)[m->out->conflict_count++] = remark->conflict;
        else
            ((moq_text *)notes)[m->out->note_count++] = remark->conflict.field;
    }
    m->out->conflicts = conflicts;
    m->out->notes = notes;
    return MOQ_OK;
}

static moq_status merge_fields(merger *m, moq_err *err) {
    moq_config *out = m->out;
    const moq_draft *by;
    MOQ_TRY(merge_field(m, "kv_cache_quant_algo", say_kv, &by, err));
    MOQ_TRY(report_absent_kv(m, by, err));
    out->kv = by ? by->kv : MOQ_KV_NONE;
    MOQ_TRY(merge_field(m, "group_size", say_group, &by, err));
    out->group_size = by ? by->group_size : 0;
    MOQ_TRY(merge_field(m, "has_zero_point", say_zero_point, &by, err));
    out->has_zero_point = by ? by->has_zero_point : MOQ_UNSAID;
    MOQ_TRY(merge_field(m, "pre_quant_scale", say_pre_quant, &by, err));
    out->pre_quant_scale = by ? by->pre_quant_scale : MOQ_UNSAID;
    MOQ_TRY(merge_field(m, "quant_method", say_method, &by, err));
    out->quant_method = by ? by->quant_method : (moq_text){0};
    MOQ_TRY(merge_field(m, "producer.name", say_producer, &by, err));
    out->producer_name = by ? by->producer_name : (moq_text){0};
    MOQ_TRY(merge_field(m, "producer.version", say_version, &by, err));
    out->producer_version = by ? by->producer_version : (moq_text){0};
    return MOQ_OK;
}

static moq_status merge_all(merger *m, moq_err *err) {
    moq_config *out = m->out;
    const moq_draft *by;
    MOQ_TRY(merge_field(m, "quant_algo", say_algo, &by, err));
    out->algo = by ? by->algo : MOQ_ALGO_NONE;
    MOQ_TRY(merge_fields(m, err));
    MOQ_TRY(merge_exclude(m, err));
    MOQ_TRY(merge_layers(m, err));
    for (size_t i = m->count; i-- > 0;) {
        out->native_algo = m->drafts[i].native_algo ? m->drafts[i].native_algo : out->native_algo;
        out->moe_algo = m->drafts[i].moe_algo ? m->drafts[i].moe_algo : out->moe_algo;
    }
    MOQ_TRY(check_fields(m, by, err));
    MOQ_TRY(apply_weight_only(m, by, err));
    if (out->group_size == 0 || moq_algo_default_group(out->algo) == 0)
        out->group_size = moq_algo_default_group(out->algo);
    return MOQ_OK;
}

moq_status moq_config_read(moq_arena *arena, const moq_document *documents, size_t count,
                           moq_config *out, moq_err *err) {
    merger m = {.out = out};
    moq_log_setup(&m.log, arena);
    *out = (moq_config){.has_zero_point = MOQ_UNSAID, .pre_quant_scale = MOQ_UNSAID};
    if (count == 0)
        return moq_fail_config(err, "$", "no configuration document");
    MOQ_TRY(read_drafts(&m, documents, count, err));
    MOQ_TRY(merge_all(&m, err));
    MOQ_TRY(moq_exclusion_compile(arena, out->exclude, out->exclude_count, &out->excluded, err));
    MOQ_TRY(report_listed_and_excluded(&m, err));
    return collect_remarks(&m, err);
}

static bool is_text(const moq_value *value, const char *text) {
    return value && value->kind == MOQ_STRING && moq_text_equal_folded(value->as.text, text);
}

static bool says_modelopt(const moq_value *outer) {
    const moq_value *method = moq_value_present(outer, "quant_method");
    if (method)
        return method->kind == MOQ_STRING && moq_text_starts_folded(method->as.text, "modelopt");
    return is_text(moq_value_present(moq_value_present(outer, "producer"), "name"), "modelopt") ||
           is_text(moq_value_present(outer, "quant_library"), "modelopt");
}

moq_family moq_config_detect(const moq_value *document) {
    const moq_document wrapped = {.file = "", .root = "$", .value = *document};
    moq_draft draft;
    moq_err ignored;
    if (moq_draft_open(&wrapped, &draft, &ignored) != MOQ_OK || !says_modelopt(draft.outer))
        return MOQ_FAMILY_NONE;
    const moq_value *name = moq_value_present(draft.inner, "quant_algo");
    moq_algo algo;
    if (!name || name->kind != MOQ_STRING || !moq_algo_parse(name->as.text, &algo))
        return MOQ_FAMILY_NONE;
    return moq_algo_family(algo);
}
