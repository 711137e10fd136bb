/* Patterns by the text they demand: see nametable.h. */
#include "core/nametable.h"

#include <string.h>

/* Patterns that are filed under one literal beginning. */
typedef struct {
    uint32_t whole; /* id of the pattern that is just this text */
    uint32_t open;  /* id of this text + "*" */
} head;

typedef struct {
    moq_glob glob;
    uint32_t id;
    uint32_t next;      /* in the list of patterns that demand the same text */
    bool covers_parent; /* ends in ".*", however many stars */
} other;

struct moq_name_table {
    moq_glob_rules rules;
    moq_textmap map; /* literal beginning -> head */
    moq_lengths lengths;
    head *heads;
    uint32_t head_count;
    moq_substrings demanded; /* text -> index into lists */
    uint32_t *lists;         /* first of the others */
    uint32_t list_count;
    uint32_t undemanding; /* first of the others without any text */
    other *others;
    uint32_t other_count;
};

static head *head_of(moq_name_table *table, moq_text text) {
    const uint32_t at = moq_textmap_insert(&table->map, text, table->head_count);
    if (at == table->head_count) {
        table->heads[table->head_count++] = (head){MOQ_NAME_NONE, MOQ_NAME_NONE};
        moq_lengths_add(&table->lengths, text.size);
    }
    return &table->heads[at];
}

/* A pattern that its beginning alone decides: text, or text and a star. */
static bool is_simple(moq_name_pattern pattern, moq_glob_rules rules) {
    const size_t size = moq_glob_head(pattern.text, rules);
    return size == pattern.text.size ||
           (size + 1 == pattern.text.size && pattern.text.data[size] == '*');
}

static void add_simple(moq_name_table *table, moq_name_pattern pattern) {
    const size_t size = moq_glob_head(pattern.text, table->rules);
    head *under = head_of(table, (moq_text){pattern.text.data, size});
    uint32_t *id = size < pattern.text.size ? &under->open : &under->whole;
    if (*id == MOQ_NAME_NONE)
        *id = pattern.id;
}

/* True if a pattern ends in a dot and stars, which are as good as one. */
static bool ends_below(moq_text pattern) {
    size_t size = pattern.size;
    while (size > 0 && pattern.data[size - 1] == '*')
        size--;
    return size < pattern.size && size > 0 && pattern.data[size - 1] == '.';
}

static moq_status add_other(moq_name_table *table, moq_arena *arena, moq_name_pattern pattern,
                            moq_err *err) {
    const uint32_t at = table->other_count++;
    other *entry = &table->others[at];
    MOQ_TRY(moq_glob_compile(arena, pattern.text, table->rules, &entry->glob, err));
    entry->id = pattern.id;
    entry->covers_parent = table->rules == MOQ_GLOB_STAR && ends_below(pattern.text);
    const moq_text demand = moq_glob_longest_literal(&entry->glob);
    uint32_t *list = &table->undemanding;
    if (demand.size > 0) {
        const uint32_t known = moq_substrings_add(&table->demanded, demand, table->list_count);
        if (known == table->list_count)
            table->lists[table->list_count++] = MOQ_NAME_NONE;
        list = &table->lists[known];
    }
    entry->next = *list;
    *list = at;
    return MOQ_OK;
}

moq_status moq_name_table_build(moq_arena *arena, const moq_name_pattern *patterns, size_t count,
                                moq_glob_rules rules, moq_name_table **out, moq_err *err) {
    void *memory;
    size_t simple = 0;
    for (size_t i = 0; i < count; i++)
        simple += is_simple(patterns[i], rules);
    MOQ_TRY(moq_arena_take(arena, 1, sizeof **out, &memory, err));
    moq_name_table *table = memory;
    table->rules = rules;
    table->undemanding = MOQ_NAME_NONE;
    MOQ_TRY(moq_textmap_setup(&table->map, arena, simple, err));
    MOQ_TRY(moq_substrings_setup(&table->demanded, arena, count - simple, err));
    MOQ_TRY(moq_arena_take(arena, simple, sizeof *table->heads, &memory, err));
    table->heads = memory;
    MOQ_TRY(moq_arena_take(arena, count - simple, sizeof *table->others, &memory, err));
    table->others = memory;
    MOQ_TRY(moq_arena_take(arena, count - simple, sizeof *table->lists, &memory, err));
    table->lists = memory;
    for (size_t i = 0; i < count; i++) {
        if (is_simple(patterns[i], rules))
            add_simple(table, patterns[i]);
        else
            MOQ_TRY(add_other(table, arena, patterns[i], err));
    }
    *out = table;
    return MOQ_OK;
}

/* The name with a dot behind it is `dotted`: what "p.*" covers of p itself. */

static uint32_t find_simple(const moq_name_table *table, moq_text name, moq_text dotted) {
    const bool below = table->rules == MOQ_GLOB_STAR;
    const size_t last = below ? dotted.size : name.size;
    uint64_t hash = 0;
    for (size_t i = 0; i <= last && i <= table->lengths.longest; i++) {
        if (i > 0)
            hash = moq_textmap_step(&table->map, hash, dotted.data[i - 1]);
        if (!moq_lengths_has(&table->lengths, i))
            continue;
        const moq_text before = {dotted.data, i};
        const uint32_t at = moq_textmap_find_hashed(&table->map, before, hash);
        if (at == MOQ_TEXTMAP_NONE)
            continue;
        const bool ends = i == name.size || (below && i < name.size && dotted.data[i] == '.');
        if (table->heads[at].whole != MOQ_NAME_NONE && ends)
            return table->heads[at].whole;
        if (table->heads[at].open != MOQ_NAME_NONE)
            return table->heads[at].open;
    }
    return MOQ_NAME_NONE;
}

static uint32_t find_in_list(const moq_name_table *table, uint32_t first, moq_text name,
                             moq_text dotted) {
    for (uint32_t i = first; i != MOQ_NAME_NONE; i = table->others[i].next) {
        const other *entry = &table->others[i];
        if (moq_glob_match(&entry->glob, name) ||
            (entry->covers_parent && moq_glob_match(&entry->glob, dotted)))
            return entry->id;
    }
    return MOQ_NAME_NONE;
}

static uint32_t find_other(const moq_name_table *table, moq_text name, moq_text dotted) {
    moq_substring_cursor cursor = {0};
    uint32_t id = find_in_list(table, table->undemanding, name, dotted);
    while (id == MOQ_NAME_NONE) {
        const uint32_t list = moq_substrings_next(&table->demanded, dotted, &cursor);
        if (list == MOQ_TEXTMAP_NONE)
            break;
        const moq_text part = {dotted.data + cursor.at, cursor.size};
        if (moq_text_find(dotted, part) == cursor.at) /* once is enough */
            id = find_in_list(table, table->lists[list], name, dotted);
    }
    return id;
}

uint32_t moq_name_table_find(const moq_name_table *table, moq_text name) {
    char buffer[MOQ_NAME_MAX];
    if (name.size >= MOQ_NAME_MAX)
        return MOQ_NAME_NONE;
    memcpy(buffer, name.data, name.size);
    buffer[name.size] = '.';
    const moq_text copy = {buffer, name.size}, dotted = {buffer, name.size + 1};
    const uint32_t id = find_simple(table, copy, dotted);
    return id == MOQ_NAME_NONE && table->other_count > 0 ? find_other(table, copy, dotted) : id;
}
