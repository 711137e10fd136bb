/* NumPy arrays, read by their struct (no DLPack, no attribute) and made through the C API.
 *
 * bfloat16, fp8 and friends are user dtypes of the package ml_dtypes, whose numbers NumPy assigns
 * when that package is imported. An array that comes in has them only where somebody has imported
 * it, so it is looked up; for a result of such a type it is imported where it is installed, or the
 * type of a result would depend on what else the program has imported so far. */
#include "binding/boundary.h"

#define MOQ_NUMPY_IMPORT
#include "binding/numpy.h"

#include <string.h>

static const struct {
    const char *name;
    moq_dtype dtype;
} ML_DTYPES[MOQ_ML_DTYPES] = {
    {"bfloat16", MOQ_DT_BF16},
    {"float8_e4m3fn", MOQ_DT_E4M3},
    {"float8_e5m2", MOQ_DT_E5M2},
    {"float8_e8m0fnu", MOQ_DT_E8M0},
};

int moq_numpy_setup(void) {
    return PyArray_ImportNumPyAPI();
}

/* Records the dtype object of one ml_dtypes type; an older package may lack it. */
static int learn_dtype(moq_boundary *boundary, PyObject *module, int i) {
    PyObject *type = PyObject_GetAttrString(module, ML_DTYPES[i].name);
    if (!type) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    PyArray_Descr *descr = NULL;
    int converted = PyArray_DescrConverter(type, &descr);
    Py_DECREF(type);
    if (!converted)
        return -1;
    boundary->ml_descr[i] = (PyObject *)descr;
    boundary->ml_type_num[i] = descr->type_num;
    return 0;
}

/* 1 when the types of this module are known now, 0 when it has none, -1 with an exception. */
static int learn_from(moq_boundary *boundary, PyObject *module) {
    for (int i = 0; i < MOQ_ML_DTYPES; i++) {
        boundary->ml_type_num[i] = NPY_NOTYPE;
        Py_CLEAR(boundary->ml_descr[i]);
    }
    for (int i = 0; i < MOQ_ML_DTYPES; i++) {
        if (learn_dtype(boundary, module, i) < 0)
            return -1;
    }
    /* A module that another thread is still importing has no types yet: look again next time. */
    boundary->ml_dtypes_known = boundary->ml_descr[0] != NULL;
    return boundary->ml_dtypes_known;
}

/* 1 when ml_dtypes is known by now, 0 when it is not imported, -1 with an exception. */
static int learn_ml_dtypes(moq_boundary *boundary) {
    if (boundary->ml_dtypes_known)
        return 1;
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed, like the next */
    PyObject *module = PyDict_GetItemString(modules, "ml_dtypes");
    return module ? learn_from(boundary, module) : 0;
}

/* Imports ml_dtypes and learns its types; 0 when it is not installed, which is asked once. */
static int import_ml_dtypes(moq_boundary *boundary) {
    int known = learn_ml_dtypes(boundary);
    if (known != 0 || boundary->ml_dtypes_absent)
        return known;
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    if (!module) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError))
            return -1;
        PyErr_Clear();
        boundary->ml_dtypes_absent = true;
        return 0;
    }
    known = learn_from(boundary, module);
    Py_DECREF(module);
    return known;
}

static int refuse_dtype(PyArray_Descr *descr, const char *name, const char *why) {
    PyErr_Format(PyExc_TypeError, "%s: %R is not supported%s", name, (PyObject *)descr, why);
    return -1;
}

/* ml_dtypes types narrower than a byte keep one value in each byte; ops read two in a byte. */
static int refuse_unpacked(PyArray_Descr *descr, const char *name) {
    static const char *const PREFIX[] = {"int4",   "uint4",  "int2", "uint2",
                                         "float4", "float6", "int1", "uint1"};
    const char *type_name = NULL;
    PyObject *text = PyObject_GetAttrString((PyObject *)descr, "name");
    if (text && PyUnicode_Check(text))
        type_name = PyUnicode_AsUTF8AndSize(text, NULL);
    PyErr_Clear();
    bool narrow = false;
    for (size_t i = 0; type_name && i < sizeof PREFIX / sizeof *PREFIX; i++)
        narrow = narrow || strncmp(type_name, PREFIX[i], strlen(PREFIX[i])) == 0;
    Py_XDECREF(text);
    return refuse_dtype(descr, name,
                        narrow ? ": it holds one value in each byte; pack the values and pass the "
                                 "bytes as uint8 with a format"
                               : "");
}

static int user_dtype(moq_boundary *boundary, PyArray_Descr *descr, const char *name,
                      moq_dtype *out) {
    int known = learn_ml_dtypes(boundary);
    if (known < 0)
        return -1;
    for (int i = 0; known && i < MOQ_ML_DTYPES; i++) {
        if (boundary->ml_type_num[i] == descr->type_num) {
            *out = ML_DTYPES[i].dtype;
            return 0;
        }
    }
    return refuse_unpacked(descr, name);
}

/* The dtype of each of NumPy's type numbers; the numbers are part of its ABI, and long has one of
 * its own. */
