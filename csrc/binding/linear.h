/* `_C.LinearPlan` as the files of its methods share it. */
#ifndef MOQ_BINDING_LINEAR_H
#define MOQ_BINDING_LINEAR_H

#include "binding/tensor.h"
#include "ops/linear.h"

typedef struct {
    PyObject_HEAD
    moq_linear_spec spec;
    moq_linear_plan plan;
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

/* The prepared parameters of a mapping, as further inputs of `a`; None is as good as no entry, and
 * an entry that the layer does not know is refused, since results without it would be others. */
int moq_run_take_params(moq_state *state, const moq_plan_object *self, PyObject *mapping,
                        moq_run_args *a, moq_linear_params *params);
/* Gives back what was taken. */
void moq_run_release(moq_run_args *a);

/* The keys under which mappings hold the tensors of a layer. */
extern const moq_keyword MOQ_PARAM_KEYWORD[MOQ_PARAM_COUNT];

/* -1 with an exception that names the argument where it is no mapping. */
int moq_plan_check_mapping(PyObject *object, const char *name);
/* mapping[keyword], a new reference, since a mapping may make its values as they are asked for;
 * NULL without an exception when it is not there. */
PyObject *moq_plan_lookup(PyObject *mapping, PyObject *keyword);
/* -1 with an exception where the tensor is not on the layer's device. */
int moq_plan_check_device(const moq_linear_spec *spec, const moq_arg *arg);
/* The first key of the mapping that is none of the names: 1 and a new reference, 0 where there is
 * none, -1 with an exception. */
int moq_plan_find_stranger(PyObject *mapping, const char *const *names, int count, PyObject **key);
/* -1 with an exception that names a key which is no prepared parameter of the layer. */
int moq_plan_refuse_strangers(const moq_plan_object *self, PyObject *mapping, const char *name);
/* A tensor of the layer's device, or of the host where `host` says that it may be there; of any
 * dtype where `dtype` is MOQ_DT_NONE. */
int moq_plan_take(moq_state *state, const moq_linear_spec *spec, PyObject *object, const char *name,
                  moq_dtype dtype, bool host, moq_arg *arg);

/* The method of linear_prepare.c. */
PyObject *moq_plan_prepare(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);

/* Methods of linear_tune.c. */
PyObject *moq_plan_measure(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                           PyObject *kwnames);
PyObject *moq_plan_keep(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                        PyObject *kwnames);

#endif
