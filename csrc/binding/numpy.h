/* NumPy's C API, imported once by py_tensor.c and shared by the other files of the binding. */
#ifndef MOQ_BINDING_NUMPY_H
#define MOQ_BINDING_NUMPY_H

#include <Python.h>

#include <stdio.h> /* NumPy's header uses FILE, which the limited API does not bring */

#define NPY_NO_DEPRECATED_API  NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION     NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL moq_numpy_api
#ifndef MOQ_NUMPY_IMPORT
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#endif