static const uint8_t BUILTIN_DTYPE[] = {
    [NPY_BOOL] = MOQ_DT_BOOL,
    [NPY_UBYTE] = MOQ_DT_U8,
    [NPY_BYTE] = MOQ_DT_I8,
    [NPY_USHORT] = MOQ_DT_U16,
    [NPY_SHORT] = MOQ_DT_I16,
    [NPY_INT] = MOQ_DT_I32,
    [NPY_LONG] = sizeof(long) == 8 ? MOQ_DT_I64 : MOQ_DT_I32,
    [NPY_LONGLONG] = MOQ_DT_I64,
    [NPY_HALF] = MOQ_DT_F16,
    [NPY_FLOAT] = MOQ_DT_F32,
    [NPY_DOUBLE] = MOQ_DT_F64,
};

static int array_dtype(moq_state *state, PyArrayObject *array, const char *name, moq_dtype *out) {
    PyArray_Descr *descr = PyArray_DESCR(array);
    size_t number = (size_t)descr->type_num;
    *out = number < sizeof BUILTIN_DTYPE ? BUILTIN_DTYPE[number] : MOQ_DT_NONE;
    if (*out == MOQ_DT_NONE) {
        if (number < NPY_USERDEF)
            return refuse_dtype(descr, name, "");
        if (user_dtype(state->boundary, descr, name, out) < 0)
            return -1;
    }
    if (PyArray_ISBYTESWAPPED(array))
        return refuse_dtype(descr, name, ": its bytes are swapped");
    return 0;
}

int moq_numpy_take(moq_state *state, PyObject *object, const char *name, moq_arg *out) {
    PyArrayObject *array = (PyArrayObject *)object;
    moq_tensor *view = &out->view;
    if (array_dtype(state, array, name, &view->dtype) < 0)
        return -1;
    int ndim = PyArray_NDIM(array);
    if (ndim > MOQ_MAX_NDIM) {
        PyErr_Format(PyExc_BufferError, "%s: %d dimensions, at most %d are supported", name, ndim,
                     MOQ_MAX_NDIM);
        return -1;
    }
    view->data = PyArray_DATA(array);
    view->device = (moq_device){MOQ_CPU, 0};
    view->ndim = ndim;
    view->readonly = !PyArray_ISWRITEABLE(array);
    /* Sizes are powers of two: one mask finds an address or a step between elements, and a shift
     * spares a 64-bit division for each dimension, which cost more than all the rest. */
    uintptr_t size = moq_dtype_size(view->dtype), odd = (uintptr_t)view->data;
    int shift = __builtin_ctzll(size);
    bool empty = false;
    for (int i = 0; i < ndim; i++) {
        npy_intp step = PyArray_STRIDE(array, i);
        view->shape[i] = PyArray_DIM(array, i);
        view->stride[i] = step >> shift;
        if (view->shape[i] > 1)
            odd |= (uintptr_t)step;
        empty = empty || view->shape[i] == 0;
    }
    if ((odd & (size - 1)) && !empty) {
        PyErr_Format(PyExc_BufferError,
                     "%s: not aligned, %s needs addresses and strides that are multiples of %zu "
                     "bytes",
                     name, moq_dtype_name(view->dtype), (size_t)size);
        return -1;
    }
    return 0;
}

/* The NumPy dtype to store `dtype` in, as a new reference: its own where there is one. */
static PyArray_Descr *storage(moq_boundary *boundary, moq_dtype dtype) {
    static const int BUILTIN[MOQ_DT_COUNT] = {
        [MOQ_DT_BOOL] = NPY_BOOL,  [MOQ_DT_U8] = NPY_UINT8,   [MOQ_DT_I8] = NPY_INT8,
        [MOQ_DT_U16] = NPY_UINT16, [MOQ_DT_I16] = NPY_INT16,  [MOQ_DT_I32] = NPY_INT32,
        [MOQ_DT_I64] = NPY_INT64,  [MOQ_DT_F16] = NPY_HALF,   [MOQ_DT_BF16] = NPY_UINT16,
        [MOQ_DT_F32] = NPY_FLOAT,  [MOQ_DT_F64] = NPY_DOUBLE, [MOQ_DT_E4M3] = NPY_UINT8,
        [MOQ_DT_E5M2] = NPY_UINT8, [MOQ_DT_E8M0] = NPY_UINT8, [MOQ_DT_E2M1X2] = NPY_UINT8,
    };
    for (int i = 0; i < MOQ_ML_DTYPES; i++) {
        if (ML_DTYPES[i].dtype != dtype)
            continue;
        if (import_ml_dtypes(boundary) < 0)
            return NULL;
        if (boundary->ml_descr[i])
            return (PyArray_Descr *)Py_NewRef(boundary->ml_descr[i]);
    }
    return PyArray_DescrFromType(BUILTIN[dtype]);
}

PyObject *moq_numpy_new(moq_state *state, moq_dtype dtype, int32_t ndim, const int64_t *shape) {
    npy_intp extents[MOQ_MAX_NDIM];
    for (int i = 0; i < ndim; i++)
        extents[i] = (npy_intp)shape[i];
    PyArray_Descr *descr = storage(state->boundary, dtype);
    if (!descr)
        return NULL;
    return PyArray_NewFromDescr(&PyArray_Type, descr, ndim, extents, NULL, NULL, 0, NULL);
}
