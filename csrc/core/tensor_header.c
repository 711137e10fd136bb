/* The header of a .safetensors file, entry by entry: see tensor_header.h. */
#include "core/tensor_header.h"

#include <string.h>

#define ELEMENTS_MAX ((int64_t)1 << 60)

enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };

void moq_header_open(moq_header_reader *reader, moq_text text) {
    *reader = (moq_header_reader){.at = text.data, .end = text.data + text.size};
}

static void skip_space(moq_header_reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

/* Takes `byte`, with space in front of it, where it is the next. */
static bool take(moq_header_reader *r, char byte) {
    skip_space(r);
    if (r->at == r->end || *r->at != byte)
        return false;
    r->at++;
    return true;
}

static bool take_text(moq_header_reader *r, moq_text *out) {
    if (!take(r, '"'))
        return false;
    const char *begin = r->at;
    while (r->at < r->end && *r->at != '"') {
        if (*r->at == '\\' || (unsigned char)*r->at < 0x20)
            return false;
        r->at++;
    }
    if (r->at == r->end)
        return false;
    *out = (moq_text){begin, (size_t)(r->at++ - begin)};
    return true;
}

static bool take_key(moq_header_reader *r, moq_text *out) {
    return take_text(r, out) && take(r, ':');
}

/* Digits without a sign and without zeros in front; what stands behind them is the caller's. */
static bool take_size(moq_header_reader *r, int64_t *out) {
    skip_space(r);
    const char *begin = r->at;
    int64_t value = 0;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9') {
        const int64_t digit = *r->at++ - '0';
        if (value > (INT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return r->at > begin && (*begin != '0' || r->at == begin + 1);
}

/* An array of `most` sizes at most; -1 where it is none. */
static int take_sizes(moq_header_reader *r, int64_t *out, int most) {
    int count = 0;
    if (!take(r, '['))
        return -1;
    if (take(r, ']'))
        return 0;
    do {
        if (count == most || !take_size(r, &out[count++]))
            return -1;
    } while (take(r, ','));
    return take(r, ']') ? count : -1;
}

/* The value of one key of an entry: which it was, or 0. */
static int take_field(moq_header_reader *r, moq_header_entry *entry) {
    moq_text key;
    if (!take_key(r, &key))
        return 0;
    if (moq_text_equal(key, MOQ_TEXT("dtype")))
        return take_text(r, &entry->dtype) ? DTYPE : 0;
    if (moq_text_equal(key, MOQ_TEXT("shape"))) {
        entry->ndim = take_sizes(r, entry->shape, MOQ_HEADER_RANK_MAX);
        return entry->ndim < 0 ? 0 : SHAPE;
    }
    int64_t offsets[2];
    if (!moq_text_equal(key, MOQ_TEXT("data_offsets")) || take_sizes(r, offsets, 2) != 2)
        return 0;
    entry->begin = offsets[0];
    entry->end = offsets[1];
    return OFFSETS;
}

static bool take_tensor(moq_header_reader *r, moq_header_entry *entry) {
    int seen = 0;
    if (!take(r, '{'))
        return false;
    do {
        const int field = take_field(r, entry);
        if (!field || (seen & field))
            return false;
        seen |= field;
    } while (take(r, ','));
    return seen == ALL && take(r, '}');
}

/* True if another entry follows: goes past the comma in front of it, or past the closing bracket.
 */
static bool has_more(moq_header_reader *r, bool *is_right) {
    const bool first = r->first;
    r->first = false;
    *is_right = true;
    if (take(r, '}'))
        return false;
    *is_right = first || take(r, ',');
    return *is_right;
}

static moq_header_step next_metadata(moq_header_reader *r, moq_header_entry *entry) {
    if (!take_key(r, &entry->name) || !take_text(r, &entry->dtype))
        return MOQ_HEADER_UNUSUAL;
    return MOQ_HEADER_METADATA;
}

moq_header_step moq_header_next(moq_header_reader *r, moq_header_entry *entry) {
    bool is_right;
    if (!r->inside) {
        r->inside = r->first = take(r, '{');
        if (!r->inside)
            return MOQ_HEADER_UNUSUAL;
    }
    for (;;) {
        if (!has_more(r, &is_right)) {
            if (!is_right)
                return MOQ_HEADER_UNUSUAL;
            if (r->metadata) {
                r->metadata = false;
                continue;
            }
            skip_space(r);
            return r->at == r->end ? MOQ_HEADER_END : MOQ_HEADER_UNUSUAL;
        }
        if (r->metadata)
            return next_metadata(r, entry);
        if (!take_key(r, &entry->name))
            return MOQ_HEADER_UNUSUAL;
        if (!moq_text_equal(entry->name, MOQ_TEXT("__metadata__")))
            return take_tensor(r, entry) ? MOQ_HEADER_TENSOR : MOQ_HEADER_UNUSUAL;
        if (r->has_metadata || !take(r, '{'))
            return MOQ_HEADER_UNUSUAL;
        r->has_metadata = r->metadata = r->first = true;
    }
}

bool moq_header_entry_fits(const moq_header_entry *entry, int64_t room, int64_t bits) {
    int64_t product = 1;
    bool is_empty = false;
    for (int32_t i = 0; i < entry->ndim; i++) {
        const int64_t extent = entry->shape[i];
        if (extent == 0) {
            is_empty = true;
            continue;
        }
        if (extent >= ELEMENTS_MAX || product > (ELEMENTS_MAX - 1) / extent)
            return false;
        product *= extent;
    }
    if (entry->begin > entry->end || entry->end > room)
        return false;
    if (bits == 0)
        return true;
    /* 2^60 elements of at most 64 bits, and 2^63 bytes: neither product is beyond 2^66. */
    __extension__ typedef unsigned __int128 wide;
    const wide needed = is_empty ? 0 : (wide)product * (wide)bits;
    return needed == (wide)(entry->end - entry->begin) * 8;
}
