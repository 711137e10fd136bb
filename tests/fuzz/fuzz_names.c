/* Patterns over names: globs, and exclusion lists in both semantics, against plain models.
 *
 * Case: UTF-8 text in lines: a name, its shards separated by commas, then the entries of the list.
 */
#include "fuzz.h"

#include "core/exclude.h"
#include "core/exclude_vllm.h"

#include <stdlib.h>
#include <string.h>

#define ENTRY_MAX  256
#define SHARD_MAX  8
#define SIZE_LIMIT 512 /* of a case: the models take time in the square of it */

typedef struct {
    moq_text name;
    moq_text shard[SHARD_MAX], entry[ENTRY_MAX];
    size_t shards, entries;
} name_case;

/* Does `pattern`, in which `*` and, if `question`, `?` are special, match? By dynamic programming
 * over prefixes, where the matcher under test backtracks. */
static bool plain_match(moq_text pattern, moq_text name, bool question) {
    bool *reach = calloc(name.size + 1, sizeof *reach); /* [i]: the pattern so far fits name[:i] */
    reach[0] = true;
    for (size_t p = 0; p < pattern.size; p++) {
        const char c = pattern.data[p];
        if (c == '*') {
            for (size_t i = 1; i <= name.size; i++)
                reach[i] = reach[i] || reach[i - 1];
            continue;
        }
        for (size_t i = name.size; i > 0; i--) {
            const bool inside = (name.data[i - 1] & 0xc0) == 0x80; /* of a code point */
            if (!question || c != '?')
                reach[i] = reach[i - 1] && name.data[i - 1] == c;
            else if (i == name.size || (name.data[i] & 0xc0) != 0x80) {
                size_t start = i - 1;
                for (bool in = inside; in; in = (name.data[start] & 0xc0) == 0x80)
                    start--;
                reach[i] = reach[start];
            } else
                reach[i] = false;
        }
        reach[0] = false;
    }
    const bool matches = reach[name.size];
    free(reach);
    return matches;
}

static bool contains(moq_text text, char c) {
    return text.size > 0 && memchr(text.data, c, text.size) != NULL;
}

static bool glob_matches(moq_arena *arena, moq_text pattern, moq_text name, moq_glob_rules rules) {
    moq_glob glob;
    moq_err err;
    const moq_status status = moq_glob_compile(arena, pattern, rules, &glob, &err);
    FUZZ_CHECK(status == MOQ_OK, "%s", err.text);
    const bool matches = moq_glob_match(&glob, name);
    const moq_text literal = moq_glob_longest_literal(&glob);
    FUZZ_CHECK(!matches || moq_text_find(name, literal) != SIZE_MAX, "%.*s%s in %.*s%s",
               MOQ_TEXT_ARGS(literal), MOQ_TEXT_ARGS(name));
    if (rules == MOQ_GLOB_STAR || !contains(pattern, '['))
        FUZZ_CHECK(matches == plain_match(pattern, name, rules == MOQ_GLOB_FNMATCH),
                   "pattern %.*s%s, name %.*s%s, rules %d", MOQ_TEXT_ARGS(pattern),
                   MOQ_TEXT_ARGS(name), rules);
    return matches;
}

/* ---- the producer's semantics ---- */

static bool covers(moq_text entry, moq_text name) {
    if (!contains(entry, '*')) {
        const bool longer = name.size > entry.size && name.data[entry.size] == '.';
        return moq_text_equal(entry, name) || (longer && moq_text_starts(name, entry));
    }
    if (plain_match(entry, name, false))
        return true;
    if (!moq_text_ends(entry, MOQ_TEXT(".*")))
        return false;
    char *dotted = malloc(name.size + 1);
    memcpy(dotted, name.data, name.size);
    dotted[name.size] = '.';
    const bool fits = plain_match(entry, (moq_text){dotted, name.size + 1}, false);
    free(dotted);
    return fits;
}

static bool excludes(moq_text entry, moq_text name) {
    const moq_text body = moq_name_body(entry);
    return covers(entry, name) ||
           (body.size > 0 && body.data[0] != '*' && covers(body, moq_name_body(name)));
}

static void check_producer(moq_arena *arena, const name_case *c) {
    moq_exclusion *set;
    moq_err err;
    bool expected = false;
    FUZZ_CHECK(moq_exclusion_compile(arena, c->entry, c->entries, &set, &err) == MOQ_OK, "%s",
               err.text);
    for (size_t i = 0; i < c->entries && c->name.size < MOQ_NAME_MAX; i++)
        expected = expected || excludes(c->entry[i], c->name);
    const uint32_t id = moq_exclusion_find(set, c->name);
    FUZZ_CHECK((id != MOQ_NAME_NONE) == expected, "name %.*s%s", MOQ_TEXT_ARGS(c->name));
    FUZZ_CHECK(id == MOQ_NAME_NONE || (id < c->entries && excludes(c->entry[id], c->name)),
               "entry %u does not cover %.*s%s", id, MOQ_TEXT_ARGS(c->name));
    const uint32_t below = moq_exclusion_find_below(set, c->name);
    FUZZ_CHECK(below == MOQ_NAME_NONE || below < c->entries, "entry %u", below);
}

