/* Texts inside a name: see substrings.h. */
#include "core/substrings.h"

void moq_lengths_add(moq_lengths *lengths, size_t length) {
    if (length > MOQ_NAME_MAX)
        return;
    lengths->bits[length / 64] |= (uint64_t)1 << (length % 64);
    if (length > lengths->longest)
        lengths->longest = length;
}

moq_status moq_substrings_setup(moq_substrings *set, moq_arena *arena, size_t expected,
                                moq_err *err) {
    *set = (moq_substrings){0};
    return moq_textmap_setup(&set->map, arena, expected, err);
}

uint32_t moq_substrings_add(moq_substrings *set, moq_text text, uint32_t value) {
    const size_t first = (size_t)(unsigned char)text.data[0] << 8;
    if (text.size > 1) {
        const size_t pair = first | (unsigned char)text.data[1];
        set->starts[pair / 64] |= (uint64_t)1 << (pair % 64);
    } else {
        for (size_t i = 0; i < 256 / 64; i++) /* any second byte will do */
            set->starts[first / 64 + i] = UINT64_MAX;
    }
    moq_lengths_add(&set->lengths, text.size);
    return moq_textmap_insert(&set->map, text, value);
}

static bool may_start(const moq_substrings *set, moq_text name, size_t at) {
    size_t pair = (size_t)(unsigned char)name.data[at] << 8;
    if (at + 1 < name.size)
        pair |= (unsigned char)name.data[at + 1];
    return set->starts[pair / 64] >> (pair % 64) & 1;
}

uint32_t moq_substrings_next(const moq_substrings *set, moq_text name,
                             moq_substring_cursor *cursor) {
    for (; cursor->at < name.size; cursor->at++, cursor->size = 0, cursor->hash = 0) {
        if (!may_start(set, name, cursor->at))
            continue;
        while (cursor->at + cursor->size < name.size && cursor->size < set->lengths.longest) {
            const char byte = name.data[cursor->at + cursor->size++];
            cursor->hash = moq_textmap_step(&set->map, cursor->hash, byte);
            if (!moq_lengths_has(&set->lengths, cursor->size))
                continue;
            const moq_text part = {name.data + cursor->at, cursor->size};
            const uint32_t value = moq_textmap_find_hashed(&set->map, part, cursor->hash);
            if (value != MOQ_TEXTMAP_NONE)
                return value;
        }
    }
    return MOQ_TEXTMAP_NONE;
}
