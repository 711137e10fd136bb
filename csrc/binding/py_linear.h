/* `_C.LinearPlan` as the files of its methods share it. */
#ifndef MOQ_BINDING_PY_LINEAR_H
#define MOQ_BINDING_PY_LINEAR_H

#include "binding/plan_object.h"
#include "ops/linear_call.h"

typedef struct {
    moq_plan_object base; /* its plan points to the spec */
    moq_linear_spec spec;
} moq_linear_object;

/* The method of linear_prepare.c. */
PyObject *moq_linear_object_prepare(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames);

#endif
