/* `_C.build_info()` and `_C.cuda_devices()`: what was built, and what this machine offers. */
#include "binding/state.h"

#include "cuda/cuda.h"

#ifndef MOQ_VERSION
#error "MOQ_VERSION is defined by setup.py"
#endif

static PyObject *build_info(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return Py_BuildValue("{s:s,s:s,s:s,s:s,s:O,s:s,s:O}", "version", MOQ_VERSION, "commit",
                         MOQ_COMMIT, "compiler", __VERSION__, "flags", MOQ_FLAGS, "cuda",
                         moq_cuda_built() ? Py_True : Py_False, "cuda_archs", MOQ_CUDA_ARCHS,
                         "cublaslt", MOQ_CUBLASLT ? Py_True : Py_False);
}

static PyObject *cuda_devices(PyObject *module, PyObject *unused) {
    (void)unused;
    moq_state *state = moq_module_state(module);
    moq_err err;
    int count = 0;
    moq_status status;
    Py_BEGIN_ALLOW_THREADS status = moq_cuda_device_count(&count, &err);
    Py_END_ALLOW_THREADS if (status != MOQ_OK) return moq_raise(state, &err);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        moq_cuda_device device;
        PyObject *row = NULL;
        if (moq_cuda_query_device(i, &device, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            row = Py_BuildValue("{s:i,s:s,s:(ii),s:i,s:K}", "index", i, "name", device.name,
                                "capability", device.major, device.minor, "sm_count",
                                device.sm_count, "memory", (unsigned long long)device.memory);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyMethodDef METHODS[] = {
    {"build_info", build_info, METH_NOARGS, "build_info() -> dict: how this extension was built"},
    {"cuda_devices", cuda_devices, METH_NOARGS,
     "cuda_devices() -> list of dict; RuntimeError says why there are none"},
    {NULL, NULL, 0, NULL},
};

int moq_add_info(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
