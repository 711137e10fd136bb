/* The tensor boundary: Python objects in, moq_tensor views out, and results back as the caller's
 * own kind of tensor.
 *
 * A view is borrowed for the length of one call: take it, use it, release it. Shape and strides are
 * copied, so nothing is read from the producer after the GIL is released. */
#ifndef MOQ_BINDING_TENSOR_H
#define MOQ_BINDING_TENSOR_H

#include "binding/state.h"
#include "core/tensor.h"

typedef struct {
    moq_tensor view;
    const char *name; /* of the argument, for messages */
    PyObject *object; /* strong: what the caller passed */
    PyObject *keeper; /* strong or NULL: a capsule that keeps the memory for the call */
    moq_dtype stored; /* dtype as the producer declares it, before a format was applied */
} moq_arg;

/* Imports the NumPy C API and prepares the per-type tables; called once at import. */
int moq_tensor_setup(moq_state *state);

/* An input. On failure *out is empty and needs no release. */
int moq_arg_take(moq_state *state, PyObject *object, const char *name, moq_arg *out);
/* An output: also refuses read-only memory and arrays of immutable producers. */
int moq_arg_take_output(moq_state *state, PyObject *object, const char *name, moq_arg *out);
/* Safe on an empty or released argument. */
void moq_arg_release(moq_arg *arg);

/* Reads the argument as `dtype`: it must be declared so, or be a raw carrier of the same width
 * (uint8/int8 for one byte, uint16/int16 for two). TypeError names both dtypes. */
int moq_arg_reinterpret(moq_arg *arg, moq_dtype dtype);

/* A new uninitialised row-major tensor of the producer and device of `like`, or, where `like` is a
 * raw carrier or NumPy has no such dtype, a carrier of the same width. Returns the object (new
 * reference) and fills *out with its view, to be released as well. */
PyObject *moq_arg_new_like(moq_state *state, const moq_arg *like, moq_dtype dtype, int32_t ndim,
                           const int64_t *shape, moq_arg *out);

#endif
