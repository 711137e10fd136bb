/* Text to number: see textmap.h. Open addressing, linear probing, never more than half full. */
#include "core/textmap.h"

#include <time.h>

/* The finaliser of splitmix64: every input bit reaches every output bit. */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* A seed that is not secret, only unpredictable for whoever wrote the file: addresses are
 * randomised by the system, and the clock runs on. */
static uint64_t random_base(const void *where) {
    struct timespec now = {0};
    timespec_get(&now, TIME_UTC);
    uint64_t seed = mix((uint64_t)(uintptr_t)where) ^ mix((uint64_t)now.tv_nsec + 1) ^
                    mix((uint64_t)now.tv_sec << 20);
    return (mix(seed) >> 4) + 512; /* below 2^61 - 1, above any byte */
}

moq_status moq_textmap_setup(moq_textmap *map, moq_arena *arena, size_t expected, moq_err *err) {
    if (expected >= MOQ_TEXTMAP_NONE / 2)
        return moq_fail(err, MOQ_ERR_MEMORY, "%zu names are too many", expected);
    size_t capacity = 8;
    while (capacity < 2 * expected)
        capacity *= 2;
    void *slots;
    MOQ_TRY(moq_arena_take(arena, capacity, sizeof *map->slots, &slots, err));
    *map = (moq_textmap){.slots = slots, .capacity = capacity, .base = random_base(slots)};
    return MOQ_OK;
}

static moq_textmap_slot *slot_of(const moq_textmap *map, moq_text key, uint64_t hash) {
    size_t at = (size_t)mix(hash) & (map->capacity - 1);
    while (map->slots[at].used &&
           !(map->slots[at].hash == hash && moq_text_equal(map->slots[at].key, key)))
        at = (at + 1) & (map->capacity - 1);
    return &map->slots[at];
}

static uint64_t hash_of(const moq_textmap *map, moq_text key) {
    uint64_t hash = 0;
    for (size_t i = 0; i < key.size; i++)
        hash = moq_textmap_step(map, hash, key.data[i]);
    return hash;
}

uint32_t moq_textmap_insert(moq_textmap *map, moq_text key, uint32_t value) {
    uint64_t hash = hash_of(map, key);
    moq_textmap_slot *slot = slot_of(map, key, hash);
    if (!slot->used) {
        *slot = (moq_textmap_slot){.key = key, .hash = hash, .value = value, .used = true};
        map->count++;
    }
    return slot->value;
}

uint32_t moq_textmap_find_hashed(const moq_textmap *map, moq_text key, uint64_t hash) {
    const moq_textmap_slot *slot = slot_of(map, key, hash);
    return slot->used ? slot->value : MOQ_TEXTMAP_NONE;
}

uint32_t moq_textmap_find(const moq_textmap *map, moq_text key) {
    return moq_textmap_find_hashed(map, key, hash_of(map, key));
}
