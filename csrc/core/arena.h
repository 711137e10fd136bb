/* Memory that is freed all at once, with a limit, so that a document cannot make the library take
 * more than it was given. Blocks are zeroed. */
#ifndef MOQ_CORE_ARENA_H
#define MOQ_CORE_ARENA_H

#include "core/status.h"

typedef struct moq_arena_block moq_arena_block;

typedef struct {
    moq_arena_block *blocks;
    size_t taken; /* bytes taken from the system */
    size_t limit;
} moq_arena;

/* An arena in zeroed memory has no limit set and serves nothing until this is called. */
void moq_arena_setup(moq_arena *arena, size_t limit);
/* Frees the blocks, if there are any; the arena may be used again afterwards. */
void moq_arena_release(moq_arena *arena);

/* `count` zeroed items of `size` bytes, aligned for any type. *out is never NULL on success, not
 * even for a count of 0. */
moq_status moq_arena_take(moq_arena *arena, size_t count, size_t size, void **out, moq_err *err);

#endif
