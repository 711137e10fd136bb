/* The tensor boundary: Python objects in, moq_tensor views out, and results back as the caller's
 * own kind of tensor.
 *
 * A view is borrowed for the length of one call: take it, use it, release it. Shape and strides are
 * copied, so nothing is read from the producer after the GIL is released. The memory is the
 * producer's: a caller that resizes or frees a tensor in another thread while a call runs breaks
 * it here as it would in the producer's own functions. Automatic differentiation does not see a
 * view; whether a tensor that requires gradients may pass is for the layer above to decide.
 *
 * An op with an optional `out=`:
 *
 *     moq_arg x, y;
 *     if (moq_arg_take(state, values[0], "x", &x) < 0)
 *         return NULL;
 *     PyObject *result = moq_arg_output(state, values[1], &x, MOQ_DT_F32, ndim, shape, &y);
 *     if (result) {
 *         int status = run(...);       checks, then the kernel without the GIL
 *         result = moq_arg_finish(state, result, &y, status);
 *     }
 *     moq_arg_release(&x);
 *     return result; */
#ifndef MOQ_BINDING_PY_TENSOR_H
#define MOQ_BINDING_PY_TENSOR_H

#include "binding/tensor_arg.h"

/* An input: memory that holds the values as they are. Refuses arrays with a mask and tensors that
 * their library negates when it reads them. On failure *out is empty and needs no release. */
int moq_arg_take(moq_state *state, PyObject *object, const char *name, moq_arg *out);
/* An input that is a prepared parameter, which every call takes again: whether a library negates
 * the tensor lazily (70 ns in torch) is asked only where its layout is that of a negated view. */
int moq_arg_take_kept(moq_state *state, PyObject *object, const char *name, moq_arg *out);
/* An input that may be absent: then *out is empty and *view NULL. */
int moq_arg_take_optional(moq_state *state, PyObject *object, const char *name, moq_arg *out,
                          const moq_tensor **view);
/* An output: also refuses read-only memory, copies, arrays of immutable producers and views whose
 * elements share memory. */
int moq_arg_take_output(moq_state *state, PyObject *object, const char *name, moq_arg *out);
/* A new uninitialised row-major tensor of the producer and device of `like`. Its dtype is `dtype`
 * as that producer spells it, or a raw carrier of the same width where the producer has no such
 * dtype. It is the carrier of `like` where `like` itself came as one, and uint8 for packed fp4,
 * as checkpoints and frameworks keep it, unless `like` is declared fp4. Returns the object (new
 * reference) and fills *out with its view as `dtype`. Then moq_arg_finish, filled or not. */
PyObject *moq_arg_new_like(moq_state *state, const moq_arg *like, moq_dtype dtype, int32_t ndim,
                           const int64_t *shape, moq_arg *out);
/* Bytes of the framework and device of `like` to work in until moq_arg_release; NULL for 0 bytes.
 * Frameworks order the reuse of memory after what is queued on their current stream. */
int moq_arg_take_memory(moq_state *state, const moq_arg *like, int64_t bytes, moq_arg *out);
/* The output of an op: `given` (its out= argument; may be NULL or None) taken as an output, read as
 * `dtype` and kept apart from `like`, or else a new tensor. An op that reads more than `like` calls
 * moq_arg_refuse_overlap for the others, and one that takes out= checks its shape. Returns the
 * object (new reference) and fills *out, or NULL and *out needs no release. */
PyObject *moq_arg_output(moq_state *state, PyObject *given, const moq_arg *like, moq_dtype dtype,
                         int32_t ndim, const int64_t *shape, moq_arg *out);
/* The object to return to the caller for an output, new or given: `result` itself, except for
 * libraries that only import finished memory (JAX), where it is adopted now; NULL when `status` < 0
 * (an exception is set) or the library refuses. Steals `result`, releases *out. */
PyObject *moq_arg_finish(moq_state *state, PyObject *result, moq_arg *out, int status);

#endif
