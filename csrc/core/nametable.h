/* Many patterns asked about one name at a time: what exclusion lists are compiled to.
 *
 * Patterns are filed under their literal beginning (everything before the first special
 * character). One pass over the name finds all beginnings that fit, and only those patterns are
 * looked at; a pattern that begins with a special character is filed under the empty text and tried
 * on every name. */
#ifndef MOQ_CORE_NAMETABLE_H
#define MOQ_CORE_NAMETABLE_H

#include "core/glob.h"
#include "core/textmap.h"

typedef struct moq_name_table moq_name_table;

/* Longest module name that can be asked about. */
#define MOQ_NAME_MAX 4096

typedef struct {
    moq_text text;
    uint32_t id; /* what a search returns for it */
} moq_name_pattern;

#define MOQ_NAME_NONE UINT32_MAX

/* Under MOQ_GLOB_STAR a pattern without star also covers everything below the name, and `p.*` also
 * covers p; under MOQ_GLOB_FNMATCH both mean what fnmatch says. The text is borrowed. */
moq_status moq_name_table_build(moq_arena *arena, const moq_name_pattern *patterns, size_t count,
                                moq_glob_rules rules, moq_name_table **out, moq_err *err);

/* Id of a pattern that matches, or MOQ_NAME_NONE. Names longer than MOQ_NAME_MAX match nothing. */
uint32_t moq_name_table_find(const moq_name_table *table, moq_text name);

/* Which lengths a set of texts has, so that most positions of a name need no look-up. */
typedef struct {
    uint64_t bits[MOQ_NAME_MAX / 64 + 1];
    size_t longest; /* of those up to MOQ_NAME_MAX; longer ones are left out */
} moq_lengths;

void moq_lengths_add(moq_lengths *lengths, size_t length);

static inline bool moq_lengths_has(const moq_lengths *lengths, size_t length) {
    return lengths->bits[length / 64] >> (length % 64) & 1;
}

#endif
