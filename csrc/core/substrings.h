/* A set of texts, and which of them lie inside a name: what pattern tables are filtered with.
 *
 * A position is looked at only if some text begins with the two bytes found there, and from it the
 * hash is carried forward once, looked up at the lengths that occur. */
#ifndef MOQ_CORE_SUBSTRINGS_H
#define MOQ_CORE_SUBSTRINGS_H

#include "core/textmap.h"

/* Longest module name that can be asked about. */
#define MOQ_NAME_MAX 4096

/* The lengths that a set of texts has. */
typedef struct {
    uint64_t bits[MOQ_NAME_MAX / 64 + 1];
    size_t longest; /* of the lengths up to MOQ_NAME_MAX; longer texts are left out */
} moq_lengths;

void moq_lengths_add(moq_lengths *lengths, size_t length);

static inline bool moq_lengths_has(const moq_lengths *lengths, size_t length) {
    return lengths->bits[length / 64] >> (length % 64) & 1;
}

typedef struct {
    moq_textmap map;
    moq_lengths lengths;
    uint64_t starts[65536 / 64]; /* pairs of bytes some text begins with */
} moq_substrings;

/* A set with room for `expected` texts. */
moq_status moq_substrings_setup(moq_substrings *set, moq_arena *arena, size_t expected,
                                moq_err *err);
/* Files a text that is not empty; returns the value that is now stored for it. */
uint32_t moq_substrings_add(moq_substrings *set, moq_text text, uint32_t value);

/* A search in progress; begin with zeros. */
typedef struct {
    size_t at, size; /* of the occurrence last found */
    uint64_t hash;
} moq_substring_cursor;

/* Value of the next text that occurs in the name, or MOQ_TEXTMAP_NONE when there is no more. A text
 * is found once for each place where it occurs. */
uint32_t moq_substrings_next(const moq_substrings *set, moq_text name,
                             moq_substring_cursor *cursor);

#endif
