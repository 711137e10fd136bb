/* `_C.LinearPlan` as the files of its methods share it. */
#ifndef MOQ_BINDING_LINEAR_H
#define MOQ_BINDING_LINEAR_H

#include "binding/tensor.h"
#include "ops/linear.h"

typedef struct {
    PyObject_HEAD
    moq_linear_spec spec;
    moq_linear_plan plan;
    int param_count; /* of the prepared form */
    moq_param_spec param[MOQ_MAX_PARAMS];
} moq_plan_object;

static inline moq_state *moq_plan_state(PyObject *self) {
    return (moq_state *)PyType_GetModuleState(Py_TYPE(self));
}

/* What a call reads, one after the other, and what it writes. */
typedef struct {
    moq_arg in[2 + MOQ_MAX_PARAMS]; /* x first */
    int count;
    moq_arg y;
} moq_run_args;

/* The prepared parameters of a mapping, as further inputs of `a`. */
int moq_run_take_params(moq_state *state, const moq_plan_object *self, PyObject *mapping,
                        moq_run_args *a, moq_linear_params *params);
/* Gives back what was taken. */
void moq_run_release(moq_run_args *a);

/* Methods of linear_tune.c. */
PyObject *moq_plan_measure(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                           PyObject *kwnames);
PyObject *moq_plan_keep(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                        PyObject *kwnames);

#endif
