/* Configurations: up to three documents read together, and what they say about modules.
 *
 * Case: parts that end at a record separator (0x1e). The first is one byte that limits memory, then
 * names of modules in lines, each perhaps with "=" and its shards; the others are JSON. */
#include "fuzz.h"

#include "core/exclude.h"
#include "core/resolve.h"

#include <stdlib.h>
#include <string.h>

#define DOCUMENT_MAX 3
#define SHARD_MAX    8
#define ASKED_MAX    64
#define SIZE_LIMIT   ((size_t)1 << 13)

static bool is_asked(moq_text name) {
    return name.size > 0 && name.size < MOQ_NAME_MAX;
}

static void check_quant(const moq_layer_quant *quant) {
    FUZZ_CHECK(quant->algo >= MOQ_ALGO_NONE && quant->algo < MOQ_ALGO_MIXED_PRECISION, "%d",
               quant->algo);
    FUZZ_CHECK(quant->group_size >= 0, "%lld", (long long)quant->group_size);
    FUZZ_CHECK(quant->rule <= MOQ_RULE_NATIVE, "%d", quant->rule);
    if (quant->rule == MOQ_RULE_EXCLUDED || quant->rule == MOQ_RULE_UNLISTED)
        FUZZ_CHECK(quant->algo == MOQ_ALGO_NONE, "%d", quant->algo);
}

/* A module's own entry decides before all else; an entry of the list covers its own name. */
static void check_entries(const moq_config *config, const moq_resolver *resolver) {
    moq_layer_quant quant;
    moq_err err;
    for (size_t i = 0; i < config->layer_count && i < ASKED_MAX; i++) {
        const moq_layer_entry *entry = &config->layers[i];
        const moq_status status = moq_resolve_layer(resolver, entry->name, NULL, 0, &quant, &err);
        if (!is_asked(entry->name)) {
            FUZZ_CHECK(status == MOQ_ERR_VALUE, "status %d", status);
            continue;
        }
        FUZZ_CHECK(status == MOQ_OK, "%s", err.text);
        FUZZ_CHECK(quant.rule == MOQ_RULE_LAYERS && quant.algo == entry->algo &&
                       quant.group_size == entry->group_size &&
                       moq_text_equal(quant.entry, entry->name),
                   "%.*s%s", MOQ_TEXT_ARGS(entry->name));
    }
    for (size_t i = 0; i < config->exclude_count && i < ASKED_MAX; i++) {
        if (is_asked(config->exclude[i]))
            FUZZ_CHECK(moq_exclusion_find(config->excluded, config->exclude[i]) != MOQ_NAME_NONE,
                       "%.*s%s", MOQ_TEXT_ARGS(config->exclude[i]));
    }
}

static void ask(const moq_config *config, const moq_resolver *resolver, moq_text name,
                const moq_text *shards, size_t count) {
    moq_layer_quant quant;
    moq_err err;
    bool excluded;
    moq_status status = moq_resolve_layer(resolver, name, shards, count, &quant, &err);
    FUZZ_CHECK(status == MOQ_OK || is_asked(name) || status == MOQ_ERR_VALUE, "status %d", status);
    if (status == MOQ_OK)
        check_quant(&quant);
    else
        fuzz_check_error(status, &err);
    status = moq_resolve_excluded(resolver, name, shards, count, &excluded, &err);
    if (status != MOQ_OK) {
        fuzz_check_error(status, &err);
        return;
    }
    if (!excluded || moq_exclusion_find(config->excluded, name) == MOQ_NAME_NONE)
        return;
    status = moq_resolve_layer(resolver, name, shards, count, &quant, &err);
    FUZZ_CHECK(status == MOQ_OK, "%s", err.text);
    FUZZ_CHECK(quant.rule == MOQ_RULE_LAYERS || quant.rule == MOQ_RULE_EXCLUDED ||
                   quant.rule == MOQ_RULE_NATIVE,
               "%.*s%s is excluded, but rule %d holds", MOQ_TEXT_ARGS(name), quant.rule);
}

static void check_config(const moq_config *config, const moq_resolver *resolver, moq_text names) {
    FUZZ_CHECK(config->algo >= MOQ_ALGO_NONE && config->algo < MOQ_ALGO_COUNT, "%d", config->algo);
    FUZZ_CHECK(config->kv >= MOQ_KV_NONE && config->kv < MOQ_KV_COUNT, "%d", config->kv);
    FUZZ_CHECK(config->group_size >= 0 && config->group_size <= 65536, "%lld",
               (long long)config->group_size);
    for (size_t i = 0; i < config->conflict_count; i++)
        FUZZ_CHECK(config->conflicts[i].field.size > 0, "conflict %zu", i);
    for (size_t i = 0; i < config->note_count; i++)
        FUZZ_CHECK(config->notes[i].size > 0, "note %zu", i);
    check_entries(config, resolver);
    moq_text line;
    for (int i = 0; i < ASKED_MAX && fuzz_split(&names, '\n', &line); i++) {
        moq_text name = {NULL, 0}, shard[SHARD_MAX];
        size_t shards = 0;
        fuzz_split(&line, '=', &name);
        while (shards < SHARD_MAX && fuzz_split(&line, ',', &shard[shards]))
            shards++;
        ask(config, resolver, name, shard, shards);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const FILES[] = {"config.json", "hf_quant_config.json", ""};
    if (size == 0 || size > SIZE_LIMIT)
        return 0;
    char *text = fuzz_utf8(data + 1, size - 1);
    moq_text rest = {text, size - 1}, names = {NULL, 0}, part;
    moq_document documents[DOCUMENT_MAX];
    moq_arena trees, arena;
    size_t count = 0;
    const bool limited = data[0] < 32;
    moq_arena_setup(&trees, (size_t)1 << 28);
    moq_arena_setup(&arena, limited ? (size_t)data[0] << 16 : (size_t)1 << 28);
    fuzz_split(&rest, '\x1e', &names);
    while (count < DOCUMENT_MAX && fuzz_split(&rest, '\x1e', &part)) {
        documents[count] = (moq_document){.file = FILES[count], .root = "$"};
        if (!fuzz_json(&trees, part, &documents[count].value))
            break;
        const moq_family family = moq_config_detect(&documents[count].value);
        FUZZ_CHECK(family <= MOQ_FAMILY_MIXED, "%d", family);
        count++;
    }
    moq_config config;
    moq_resolver *resolver;
    moq_err err;
    moq_status status = moq_config_read(&arena, documents, count, &config, &err);
    if (status == MOQ_OK)
        status = moq_resolver_build(&arena, &config, &resolver, &err);
    FUZZ_CHECK(limited || status != MOQ_ERR_MEMORY, "%s", err.text);
    if (status == MOQ_OK)
        check_config(&config, resolver, names);
    else
        fuzz_check_error(status, &err);
    moq_arena_release(&arena);
    moq_arena_release(&trees);
    free(text);
    return 0;
}
