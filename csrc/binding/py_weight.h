/* Weights as the types of the binding that have some share them: `_C.LinearPlan`, `_C.WeightPlan`,
 * `_C.MoEPlan`. */
#ifndef MOQ_BINDING_PY_WEIGHT_H
#define MOQ_BINDING_PY_WEIGHT_H

#include "binding/state.h"
#include "core/weight.h"

/* The sizes of a sequence of partitions, in memory that the caller frees; their number, or -1 with
 * an exception and NULL. */
int moq_take_partitions(PyObject *value, int64_t **partitions);

/* A weight of a layer that prepare() makes ready. */
typedef struct {
    const moq_weight *weight;
    bool alternates; /* rows of its two partitions take turns in tensors of the checkpoint */
    bool bias;       /* it may have one, which is prepared with it */
} moq_prepared_weight;

#define MOQ_MAX_WEIGHTS 2

typedef struct {
    const char *text; /* what messages call the layer */
    int count;
    moq_prepared_weight weight[MOQ_MAX_WEIGHTS];
} moq_prepared_layer;

/* prepare(params, out=None, origins=None): new tensors in a dict, or `out`. `origins` has the
 * tensors that biases and input scales of `params` were computed of. Everything is checked before
 * anything is written; only of several weights on CUDA the second one is checked after the first
 * is. */
PyObject *moq_weight_prepare_call(moq_state *state, const moq_prepared_layer *layer,
                                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif
