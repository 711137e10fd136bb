/* `_C.read_tensor_header`: the tensors of a .safetensors file from its header. */
#include "binding/state.h"
#include "core/tensor_header.h"

/* Attributes of moqext.TensorInfo; fields of an entry. */
enum { NAME, DTYPE, SHAPE, FILE_PATH, BEGIN, END, FIELDS };

static const char *const FIELD_NAMES[FIELDS] = {"name", "dtype", "shape", "file", "begin", "end"};

typedef struct {
    PyTypeObject *type; /* of the objects that describe tensors */
    PyObject *file;
    PyObject *bits; /* dict: dtype -> bits of an element */
    int64_t data_begin, room;
    PyObject *field[FIELDS]; /* names of attributes */
    PyObject *tensors, *metadata;
} reading;

/* Text as str. Where it is no UTF-8, NULL without an exception. */
static PyObject *make_text(moq_text text) {
    PyObject *made = PyUnicode_DecodeUTF8(text.data, (Py_ssize_t)text.size, NULL);
    if (!made && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        PyErr_Clear();
    return made;
}

static PyObject *make_shape(const moq_header_entry *entry) {
    PyObject *shape = PyTuple_New(entry->ndim);
    for (int32_t i = 0; shape && i < entry->ndim; i++) {
        PyObject *extent = PyLong_FromLongLong(entry->shape[i]);
        if (!extent || PyTuple_SetItem(shape, i, extent) < 0) {
            Py_DECREF(shape);
            return NULL;
        }
    }
    return shape;
}

/* Bits of an element, 0 for a dtype that nobody knows, -1 with an exception. */
static int64_t find_bits(const reading *r, PyObject *dtype) {
    PyObject *bits = PyDict_GetItemWithError(r->bits, dtype);
    if (bits)
        return PyLong_AsLongLong(bits);
    return PyErr_Occurred() ? -1 : 0;
}

/* Puts `value` under `key`: 1, or 0 where the key is there already, or -1. */
static int put_new(PyObject *dict, PyObject *key, PyObject *value) {
    const Py_ssize_t before = PyDict_Size(dict);
    if (PyDict_SetItem(dict, key, value) < 0)
        return -1;
    return PyDict_Size(dict) > before;
}

/* The description of a tensor: a frozen dataclass, whose own __setattr__ refuses. */
static PyObject *make_info(const reading *r, PyObject *const values[FIELDS]) {
    PyObject *info = PyType_GenericNew(r->type, NULL, NULL);
    for (int i = 0; info && i < FIELDS; i++) {
        if (PyObject_GenericSetAttr(info, r->field[i], values[i]) < 0)
            Py_CLEAR(info);
    }
    return info;
}

/* Adds a tensor that is new, as put_new does; 0 also where the entry is not to be believed. */
static int add_tensor(const reading *r, const moq_header_entry *entry) {
    PyObject *values[FIELDS] = {[FILE_PATH] = Py_NewRef(r->file)}, *info = NULL;
    int done = 0;
    values[NAME] = make_text(entry->name);
    values[DTYPE] = values[NAME] ? make_text(entry->dtype) : NULL;
    if (values[DTYPE]) {
        PyUnicode_InternInPlace(&values[DTYPE]);
        const int64_t bits = find_bits(r, values[DTYPE]);
        if (bits >= 0 && moq_header_entry_fits(entry, r->room, bits)) {
            values[SHAPE] = make_shape(entry);
            values[BEGIN] = PyLong_FromLongLong(r->data_begin + entry->begin);
            values[END] = PyLong_FromLongLong(r->data_begin + entry->end);
            if (values[SHAPE] && values[BEGIN] && values[END])
                info = make_info(r, values);
        }
    }
    if (info)
        done = put_new(r->tensors, values[NAME], info);
    Py_XDECREF(info);
    for (int i = 0; i < FIELDS; i++)
        Py_XDECREF(values[i]);
    return PyErr_Occurred() ? -1 : done;
}

static int add_metadata(const reading *r, const moq_header_entry *entry) {
    PyObject *key = make_text(entry->name), *value = key ? make_text(entry->dtype) : NULL;
    const int done = value ? put_new(r->metadata, key, value) : 0;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : done;
}

/* Reads all entries: 1, or 0 where something is unusual, or -1. */
static int read_entries(const reading *r, moq_text text) {
    moq_header_reader reader;
    moq_header_entry entry;
    moq_header_open(&reader, text);
    for (;;) {
        int done = 0;
        switch (moq_header_next(&reader, &entry)) {
        case MOQ_HEADER_END:
            return 1;
        case MOQ_HEADER_TENSOR:
            done = add_tensor(r, &entry);
            break;
        case MOQ_HEADER_METADATA:
            done = add_metadata(r, &entry);
            break;
        case MOQ_HEADER_UNUSUAL:
            break;
        }
        if (done <= 0)
            return done;
    }
}

static PyObject *read_tensor_header(PyObject *module, PyObject *args) {
    (void)module;
    reading r = {.room = 0};
    PyObject *text, *type, *result = NULL;
    long long data_begin, size;
    char *data;
    Py_ssize_t length;
    int done = 0;
    if (!PyArg_ParseTuple(args, "SO!OLLO!:read_tensor_header", &text, &PyType_Type, &type, &r.file,
                          &data_begin, &size, &PyDict_Type, &r.bits) ||
        PyBytes_AsStringAndSize(text, &data, &length) < 0)
        return NULL;
    r.type = (PyTypeObject *)type;
    r.data_begin = data_begin;
    r.room = size - data_begin;
    r.tensors = PyDict_New();
    r.metadata = PyDict_New();
    if (!r.tensors || !r.metadata)
        done = -1;
    for (int i = 0; i < FIELDS && done == 0; i++) {
        r.field[i] = PyUnicode_InternFromString(FIELD_NAMES[i]);
        done = r.field[i] ? 0 : -1;
    }
    if (done == 0)
        done = read_entries(&r, (moq_text){data, (size_t)length});
    if (done > 0)
        result = PyTuple_Pack(2, r.tensors, r.metadata);
    else if (done == 0)
        result = Py_NewRef(Py_None);
    Py_XDECREF(r.tensors);
    Py_XDECREF(r.metadata);
    for (int i = 0; i < FIELDS; i++)
        Py_XDECREF(r.field[i]);
    return result;
}

static PyMethodDef METHODS[] = {
    {"read_tensor_header", read_tensor_header, METH_VARARGS,
     "read_tensor_header(text, info, file, data_begin, size, bits, /): (tensors, metadata) of a "
     "header without anything unusual in it, else None"},
    {NULL, NULL, 0, NULL},
};

int moq_add_tensor_header(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
