/* Error records of the lower floors become Python exceptions here and nowhere else. */
#include "binding/state.h"

#include <string.h>

static PyObject *exception_type(moq_state *state, moq_status kind) {
    switch (kind) {
    case MOQ_ERR_VALUE:
        return PyExc_ValueError;
    case MOQ_ERR_TYPE:
        return PyExc_TypeError;
    case MOQ_ERR_BUFFER:
        return PyExc_BufferError;
    case MOQ_ERR_MEMORY:
        return PyExc_MemoryError;
    case MOQ_ERR_CONFIG:
        return state->config_error;
    case MOQ_ERR_UNSUPPORTED:
        return state->unsupported_error;
    case MOQ_OK:
    case MOQ_ERR_INTERRUPTED:
    case MOQ_ERR_INTERNAL:
        break;
    }
    return PyExc_RuntimeError;
}

static PyObject *decode(const char *text) {
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

PyObject *moq_raise(moq_state *state, const moq_err *err) {
    if (err->kind == MOQ_ERR_INTERRUPTED && PyErr_Occurred())
        return NULL;
    PyObject *type = exception_type(state, err->kind);
    char text[MOQ_MESSAGE_SIZE];
    PyObject *message = decode(moq_err_message(err, text));
    PyObject *error = message ? PyObject_CallFunctionObjArgs(type, message, NULL) : NULL;
    if (error && err->kind == MOQ_ERR_CONFIG) {
        PyObject *path = decode(err->path);
        if (!path || PyObject_SetAttrString(error, "path", path) < 0)
            Py_CLEAR(error);
        Py_XDECREF(path);
    }
    if (error)
        PyErr_SetObject(type, error);
    Py_XDECREF(error);
    Py_XDECREF(message);
    return NULL;
}
