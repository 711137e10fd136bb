/* `_C.to_device(x, device)` and `_C.to_host(x)`: tensors to and from a CUDA device, of whatever
 * library, by memory of moqext's own. `_C.copy(x, out, dtype)`: into a tensor that is there, of
 * another library or not. */
#include "binding/args.h"
#include "binding/boundary.h"
#include "binding/mapping.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"
#include "ops/check.h"
#include "ops/transfer.h"

/* Copies x to the new tensor `result`, which becomes the returned object. */
static PyObject *fill(moq_state *state, const moq_arg *x, void *stream, PyObject *result,
                      const moq_tensor *out) {
    moq_status status;
    moq_err err;
    if (!result)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = moq_run_transfer(&x->view, stream, out, &err);
    Py_END_ALLOW_THREADS
    if (status == MOQ_OK)
        return result;
    Py_DECREF(result);
    return moq_raise(state, &err);
}

static PyObject *to_device(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames) {
    static const moq_signature SIGNATURE = {"to_device", 2, 2, 2, {KW_x, KW_device}};
    moq_state *state = moq_module_state(module);
    PyObject *values[2];
    moq_device device;
    moq_tensor out;
    moq_arg x;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        moq_arg_device(values[1], "device", &device) < 0)
        return NULL;
    if (device.kind != MOQ_CUDA) {
        PyErr_Format(PyExc_ValueError, "device: expected \"cuda:N\", got %R", values[1]);
        return NULL;
    }
    if (moq_arg_take(state, values[0], "x", &x) < 0)
        return NULL;
    PyObject *result = moq_owned_new(state, x.view.dtype, device, x.view.ndim, x.view.shape, &out);
    result = fill(state, &x, NULL, result, &out);
    moq_arg_release(&x);
    return result;
}

/* A new array, or the one that is given. */
static PyObject *take_target(moq_state *state, PyObject *given, const moq_arg *x, moq_arg *out) {
    if (moq_arg_absent(given)) {
        PyObject *result = moq_numpy_new(state, x->view.dtype, x->view.ndim, x->view.shape);
        if (result && moq_numpy_take(state, result, "out", out) < 0)
            Py_CLEAR(result);
        return result;
    }
    moq_tensor expected = moq_describe(x->view.dtype, x->view.ndim, x->view.shape);
    moq_err err;
    if (moq_arg_take_output(state, given, "out", out) < 0)
        return NULL;
    if (moq_arg_reinterpret(out, x->view.dtype) < 0)
        return NULL;
    if (moq_check_output(&out->view, "out", &expected, NULL, 0, &err) == MOQ_OK)
        return Py_NewRef(given);
    return moq_raise(state, &err);
}

static PyObject *to_host(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
    static const moq_signature SIGNATURE = {"to_host", 1, 1, 2, {KW_x, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[2], *result = NULL;
    moq_arg x, out = {0};
    void *stream;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        moq_arg_take(state, values[0], "x", &x) < 0)
        return NULL;
    if (moq_stream_take(NULL, &x, &stream) == 0)
        result = take_target(state, values[1], &x, &out);
    result = fill(state, &x, stream, result, &out.view);
    moq_arg_release(&x);
    moq_arg_release(&out);
    return result;
}

/* Reads both ends of a copy as one dtype; numbers of another type become float32. */
static int read_as(moq_dtype dtype, moq_arg *x, moq_arg *out) {
    if (moq_arg_reinterpret(out, dtype) < 0)
        return -1;
    if (dtype != MOQ_DT_F32)
        return moq_arg_reinterpret(x, dtype);
    if (x->view.dtype == MOQ_DT_U16) /* bfloat16 where NumPy has none */
        x->view.dtype = MOQ_DT_BF16;
    return 0;
}

static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames) {
    static const moq_signature SIGNATURE = {"copy", 3, 3, 3, {KW_x, KW_out, KW_dtype}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3];
    moq_dtype dtype;
    moq_arg x, out;
    moq_err err;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        moq_arg_dtype(values[2], "dtype", &dtype) < 0 ||
        moq_arg_take(state, values[0], "x", &x) < 0)
        return NULL;
    if (moq_arg_take_output(state, values[1], "out", &out) < 0) {
        moq_arg_release(&x);
        return NULL;
    }
    int status = read_as(dtype, &x, &out);
    if (status == 0)
        status = moq_arg_refuse_overlap(&out, &x);
    if (status == 0 && moq_run_copy(&x.view, "x", &out.view, &err) != MOQ_OK) {
        moq_raise(state, &err);
        status = -1;
    }
    moq_arg_release(&x);
    return moq_arg_finish(state, Py_NewRef(values[1]), &out, status);
}

