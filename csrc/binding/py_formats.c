/* `_C.encode(x, format, out=None)` and `_C.decode(codes, format, out=None)`: number formats. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "core/formats.h"
#include "ops/convert.h"

/* The dtype `format` names: any number format but float32, which needs no code. */
static int parse_format(PyObject *value, moq_dtype *out) {
    const char *text = moq_arg_text(value, "format");
    if (!text)
        return -1;
    *out = moq_dtype_from_name(text);
    if (!moq_dtype_is_float(*out) || *out == MOQ_DT_F32) {
        PyErr_Format(PyExc_ValueError,
                     "format: expected e4m3, e5m2, e8m0, e2m1, bf16 or fp16, got %R", value);
        return -1;
    }
    return 0;
}

static int run(moq_state *state, const moq_arg *x, const moq_arg *result) {
    moq_err err;
    moq_status status;
    moq_long_call call;
    moq_long_call_begin(&call);
    status = moq_run_convert(&x->view, x->name, &result->view, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* The result of converting `x` to `dtype`: in `out` where that is given. */
static PyObject *convert(moq_state *state, const moq_arg *x, moq_dtype dtype, PyObject *out) {
    moq_err err;
    moq_tensor shape;
    moq_arg result;
    if (moq_describe_convert(&x->view, x->name, dtype, &shape, &err) != MOQ_OK)
        return moq_raise(state, &err);
    PyObject *object = moq_arg_output(state, out, x, dtype, shape.ndim, shape.shape, &result);
    if (!object)
        return NULL;
    return moq_arg_finish(state, object, &result, run(state, x, &result));
}

static PyObject *encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames) {
    static const moq_signature signature = {"encode", 3, 2, 3, {KW_x, KW_format, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3], *result = NULL;
    moq_dtype format;
    moq_arg x;
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0 ||
        parse_format(values[1], &format) < 0 || moq_arg_take(state, values[0], "x", &x) < 0)
        return NULL;
    /* NumPy has no bfloat16, so a raw array of its width is one. */
    if (x.stored == MOQ_DT_U16 || x.stored == MOQ_DT_I16)
        x.view.dtype = MOQ_DT_BF16;
    if (x.view.dtype == MOQ_DT_F32 || x.view.dtype == MOQ_DT_F16 || x.view.dtype == MOQ_DT_BF16)
        result = convert(state, &x, format, values[2]);
    else
        PyErr_Format(PyExc_TypeError, "x: expected float32, float16 or bfloat16, got %s",
                     moq_dtype_name(x.stored));
    moq_arg_release(&x);
    return result;
}

static PyObject *decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames) {
    static const moq_signature signature = {"decode", 3, 2, 3, {KW_codes, KW_format, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3], *result = NULL;
    moq_dtype format;
    moq_arg codes;
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0 ||
        parse_format(values[1], &format) < 0 || moq_arg_take(state, values[0], "codes", &codes) < 0)
        return NULL;
    if (moq_arg_apply_format(&codes, format) == 0)
        result = convert(state, &codes, MOQ_DT_F32, values[2]);
    moq_arg_release(&codes);
    return result;
}

static PyMethodDef METHODS[] = {
    {"encode", (PyCFunction)(void (*)(void))encode, METH_FASTCALL | METH_KEYWORDS,
     "encode(x, format, out=None): codes of a float32, float16 or bfloat16 tensor"},
    {"decode", (PyCFunction)(void (*)(void))decode, METH_FASTCALL | METH_KEYWORDS,
     "decode(codes, format, out=None): float32 values of codes or of their raw carrier"},
    {NULL, NULL, 0, NULL},
};

int moq_add_formats(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
