/* `_C.Plan`: the methods that plans of every operation have, which know the plan alone. Types of
 * operations (`_C.LinearPlan`) derive from it and add the problem, prepare and run. */
#ifndef MOQ_BINDING_PLAN_OBJECT_H
#define MOQ_BINDING_PLAN_OBJECT_H

#include "binding/state.h"
#include "ops/plan.h"

typedef struct {
    PyObject_HEAD
    moq_plan plan;
} moq_plan_object;

static inline moq_state *moq_plan_state(PyObject *self) {
    return (moq_state *)PyType_GetModuleState(Py_TYPE(self));
}

/* An object of a type of the module, all zero. The problem of a plan is to be filled in place,
 * since the plan points to it, and then planned; NULL with an exception. */
PyObject *moq_plan_object_new(PyTypeObject *type);

/* Finds the chip of a layer's device, or the one that `capability` says it is, where that is given.
 */
int moq_plan_find_target(moq_state *state, PyObject *capability, bool pretend, moq_device device,
                         moq_target *target);

/* Parameters as a list of (name, shape, dtype, role, required). */
PyObject *moq_describe_params(const moq_param_spec *params, int count);

/* The names of an operation's kernels, "family:name", appended to a list. */
int moq_append_kernels(const moq_operation *operation, PyObject *list);

#endif
