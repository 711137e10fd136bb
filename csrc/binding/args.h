/* Arguments of METH_FASTCALL | METH_KEYWORDS functions: positions and interned keywords into an
 * array, 22 to 36 ns a call where PyArg_ParseTupleAndKeywords takes 190. */
#ifndef MOQ_BINDING_ARGS_H
#define MOQ_BINDING_ARGS_H

#include "binding/state.h"
#include "core/tensor.h"

#include <stdbool.h>
#include <stdint.h>

#define MOQ_MAX_ARGS 19

typedef struct {
    const char *function; /* for messages, e.g. "linear" */
    int positional;       /* how many may be given by position */
    int required;         /* the first `required` must be given */
    int count;
    moq_keyword keyword[MOQ_MAX_ARGS];
} moq_signature;

/* Fills values[0 .. count) with borrowed references, NULL where an argument was left out. */
int moq_args_parse(moq_state *state, const moq_signature *signature, PyObject *const *args,
                   Py_ssize_t nargs, PyObject *kwnames, PyObject **values);

/* A str argument as UTF-8 that lives as long as the object; TypeError names the argument. */
const char *moq_arg_text(PyObject *value, const char *name);
/* An argument with __index__ (int, NumPy's integers, not bool) within [low, high]; ValueError names
 * the argument and the range. */
int moq_arg_int(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *out);
/* A str argument that names a dtype; ValueError names the argument and what it says. */
int moq_arg_dtype(PyObject *value, const char *name, moq_dtype *out);
/* A str argument "cpu", "cuda" or "cuda:N"; ValueError names it and what it says. */
int moq_arg_device(PyObject *value, const char *name, moq_device *out);
/* True for NULL and None. */
bool moq_arg_absent(PyObject *value);

#endif
