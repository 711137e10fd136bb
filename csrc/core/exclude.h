/* A compiled list of excluded modules, as the producer means it.
 *
 * An entry without `*` covers the module of that name and everything below it; one with `*` is a
 * whole-name glob in which `*` crosses dots and nothing else is special, and `p.*` covers p itself
 * too. A leading `model.`, `language_model.`, `model.language_model.` or `language_model.model.`
 * may be there or not, on either side: an entry fits as written, or after such a prefix is taken
 * off both itself and the name. */
#ifndef MOQ_CORE_EXCLUDE_H
#define MOQ_CORE_EXCLUDE_H

#include "core/names.h"
#include "core/nametable.h"

typedef struct moq_exclusion moq_exclusion;

/* Compiles a list, all of whose memory is the arena's; the entries' text is borrowed. */
moq_status moq_exclusion_compile(moq_arena *arena, const moq_text *entries, size_t count,
                                 moq_exclusion **out, moq_err *err);

/* Index of an entry that covers `name`, or MOQ_NAME_NONE. */
uint32_t moq_exclusion_find(const moq_exclusion *set, moq_text name);
/* Index of an entry that names something below the expert container `name`, or MOQ_NAME_NONE. */
uint32_t moq_exclusion_find_below(const moq_exclusion *set, moq_text name);

#endif
