/* The algorithm of one module: see resolve.h. */
#include "core/resolve.h"

#include "core/names.h"
#include "core/textmap.h"

#include <stdio.h>
#include <string.h>

/* The entries of quantized_layers below one expert container. */
typedef struct {
    uint32_t first, different; /* `different` disagrees with `first`, or is NONE */
} expert_group;

struct moq_resolver {
    const moq_config *config;
    moq_textmap written; /* name of an entry of quantized_layers -> its index */
    moq_textmap aligned; /* the same without prefix */
    bool *ambiguous;     /* entries whose aligned name another entry has with another algorithm */
    moq_textmap containers; /* expert container, with and without prefix -> its group */
    expert_group *groups;
    uint32_t group_count;
};

static bool same_layer(const moq_layer_entry *a, const moq_layer_entry *b) {
    return a->algo == b->algo && a->group_size == b->group_size;
}

/* Files an entry under the expert container it lies in. */
static void add_to_container(moq_resolver *resolver, moq_text above, uint32_t id) {
    const moq_layer_entry *entries = resolver->config->layers;
    uint32_t at = moq_textmap_insert(&resolver->containers, above, resolver->group_count);
    expert_group *group = &resolver->groups[at];
    if (at == resolver->group_count) {
        *group = (expert_group){id, MOQ_TEXTMAP_NONE};
        resolver->group_count++;
    } else if (!same_layer(&entries[group->first], &entries[id])) {
        group->different = id;
    }
}

static void add_entry(moq_resolver *resolver, uint32_t id) {
    const moq_layer_entry *entries = resolver->config->layers;
    const moq_text name = entries[id].name, body = moq_name_body(name);
    moq_textmap_insert(&resolver->written, name, id);
    uint32_t first = moq_textmap_insert(&resolver->aligned, body, id);
    if (!same_layer(&entries[first], &entries[id]))
        resolver->ambiguous[first] = true;
    const moq_text container = moq_name_experts_above(name);
    if (container.size == 0)
        return;
    add_to_container(resolver, container, id);
    if (moq_name_body(container).size != container.size)
        add_to_container(resolver, moq_name_body(container), id);
}

moq_status moq_resolver_build(moq_arena *arena, const moq_config *config, moq_resolver **out,
                              moq_err *err) {
    const size_t count = config->layer_count;
    void *memory;
    MOQ_TRY(moq_arena_take(arena, 1, sizeof **out, &memory, err));
    moq_resolver *resolver = memory;
    resolver->config = config;
    MOQ_TRY(moq_textmap_setup(&resolver->written, arena, count, err));
    MOQ_TRY(moq_textmap_setup(&resolver->aligned, arena, count, err));
    MOQ_TRY(moq_textmap_setup(&resolver->containers, arena, 2 * count, err));
    MOQ_TRY(moq_arena_take(arena, count, sizeof *resolver->ambiguous, &memory, err));
    resolver->ambiguous = memory;
    MOQ_TRY(moq_arena_take(arena, 2 * count, sizeof *resolver->groups, &memory, err));
    resolver->groups = memory;
    for (size_t i = 0; i < count; i++)
        add_entry(resolver, (uint32_t)i);
    *out = resolver;
    return MOQ_OK;
}

/* The entry of this very name, with or without prefix. */
static const moq_layer_entry *find_listed(const moq_resolver *resolver, moq_text name) {
    uint32_t id = moq_textmap_find(&resolver->written, name);
    if (id == MOQ_TEXTMAP_NONE) {
        id = moq_textmap_find(&resolver->aligned, moq_name_body(name));
        if (id == MOQ_TEXTMAP_NONE || resolver->ambiguous[id])
            return NULL;
    }
    return &resolver->config->layers[id];
}

/* The hash of name[from, to) for every dot at `to`, the name being shorter than MOQ_NAME_MAX. */
static void hash_prefixes(const moq_textmap *map, moq_text name, size_t from, uint64_t *hash) {
    uint64_t sum = 0;
    for (size_t i = from; i < name.size; i++) {
        if (name.data[i] == '.')
            hash[i] = sum;
        sum = moq_textmap_step(map, sum, name.data[i]);
    }
}

/* The entry of the nearest module above the module `name`. Each module above is looked up by a hash
 * that one pass over the name has found, so that names of very many parts take no longer than
 * others. */
static const moq_layer_entry *find_container(const moq_resolver *resolver, moq_text name) {
    uint64_t written[MOQ_NAME_MAX], aligned[MOQ_NAME_MAX];
    size_t hashed = SIZE_MAX; /* where the names begin that `aligned` is of */
    if (resolver->config->layer_count == 0)
        return NULL;
    hash_prefixes(&resolver->written, name, 0, written);
    for (size_t at = name.size; at-- > 1;) {
        if (name.data[at] != '.')
            continue;
        const moq_text above = {name.data, at}, body = moq_name_body(above);
        uint32_t id = moq_textmap_find_hashed(&resolver->written, above, written[at]);
        if (id == MOQ_TEXTMAP_NONE) {
            const size_t start = (size_t)(body.data - name.data);
            if (start != hashed) /* three times at most: there are so many prefixes */
                hash_prefixes(&resolver->aligned, name, hashed = start, aligned);
            id = moq_textmap_find_hashed(&resolver->aligned, body, aligned[at]);
            if (id == MOQ_TEXTMAP_NONE || resolver->ambiguous[id])
                continue;
        }
        return &resolver->config->layers[id];
    }
    return NULL;
}

