/* The arena: see arena.h. A list of malloc'd blocks, the newest first; only it has room. */
#include "core/arena.h"

#include <stdalign.h>
#include <stdint.h>
#include <stdlib.h>

#define BLOCK_BYTES ((size_t)1 << 16)

struct moq_arena_block {
    moq_arena_block *next;
    size_t used, size;
    max_align_t data[];
};

void moq_arena_setup(moq_arena *arena, size_t limit) {
    *arena = (moq_arena){.limit = limit};
}

void moq_arena_release(moq_arena *arena) {
    moq_arena_block *block = arena->blocks;
    while (block) {
        moq_arena_block *next = block->next;
        free(block);
        block = next;
    }
    arena->blocks = NULL;
    arena->taken = 0;
}

static moq_status add_block(moq_arena *arena, size_t bytes, moq_err *err) {
    size_t size = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
    if (size > arena->limit - arena->taken)
        return moq_fail(err, MOQ_ERR_MEMORY, "a document needs more than the %zu bytes it may take",
                        arena->limit);
    moq_arena_block *block = calloc(1, sizeof *block + size);
    if (!block)
        return moq_fail(err, MOQ_ERR_MEMORY, "out of memory for %zu bytes", size);
    block->size = size;
    block->next = arena->blocks;
    arena->blocks = block;
    arena->taken += size;
    return MOQ_OK;
}

moq_status moq_arena_take(moq_arena *arena, size_t count, size_t size, void **out, moq_err *err) {
    const size_t unit = alignof(max_align_t);
    if (size && count > (SIZE_MAX - 2 * unit) / size)
        return moq_fail(err, MOQ_ERR_MEMORY, "%zu items of %zu bytes are too many", count, size);
    size_t bytes = (count * size + unit) / unit * unit;
    if (!arena->blocks || arena->blocks->size - arena->blocks->used < bytes)
        MOQ_TRY(add_block(arena, bytes, err));
    moq_arena_block *block = arena->blocks;
    *out = (char *)block->data + block->used;
    block->used += bytes;
    return MOQ_OK;
}
