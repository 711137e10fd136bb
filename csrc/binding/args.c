/* Argument parsing: see args.h. */
#include "binding/args.h"

#include <stdio.h>
#include <string.h>

#include <string.h>

static int find_keyword(moq_state *state, const moq_signature *signature, PyObject *name) {
    for (int i = 0; i < signature->count; i++) {
        if (state->keyword[signature->keyword[i]] == name)
            return i;
    }
    /* A caller may have built the name at run time, so equal text is as good as the same object. */
    for (int i = 0; i < signature->count; i++) {
        if (PyUnicode_Compare(state->keyword[signature->keyword[i]], name) == 0)
            return i;
        if (PyErr_Occurred())
            return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", signature->function,
                 name);
    return -1;
}

int moq_args_parse(moq_state *state, const moq_signature *signature, PyObject *const *args,
                   Py_ssize_t nargs, PyObject *kwnames, PyObject **values) {
    Py_ssize_t keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional arguments, got %zd",
                     signature->function, signature->positional, nargs);
        return -1;
    }
    for (int i = 0; i < signature->count; i++)
        values[i] = i < nargs ? args[i] : NULL;
    for (Py_ssize_t k = 0; k < keywords; k++) {
        PyObject *name = PyTuple_GetItem(kwnames, k);
        int at = name ? find_keyword(state, signature, name) : -1;
        if (at < 0)
            return -1;
        if (values[at]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R",
                         signature->function, name);
            return -1;
        }
        values[at] = args[nargs + k];
    }
    for (int i = 0; i < signature->required; i++) {
        if (!values[i]) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument %R", signature->function,
                         state->keyword[signature->keyword[i]]);
            return -1;
        }
    }
    return 0;
}

const char *moq_arg_text(PyObject *value, const char *name) {
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a str, got %R", name, Py_TYPE(value));
        return NULL;
    }
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text && strlen(text) == (size_t)size)
        return text;
    if (text || PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) { /* a lone surrogate */
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected Unicode text without NUL, got %R", name,
                     value);
    }
    return NULL;
}

int moq_arg_int(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *out) {
    PyObject *number = PyIndex_Check(value) && !PyBool_Check(value) ? PyNumber_Index(value) : NULL;
    if (!number) {
        PyErr_Format(PyExc_TypeError, "%s: expected an int, got %R", name, Py_TYPE(value));
        return -1;
    }
    int overflow = 0;
    *out = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (overflow || *out < low || *out > high) {
        PyErr_Format(PyExc_ValueError, "%s: expected an int from %lld to %lld, got %R", name,
                     (long long)low, (long long)high, value);
        return -1;
    }
    return 0;
}

int moq_arg_dtype(PyObject *value, const char *name, moq_dtype *out) {
    const char *text = moq_arg_text(value, name);
    if (!text)
        return -1;
    *out = moq_dtype_from_name(text);
    if (*out != MOQ_DT_NONE)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: unknown dtype %R", name, value);
    return -1;
}

bool moq_arg_absent(PyObject *value) {
    return value == NULL || value == Py_None;
}

int moq_arg_device(PyObject *value, const char *name, moq_device *device) {
    const char *text = moq_arg_text(value, name);
    char tail = 0;
    int index = 0;
    if (!text)
        return -1;
    if (strcmp(text, "cpu") == 0) {
        *device = (moq_device){MOQ_CPU, 0};
        return 0;
    }
    if (strcmp(text, "cuda") == 0 ||
        (sscanf(text, "cuda:%d%c", &index, &tail) == 1 && index >= 0)) {
        *device = (moq_device){MOQ_CUDA, index};
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: expected \"cpu\" or \"cuda:N\", got %R", name, value);
    return -1;
}
