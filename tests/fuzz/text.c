/* Text and JSON of the fuzz targets: see fuzz.h. */
#include "fuzz.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 64 /* as in the binding */

/* Bytes of the well-formed sequence at `data`, or 0 (Unicode 15, table 3-7). */
static size_t sequence(const uint8_t *data, size_t left) {
    const uint8_t lead = data[0];
    const size_t size = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (size == 0 || size > left || lead > 0xf4)
        return 0;
    for (size_t i = 1; i < size; i++) {
        if ((data[i] & 0xc0) != 0x80)
            return 0;
    }
    const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    return size > 1 && (data[1] < low || data[1] > high) ? 0 : size;
}

char *fuzz_utf8(const uint8_t *data, size_t size) {
    char *text = malloc(size + 1);
    for (size_t at = 0; at < size;) {
        const size_t length = sequence(data + at, size - at);
        if (length > 0)
            memcpy(text + at, data + at, length);
        else
            text[at] = (char)(data[at] & 0x7f);
        at += length ? length : 1;
    }
    text[size] = '\0';
    return text;
}

bool fuzz_split(moq_text *rest, char separator, moq_text *out) {
    if (!rest->data)
        return false;
    const char *end = rest->size ? memchr(rest->data, separator, rest->size) : NULL;
    if (!end) {
        *out = *rest;
        *rest = (moq_text){NULL, 0};
        return true;
    }
    *out = (moq_text){rest->data, (size_t)(end - rest->data)};
    *rest = (moq_text){end + 1, rest->size - out->size - 1};
    return true;
}

/* ---- JSON ---- */

typedef struct {
    moq_arena *arena;
    const char *at, *end;
} reader;

static bool read_value(reader *r, int depth, moq_value *out);

static char peek(reader *r) {
    while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at)
        r->at++;
    return r->at < r->end ? *r->at : '\0';
}

static bool eat(reader *r, char c) {
    if (peek(r) != c || r->at == r->end)
        return false;
    r->at++;
    return true;
}

static void *take(reader *r, size_t count, size_t size) {
    void *memory;
    moq_err err;
    return moq_arena_take(r->arena, count, size, &memory, &err) == MOQ_OK ? memory : NULL;
}

static int hex(char c) {
    const char *digits = "0123456789abcdef0123456789ABCDEF", *hit = c ? strchr(digits, c) : NULL;
    return hit ? (int)(hit - digits) % 16 : -1;
}

static bool read_unit(reader *r, uint32_t *out) {
    if (r->end - r->at < 4)
        return false;
    *out = 0;
    for (int i = 0; i < 4; i++) {
        const int digit = hex(*r->at++);
        if (digit < 0)
            return false;
        *out = *out << 4 | (uint32_t)digit;
    }
    return true;
}

/* The code point after "\u". */
static bool read_escape(reader *r, uint32_t *code) {
    uint32_t low;
    if (!read_unit(r, code) || (*code >= 0xdc00 && *code < 0xe000))
        return false;
    if (*code < 0xd800 || *code >= 0xe000)
        return true;
    if (r->end - r->at < 2 || memcmp(r->at, "\\u", 2) != 0)
        return false;
    r->at += 2;
    if (!read_unit(r, &low) || low < 0xdc00 || low >= 0xe000)
        return false;
    *code = 0x10000 + ((*code - 0xd800) << 10 | (low - 0xdc00));
    return true;
}

static size_t put_code(char *to, uint32_t code) {
    const int size = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint8_t LEAD[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = size - 1; i > 0; i--, code >>= 6)
        to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(LEAD[size] | code);
    return (size_t)size;
}

/* Bytes up to the closing quote: an escape is never shorter than what it stands for. */
static size_t text_bound(const reader *r) {
    const char *at = r->at;
    while (at < r->end && *at != '"')
        at += *at == '\\' && r->end - at > 1 ? 2 : 1;
    return (size_t)(at - r->at);
}

static bool read_text(reader *r, moq_text *out) {
    if (!eat(r, '"'))
        return false;
    char *text = take(r, text_bound(r) + 1, 1);
    size_t used = 0;
    while (text && r->at < r->end && *r->at != '"') {
        char c = *r->at++;
        if (c == '\\') {
            static const char NAMES[] = "\"\\/bfnrt", MEANT[] = "\"\\/\b\f\n\r\t";
            c = r->at < r->end ? *r->at++ : '\0';
            const char *hit = c ? strchr(NAMES, c) : NULL;
            uint32_t code;
            if (hit)
                text[used++] = MEANT[hit - NAMES];
            else if (c == 'u' && read_escape(r, &code))
                used += put_code(text + used, code);
            else
                return false;
        } else {
            text[used++] = c;
        }
    }
    *out = (moq_text){text, used};
    return text && eat(r, '"');
}

