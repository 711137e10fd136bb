/* Python mappings into document trees: see py_value.h. */
#include "binding/py_value.h"

#include <string.h>

#define DEPTH_MAX 64

typedef struct {
    moq_state *state;
    moq_arena *arena;
    moq_err err;
} copier;

static int copy_value(copier *c, PyObject *object, const moq_path *path, int depth, moq_value *out);

static int raise_at(copier *c, const moq_path *path, const char *message) {
    moq_fail_at(&c->err, path, "%s", message);
    moq_raise(c->state, &c->err);
    return -1;
}

static int take(copier *c, Py_ssize_t count, size_t size, void **out) {
    if (moq_arena_take(c->arena, (size_t)count, size, out, &c->err) == MOQ_OK)
        return 0;
    moq_raise(c->state, &c->err);
    return -1;
}

static int copy_text(copier *c, PyObject *object, const moq_path *path, moq_text *out) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(object, &size);
    void *memory;
    if (!data) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
            return -1;
        PyErr_Clear();
        return raise_at(c, path, "text with a lone surrogate, which is no Unicode text");
    }
    if (take(c, size + 1, 1, &memory) < 0)
        return -1;
    memcpy(memory, data, (size_t)size);
    *out = (moq_text){memory, (size_t)size};
    return 0;
}

static int copy_integer(PyObject *object, moq_value *out) {
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && PyErr_Occurred())
        return -1;
    *out = overflow ? (moq_value){.kind = MOQ_FLOAT, .as.real = overflow > 0 ? 1e300 : -1e300}
                    : (moq_value){.kind = MOQ_INT, .as.integer = value};
    return 0;
}

static int copy_list(copier *c, PyObject *object, const moq_path *path, int depth, moq_value *out) {
    /* A tuple of its own: a list could change while it is read. */
    PyObject *items = PySequence_Tuple(object);
    void *memory;
    int done = -1;
    if (!items)
        return -1;
    const Py_ssize_t count = PyTuple_Size(items);
    if (take(c, count, sizeof(moq_value), &memory) < 0)
        goto end;
    out->kind = MOQ_LIST;
    out->as.list.items = memory;
    out->as.list.count = (size_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        const moq_path item = {.up = path, .index = (size_t)i};
        if (copy_value(c, PyTuple_GetItem(items, i), &item, depth + 1, &out->as.list.items[i]) < 0)
            goto end;
    }
    done = 0;
end:
    Py_DECREF(items);
    return done;
}

static int copy_member(copier *c, PyObject *pair, const moq_path *path, int depth,
                       moq_member *out) {
    PyObject *key =
        PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyTuple_GetItem(pair, 0) : NULL;
    if (!key || !PyUnicode_Check(key))
        return raise_at(c, path, "expected text as the key of every member");
    if (copy_text(c, key, path, &out->key) < 0)
        return -1;
    const moq_path member = {.up = path, .key = out->key};
    return copy_value(c, PyTuple_GetItem(pair, 1), &member, depth + 1, &out->value);
}

static int copy_object(copier *c, PyObject *object, const moq_path *path, int depth,
                       moq_value *out) {
    PyObject *items = PyMapping_Items(object);
    void *memory;
    int done = -1;
    if (!items)
        return -1;
    const Py_ssize_t count = PyList_Size(items);
    if (take(c, count, sizeof(moq_member), &memory) < 0)
        goto end;
    out->kind = MOQ_OBJECT;
    out->as.object.members = memory;
    out->as.object.count = (size_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (copy_member(c, PyList_GetItem(items, i), path, depth, &out->as.object.members[i]) < 0)
            goto end;
    }
    done = 0;
end:
    Py_DECREF(items);
    return done;
}

static int copy_value(copier *c, PyObject *object, const moq_path *path, int depth,
                      moq_value *out) {
    *out = (moq_value){.kind = MOQ_NULL};
    if (depth > DEPTH_MAX)
        return raise_at(c, path, "nested deeper than 64 levels");
    if (object == Py_None)
        return 0;
    if (PyBool_Check(object)) {
        *out = (moq_value){.kind = MOQ_BOOL, .as.truth = object == Py_True};
        return 0;
    }
    if (PyLong_Check(object))
        return copy_integer(object, out);
    if (PyFloat_Check(object)) {
        *out = (moq_value){.kind = MOQ_FLOAT, .as.real = PyFloat_AsDouble(object)};
        return 0;
    }
    if (PyUnicode_Check(object)) {
        out->kind = MOQ_STRING;
        return copy_text(c, object, path, &out->as.text);
    }
    if (PyList_Check(object) || PyTuple_Check(object))
        return copy_list(c, object, path, depth, out);
    if (PyDict_Check(object) || PyObject_HasAttrString(object, "items"))
        return copy_object(c, object, path, depth, out);
    return raise_at(c, path,
                    "expected what JSON can hold: an object, a list, text, a number, true, "
                    "false or null");
}

int moq_value_from_python(moq_state *state, moq_arena *arena, PyObject *object,
                          const moq_path *path, moq_value *out) {
    copier c = {.state = state, .arena = arena};
    return copy_value(&c, object, path, 0, out);
}

int moq_text_from_python(moq_state *state, moq_arena *arena, PyObject *object, const char *name,
                         moq_text *out) {
    copier c = {.state = state, .arena = arena};
    const moq_path path = {.key = {name, strlen(name)}};
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a str, got %R", name, Py_TYPE(object));
        return -1;
    }
    return copy_text(&c, object, &path, out);
}

PyObject *moq_text_to_python(moq_text text) {
    if (!text.data)
        Py_RETURN_NONE;
    /* Text cut to fit a message may end inside a code point. */
    return PyUnicode_DecodeUTF8(text.data, (Py_ssize_t)text.size, "replace");
}
