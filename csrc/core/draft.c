/* Reading one configuration document: see draft.h. */
#include "core/draft.h"

#include "core/textmap.h"

#include <string.h>

#define GROUP_MAX 65536

void moq_log_setup(moq_log *log, moq_arena *arena) {
    *log = (moq_log){.arena = arena};
    log->last = &log->first;
}

static moq_status add_remark(moq_log *log, const moq_conflict *conflict, moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(log->arena, 1, sizeof(moq_remark), &memory, err));
    moq_remark *remark = memory;
    remark->conflict = *conflict;
    *log->last = remark;
    log->last = &remark->next;
    return MOQ_OK;
}

moq_status moq_log_conflict(moq_log *log, const moq_conflict *conflict, moq_err *err) {
    log->conflicts++;
    return add_remark(log, conflict, err);
}

moq_status moq_log_note(moq_log *log, moq_text note, moq_err *err) {
    log->notes++;
    return add_remark(log, &(moq_conflict){.field = note}, err);
}

/* A field, with its place for messages; value is NULL when it is absent. */
typedef struct {
    const moq_value *value;
    moq_path path;
} field;

static moq_path member_path(const moq_path *up, const char *key) {
    return (moq_path){.up = up, .key = {key, strlen(key)}};
}

/* Looks beside the other fields first, then, in a nested document, next to `quantization`. */
static field find(const moq_draft *draft, const char *key) {
    field found = {moq_value_member(draft->inner, key), member_path(draft->inner_path, key)};
    if (!found.value && draft->nested && moq_value_member(draft->outer, key))
        found = (field){moq_value_member(draft->outer, key), member_path(draft->outer_path, key)};
    return found;
}

/* The field that find() finds, absent where its value is null. */
static field find_present(const moq_draft *draft, const char *key) {
    field found = find(draft, key);
    if (found.value && found.value->kind == MOQ_NULL)
        found.value = NULL;
    return found;
}

static moq_status refuse(const moq_path *path, const moq_value *found, const char *expected,
                         moq_err *err) {
    char text[300];
    return moq_fail_at(err, path, "expected %s, found %s", expected,
                       moq_value_describe(found, text, sizeof text));
}

static moq_status copy_path(moq_arena *arena, const moq_path *path, const char **out,
                            moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(arena, 1, sizeof err->path, &memory, err));
    moq_path_print(path, memory, sizeof err->path);
    *out = memory;
    return MOQ_OK;
}

moq_status moq_draft_open(const moq_document *document, moq_draft *draft, moq_err *err) {
    const moq_value *top = &document->value;
    *draft = (moq_draft){
        .document = document, .has_zero_point = MOQ_UNSAID, .pre_quant_scale = MOQ_UNSAID};
    draft->root =
        (moq_path){.key = {document->root, strlen(document->root)}, .file = document->file};
    draft->outer_path = &draft->root;
    if (top->kind != MOQ_OBJECT)
        return refuse(&draft->root, top, "an object", err);
    const moq_value *wrapped = moq_value_present(top, "quantization_config");
    if (wrapped && !moq_value_member(top, "quant_algo") && !moq_value_member(top, "quantization")) {
        draft->wrapper = member_path(&draft->root, "quantization_config");
        draft->outer_path = &draft->wrapper;
        if (wrapped->kind != MOQ_OBJECT)
            return refuse(&draft->wrapper, wrapped, "an object", err);
        top = wrapped;
    }
    draft->outer = draft->inner = top;
    draft->inner_path = draft->outer_path;
    const moq_value *nested = moq_value_member(top, "quantization");
    if (nested) {
        draft->nest = member_path(draft->outer_path, "quantization");
        if (nested->kind != MOQ_OBJECT)
            return refuse(&draft->nest, nested, "an object", err);
        draft->nested = true;
        draft->inner = nested;
        draft->inner_path = &draft->nest;
    }
    return MOQ_OK;
}

moq_status moq_fail_no_algo(moq_err *err, const moq_path *path) {
    char names[MOQ_ALGO_LIST_SIZE];
    return moq_fail_at(err, path, "missing; recognised are %s",
                       moq_algo_list(NULL, names, sizeof names));
}

