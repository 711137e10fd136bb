/* The places where Python has cuBLASLt: see py_cublaslt.h. */
#include "binding/py_cublaslt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The folder where pip's nvidia-* packages unpack their libraries, below site-packages. */
#define PIP_DIRECTORY "/nvidia/cu13/lib"

/* Appends ":entry/nvidia/cu13/lib" to a text that malloc made; the text as it was where there is no
 * more memory, or an entry is no path. */
static char *append(char *text, PyObject *entry) {
    PyObject *path = PyUnicode_Check(entry) ? PyUnicode_EncodeFSDefault(entry) : NULL;
    const char *directory = path ? PyBytes_AsString(path) : NULL;
    size_t used = strlen(text), more = directory ? strlen(directory) : 0;
    char *longer = more ? realloc(text, used + more + sizeof ":" PIP_DIRECTORY) : NULL;
    if (longer)
        sprintf(longer + used, ":%s" PIP_DIRECTORY, directory);
    PyErr_Clear();
    Py_XDECREF(path);
    return longer ? longer : text;
}

const moq_cublaslt *moq_cublaslt_find_in_path(char *reason, size_t size) {
    PyObject *path = PySys_GetObject("path");
    char *directories = calloc(1, 1);
    const moq_cublaslt *found;
    Py_ssize_t count = directories && path && PyList_Check(path) ? PyList_Size(path) : 0;
    for (Py_ssize_t i = 0; i < count; i++)
        directories = append(directories, PyList_GetItem(path, i));
    Py_BEGIN_ALLOW_THREADS
    found = moq_cublaslt_find(directories, reason, size);
    Py_END_ALLOW_THREADS
    free(directories);
    return found;
}
