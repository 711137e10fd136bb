/* Exclusion as the producer means it: see exclude.h. */
#include "core/exclude.h"

struct moq_exclusion {
    moq_name_table *written; /* entries as they stand */
    moq_name_table *aligned; /* entries without their prefix, for names without a prefix */
    moq_textmap containers;  /* expert container above an entry, with and without prefix */
};

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

/* The expert container an entry lies in, as far as the entry is literal. */
static moq_text container_of(moq_text entry) {
    return moq_name_experts_above((moq_text){entry.data, moq_glob_head(entry, MOQ_GLOB_STAR)});
}

moq_status moq_exclusion_compile(moq_arena *arena, const moq_text *entries, size_t count,
                                 moq_exclusion **out, moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(arena, 1, sizeof **out, &memory, err));
    moq_exclusion *set = memory;
    MOQ_TRY(moq_arena_take(arena, count, sizeof(moq_name_pattern), &memory, err));
    moq_name_pattern *patterns = memory;
    size_t inside = 0; /* entries that lie in a container */
    for (size_t i = 0; i < count; i++) {
        patterns[i] = (moq_name_pattern){entries[i], (uint32_t)i};
        inside += container_of(entries[i]).size > 0;
    }
    MOQ_TRY(moq_name_table_build(arena, patterns, count, MOQ_GLOB_STAR, &set->written, err));
    MOQ_TRY(build_aligned(set, arena, entries, count, patterns, err));
    MOQ_TRY(moq_textmap_setup(&set->containers, arena, 2 * inside, err));
    for (size_t i = 0; i < count && inside > 0; i++) {
        const moq_text container = container_of(entries[i]), body = moq_name_body(container);
        if (container.size == 0)
            continue;
        moq_textmap_insert(&set->containers, container, (uint32_t)i);
        if (body.size != container.size)
            moq_textmap_insert(&set->containers, body, (uint32_t)i);
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