static moq_status read_algo(const moq_value *value, const moq_path *path, moq_algo *out,
                            moq_err *err) {
    bool named = value->kind == MOQ_STRING;
    if (named && moq_algo_parse(value->as.text, out))
        return MOQ_OK;
    char text[300], names[MOQ_ALGO_LIST_SIZE], hint[64];
    return moq_fail_at(err, path, "%s quantization algorithm %s; recognised are %s (in any case)%s",
                       named ? "unknown" : "expected the name of a",
                       moq_value_describe(value, text, sizeof text),
                       moq_algo_list(NULL, names, sizeof names),
                       named ? moq_algo_hint(value->as.text, hint, sizeof hint) : "");
}

static moq_status read_kv(const moq_value *value, const moq_path *path, moq_kv *out, moq_err *err) {
    bool named = value->kind == MOQ_STRING;
    if (named && moq_kv_parse(value->as.text, out))
        return MOQ_OK;
    char text[300], names[64], hint[64];
    return moq_fail_at(err, path, "%s KV-cache algorithm %s; recognised are %s (in any case)%s",
                       named ? "unknown" : "expected the name of a",
                       moq_value_describe(value, text, sizeof text),
                       moq_kv_list(names, sizeof names),
                       named ? moq_kv_hint(value->as.text, hint, sizeof hint) : "");
}

/* kv_cache_scheme: a name, or {"type": "float" | "int", "num_bits": 8 | 4}. */
static moq_status read_kv_scheme(const moq_value *value, const moq_path *path, moq_kv *out,
                                 moq_err *err) {
    if (value->kind == MOQ_STRING)
        return read_kv(value, path, out, err);
    const moq_value *type = moq_value_present(value, "type");
    const moq_value *bits = moq_value_present(value, "num_bits");
    const bool is_float =
        type && type->kind == MOQ_STRING && moq_text_equal_folded(type->as.text, "float");
    const bool is_int =
        type && type->kind == MOQ_STRING && moq_text_equal_folded(type->as.text, "int");
    const int64_t width = bits && bits->kind == MOQ_INT ? bits->as.integer : 0;
    if (is_float && width == 8)
        *out = MOQ_KV_FP8;
    else if (is_float && width == 4)
        *out = MOQ_KV_NVFP4;
    else if (is_int && width == 8)
        *out = MOQ_KV_INT8;
    else if (value->kind != MOQ_OBJECT)
        return refuse(path, value, "a name or an object with type and num_bits", err);
    else
        return moq_fail_at(err, path,
                           "no KV-cache algorithm has this type and num_bits; expected float with "
                           "8 or 4 bits, or int with 8");
    return MOQ_OK;
}

/* A positive count; an integral float or a string of digits will do, as int() takes them. */
static moq_status read_group(const moq_value *value, const moq_path *path, int64_t *out,
                             moq_err *err) {
    int64_t size = 0;
    if (value->kind == MOQ_INT) {
        size = value->as.integer;
    } else if (value->kind == MOQ_FLOAT && value->as.real >= 1 && value->as.real <= GROUP_MAX &&
               value->as.real == (double)(int64_t)value->as.real) {
        size = (int64_t)value->as.real;
    } else if (value->kind == MOQ_STRING && value->as.text.size > 0 && value->as.text.size <= 5) {
        for (size_t i = 0; i < value->as.text.size; i++) {
            const char digit = value->as.text.data[i];
            if (digit < '0' || digit > '9')
                return refuse(path, value, "a positive integer", err);
            size = size * 10 + (digit - '0');
        }
    }
    if (size < 1 || size > GROUP_MAX)
        return refuse(path, value, "an integer from 1 to 65536", err);
    *out = size;
    return MOQ_OK;
}

static moq_status read_flag(const moq_draft *draft, const char *key, moq_flag *out, moq_err *err) {
    const field found = find_present(draft, key);
    if (!found.value)
        return MOQ_OK;
    if (found.value->kind != MOQ_BOOL)
        return refuse(&found.path, found.value, "true or false", err);
    *out = found.value->as.truth ? MOQ_YES : MOQ_NO;
    return MOQ_OK;
}

/* Some exports of hybrid models leave a name-reversal marker, ".\0" and what follows, at the end of
 * a name; a wildcard after it still counts. */
