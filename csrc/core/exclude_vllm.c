/* Exclusion as vLLM reads it: see exclude_vllm.h. */
#include "core/exclude_vllm.h"

#include <stdlib.h>
#include <string.h>

#define EXPERTS MOQ_TEXT("experts")

struct moq_vllm_exclusion {
    moq_substrings entries; /* every entry but the empty one, as plain text */
    bool has_empty;
    moq_text *experts; /* entries with "experts" in them, the longest first */
    size_t expert_count;
    moq_name_table *globs;
};

static int by_falling_length(const void *a, const void *b) {
    const size_t left = ((const moq_text *)a)->size, right = ((const moq_text *)b)->size;
    return (left < right) - (left > right);
}

moq_status moq_vllm_exclusion_compile(moq_arena *arena, const moq_text *entries, size_t count,
                                      moq_vllm_exclusion **out, moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(arena, 1, sizeof **out, &memory, err));
    moq_vllm_exclusion *set = memory;
    MOQ_TRY(moq_substrings_setup(&set->entries, arena, count, err));
    MOQ_TRY(moq_arena_take(arena, count, sizeof *set->experts, &memory, err));
    set->experts = memory;
    MOQ_TRY(moq_arena_take(arena, count, sizeof(moq_name_pattern), &memory, err));
    moq_name_pattern *patterns = memory;
    for (size_t i = 0; i < count; i++) {
        patterns[i] = (moq_name_pattern){entries[i], (uint32_t)i};
        if (entries[i].size == 0)
            set->has_empty = true;
        else
            moq_substrings_add(&set->entries, entries[i], (uint32_t)i);
        if (moq_text_find(entries[i], EXPERTS) != SIZE_MAX)
            set->experts[set->expert_count++] = entries[i];
    }
    qsort(set->experts, set->expert_count, sizeof *set->experts, by_falling_length);
    MOQ_TRY(moq_name_table_build(arena, patterns, count, MOQ_GLOB_FNMATCH, &set->globs, err));
    *out = set;
    return MOQ_OK;
}

static bool is_entry(const moq_vllm_exclusion *set, moq_text name) {
    return name.size == 0 ? set->has_empty
                          : moq_textmap_find(&set->entries.map, name) != MOQ_TEXTMAP_NONE;
}

static bool has_entry_inside(const moq_vllm_exclusion *set, moq_text name) {
    moq_substring_cursor cursor = {0};
    return (set->has_empty && name.size > 0) ||
           moq_substrings_next(&set->entries, name, &cursor) != MOQ_TEXTMAP_NONE;
}

static bool lies_inside_experts_entry(const moq_vllm_exclusion *set, moq_text name) {
    for (size_t i = 0; i < set->expert_count && set->experts[i].size >= name.size; i++) {
        if (moq_text_find(set->experts[i], name) != SIZE_MAX)
            return true;
    }
    return false;
}

static size_t count_occurrences(moq_text name, moq_text part) {
    size_t count = 0;
    for (size_t at; (at = moq_text_find(name, part)) != SIZE_MAX; count++)
        name = (moq_text){name.data + at + part.size, name.size - at - part.size};
    return count;
}

/* True if `name` with every occurrence of `old` replaced by `new` is an entry. */
static moq_status is_replaced_entry(const moq_vllm_exclusion *set, moq_text name, moq_text old,
                                    moq_text new, bool *out, moq_err *err) {
    const size_t room = name.size + count_occurrences(name, old) * new.size;
    char *buffer = malloc(room + 1);
    if (!buffer)
        return moq_fail(err, MOQ_ERR_MEMORY, "out of memory for %zu bytes", room);
    size_t used = 0;
    for (size_t at; (at = moq_text_find(name, old)) != SIZE_MAX;) {
        memcpy(buffer + used, name.data, at);
        memcpy(buffer + used + at, new.data, new.size);
        used += at + new.size;
        name = (moq_text){name.data + at + old.size, name.size - at - old.size};
    }
    memcpy(buffer + used, name.data, name.size);
    *out = is_entry(set, (moq_text){buffer, used + name.size});
    free(buffer);
    return MOQ_OK;
}

static moq_status shards_agree(const moq_vllm_exclusion *set, moq_text name, const moq_text *shards,
                               size_t count, const char *path, bool *out, moq_err *err) {
    const moq_text last = moq_text_last_component(name);
    bool first = false;
    for (size_t i = 0; i < count; i++) {
        MOQ_TRY(is_replaced_entry(set, name, last, shards[i], out, err));
        if (i == 0)
            first = *out;
        if (*out != first)
            return moq_fail_config(
                err, path, "%s: of %.*s%s, only one of the shards %.*s%s and %.*s%s is listed",
                path, MOQ_TEXT_ARGS(name), MOQ_TEXT_ARGS(shards[0]), MOQ_TEXT_ARGS(shards[i]));
    }
    return MOQ_OK;
}

/* Linears below these names are unquantized in vLLM, whatever the checkpoint says of them. */
static bool is_vision_tower(moq_text name) {
    static const moq_text towers[] = {MOQ_TEXT("vision_tower"), MOQ_TEXT("vision_model"),
                                      MOQ_TEXT("vit_large_projector")};
    for (size_t i = 0; i < sizeof towers / sizeof *towers; i++) {
        if (moq_text_find(name, towers[i]) != SIZE_MAX)
            return true;
    }
    return false;
}

moq_status moq_vllm_exclusion_find(const moq_vllm_exclusion *set, moq_text name,
                                   const moq_text *shards, size_t shard_count, const char *path,
                                   bool *out, moq_err *err) {
    *out = is_entry(set, name);
    if (!*out && shard_count > 0 && moq_text_last_component(name).size > 0)
        MOQ_TRY(shards_agree(set, name, shards, shard_count, path, out, err));
    else if (!*out && moq_text_find(name, EXPERTS) != SIZE_MAX)
        *out = lies_inside_experts_entry(set, name);
    *out = *out || has_entry_inside(set, name) ||
           moq_name_table_find(set->globs, name) != MOQ_NAME_NONE || is_vision_tower(name);
    return MOQ_OK;
}