static moq_layer_quant from_entry(const moq_layer_entry *entry) {
    return (moq_layer_quant){entry->algo, entry->group_size, MOQ_RULE_LAYERS, entry->name};
}

/* The algorithm of a module that no entry covers, or that ModelOpt was told to leave alone. */
static moq_layer_quant from_native(const moq_config *config) {
    return (moq_layer_quant){config->native_algo,
                             moq_algo_default_group(config->native_algo),
                             MOQ_RULE_NATIVE,
                             {NULL, 0}};
}

static moq_layer_quant from_config(const moq_config *config) {
    if (config->native_algo != MOQ_ALGO_NONE)
        return from_native(config);
    if (config->algo == MOQ_ALGO_MIXED_PRECISION)
        return (moq_layer_quant){.rule = MOQ_RULE_UNLISTED};
    return (moq_layer_quant){
        .algo = config->algo, .group_size = config->group_size, .rule = MOQ_RULE_CONFIG};
}

/* The maker's own format never covers the output head. */
static moq_layer_quant from_exclusion(const moq_config *config, moq_text name, uint32_t id) {
    const moq_text last = moq_text_last_component(name);
    const bool is_head =
        moq_text_equal(last, MOQ_TEXT("head")) || moq_text_equal(last, MOQ_TEXT("lm_head"));
    if (config->native_algo != MOQ_ALGO_NONE && !is_head)
        return from_native(config);
    return (moq_layer_quant){.rule = MOQ_RULE_EXCLUDED, .entry = config->exclude[id]};
}

/* One name, nothing expanded. *direct: the module itself is named, by listing or exclusion. */
static moq_layer_quant resolve_name(const moq_resolver *resolver, moq_text name, bool *direct) {
    const moq_layer_entry *entry = find_listed(resolver, name);
    *direct = true;
    if (entry)
        return from_entry(entry);
    const uint32_t id = moq_exclusion_find(resolver->config->excluded, name);
    if (id != MOQ_NAME_NONE)
        return from_exclusion(resolver->config, name, id);
    *direct = false;
    entry = find_container(resolver, name);
    return entry ? from_entry(entry) : from_config(resolver->config);
}

static moq_status check_name(moq_text name, moq_err *err) {
    if (name.size == 0 || name.size >= MOQ_NAME_MAX)
        return moq_fail_of(err, MOQ_ERR_VALUE, "module",
                           "expected a name of 1 to %d bytes, got one of %zu", MOQ_NAME_MAX - 1,
                           name.size);
    return MOQ_OK;
}

/* The whole name of a part, in `buffer` of MOQ_NAME_MAX bytes. */
static moq_status part_name(moq_text module, moq_text part, char *buffer, moq_text *out,
                            moq_err *err) {
    const bool whole = moq_text_find(part, MOQ_TEXT(".")) != SIZE_MAX;
    const size_t stem = whole ? 0 : module.size - moq_text_last_component(module).size;
    *out = (moq_text){buffer, stem + part.size};
    MOQ_TRY(check_name(*out, err));
    memcpy(buffer, module.data, stem);
    memcpy(buffer + stem, part.data, part.size);
    return MOQ_OK;
}

