/* Producers by type: see producer.h. The table holds its types, so a slot never speaks about
 * another type that came to live at the same address. */
#include "binding/boundary.h"
#include "binding/numpy.h"

#define EXCHANGE_CAPSULE "dlpack_exchange_api"
/* A chain of older tables is as long as there were major versions; more than this is a loop. */
#define MAX_OLDER_TABLES 16

/* 1 when `type` has the attribute, 0 when not, -1 on any other error. */
static int type_has(PyObject *type, const char *attribute) {
    PyObject *value = PyObject_GetAttrString(type, attribute);
    if (value) {
        Py_DECREF(value);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    return 0;
}

/* The newest table of the chain we can call, or NULL: then the producer's `__dlpack__` serves. */
static const DLPackExchangeAPI *usable_table(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, EXCHANGE_CAPSULE))
        return NULL;
    const DLPackExchangeAPIHeader *header =
        (const DLPackExchangeAPIHeader *)PyCapsule_GetPointer(capsule, EXCHANGE_CAPSULE);
    for (int i = 0; header && i < MAX_OLDER_TABLES; i++, header = header->prev_api) {
        if (header->version.major != DLPACK_MAJOR_VERSION)
            continue;
        const DLPackExchangeAPI *table = (const DLPackExchangeAPI *)header;
        return table->managed_tensor_from_py_object_no_sync ? table : NULL;
    }
    return NULL;
}

/* 1 if the class itself defines the attribute, 0 if not, -1 on an error. */
static int defines(PyObject *class, const char *attribute) {
    PyObject *own = PyObject_GetAttrString(class, "__dict__");
    int found = own ? PyMapping_HasKeyString(own, attribute) : -1;
    Py_XDECREF(own);
    return found;
}

/* 1 where a class that derives from the one with the exchange table exports its tensors by a
 * `__dlpack__` of its own, which the table knows nothing of. */
static int overrides_table(PyObject *type) {
    PyObject *line = PyObject_GetAttrString(type, "__mro__");
    Py_ssize_t count = line ? PyTuple_Size(line) : -1;
    int found = count < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; i < count && found == 0; i++) {
        PyObject *class = PyTuple_GetItem(line, i);
        int table = defines(class, "__dlpack_c_exchange_api__");
        if (table != 0) {
            found = table < 0 ? -1 : 0;
            break;
        }
        found = defines(class, "__dlpack__");
    }
    Py_XDECREF(line);
    return found;
}

static int find_exchange(PyObject *type, const DLPackExchangeAPI **out) {
    *out = NULL;
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    *out = usable_table(capsule); /* static in the producer, so it outlives the capsule */
    Py_DECREF(capsule);
    int overrides = *out ? overrides_table(type) : 0;
    if (overrides > 0)
        *out = NULL;
    return overrides < 0 ? -1 : 0;
}

/* The method by which objects of the type say that they are negated; *out is NULL without one. */
static int find_is_neg(PyObject *type, PyObject **out) {
    *out = PyObject_GetAttrString(type, "is_neg");
    if (*out && PyCallable_Check(*out))
        return 0;
    Py_CLEAR(*out);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    return 0;
}

static int examine_array(PyObject *type, moq_producer *out) {
    int masked = type_has(type, "mask");
    out->protocol = MOQ_FROM_NUMPY;
    out->in_place = true;
    out->masked = masked > 0;
    return masked < 0 ? -1 : 0;
}

static int examine(PyObject *object, PyObject *type, moq_producer *out) {
    *out = (moq_producer){.type = type};
    if (PyArray_Check(object))
        return examine_array(type, out);
    if (find_exchange(type, &out->exchange) < 0)
        return -1;
    int dlpack = type_has(type, "__dlpack__");
    int in_place = dlpack < 0 ? -1 : type_has(type, "__iadd__");
    int library = in_place < 0 ? -1 : type_has(type, "__array_namespace__");
    if (library < 0 || find_is_neg(type, &out->is_neg) < 0)
        return -1;
    out->in_place = in_place;
    out->array_library = library;
    out->protocol = out->exchange ? MOQ_FROM_EXCHANGE : dlpack ? MOQ_FROM_DLPACK : MOQ_FROM_NOTHING;
    return 0;
}

int moq_producer_of(moq_state *state, PyObject *object, moq_producer *out) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    /* Type objects are at least 64-byte multiples apart in practice; fold two ranges of bits. */
    uintptr_t key = (uintptr_t)type;
    moq_producer *slot =
        &state->boundary->producer[((key >> 5) ^ (key >> 11)) % MOQ_PRODUCER_SLOTS];
    if (slot->type != type) {
        moq_producer fresh;
        if (examine(object, type, &fresh) < 0)
            return -1;
        PyObject *evicted = slot->type, *method = slot->is_neg;
        *slot = fresh;
        Py_INCREF(type);
        *out = fresh;
        Py_XDECREF(evicted); /* last: this may run Python code */
        Py_XDECREF(method);
        return 0;
    }
    *out = *slot;
    return 0;
}