static moq_status clean_name(moq_arena *arena, moq_text name, moq_text *out, moq_err *err) {
    *out = name;
    const size_t cut = moq_text_find(name, (moq_text){".\0", 2});
    if (cut == SIZE_MAX)
        return MOQ_OK;
    const moq_text tail = moq_text_ends(name, MOQ_TEXT(".*"))  ? MOQ_TEXT(".*")
                          : moq_text_ends(name, MOQ_TEXT("*")) ? MOQ_TEXT("*")
                                                               : MOQ_TEXT("");
    void *memory;
    MOQ_TRY(moq_arena_take(arena, cut + tail.size + 1, 1, &memory, err));
    memcpy(memory, name.data, cut);
    memcpy((char *)memory + cut, tail.data, tail.size);
    *out = (moq_text){memory, cut + tail.size};
    return MOQ_OK;
}

/* Names of the exclusion list: the flat shape writes `ignore`, the others `exclude_modules`; the
 * other two are what engines also accept. */
static const char *const *exclude_keys(const moq_draft *draft) {
    static const char *const NESTED[] = {"exclude_modules", "ignore", "modules_to_not_convert",
                                         "ignored_layers", NULL};
    static const char *const FLAT[] = {"ignore", "exclude_modules", "modules_to_not_convert",
                                       "ignored_layers", NULL};
    return draft->nested ? NESTED : FLAT;
}

static moq_status read_names(moq_arena *arena, const field *list, moq_text **out, size_t *count,
                             moq_err *err) {
    if (list->value->kind != MOQ_LIST)
        return refuse(&list->path, list->value, "a list of module names", err);
    const size_t size = list->value->as.list.count;
    void *memory;
    moq_textmap seen;
    MOQ_TRY(moq_arena_take(arena, size, sizeof **out, &memory, err));
    MOQ_TRY(moq_textmap_setup(&seen, arena, size, err));
    *out = memory;
    *count = 0;
    for (size_t i = 0; i < size; i++) {
        const moq_value *item = &list->value->as.list.items[i];
        const moq_path path = {.up = &list->path, .index = i};
        if (item->kind != MOQ_STRING)
            return refuse(&path, item, "a module name", err);
        MOQ_TRY(clean_name(arena, item->as.text, &(*out)[*count], err));
        if (moq_textmap_insert(&seen, (*out)[*count], (uint32_t)i) == (uint32_t)i)
            ++*count; /* lists of older exports name lm_head twice */
    }
    return MOQ_OK;
}

static bool same_names(const moq_text *a, const moq_text *b, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!moq_text_equal(a[i], b[i]))
            return false;
    }
    return true;
}

static moq_status note_second_list(moq_log *log, const moq_draft *draft, const char *chosen,
                                   const char *other, moq_err *err) {
    return moq_log_conflict(log,
                            &(moq_conflict){.field = MOQ_TEXT("exclude_modules"),
                                            .chosen = {chosen, strlen(chosen)},
                                            .other = {other, strlen(other)},
                                            .chosen_file = draft->document->file,
                                            .other_file = draft->document->file},
                            err);
}

static moq_status read_exclude(moq_log *log, moq_draft *draft, moq_err *err) {
    const char *chosen = NULL;
    for (const char *const *key = exclude_keys(draft); *key; key++) {
        const field found = find_present(draft, *key);
        if (!found.value)
            continue;
        moq_text *names = NULL;
        size_t count = 0;
        MOQ_TRY(read_names(log->arena, &found, &names, &count, err));
        if (!chosen) {
            chosen = *key;
            draft->exclude_stated = true;
            draft->exclude = names;
            draft->exclude_count = count;
            MOQ_TRY(copy_path(log->arena, &found.path, &draft->exclude_path, err));
        } else if (count != draft->exclude_count || !same_names(names, draft->exclude, count)) {
            MOQ_TRY(note_second_list(log, draft, chosen, *key, err));
        }
    }
    return MOQ_OK;
}

static moq_status read_layer(moq_arena *arena, const moq_member *member, const moq_path *up,
                             moq_layer_entry *out, moq_err *err) {
    const moq_path path = {.up = up, .key = member->key};
    const moq_path algo_path = member_path(&path, "quant_algo");
    const moq_path group_path = member_path(&path, "group_size");
    if (member->value.kind != MOQ_OBJECT)
        return refuse(&path, &member->value, "an object with quant_algo", err);
    const moq_value *algo = moq_value_member(&member->value, "quant_algo");
    if (!algo)
        return moq_fail_no_algo(err, &algo_path);
    out->algo = MOQ_ALGO_NONE;
    if (algo->kind != MOQ_NULL)
        MOQ_TRY(read_algo(algo, &algo_path, &out->algo, err));
    if (out->algo == MOQ_ALGO_MIXED_PRECISION)
        return moq_fail_at(err, &algo_path, "MIXED_PRECISION is not the algorithm of a layer");
    out->group_size = moq_algo_default_group(out->algo);
    const moq_value *group = moq_value_present(&member->value, "group_size");
    if (group && out->group_size > 0)
        MOQ_TRY(read_group(group, &group_path, &out->group_size, err));
    return clean_name(arena, member->key, &out->name, err);
}