/* Lists the parts with their algorithms: "q_proj: FP8, k_proj: not quantized". */
static moq_status fail_parts(const moq_resolver *resolver, moq_text module, const moq_text *parts,
                             size_t count, moq_err *err) {
    char list[600] = "", buffer[MOQ_NAME_MAX];
    size_t used = 0;
    for (size_t i = 0; i < count && used < sizeof list - 1; i++) {
        moq_text name;
        bool direct;
        MOQ_TRY(part_name(module, parts[i], buffer, &name, err));
        const moq_layer_quant quant = resolve_name(resolver, name, &direct);
        const char *algo = quant.algo ? moq_algo_name(quant.algo) : "not quantized";
        const char *separator = i ? ", " : "";
        int wrote = snprintf(list + used, sizeof list - used, "%s%.*s%s: %s", separator,
                             MOQ_TEXT_ARGS(parts[i]), algo);
        if (quant.group_size > 0 && wrote > 0 && used + (size_t)wrote < sizeof list)
            wrote += snprintf(list + used + wrote, sizeof list - used - (size_t)wrote,
                              " (group size %d)", (int)quant.group_size);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    moq_end_cut(list, sizeof list, used);
    const moq_config *config = resolver->config;
    const char *path = config->layer_count ? config->layers_path : config->exclude_path;
    return moq_fail_config(
        err, path,
        "%s: the parts of %.*s%s are quantized differently: %s; load them one by "
        "one, or name the parts that exist with shards=",
        path, MOQ_TEXT_ARGS(module), list);
}

static moq_status resolve_parts(const moq_resolver *resolver, moq_text module,
                                const moq_text *parts, size_t count, moq_layer_quant *out,
                                moq_err *err) {
    char buffer[MOQ_NAME_MAX];
    for (size_t i = 0; i < count; i++) {
        moq_text name;
        bool direct;
        MOQ_TRY(part_name(module, parts[i], buffer, &name, err));
        const moq_layer_quant quant = resolve_name(resolver, name, &direct);
        if (i == 0)
            *out = quant;
        else if (quant.algo != out->algo || quant.group_size != out->group_size)
            return fail_parts(resolver, module, parts, count, err);
    }
    return MOQ_OK;
}

static moq_status fail_below(const moq_config *config, moq_text module, uint32_t id, moq_err *err) {
    return moq_fail_config(err, config->exclude_path,
                           "%s: '%.*s%s' excludes part of %.*s%s; name all its parts with shards=",
                           config->exclude_path, MOQ_TEXT_ARGS(config->exclude[id]),
                           MOQ_TEXT_ARGS(module));
}

/* An expert container nothing names: the entries below it decide, when they agree. */
static moq_status resolve_experts(const moq_resolver *resolver, moq_text module,
                                  moq_layer_quant *out, moq_err *err) {
    const moq_config *config = resolver->config;
    uint32_t at = moq_textmap_find(&resolver->containers, module);
    if (at == MOQ_TEXTMAP_NONE)
        at = moq_textmap_find(&resolver->containers, moq_name_body(module));
    if (at != MOQ_TEXTMAP_NONE) {
        const expert_group *group = &resolver->groups[at];
        const moq_layer_entry *first = &config->layers[group->first];
        if (group->different != MOQ_TEXTMAP_NONE) {
            const moq_layer_entry *other = &config->layers[group->different];
            return moq_fail_config(
                err, config->layers_path,
                "%s: the experts of %.*s%s are quantized differently: '%.*s%s' is %s (group size "
                "%d), "
                "'%.*s%s' is %s (group size %d)",
                config->layers_path, MOQ_TEXT_ARGS(module), MOQ_TEXT_ARGS(first->name),
                first->algo ? moq_algo_name(first->algo) : "not quantized", (int)first->group_size,
                MOQ_TEXT_ARGS(other->name),
                other->algo ? moq_algo_name(other->algo) : "not quantized", (int)other->group_size);
        }
        *out = from_entry(first);
    }
    const uint32_t id = moq_exclusion_find_below(config->excluded, module);
    if (id != MOQ_NAME_NONE && out->algo != MOQ_ALGO_NONE && out->rule != MOQ_RULE_NATIVE)
        return fail_below(config, module, id, err);
    return MOQ_OK;
}

moq_status moq_resolve_layer(const moq_resolver *resolver, moq_text module, const moq_text *parts,
                             size_t count, moq_layer_quant *out, moq_err *err) {
    bool direct;
    MOQ_TRY(check_name(module, err));
    *out = resolve_name(resolver, module, &direct);
    if (direct)
        return MOQ_OK;
    if (count == 0)
        parts = moq_fused_parts(moq_text_last_component(module), &count);
    if (count > 0)
        return resolve_parts(resolver, module, parts, count, out, err);
    return moq_name_is_experts(module) ? resolve_experts(resolver, module, out, err) : MOQ_OK;
}

static moq_status fail_partly_excluded(const moq_config *config, moq_text module, moq_text excluded,
                                       moq_text other, moq_err *err) {
    return moq_fail_config(
        err, config->exclude_path, "%s: of %.*s%s, %.*s%s is excluded and %.*s%s is not",
        config->exclude_path, MOQ_TEXT_ARGS(module), MOQ_TEXT_ARGS(excluded), MOQ_TEXT_ARGS(other));
}

moq_status moq_resolve_excluded(const moq_resolver *resolver, moq_text module,
                                const moq_text *parts, size_t count, bool *out, moq_err *err) {
    const moq_config *config = resolver->config;
    MOQ_TRY(check_name(module, err));
    *out = moq_exclusion_find(config->excluded, module) != MOQ_NAME_NONE;
    if (*out)
        return MOQ_OK;
    if (count == 0)
        parts = moq_fused_parts(moq_text_last_component(module), &count);
    char buffer[MOQ_NAME_MAX];
    for (size_t i = 0; i < count; i++) {
        moq_text name;
        MOQ_TRY(part_name(module, parts[i], buffer, &name, err));
        const bool excluded = moq_exclusion_find(config->excluded, name) != MOQ_NAME_NONE;
        if (i > 0 && excluded != *out)
            return fail_partly_excluded(config, module, parts[excluded ? i : 0],
                                        parts[excluded ? 0 : i], err);
        *out = excluded;
    }
    if (count == 0 && moq_name_is_experts(module)) {
        const uint32_t id = moq_exclusion_find_below(config->excluded, module);
        if (id != MOQ_NAME_NONE)
            return fail_below(config, module, id, err);
    }
    return MOQ_OK;
}
