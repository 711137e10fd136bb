/* The end of a process in which an invariant is broken: see invariant.h. */
#include "core/invariant.h"

#ifdef MOQ_CHECKED

#include <stdio.h>
#include <stdlib.h>

void moq_break(const char *invariant, const char *file, int line) {
    fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, invariant);
    abort();
}
#endif
