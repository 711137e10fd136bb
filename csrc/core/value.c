/* Document trees, text and paths: see value.h. */
#include "core/value.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool moq_text_equal(moq_text a, moq_text b) {
    return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

bool moq_text_starts(moq_text text, moq_text head) {
    return text.size >= head.size && memcmp(text.data, head.data, head.size) == 0;
}

bool moq_text_ends(moq_text text, moq_text tail) {
    return text.size >= tail.size &&
           memcmp(text.data + text.size - tail.size, tail.data, tail.size) == 0;
}

static char fold(char c) {
    return c >= 'a' && c <= 'z' ? (char)(c - 'a' + 'A') : c;
}

bool moq_text_equal_folded(moq_text text, const char *name) {
    for (size_t i = 0; i < text.size; i++) {
        if (name[i] == '\0' || fold(text.data[i]) != fold(name[i]))
            return false;
    }
    return name[text.size] == '\0';
}

bool moq_text_starts_folded(moq_text text, const char *head) {
    const size_t size = strlen(head);
    return text.size >= size && moq_text_equal_folded((moq_text){text.data, size}, head);
}

size_t moq_text_find(moq_text text, moq_text part) {
    if (part.size == 0)
        return 0;
    for (size_t at = 0; at + part.size <= text.size; at++) {
        const char *hit = memchr(text.data + at, part.data[0], text.size - part.size + 1 - at);
        if (!hit)
            break;
        at = (size_t)(hit - text.data);
        if (memcmp(hit, part.data, part.size) == 0)
            return at;
    }
    return SIZE_MAX;
}

int moq_text_shown(moq_text text) {
    return (int)(text.size > 200 ? moq_utf8_cut(text.data, 200) : text.size);
}

moq_text moq_text_last_component(moq_text name) {
    size_t at = name.size;
    while (at > 0 && name.data[at - 1] != '.')
        at--;
    return (moq_text){name.data + at, name.size - at};
}

moq_status moq_text_print(moq_arena *arena, moq_text *out, moq_err *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    char buffer[1024];
    int wanted = vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    size_t size = wanted < 0 ? 0 : (size_t)wanted;
    if (size >= sizeof buffer)
        size = moq_utf8_cut(buffer, sizeof buffer - 1);
    void *copy;
    MOQ_TRY(moq_arena_take(arena, size + 1, 1, &copy, err));
    memcpy(copy, buffer, size);
    *out = (moq_text){copy, size};
    return MOQ_OK;
}

const moq_value *moq_value_member(const moq_value *object, const char *key) {
    if (!object || object->kind != MOQ_OBJECT)
        return NULL;
    const moq_text wanted = {key, strlen(key)};
    for (size_t i = 0; i < object->as.object.count; i++) {
        if (moq_text_equal(object->as.object.members[i].key, wanted))
            return &object->as.object.members[i].value;
    }
    return NULL;
}

const moq_value *moq_value_present(const moq_value *object, const char *key) {
    const moq_value *value = moq_value_member(object, key);
    return value && value->kind != MOQ_NULL ? value : NULL;
}

const char *moq_value_describe(const moq_value *value, char *buffer, size_t size) {
    switch (value->kind) {
    case MOQ_NULL:
        snprintf(buffer, size, "null");
        break;
    case MOQ_BOOL:
        snprintf(buffer, size, value->as.truth ? "true" : "false");
        break;
    case MOQ_INT:
        snprintf(buffer, size, "%" PRId64, value->as.integer);
        break;
    case MOQ_FLOAT:
        snprintf(buffer, size, "%g", value->as.real);
        break;
    case MOQ_STRING:
        snprintf(buffer, size, "'%.*s%s'", MOQ_TEXT_ARGS(value->as.text));
        break;
    case MOQ_LIST:
        snprintf(buffer, size, "a list of %zu", value->as.list.count);
        break;
    case MOQ_OBJECT:
        snprintf(buffer, size, "an object of %zu members", value->as.object.count);
        break;
    }
    return buffer;
}

static bool is_plain_key(moq_text key) {
    for (size_t i = 0; i < key.size; i++) {
        char c = key.data[i];
        if (!(c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
              (i > 0 && c >= '0' && c <= '9')))
            return false;
    }
    return key.size > 0;
}

typedef struct {
    char *data;
    size_t used, size;
} printer;

static void put(printer *to, const char *data, size_t size) {
    if (size > to->size - 1 - to->used)
        size = to->size - 1 - to->used;
    memcpy(to->data + to->used, data, size);
    to->used += size;
    to->data[to->used] = '\0';
}

/* Control bytes of a key, NUL among them, are shown escaped. */
static void put_quoted(printer *to, moq_text key) {
    put(to, "['", 2);
    for (size_t i = 0; i < key.size; i++) {
        unsigned char c = (unsigned char)key.data[i];
        char escape[8];
        if (c >= 0x20 && c != '\'' && c != '\\')
            put(to, key.data + i, 1);
        else
            put(to, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", c));
    }
    put(to, "']", 2);
}

static void print_steps(const moq_path *path, printer *to) {
    if (!path->up) {
        put(to, path->key.data, path->key.size);
        return;
    }
    print_steps(path->up, to);
    if (!path->key.data) {
        char index[24];
        put(to, index, (size_t)snprintf(index, sizeof index, "[%zu]", path->index));
    } else if (is_plain_key(path->key)) {
        put(to, ".", 1);
        put(to, path->key.data, path->key.size);
    } else {
        put_quoted(to, path->key);
    }
}

void moq_path_print(const moq_path *path, char *buffer, size_t size) {
    printer to = {buffer, 0, size};
    buffer[0] = '\0';
    print_steps(path, &to);
    if (to.used == size - 1 && size > 4)
        memcpy(buffer + moq_utf8_cut(buffer, size - 4), "...", 4);
}

moq_status moq_fail_at(moq_err *err, const moq_path *path, const char *format, ...) {
    char where[sizeof err->path], message[sizeof err->text];
    const moq_path *root = path;
    while (root->up)
        root = root->up;
    moq_path_print(path, where, sizeof where);
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    const char *file = root->file ? root->file : "";
    return moq_fail_config(err, where, "%s%s%s: %s", file, *file ? ": " : "", where, message);
}