/* ---- vLLM's semantics ---- */

static bool listed(const name_case *c, moq_text name) {
    for (size_t i = 0; i < c->entries; i++) {
        if (moq_text_equal(c->entry[i], name))
            return true;
    }
    return false;
}

/* str.replace, then the question whether that is an entry. */
static bool replaced_is_listed(const name_case *c, moq_text old, moq_text new) {
    moq_text rest = c->name;
    char *text = malloc((c->name.size + 1) * (new.size + 1));
    size_t used = 0;
    while (rest.size > 0) {
        const bool hit = moq_text_starts(rest, old);
        const moq_text piece = hit ? new : (moq_text){rest.data, 1};
        const size_t step = hit ? old.size : 1;
        memcpy(text + used, piece.data, piece.size);
        used += piece.size;
        rest = (moq_text){rest.data + step, rest.size - step};
    }
    const bool found = listed(c, (moq_text){text, used});
    free(text);
    return found;
}

/* 0 or 1, or -1 where only some shards are listed. */
static int vllm_listed(const name_case *c) {
    const moq_text last = moq_text_last_component(c->name);
    bool any = false, all = true;
    if (c->shards > 0 && last.size > 0) {
        if (listed(c, c->name))
            return 1;
        for (size_t i = 0; i < c->shards; i++) {
            const bool one = replaced_is_listed(c, last, c->shard[i]);
            any = any || one;
            all = all && one;
        }
        return any == all ? any : -1;
    }
    if (moq_text_find(c->name, MOQ_TEXT("experts")) == SIZE_MAX)
        return listed(c, c->name);
    for (size_t i = 0; i < c->entries; i++) {
        any = any || (moq_text_find(c->entry[i], MOQ_TEXT("experts")) != SIZE_MAX &&
                      moq_text_find(c->entry[i], c->name) != SIZE_MAX);
    }
    return any;
}

static int vllm_model(moq_arena *arena, const name_case *c) {
    const int named = vllm_listed(c);
    for (size_t i = 0; i < c->entries && named == 0; i++) {
        const bool inside = moq_text_find(c->name, c->entry[i]) != SIZE_MAX;
        if ((inside && !moq_text_equal(c->name, c->entry[i])) ||
            glob_matches(arena, c->entry[i], c->name, MOQ_GLOB_FNMATCH))
            return 1;
    }
    if (named == 0)
        return moq_text_find(c->name, MOQ_TEXT("vision_tower")) != SIZE_MAX ||
               moq_text_find(c->name, MOQ_TEXT("vision_model")) != SIZE_MAX ||
               moq_text_find(c->name, MOQ_TEXT("vit_large_projector")) != SIZE_MAX;
    return named;
}

static void check_vllm(moq_arena *arena, const name_case *c) {
    moq_vllm_exclusion *set;
    moq_err err;
    bool answer = false;
    if (c->name.size == 0 || c->name.size >= MOQ_NAME_MAX)
        return; /* the binding refuses such names */
    FUZZ_CHECK(moq_vllm_exclusion_compile(arena, c->entry, c->entries, &set, &err) == MOQ_OK, "%s",
               err.text);
    const moq_status status =
        moq_vllm_exclusion_find(set, c->name, c->shard, c->shards, "$.ignore", &answer, &err);
    if (status != MOQ_OK)
        fuzz_check_error(status, &err);
    const int expected = vllm_model(arena, c);
    FUZZ_CHECK((status == MOQ_OK ? answer : -1) == expected, "%.*s%s: %d, expected %d",
               MOQ_TEXT_ARGS(c->name), status == MOQ_OK ? answer : -1, expected);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > SIZE_LIMIT)
        return 0;
    char *text = fuzz_utf8(data, size);
    moq_text rest = {text, size}, shards = {NULL, 0};
    name_case *c = calloc(1, sizeof *c);
    moq_arena arena;
    moq_arena_setup(&arena, (size_t)1 << 26);
    fuzz_split(&rest, '\n', &c->name);
    fuzz_split(&rest, '\n', &shards);
    while (shards.size > 0 && c->shards < SHARD_MAX &&
           fuzz_split(&shards, ',', &c->shard[c->shards]))
        c->shards++;
    while (c->entries < ENTRY_MAX && fuzz_split(&rest, '\n', &c->entry[c->entries]))
        c->entries++;
    for (size_t i = 0; i < c->entries; i++)
        glob_matches(&arena, c->entry[i], c->name, MOQ_GLOB_STAR);
    check_producer(&arena, c);
    check_vllm(&arena, c);
    moq_arena_release(&arena);
    free(c);
    free(text);
    return 0;
}