static moq_status read_layers(moq_arena *arena, moq_draft *draft, moq_err *err) {
    const field found = find_present(draft, "quantized_layers");
    if (!found.value)
        return MOQ_OK;
    if (found.value->kind != MOQ_OBJECT)
        return refuse(&found.path, found.value, "an object of layers", err);
    const size_t size = found.value->as.object.count;
    void *memory;
    moq_textmap seen;
    MOQ_TRY(moq_arena_take(arena, size, sizeof *draft->layers, &memory, err));
    MOQ_TRY(moq_textmap_setup(&seen, arena, size, err));
    draft->layers = memory;
    MOQ_TRY(copy_path(arena, &found.path, &draft->layers_path, err));
    for (size_t i = 0; i < size; i++) {
        const moq_member *member = &found.value->as.object.members[i];
        moq_layer_entry *entry = &draft->layers[draft->layer_count];
        MOQ_TRY(read_layer(arena, member, &found.path, entry, err));
        uint32_t first = moq_textmap_insert(&seen, entry->name, (uint32_t)draft->layer_count);
        const moq_path path = {.up = &found.path, .key = member->key};
        if (first == draft->layer_count)
            draft->layer_count++;
        else if (draft->layers[first].algo != entry->algo ||
                 draft->layers[first].group_size != entry->group_size)
            return moq_fail_at(err, &path, "listed a second time, as %s and not %s",
                               moq_algo_name(entry->algo),
                               moq_algo_name(draft->layers[first].algo));
    }
    return MOQ_OK;
}

/* The nested shape states the KV algorithm by kv_cache_quant_algo, the flat one by kv_cache_scheme;
 * each may carry the other's field. */
static moq_status read_kv_fields(moq_log *log, moq_draft *draft, moq_err *err) {
    const field name = find(draft, "kv_cache_quant_algo");
    const field scheme = find(draft, "kv_cache_scheme");
    moq_kv by_name = MOQ_KV_NONE, by_scheme = MOQ_KV_NONE;
    const bool named = name.value && name.value->kind != MOQ_NULL;
    const bool schemed = scheme.value && scheme.value->kind != MOQ_NULL;
    if (named)
        MOQ_TRY(read_kv(name.value, &name.path, &by_name, err));
    if (schemed)
        MOQ_TRY(read_kv_scheme(scheme.value, &scheme.path, &by_scheme, err));
    draft->kv_stated = name.value || scheme.value;
    const bool by_scheme_first = schemed && (!draft->nested || !named);
    draft->kv = by_scheme_first ? by_scheme : by_name;
    if (!named || !schemed || by_name == by_scheme)
        return MOQ_OK;
    /* A 4-bit scheme does not say whether a bias goes with it. */
    if (by_name == MOQ_KV_NVFP4_AFFINE && by_scheme == MOQ_KV_NVFP4) {
        draft->kv = by_name;
        return MOQ_OK;
    }
    const char *chosen = moq_kv_name(draft->kv);
    const char *other = moq_kv_name(by_scheme_first ? by_name : by_scheme);
    return moq_log_conflict(log,
                            &(moq_conflict){.field = MOQ_TEXT("kv_cache_quant_algo"),
                                            .chosen = {chosen, strlen(chosen)},
                                            .other = {other, strlen(other)},
                                            .chosen_file = draft->document->file,
                                            .other_file = draft->document->file},
                            err);
}

/* config_groups describes and does not decide, with two exceptions: the group size of the weights
 * where no field says it, and whether activations are quantized at all. */
