/* The name that a misspelt one was probably meant to be, for messages.
 *
 * Names are compared by their letters and digits, in either case: one that differs in a letter too
 * many, too few, another or swapped with its neighbour (two in names of six or more) is near.
 * Digits tell formats apart, so none may be another: FP9 is not taken for FP8. */
#ifndef MOQ_CORE_NEAREST_H
#define MOQ_CORE_NEAREST_H

#include "core/value.h"

#define MOQ_NEAREST_SIZE 40

typedef struct {
    char typed[MOQ_NEAREST_SIZE];
    int size;         /* 0: nothing, or more than a name has */
    int distance;     /* of the nearest spelling to what was typed */
    const char *name; /* the name with that spelling; NULL: none, or two names as near */
} moq_nearest;

void moq_nearest_begin(moq_nearest *nearest, moq_text typed);
/* Tries a spelling that may have been meant; `name` is what it is called, one for all spellings. */
void moq_nearest_try(moq_nearest *nearest, const char *spelling, const char *name);
/* "; did you mean NVFP4?", or "". */
const char *moq_nearest_hint(const moq_nearest *nearest, char *buffer, size_t size);

#endif
