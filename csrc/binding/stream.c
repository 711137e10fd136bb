/* The CUDA stream of a call: see stream.h. */
#include "binding/stream.h"

#include "binding/args.h"
#include "third_party/dlpack.h"

/* The handle of `(version, handle)`, what `__cuda_stream__` returns. */
static PyObject *protocol_handle(PyObject *given) {
    PyObject *pair = PyObject_CallMethod(given, "__cuda_stream__", NULL);
    PyObject *handle = pair && PySequence_Check(pair) && PySequence_Size(pair) == 2
                           ? PySequence_GetItem(pair, 1)
                           : NULL;
    if (!handle && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError,
                        "stream: expected __cuda_stream__() to return (version, handle)");
    Py_XDECREF(pair);
    return handle;
}

static int take_given(PyObject *given, void **stream) {
    PyObject *handle = PyLong_Check(given)                                ? Py_NewRef(given)
                       : PyObject_HasAttrString(given, "__cuda_stream__") ? protocol_handle(given)
                                                                          : NULL;
    if (!handle) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError,
                         "stream: expected None, an integer handle or an object with "
                         "__cuda_stream__, got %R",
                         Py_TYPE(given));
        return -1;
    }
    *stream = PyLong_Check(handle) && !PyBool_Check(handle) ? PyLong_AsVoidPtr(handle) : NULL;
    if (!PyLong_Check(handle) || PyBool_Check(handle))
        PyErr_Format(PyExc_TypeError, "stream: expected an integer handle, got %R",
                     Py_TYPE(handle));
    Py_DECREF(handle);
    return PyErr_Occurred() ? -1 : 0;
}

int moq_stream_of_memory(const moq_arg *arg, void *otherwise, void **stream) {
    *stream = otherwise;
    if (!arg->exchange || arg->view.device.kind != MOQ_CUDA)
        return 0;
    return arg->exchange->current_work_stream(kDLCUDA, arg->view.device.index, stream) == 0 ? 0
                                                                                            : -1;
}

int moq_stream_take(PyObject *given, const moq_arg *x, void **stream) {
    *stream = NULL;
    if (x->view.device.kind != MOQ_CUDA) {
        if (moq_arg_absent(given))
            return 0;
        PyErr_SetString(PyExc_ValueError, "stream: expected None for tensors on the CPU");
        return -1;
    }
    if (!moq_arg_absent(given))
        return take_given(given, stream);
    return moq_stream_of_memory(x, NULL, stream);
}
