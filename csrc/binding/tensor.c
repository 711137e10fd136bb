/* The tensor boundary: see tensor.h. */
#include "binding/tensor.h"

#define MOQ_NUMPY_IMPORT
#include "binding/numpy.h"

static moq_dtype numpy_dtype(int type_num) {
    switch (type_num) {
    case NPY_BOOL:
        return MOQ_DT_BOOL;
    case NPY_UBYTE:
        return MOQ_DT_U8;
    case NPY_BYTE:
        return MOQ_DT_I8;
    case NPY_USHORT:
        return MOQ_DT_U16;
    case NPY_SHORT:
        return MOQ_DT_I16;
    case NPY_INT:
        return MOQ_DT_I32;
    case NPY_LONG:
        return MOQ_DT_I64;
    case NPY_HALF:
        return MOQ_DT_F16;
    case NPY_FLOAT:
        return MOQ_DT_F32;
    case NPY_DOUBLE:
        return MOQ_DT_F64;
    default:
        return MOQ_DT_NONE;
    }
}

int moq_tensor_setup(moq_state *state) {
    (void)state;
    return PyArray_ImportNumPyAPI();
}

int moq_arg_take(moq_state *state, PyObject *object, const char *name, moq_arg *out) {
    (void)state;
    *out = (moq_arg){.name = name};
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a tensor, got %R", name, Py_TYPE(object));
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    moq_tensor *view = &out->view;
    view->dtype = numpy_dtype(PyArray_TYPE(array));
    view->ndim = PyArray_NDIM(array);
    if (view->dtype == MOQ_DT_NONE || view->ndim > MOQ_MAX_NDIM) {
        PyErr_Format(PyExc_TypeError, "%s: dtype or rank not supported", name);
        return -1;
    }
    view->data = PyArray_DATA(array);
    view->readonly = !PyArray_ISWRITEABLE(array);
    int64_t size = (int64_t)moq_dtype_size(view->dtype);
    for (int i = 0; i < view->ndim; i++) {
        view->shape[i] = PyArray_DIM(array, i);
        view->stride[i] = PyArray_STRIDE(array, i) / size;
    }
    out->stored = view->dtype;
    out->object = Py_NewRef(object);
    return 0;
}

int moq_arg_take_output(moq_state *state, PyObject *object, const char *name, moq_arg *out) {
    if (moq_arg_take(state, object, name, out) < 0)
        return -1;
    if (out->view.readonly) {
        PyErr_Format(PyExc_BufferError, "%s: read-only memory cannot be written", name);
        moq_arg_release(out);
        return -1;
    }
    return 0;
}

void moq_arg_release(moq_arg *arg) {
    Py_CLEAR(arg->keeper);
    Py_CLEAR(arg->object);
}

int moq_arg_reinterpret(moq_arg *arg, moq_dtype dtype) {
    moq_dtype stored = arg->stored;
    bool carrier = moq_dtype_size(dtype) == 1 ? stored == MOQ_DT_U8 || stored == MOQ_DT_I8
                                              : stored == MOQ_DT_U16 || stored == MOQ_DT_I16;
    if (stored != dtype && !(carrier && moq_dtype_size(dtype) == moq_dtype_size(stored))) {
        PyErr_Format(PyExc_TypeError, "%s: expected %s or a raw carrier of its width, got %s",
                     arg->name, moq_dtype_name(dtype), moq_dtype_name(stored));
        return -1;
    }
    arg->view.dtype = dtype;
    return 0;
}

PyObject *moq_arg_new_like(moq_state *state, const moq_arg *like, moq_dtype dtype, int32_t ndim,
                           const int64_t *shape, moq_arg *out) {
    (void)like;
    npy_intp extents[MOQ_MAX_NDIM];
    int type = moq_dtype_size(dtype) == 1 ? NPY_UBYTE : NPY_USHORT;
    if (dtype == MOQ_DT_F32)
        type = NPY_FLOAT;
    if (dtype == MOQ_DT_F16)
        type = NPY_HALF;
    for (int i = 0; i < ndim; i++)
        extents[i] = (npy_intp)shape[i];
    PyObject *array = PyArray_SimpleNew(ndim, extents, type);
    if (!array)
        return NULL;
    if (moq_arg_take(state, array, "out", out) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    out->view.dtype = dtype;
    return array;
}
