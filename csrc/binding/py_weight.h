/* Weights as the types of the binding that have one share them: `_C.LinearPlan`, `_C.WeightPlan`.
 */
#ifndef MOQ_BINDING_PY_WEIGHT_H
#define MOQ_BINDING_PY_WEIGHT_H

#include "binding/state.h"
#include "core/weight.h"

/* The sizes of a sequence of partitions, in memory that the caller frees; their number, or -1 with
 * an exception and NULL. */
int moq_take_partitions(PyObject *value, int64_t **partitions);

/* prepare(params, out=None, only_checks=False) of a weight: new tensors in a dict, or `out`, which
 * is not written where it only checks. `text` is what messages call the layer. */
PyObject *moq_weight_prepare_call(moq_state *state, const moq_weight *weight, const char *text,
                                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif
