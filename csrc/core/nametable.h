/* Many patterns asked about one name at a time: what exclusion lists are compiled to.
 *
 * A pattern without special character, and one whose only special character is a star at its end,
 * is filed under the text before it, found in one pass over the name. Any other is filed under the
 * longest text it demands, and tried only on names that contain it. */
#ifndef MOQ_CORE_NAMETABLE_H
#define MOQ_CORE_NAMETABLE_H

#include "core/glob.h"
#include "core/substrings.h"

typedef struct moq_name_table moq_name_table;

typedef struct {
    moq_text text;
    uint32_t id; /* what a search returns for it */
} moq_name_pattern;

#define MOQ_NAME_NONE UINT32_MAX

/* Under MOQ_GLOB_STAR a pattern without star also covers everything below the name, and `p.*` also
 * covers p; under MOQ_GLOB_FNMATCH both mean what fnmatch says. The text is borrowed. */
moq_status moq_name_table_build(moq_arena *arena, const moq_name_pattern *patterns, size_t count,
                                moq_glob_rules rules, moq_name_table **out, moq_err *err);

/* Id of a pattern that matches, or MOQ_NAME_NONE. Names of MOQ_NAME_MAX bytes and more match
 * nothing. */
uint32_t moq_name_table_find(const moq_name_table *table, moq_text name);

#endif
