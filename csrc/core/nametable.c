/* Patterns by their literal beginning: see nametable.h. */
#include "core/nametable.h"

#include <string.h>

/* What is filed under one literal beginning. */
typedef struct {
    uint32_t whole;  /* id of the pattern that is just this text */
    uint32_t open;   /* id of this text + "*" */
    uint32_t others; /* first of the tails with more to match */
} head;

typedef struct {
    moq_glob tail;
    uint32_t id, next;
    bool covers_parent; /* ends in ".*" */
} other;

struct moq_name_table {
    moq_glob_rules rules;
    moq_textmap map; /* literal beginning -> index of head */
    moq_lengths lengths;
    head *heads;
    other *others;
    uint32_t head_count, other_count;
};

void moq_lengths_add(moq_lengths *lengths, size_t length) {
    if (length > MOQ_NAME_MAX)
        return;
    lengths->bits[length / 64] |= (uint64_t)1 << (length % 64);
    if (length > lengths->longest)
        lengths->longest = length;
}

static head *head_of(moq_name_table *table, moq_text text) {
    uint32_t at = moq_textmap_insert(&table->map, text, table->head_count);
    if (at == table->head_count) {
        table->heads[table->head_count++] = (head){MOQ_NAME_NONE, MOQ_NAME_NONE, MOQ_NAME_NONE};
        moq_lengths_add(&table->lengths, text.size);
    }
    return &table->heads[at];
}

static moq_status add_pattern(moq_name_table *table, moq_arena *arena, moq_name_pattern pattern,
                              moq_err *err) {
    const size_t size = moq_glob_head(pattern.text, table->rules);
    const moq_text tail = {pattern.text.data + size, pattern.text.size - size};
    head *under = head_of(table, (moq_text){pattern.text.data, size});
    if (tail.size == 0) {
        if (under->whole == MOQ_NAME_NONE)
            under->whole = pattern.id;
    } else if (tail.size == 1 && tail.data[0] == '*') {
        if (under->open == MOQ_NAME_NONE)
            under->open = pattern.id;
    } else {
        other *entry = &table->others[table->other_count];
        MOQ_TRY(moq_glob_compile(arena, tail, table->rules, &entry->tail, err));
        entry->id = pattern.id;
        entry->next = under->others;
        entry->covers_parent =
            table->rules == MOQ_GLOB_STAR && moq_text_ends(pattern.text, MOQ_TEXT(".*"));
        under->others = table->other_count++;
    }
    return MOQ_OK;
}

moq_status moq_name_table_build(moq_arena *arena, const moq_name_pattern *patterns, size_t count,
                                moq_glob_rules rules, moq_name_table **out, moq_err *err) {
    void *memory;
    MOQ_TRY(moq_arena_take(arena, 1, sizeof **out, &memory, err));
    moq_name_table *table = memory;
    table->rules = rules;
    MOQ_TRY(moq_textmap_setup(&table->map, arena, count, err));
    MOQ_TRY(moq_arena_take(arena, count, sizeof *table->heads, &memory, err));
    table->heads = memory;
    size_t others = 0;
    for (size_t i = 0; i < count; i++)
        others += moq_glob_head(patterns[i].text, rules) + 1 < patterns[i].text.size ||
                  !moq_text_ends(patterns[i].text, MOQ_TEXT("*"));
    MOQ_TRY(moq_arena_take(arena, others, sizeof *table->others, &memory, err));
    table->others = memory;
    for (size_t i = 0; i < count; i++)
        MOQ_TRY(add_pattern(table, arena, patterns[i], err));
    *out = table;
    return MOQ_OK;
}

/* The id of a pattern filed under `under` that matches the name, whose rest begins at `at`. The
 * byte after the name is a dot. */
static uint32_t find_under(const moq_name_table *table, const head *under, moq_text name,
                           size_t at) {
    const bool at_end = at == name.size;
    const moq_text rest = {name.data + at, name.size - at};
    const moq_text dotted = {name.data + at, name.size - at + 1};
    const bool below = table->rules == MOQ_GLOB_STAR && name.data[at] == '.';
    if (under->whole != MOQ_NAME_NONE && (at_end || below))
        return under->whole;
    if (under->open != MOQ_NAME_NONE)
        return under->open;
    for (uint32_t i = under->others; i != MOQ_NAME_NONE; i = table->others[i].next) {
        const other *entry = &table->others[i];
        if (moq_glob_match(&entry->tail, rest) ||
            (entry->covers_parent && moq_glob_match(&entry->tail, dotted)))
            return entry->id;
    }
    return MOQ_NAME_NONE;
}

/* The last step of a search: "name." as the literal beginning of "name.*". */
static uint32_t find_parent(const moq_name_table *table, moq_text name, uint64_t hash) {
    const moq_text dotted = {name.data, name.size + 1};
    if (table->rules != MOQ_GLOB_STAR || !moq_lengths_has(&table->lengths, dotted.size))
        return MOQ_NAME_NONE;
    hash = moq_textmap_step(&table->map, hash, '.');
    uint32_t at = moq_textmap_find_hashed(&table->map, dotted, hash);
    return at == MOQ_TEXTMAP_NONE ? MOQ_NAME_NONE : table->heads[at].open;
}

uint32_t moq_name_table_find(const moq_name_table *table, moq_text name) {
    char buffer[MOQ_NAME_MAX + 1];
    if (name.size >= MOQ_NAME_MAX)
        return MOQ_NAME_NONE;
    memcpy(buffer, name.data, name.size);
    buffer[name.size] = '.';
    const moq_text copy = {buffer, name.size};
    uint64_t hash = 0;
    for (size_t i = 0; i <= copy.size && i <= table->lengths.longest; i++) {
        if (i > 0)
            hash = moq_textmap_step(&table->map, hash, copy.data[i - 1]);
        if (!moq_lengths_has(&table->lengths, i))
            continue;
        uint32_t at = moq_textmap_find_hashed(&table->map, (moq_text){copy.data, i}, hash);
        if (at == MOQ_TEXTMAP_NONE)
            continue;
        uint32_t id = find_under(table, &table->heads[at], copy, i);
        if (id != MOQ_NAME_NONE)
            return id;
    }
    return copy.size < table->lengths.longest ? find_parent(table, copy, hash) : MOQ_NAME_NONE;
}