/* A number, or the NaN and Infinity that Python's reader takes. */
static bool read_number(reader *r, moq_value *out) {
    char buffer[400], *end;
    size_t size = 0;
    bool whole = true;
    while (r->at < r->end && size < sizeof buffer - 1 && *r->at &&
           strchr("+-.0123456789eENaInfity", *r->at)) {
        whole = whole && strchr("+-0123456789", *r->at);
        buffer[size++] = *r->at++;
    }
    buffer[size] = '\0';
    errno = 0;
    const long long integer = strtoll(buffer, &end, 10);
    if (whole && size > 0 && end == buffer + size && errno == 0) {
        *out = (moq_value){.kind = MOQ_INT, .as.integer = integer};
        return true;
    }
    const double real = strtod(buffer, &end);
    /* The binding's form of an integer beyond 64 bits. */
    const double bounded = whole ? copysign(1e300, real) : real;
    *out = (moq_value){.kind = MOQ_FLOAT, .as.real = bounded};
    return size > 0 && end == buffer + size;
}

static bool read_word(reader *r, const char *word) {
    const size_t size = strlen(word);
    if ((size_t)(r->end - r->at) < size || memcmp(r->at, word, size) != 0)
        return false;
    r->at += size;
    return true;
}

/* Room for one more item: the array doubles, and the arena keeps the old ones. */
static void *grow(reader *r, void *items, size_t count, size_t size) {
    if (count > 0 && (count & (count - 1)) != 0)
        return items;
    void *larger = take(r, count ? 2 * count : 1, size);
    if (larger && count > 0)
        memcpy(larger, items, count * size);
    return larger;
}

static bool read_list(reader *r, int depth, moq_value *out) {
    moq_value *items = NULL;
    size_t count = 0;
    r->at++;
    if (!eat(r, ']')) {
        do {
            items = grow(r, items, count, sizeof *items);
            if (!items || !read_value(r, depth + 1, &items[count++]))
                return false;
        } while (eat(r, ','));
        if (!eat(r, ']'))
            return false;
    }
    *out = (moq_value){.kind = MOQ_LIST, .as.list = {items, count}};
    return true;
}

static moq_member *find_member(moq_member *members, size_t count, moq_text key) {
    for (size_t i = 0; i < count; i++) {
        if (moq_text_equal(members[i].key, key))
            return &members[i];
    }
    return &members[count];
}

static bool read_object(reader *r, int depth, moq_value *out) {
    moq_member *members = NULL;
    size_t count = 0;
    r->at++;
    if (!eat(r, '}')) {
        do {
            moq_text key;
            members = grow(r, members, count, sizeof *members);
            if (!members || !read_text(r, &key) || !eat(r, ':'))
                return false;
            moq_member *member = find_member(members, count, key);
            count += member == &members[count];
            member->key = key;
            if (!read_value(r, depth + 1, &member->value))
                return false;
        } while (eat(r, ','));
        if (!eat(r, '}'))
            return false;
    }
    *out = (moq_value){.kind = MOQ_OBJECT, .as.object = {members, count}};
    return true;
}

static bool read_value(reader *r, int depth, moq_value *out) {
    const char c = peek(r);
    if (depth > DEPTH_MAX)
        return false;
    *out = (moq_value){.kind = MOQ_NULL};
    if (c == '{')
        return read_object(r, depth, out);
    if (c == '[')
        return read_list(r, depth, out);
    if (c == '"') {
        out->kind = MOQ_STRING;
        return read_text(r, &out->as.text);
    }
    if (read_word(r, "null"))
        return true;
    if (read_word(r, "true") || read_word(r, "false")) {
        *out = (moq_value){.kind = MOQ_BOOL, .as.truth = c == 't'};
        return true;
    }
    return read_number(r, out);
}

bool fuzz_json(moq_arena *arena, moq_text text, moq_value *out) {
    reader r = {arena, text.data, text.data + text.size};
    return read_value(&r, 0, out) && peek(&r) == '\0' && r.at == r.end;
}
