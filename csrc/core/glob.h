/* Patterns over module names, compiled once.
 *
 * Two rule sets. MOQ_GLOB_STAR is the one ModelOpt writes for: `*` matches any run of characters,
 * dots included, and nothing else is special. MOQ_GLOB_FNMATCH is that of Python's
 * fnmatch.fnmatchcase, with `?`, `[...]` and `[!...]` on code points, reversed ranges and unclosed
 * brackets included. Both match whole names, case-sensitively, in time O(name * pattern). */
#ifndef MOQ_CORE_GLOB_H
#define MOQ_CORE_GLOB_H

#include "core/value.h"

typedef enum { MOQ_GLOB_STAR, MOQ_GLOB_FNMATCH } moq_glob_rules;

typedef struct moq_glob_op moq_glob_op;

typedef struct {
    const moq_glob_op *ops;
    size_t count;
} moq_glob;

/* The text of the pattern is borrowed and must live as long as the glob. */
moq_status moq_glob_compile(moq_arena *arena, moq_text pattern, moq_glob_rules rules, moq_glob *out,
                            moq_err *err);
bool moq_glob_match(const moq_glob *glob, moq_text name);
/* The longest text that every matching name contains, the last of several; empty when there is
 * none. */
moq_text moq_glob_longest_literal(const moq_glob *glob);
/* Number of leading bytes before the first special character. */
size_t moq_glob_head(moq_text pattern, moq_glob_rules rules);

#endif
