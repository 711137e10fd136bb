/* Exclusion as the producer means it: see exclude.h. */
#include "core/exclude.h"

struct moq_exclusion {
    moq_name_table *written; /* entries as they stand */
    moq_name_table *aligned; /* entries without prefix, for names without theirs */
    moq_textmap containers;  /* "….experts" above an entry, with and without prefix */
};

moq_text moq_name_body(moq_text name) {
    static const moq_text PREFIXES[] = {
        {"model.language_model.", 21},
        {"language_model.model.", 21},
        {"language_model.", 15},
        {"model.", 6},
    };
    for (size_t i = 0; i < sizeof PREFIXES / sizeof *PREFIXES; i++) {
        if (moq_text_starts(name, PREFIXES[i]))
            return (moq_text){name.data + PREFIXES[i].size, name.size - PREFIXES[i].size};
    }
    return name;
}

bool moq_name_is_experts(moq_text name) {
    return moq_text_equal(moq_text_last_component(name), MOQ_TEXT("experts"));
}

static moq_status build_aligned(moq_exclusion *set, moq_arena *arena, const moq_text *entries,
                                size_t count, moq_name_pattern *patterns, moq_err *err) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        moq_text body = moq_name_body(entries[i]);
        /* "model.*" means the model and not, say, lm_head, so a bare wildcard is never aligned. */
        if (body.size > 0 && body.data[0] != '*')
            patterns[kept++] = (moq_name_pattern){body, (uint32_t)i};
    }
    return moq_name_table_build(arena, patterns, kept, MOQ_GLOB_STAR, &set->aligned, err);
}

/* The container an entry lies in, as far as the entry is literal: an expert holds no experts. */
static void add_container(moq_textmap *map, moq_text entry, uint32_t id) {
    const size_t literal = moq_glob_head(entry, MOQ_GLOB_STAR);
    for (size_t i = 0; i < literal; i++) {
        moq_text above = {entry.data, i};
        if (entry.data[i] != '.' || !moq_name_is_experts(above))
            continue;
        moq_textmap_insert(map, above, id);
        return;
    }
}

moq_status moq_exclusion_compile(moq_arena *arena, const moq_text *entries, size_t count,
                                 moq_exclusion **out, moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(arena, 1, sizeof **out, &memory, err));
    moq_exclusion *set = memory;
    MOQ_TRY(moq_arena_take(arena, count, sizeof(moq_name_pattern), &memory, err));
    moq_name_pattern *patterns = memory;
    size_t inside = 0; /* entries that may lie in a container */
    for (size_t i = 0; i < count; i++) {
        patterns[i] = (moq_name_pattern){entries[i], (uint32_t)i};
        inside += moq_text_find(entries[i], MOQ_TEXT("experts.")) != SIZE_MAX;
    }
    MOQ_TRY(moq_name_table_build(arena, patterns, count, MOQ_GLOB_STAR, &set->written, err));
    MOQ_TRY(build_aligned(set, arena, entries, count, patterns, err));
    MOQ_TRY(moq_textmap_setup(&set->containers, arena, 2 * inside, err));
    for (size_t i = 0; i < count && inside > 0; i++) {
        moq_text body = moq_name_body(entries[i]);
        add_container(&set->containers, entries[i], (uint32_t)i);
        if (body.size != entries[i].size)
            add_container(&set->containers, body, (uint32_t)i);
    }
    *out = set;
    return MOQ_OK;
}

uint32_t moq_exclusion_find(const moq_exclusion *set, moq_text name) {
    uint32_t id = moq_name_table_find(set->written, name);
    return id == MOQ_NAME_NONE ? moq_name_table_find(set->aligned, moq_name_body(name)) : id;
}

uint32_t moq_exclusion_find_below(const moq_exclusion *set, moq_text name) {
    uint32_t id = moq_textmap_find(&set->containers, name);
    return id == MOQ_TEXTMAP_NONE ? moq_textmap_find(&set->containers, moq_name_body(name)) : id;
}