static moq_status read_groups(moq_draft *draft, moq_err *err) {
    const field groups = find_present(draft, "config_groups");
    if (!groups.value)
        return MOQ_OK;
    if (groups.value->kind != MOQ_OBJECT)
        return refuse(&groups.path, groups.value, "an object of groups", err);
    draft->weight_only = groups.value->as.object.count > 0;
    int64_t shared = 0;
    for (size_t i = 0; i < groups.value->as.object.count; i++) {
        const moq_member *group = &groups.value->as.object.members[i];
        const moq_path path = {.up = &groups.path, .key = group->key};
        const moq_path weights_path = member_path(&path, "weights");
        const moq_path size_path = member_path(&weights_path, "group_size");
        if (group->value.kind != MOQ_OBJECT)
            return refuse(&path, &group->value, "an object", err);
        if (moq_value_present(&group->value, "input_activations"))
            draft->weight_only = false;
        const moq_value *weights = moq_value_present(&group->value, "weights");
        const moq_value *size = moq_value_present(weights, "group_size");
        int64_t own;
        if (!size || draft->algo == MOQ_ALGO_MIXED_PRECISION)
            continue;
        MOQ_TRY(read_group(size, &size_path, &own, err));
        if (draft->group_size == 0 && shared > 0 && own != shared)
            return refuse(&size_path, size, "one group size for all groups", err);
        shared = own;
    }
    if (draft->group_size == 0)
        draft->group_size = shared;
    return MOQ_OK;
}

/* Text of a field that only informs; other kinds of value are passed over. */
static moq_text text_of(const moq_value *object, const char *key) {
    const moq_value *value = moq_value_present(object, key);
    return value && value->kind == MOQ_STRING ? value->as.text : (moq_text){0};
}

/* Layers of a model whose maker stored it in 128 x 128 FP8 blocks, and of which ModelOpt
 * requantized only some. */
static moq_status read_native(moq_draft *draft, moq_err *err) {
    const field shape = find_present(draft, "weight_block_size");
    const field method = find(draft, "quant_method");
    if (!shape.value)
        return moq_fail_at(err, &method.path,
                           "quant_method fp8 beside a ModelOpt algorithm needs weight_block_size");
    const moq_value *items = shape.value->kind == MOQ_LIST ? shape.value->as.list.items : NULL;
    if (!items || shape.value->as.list.count != 2 || items[0].kind != MOQ_INT ||
        items[1].kind != MOQ_INT || items[0].as.integer != 128 || items[1].as.integer != 128)
        return refuse(&shape.path, shape.value, "[128, 128]", err);
    draft->native_algo = MOQ_ALGO_FP8_PB_WO;
    return MOQ_OK;
}

static moq_status read_origin(moq_draft *draft, moq_err *err) {
    const field method = find_present(draft, "quant_method");
    const field producer = find_present(draft, "producer");
    if (method.value && method.value->kind != MOQ_STRING)
        return refuse(&method.path, method.value, "a string", err);
    draft->quant_method = method.value ? method.value->as.text : (moq_text){0};
    draft->producer_name = text_of(producer.value, "name");
    draft->producer_version = text_of(producer.value, "version");
    if (!method.value || moq_text_starts_folded(draft->quant_method, "modelopt"))
        return MOQ_OK;
    const bool ours = find_present(draft, "quant_algo").value &&
                      (moq_text_equal_folded(draft->producer_name, "modelopt") ||
                       find_present(draft, "moe_quant_algo").value);
    draft->foreign = !ours || !moq_text_equal_folded(draft->quant_method, "fp8");
    return draft->foreign ? MOQ_OK : read_native(draft, err);
}

moq_status moq_draft_read(moq_log *log, const moq_document *document, moq_draft *draft,
                          moq_err *err) {
    MOQ_TRY(moq_draft_open(document, draft, err));
    MOQ_TRY(read_origin(draft, err));
    if (draft->foreign)
        return MOQ_OK;
    const field algo = find(draft, "quant_algo");
    const field moe = find_present(draft, "moe_quant_algo");
    const field group = find_present(draft, "group_size");
    draft->algo_stated = algo.value != NULL;
    if (algo.value && algo.value->kind != MOQ_NULL)
        MOQ_TRY(read_algo(algo.value, &algo.path, &draft->algo, err));
    if (moe.value)
        MOQ_TRY(read_algo(moe.value, &moe.path, &draft->moe_algo, err));
    if (group.value)
        MOQ_TRY(read_group(group.value, &group.path, &draft->group_size, err));
    MOQ_TRY(read_flag(draft, "has_zero_point", &draft->has_zero_point, err));
    MOQ_TRY(read_flag(draft, "pre_quant_scale", &draft->pre_quant_scale, err));
    MOQ_TRY(read_kv_fields(log, draft, err));
    MOQ_TRY(read_groups(draft, err));
    MOQ_TRY(read_exclude(log, draft, err));
    return read_layers(log->arena, draft, err);
}
