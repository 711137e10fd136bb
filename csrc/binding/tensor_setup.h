/* The tensor boundary's part in the life of the module: what it remembers is made when the module
 * is imported and given back when the module goes. */
#ifndef MOQ_BINDING_TENSOR_SETUP_H
#define MOQ_BINDING_TENSOR_SETUP_H

#include "binding/state.h"

/* Imports the NumPy C API and prepares the per-type tables; called once at import. */
int moq_tensor_setup(PyObject *module, moq_state *state);
int moq_tensor_traverse(moq_state *state, visitproc visit, void *arg);
void moq_tensor_clear(moq_state *state);

#endif
