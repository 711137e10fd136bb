/* A hash table from text to a number, and the incremental hash under it.
 *
 * The hash is a polynomial over the bytes modulo 2^61 - 1, so the hash of every prefix of a name
 * falls out of one pass over it. Its base differs from table to table and run to run: names chosen
 * to collide (they come from files) do so with a probability of about length / 2^61. */
#ifndef MOQ_CORE_TEXTMAP_H
#define MOQ_CORE_TEXTMAP_H

#include "core/value.h"

typedef struct {
    moq_text key;
    uint64_t hash;
    uint32_t value;
    bool used;
} moq_textmap_slot;

typedef struct {
    moq_textmap_slot *slots;
    size_t capacity; /* a power of two */
    size_t count;
    uint64_t base;
} moq_textmap;

#define MOQ_TEXTMAP_NONE UINT32_MAX

/* Makes room for `expected` keys, all of them taken from the arena; more are an internal error. */
moq_status moq_textmap_setup(moq_textmap *map, moq_arena *arena, size_t expected, moq_err *err);
/* Inserts unless the key is there; returns the value now stored. Keys are not copied. */
uint32_t moq_textmap_insert(moq_textmap *map, moq_text key, uint32_t value);
/* Value of the key, or MOQ_TEXTMAP_NONE. */
uint32_t moq_textmap_find(const moq_textmap *map, moq_text key);

/* The hash of text + byte, from the hash of text; the empty text has hash 0. */
static inline uint64_t moq_textmap_step(const moq_textmap *map, uint64_t hash, char byte) {
    const uint64_t prime = ((uint64_t)1 << 61) - 1;
    __extension__ unsigned __int128 product = (unsigned __int128)hash * map->base;
    uint64_t sum = (uint64_t)(product & prime) + (uint64_t)(product >> 61);
    sum = (sum >= prime ? sum - prime : sum) + (unsigned char)byte + 1;
    return sum >= prime ? sum - prime : sum;
}
/* The lookup for a key whose hash is known. */
uint32_t moq_textmap_find_hashed(const moq_textmap *map, moq_text key, uint64_t hash);

#endif
