/* The tensor boundary: see py_tensor.h. Which way in a type offers decides once (producer.c); after
 * that a NumPy array costs a few nanoseconds and a torch tensor one call of its exchange API. */
#include "binding/py_tensor.h"

#include "binding/boundary.h"
#include "binding/numpy.h"

/* Clears everything but the view, which costs more to clear than to fill. */
static void reset(moq_arg *arg, const char *name) {
    arg->name = name;
    arg->object = arg->keeper = arg->adopt = NULL;
    arg->managed = NULL;
    arg->exchange = NULL;
    arg->stored = MOQ_DT_NONE;
}

static int not_a_tensor(PyObject *object, const char *name) {
    PyErr_Format(PyExc_TypeError,
                 "%s: expected a tensor (a NumPy array or an object with __dlpack__), got %R", name,
                 Py_TYPE(object));
    return -1;
}

static int refuse_mask(PyObject *object, const char *name) {
    PyErr_Format(
        PyExc_TypeError,
        "%s: expected an array without a mask, got %R; pass its filled(value), or its data "
        "to use what lies under the mask",
        name, Py_TYPE(object));
    return -1;
}

/* Refuses a tensor whose values are the negatives of its memory. */
static int refuse_negated(PyObject *is_neg, PyObject *object, const moq_arg *arg) {
    PyObject *answer = PyObject_CallFunctionObjArgs(is_neg, object, NULL);
    int negated = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (negated < 0)
        moq_note_argument(arg->name);
    else if (negated)
        PyErr_Format(PyExc_BufferError,
                     "%s: its values are the negatives of what is in its memory (is_neg()); pass "
                     "%s.resolve_neg()",
                     arg->name, arg->name);
    return negated ? -1 : 0;
}

/* True if a view may be the imaginary part of complex numbers, every second element of their
 * memory: what libraries negate lazily. One element says so by its address. */
static bool steps_over_memory(const moq_tensor *view) {
    return moq_tensor_numel(view) == 1
               ? (uintptr_t)view->data / moq_dtype_size(view->dtype) % 2 == 1
               : !moq_tensor_is_contiguous(view);
}

/* Takes by whichever way the producer offers. */
static int take_memory(moq_state *state, const moq_producer *producer, PyObject *object,
                       const char *name, bool output, moq_arg *out, bool *legacy) {
    switch (producer->protocol) {
    case MOQ_FROM_NUMPY:
        return producer->masked ? refuse_mask(object, name)
                                : moq_numpy_take(state, object, name, out);
    case MOQ_FROM_EXCHANGE:
        return moq_exchange_take(producer->exchange, object, name, output, out);
    case MOQ_FROM_DLPACK:
        return moq_dlpack_take(state, producer, object, name, output, out, legacy);
    case MOQ_FROM_NOTHING:
        break;
    }
    return not_a_tensor(object, name);
}

static int take(moq_state *state, const moq_producer *producer, PyObject *object, const char *name,
                bool output, bool kept, moq_arg *out, bool *legacy) {
    /* This reference is ours to the end: what the producer does may give its place in the table to
     * another type. */
    PyObject *is_neg = Py_XNewRef(producer->is_neg);
    int status = take_memory(state, producer, object, name, output, out, legacy);
    if (status == 0) {
        out->stored = out->view.dtype;
        out->object = Py_NewRef(object);
        if (is_neg && (!kept || steps_over_memory(&out->view)))
            status = refuse_negated(is_neg, object, out);
        if (status < 0)
            moq_arg_release(out);
    }
    Py_XDECREF(is_neg);
    return status;
}

static int take_input(moq_state *state, PyObject *object, const char *name, bool kept,
                      moq_arg *out) {
    reset(out, name);
    if (PyArray_CheckExact(object)) {
        if (moq_numpy_take(state, object, name, out) < 0)
            return -1;
        out->stored = out->view.dtype;
        out->object = Py_NewRef(object);
        return 0;
    }
    moq_producer producer;
    bool legacy = false;
    if (moq_producer_of(state, object, &producer) < 0)
        return -1;
    return take(state, &producer, object, name, false, kept, out, &legacy);
}

int moq_arg_take(moq_state *state, PyObject *object, const char *name, moq_arg *out) {
    return take_input(state, object, name, false, out);
}

int moq_arg_take_kept(moq_state *state, PyObject *object, const char *name, moq_arg *out) {
    return take_input(state, object, name, true, out);
}

/* True when no two elements can share memory: with the dimensions sorted by stride, each steps
 * over all that the smaller ones reach. Exotic layouts that interleave count as sharing. */
static bool elements_are_apart(const moq_tensor *t) {
    int64_t stride[MOQ_MAX_NDIM], extent[MOQ_MAX_NDIM];
    int n = 0;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 0)
            return true;
        if (t->shape[i] == 1)
            continue;
        int64_t step = t->stride[i] < 0 ? -t->stride[i] : t->stride[i];
        int at = n++;
        for (; at > 0 && stride[at - 1] > step; at--) {
            stride[at] = stride[at - 1];
            extent[at] = extent[at - 1];
        }
        stride[at] = step;
        extent[at] = t->shape[i];
    }
    int64_t reach = 0; /* the import checked that this cannot overflow */
    for (int i = 0; i < n; i++) {
        if (stride[i] <= reach)
            return false;
        reach += stride[i] * (extent[i] - 1);
    }
    return true;
}

static int refuse_output(const moq_arg *out, const moq_producer *producer, bool legacy) {
    const char *reason = NULL;
    if (!producer->in_place && (legacy || producer->array_library))
        reason = "the arrays of its type are immutable";
    else if (out->view.readonly)
        reason = "read-only memory cannot be written";
    else if (!elements_are_apart(&out->view))
        reason = "its elements share memory";
    if (!reason)
        return 0;
    PyErr_Format(PyExc_BufferError, "%s: not usable as an output, %s (%R)", out->name, reason,
                 Py_TYPE(out->object));
    return -1;
}

int moq_arg_take_optional(moq_state *state, PyObject *object, const char *name, moq_arg *out,
                          const moq_tensor **view) {
    *out = (moq_arg){0};
    *view = NULL;
    if (!object || object == Py_None)
        return 0;
    *view = &out->view;
    return moq_arg_take(state, object, name, out);
}

int moq_arg_take_output(moq_state *state, PyObject *object, const char *name, moq_arg *out) {
    reset(out, name);
    moq_producer producer;
    bool legacy = false;
    if (moq_producer_of(state, object, &producer) < 0 ||
        take(state, &producer, object, name, true, false, out, &legacy) < 0)
        return -1;
    if (refuse_output(out, &producer, legacy) == 0)
        return 0;
    moq_arg_release(out);
    return -1;
}
