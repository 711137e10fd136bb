/* The tensor boundary's part in the life of the module: see tensor_setup.h. */
#include "binding/tensor_setup.h"

#include "binding/boundary.h"
#include "binding/workspace.h"

int moq_tensor_setup(PyObject *module, moq_state *state) {
    state->boundary = PyMem_Calloc(1, sizeof *state->boundary);
    if (!state->boundary) {
        PyErr_NoMemory();
        return -1;
    }
    state->boundary->empty_tuple = PyTuple_New(0);
    if (!state->boundary->empty_tuple)
        return -1;
    if (moq_numpy_setup() < 0)
        return -1;
    return moq_owned_setup(module, state);
}

int moq_tensor_traverse(moq_state *state, visitproc visit, void *arg) {
    moq_boundary *boundary = state->boundary;
    if (!boundary)
        return 0;
    for (int i = 0; i < MOQ_PRODUCER_SLOTS; i++) {
        Py_VISIT(boundary->producer[i].type);
        Py_VISIT(boundary->producer[i].is_neg);
    }
    for (int i = 0; i < MOQ_ML_DTYPES; i++)
        Py_VISIT(boundary->ml_descr[i]);
    Py_VISIT(boundary->owned_type);
    return 0;
}

void moq_tensor_clear(moq_state *state) {
    moq_boundary *boundary = state->boundary;
    if (!boundary)
        return;
    state->boundary = NULL;
    for (int i = 0; i < MOQ_PRODUCER_SLOTS; i++) {
        Py_CLEAR(boundary->producer[i].type);
        Py_CLEAR(boundary->producer[i].is_neg);
    }
    for (int i = 0; i < MOQ_ML_DTYPES; i++)
        Py_CLEAR(boundary->ml_descr[i]);
    Py_CLEAR(boundary->owned_type);
    Py_CLEAR(boundary->empty_tuple);
    moq_workspace_clear(boundary);
    PyMem_Free(boundary);
}