/* Refuses more values than the caller has a use for, and gaps between them: only what is as it
 * should be is read. */
static int check_numbers(const moq_arg *x, int64_t most) {
    char shape[128];
    if (moq_tensor_numel(&x->view) > most) {
        PyErr_Format(PyExc_ValueError, "%s: expected at most %lld values, got shape %s", x->name,
                     (long long)most, moq_shape_text(&x->view, shape, sizeof shape));
        return -1;
    }
    if (moq_tensor_is_contiguous(&x->view))
        return 0;
    PyErr_Format(PyExc_BufferError, "%s: expected a contiguous tensor", x->name);
    return -1;
}

/* Numbers of the host as a NumPy array of float32. */
static PyObject *as_numbers(moq_state *state, moq_arg *x) {
    moq_arg out = {0};
    moq_err err;
    PyObject *result = moq_numpy_new(state, MOQ_DT_F32, x->view.ndim, x->view.shape);
    if (!result || moq_numpy_take(state, result, "out", &out) < 0) {
        Py_XDECREF(result);
        return NULL;
    }
    /* Numbers in bfloat16 arrive as uint16 where NumPy has no such type. */
    if (x->view.dtype == MOQ_DT_U16)
        x->view.dtype = MOQ_DT_BF16;
    moq_status status = moq_run_copy(&x->view, x->name, &out.view, &err);
    moq_arg_release(&out);
    if (status == MOQ_OK)
        return result;
    Py_DECREF(result);
    return moq_raise(state, &err);
}

static PyObject *numbers(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
    static const moq_signature SIGNATURE = {
        "numbers", 4, 4, 4, {KW_x, KW_name, KW_device, KW_limit}};
    moq_state *state = moq_module_state(module);
    PyObject *values[4], *host = NULL;
    moq_device device;
    int64_t most;
    moq_arg x;
    const char *name;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        !(name = moq_arg_text(values[1], "name")) ||
        moq_arg_device(values[2], "device", &device) < 0 ||
        moq_arg_int(values[3], "limit", 0, INT64_MAX, &most) < 0)
        return NULL;
    if (moq_arg_take_on(state, device, values[0], name, MOQ_DT_NONE, true, &x) < 0)
        return NULL;
    if (check_numbers(&x, most) < 0) {
        moq_arg_release(&x);
        return NULL;
    }
    if (x.view.device.kind == MOQ_CUDA) {
        moq_arg_release(&x);
        host = to_host(module, values, 1, NULL);
        if (!host || moq_arg_take(state, host, name, &x) < 0) {
            Py_XDECREF(host);
            return NULL;
        }
    }
    PyObject *result = as_numbers(state, &x);
    moq_arg_release(&x);
    Py_XDECREF(host);
    return result;
}

static PyMethodDef METHODS[] = {
    {"to_device", (PyCFunction)(void (*)(void))to_device, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.to_device."},
    {"to_host", (PyCFunction)(void (*)(void))to_host, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.to_host."},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL | METH_KEYWORDS,
     "copy(x, out, dtype) -> out: codes of that dtype as they are, numbers of any type as float32"},
    {"numbers", (PyCFunction)(void (*)(void))numbers, METH_FASTCALL | METH_KEYWORDS,
     "numbers(x, name, device, limit) -> NumPy array of float32, of at most `limit` values on the "
     "device or the host; name: what messages call x"},
    {NULL, NULL, 0, NULL},
};

int moq_add_transfer(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
