/* `_C.describe_tensor`, `_C.check_tensors` and `_C.empty_like`: the tensor boundary seen from
 * Python, for tests, benchmarks and whoever wonders what moqext sees of a tensor. */
#include "binding/args.h"
#include "binding/py_tensor.h"

#include <string.h>

/* Takes `object`, read as `format` unless that is absent. */
static int take_as(moq_state *state, PyObject *object, const char *name, PyObject *format,
                   moq_arg *out) {
    moq_dtype dtype = MOQ_DT_NONE;
    if (!moq_arg_absent(format) && moq_arg_dtype(format, "format", &dtype) < 0)
        return -1;
    if (moq_arg_take(state, object, name, out) < 0)
        return -1;
    if (dtype == MOQ_DT_NONE || moq_arg_apply_format(out, dtype) == 0)
        return 0;
    moq_arg_release(out);
    return -1;
}

static PyObject *tuple_of(const int64_t *values, int n) {
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, i, value) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *describe_view(const moq_arg *arg) {
    const moq_tensor *t = &arg->view;
    PyObject *device = t->device.kind == MOQ_CPU ? PyUnicode_FromString("cpu")
                                                 : PyUnicode_FromFormat("cuda:%d", t->device.index);
    return Py_BuildValue("{s:s,s:s,s:N,s:N,s:N,s:O,s:N}", "dtype", moq_dtype_name(t->dtype),
                         "stored", moq_dtype_name(arg->stored), "shape",
                         tuple_of(t->shape, t->ndim), "strides", tuple_of(t->stride, t->ndim),
                         "device", device, "readonly", t->readonly ? Py_True : Py_False, "pointer",
                         PyLong_FromVoidPtr(t->data));
}

static PyObject *describe_tensor(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames) {
    static const moq_signature SIGNATURE = {"describe_tensor", 1, 1, 3, {KW_x, KW_format, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[MOQ_MAX_ARGS];
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    moq_arg x, out = {0};
    if (take_as(state, values[0], "x", values[1], &x) < 0)
        return NULL;
    PyObject *result = NULL;
    if (moq_arg_absent(values[2]) || (moq_arg_take_output(state, values[2], "out", &out) == 0 &&
                                      moq_arg_refuse_overlap(&out, &x) == 0))
        result = describe_view(out.object ? &out : &x);
    moq_arg_release(&out);
    moq_arg_release(&x);
    return result;
}

static PyObject *check_tensors(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    moq_state *state = moq_module_state(module);
    moq_arg taken[MOQ_MAX_ARGS];
    if (nargs > MOQ_MAX_ARGS) {
        PyErr_Format(PyExc_TypeError, "check_tensors() takes at most %d arguments, got %zd",
                     MOQ_MAX_ARGS, nargs);
        return NULL;
    }
    Py_ssize_t n = 0;
    while (n < nargs && moq_arg_take(state, args[n], "tensor", &taken[n]) == 0)
        n++;
    bool complete = n == nargs;
    while (n > 0)
        moq_arg_release(&taken[--n]);
    return complete ? Py_NewRef(Py_None) : NULL;
}

/* Fills shape[] from a sequence of ints and returns its length, or -1. */
static int parse_shape(PyObject *object, int64_t *shape) {
    PyObject *sequence = PySequence_Tuple(object);
    if (!sequence)
        return -1;
    Py_ssize_t n = PyTuple_Size(sequence);
    if (n > MOQ_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "shape: %zd dimensions, at most %d are supported", n,
                     MOQ_MAX_NDIM);
        n = -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (moq_arg_int(PyTuple_GetItem(sequence, i), "shape", 0, INT64_MAX, &shape[i]) < 0)
            n = -1;
    }
    Py_DECREF(sequence);
    return (int)n;
}

static PyObject *empty_like(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    static const moq_signature SIGNATURE = {
        "empty_like", 3, 3, 4, {KW_x, KW_shape, KW_dtype, KW_format}};
    moq_state *state = moq_module_state(module);
    PyObject *values[MOQ_MAX_ARGS];
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    int64_t shape[MOQ_MAX_NDIM];
    int ndim = parse_shape(values[1], shape);
    moq_dtype dtype;
    moq_arg x, out;
    if (ndim < 0 || moq_arg_dtype(values[2], "dtype", &dtype) < 0 ||
        take_as(state, values[0], "x", values[3], &x) < 0)
        return NULL;
    PyObject *result = moq_arg_new_like(state, &x, dtype, ndim, shape, &out);
    if (result) {
        size_t bytes = (size_t)moq_tensor_numel(&out.view) * moq_dtype_size(dtype);
        if (bytes > 0 && out.view.device.kind == MOQ_CPU)
            memset(out.view.data, 0, bytes);
        result = moq_arg_finish(state, result, &out, 0);
    }
    moq_arg_release(&x);
    return result;
}

static PyMethodDef METHODS[] = {
    {"describe_tensor", (PyCFunction)(void (*)(void))describe_tensor, METH_FASTCALL | METH_KEYWORDS,
     "describe_tensor(x, *, format=None, out=None) -> dict\n\n"
     "What moqext sees of `x` (of `out`, checked as the output of an op that reads `x`, when "
     "given):"
     "\ndtype, stored, shape, strides (in elements), device, readonly, pointer."},
    {"check_tensors", (PyCFunction)(void (*)(void))check_tensors, METH_FASTCALL,
     "check_tensors(*tensors) -> None: takes and releases each, raising what an op would raise"},
    {"empty_like", (PyCFunction)(void (*)(void))empty_like, METH_FASTCALL | METH_KEYWORDS,
     "empty_like(x, shape, dtype, *, format=None) -> tensor\n\n"
     "A new tensor of x's own kind and device, as ops return it. CPU memory is cleared."},
    {NULL, NULL, 0, NULL},
};

int moq_add_describe(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
