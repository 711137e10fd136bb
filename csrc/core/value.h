/* A parsed JSON-like document: what a configuration is read from.
 *
 * The tree lives in an arena and is built by the binding; nothing here knows where it came from.
 * Text is UTF-8 with a length, may hold NUL bytes, and is not NUL-terminated. Failures inside a
 * document carry its file and the JSON path of the field. */
#ifndef MOQ_CORE_VALUE_H
#define MOQ_CORE_VALUE_H

#include "core/arena.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    const char *data;
    size_t size;
} moq_text;

#define MOQ_TEXT(literal) ((moq_text){(literal), sizeof(literal) - 1})

/* The beginning of a text, for a message: 200 bytes at most, never a part of a character. */
int moq_text_shown(moq_text text);

/* Arguments for printf's "%.*s%s": the text, or its beginning and three dots. */
#define MOQ_TEXT_ARGS(text)                                                                        \
    moq_text_shown(text), (text).data, (size_t)moq_text_shown(text) < (text).size ? "..." : ""

bool moq_text_equal(moq_text a, moq_text b);
bool moq_text_starts(moq_text text, moq_text head);
bool moq_text_ends(moq_text text, moq_text tail);
/* ASCII letters compare equal in either case; `name` is NUL-terminated. */
bool moq_text_equal_folded(moq_text text, const char *name);
bool moq_text_starts_folded(moq_text text, const char *head);
/* Offset of the first occurrence of `part`, or SIZE_MAX; an empty part occurs at 0. */
size_t moq_text_find(moq_text text, moq_text part);
/* The part of a text after its last dot. */
moq_text moq_text_last_component(moq_text name);
/* A copy of printf's output in the arena. */
moq_status moq_text_print(moq_arena *arena, moq_text *out, moq_err *err, const char *format, ...)
    MOQ_PRINTF(4, 5);

typedef enum {
    MOQ_NULL,
    MOQ_BOOL,
    MOQ_INT,
    MOQ_FLOAT, /* also an integer beyond 64 bits */
    MOQ_STRING,
    MOQ_LIST,
    MOQ_OBJECT
} moq_value_kind;

typedef struct moq_value moq_value;
typedef struct moq_member moq_member;

struct moq_value {
    moq_value_kind kind;
    union {
        bool truth;
        int64_t integer;
        double real;
        moq_text text;
        struct {
            moq_value *items;
            size_t count;
        } list;
        struct {
            moq_member *members; /* in the document's order, keys distinct */
            size_t count;
        } object;
    } as;
};

struct moq_member {
    moq_text key;
    moq_value value;
};

/* The member `key`, or NULL when there is none or `object` is no object (NULL included). */
const moq_value *moq_value_member(const moq_value *object, const char *key);
/* The member `key`, or NULL when it is absent or null. */
const moq_value *moq_value_present(const moq_value *object, const char *key);
/* Writes what a value is, short enough for a message: 'text', 3, null, "a list of 4". */
const char *moq_value_describe(const moq_value *value, char *buffer, size_t size);

/* A place in a document: a chain from the field up to its root, on the callers' stacks. */
typedef struct moq_path {
    const struct moq_path *up; /* NULL for the root */
    moq_text key;              /* member name; for the root the text it prints as, e.g. "$" */
    const char *file;          /* root only: file name for messages, or "" */
    size_t index;              /* list item, used where key.data is NULL */
} moq_path;

/* ".name" or "['odd name']" steps; cut with "..." when the buffer is too small. */
void moq_path_print(const moq_path *path, char *buffer, size_t size);
/* A MOQ_ERR_CONFIG failure at `path`, the message led by the file's name. */
moq_status moq_fail_at(moq_err *err, const moq_path *path, const char *format, ...)
    MOQ_PRINTF(3, 4);

#endif
