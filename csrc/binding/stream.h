/* The CUDA stream of a call: the one the caller gives, or its framework's current one. */
#ifndef MOQ_BINDING_STREAM_H
#define MOQ_BINDING_STREAM_H

#include "binding/py_tensor.h"

/* Finds the stream of the work on `x`. `given` is the argument stream=: an integer handle, an
 * object with `__cuda_stream__`, or None for the current stream of x's framework; one that does not
 * tell (it has no DLPack exchange API) is taken to use the legacy default stream. For a tensor on
 * the CPU only None will do, and the stream is NULL. */
int moq_stream_take(PyObject *given, const moq_arg *x, void **stream);

/* The stream in whose order the framework of `arg` uses memory again: its current one, or
 * `otherwise` where it does not tell. */
int moq_stream_of_memory(const moq_arg *arg, void *otherwise, void **stream);

#endif
