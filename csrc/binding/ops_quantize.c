/* `_C.quantize`: activations to FP8 or NVFP4 codes and scales. */
#include "binding/args.h"
#include "binding/stream.h"
#include "binding/tensor.h"

#include "ops/quantize.h"

enum { X, SCHEME, SCALE, GROUP_SIZE, OUT, SCALE_OUT, FORMAT, STREAM, COUNT };

static const moq_signature SIGNATURE = {
    "quantize",
    2,
    2,
    COUNT,
    {KW_x, KW_scheme, KW_scale, KW_group_size, KW_out, KW_scale_out, KW_format, KW_stream},
};

/* Reads x as format= says; without it a raw array of 16 bits is bfloat16, which NumPy lacks. */
static int apply_format(PyObject *format, moq_arg *x) {
    if (moq_arg_absent(format)) {
        if (x->stored == MOQ_DT_U16 || x->stored == MOQ_DT_I16)
            x->view.dtype = MOQ_DT_BF16;
        return 0;
    }
    moq_dtype dtype;
    if (moq_arg_dtype(format, "format", &dtype) < 0)
        return -1;
    return moq_arg_reinterpret(x, dtype);
}

/* A result: the tensor given for it, or a new one. What is given is checked by the operation. */
static PyObject *take_result(moq_state *state, PyObject *given, const char *name, const moq_arg *x,
                             const moq_tensor *expected, moq_arg *out) {
    if (moq_arg_absent(given))
        return moq_arg_new_like(state, x, expected->dtype, expected->ndim, expected->shape, out);
    return moq_arg_take_output(state, given, name, out) < 0 ? NULL : Py_NewRef(given);
}

/* Takes the results a plan writes. result[i] stays NULL, and its view out of the run, where the
 * given scale is what the caller gets. */
static int take_results(moq_state *state, PyObject *const *values, const moq_arg *x,
                        const moq_quantize_plan *plan, PyObject **result, moq_arg *out) {
    bool fixed = plan->given.ndim >= 0, nvfp4 = plan->scheme == MOQ_QUANTIZE_NVFP4;
    result[0] = take_result(state, values[OUT], "out", x, &plan->codes, &out[0]);
    if (!result[0])
        return -1;
    if (nvfp4 || !fixed) {
        result[1] = take_result(state, values[SCALE_OUT], "scale_out", x, &plan->scale, &out[1]);
        if (!result[1])
            return -1;
    } else if (!moq_arg_absent(values[SCALE_OUT])) {
        PyErr_SetString(PyExc_ValueError, "scale_out: expected None where scale is given");
        return -1;
    }
    if (nvfp4 && !fixed) {
        result[2] = take_result(state, NULL, "scale_2", x, &plan->scale_2, &out[2]);
        if (!result[2])
            return -1;
    }
    return 0;
}

/* Runs with memory of the framework of x to work in, where the plan needs some. Frameworks order its
 * reuse after the call on the stream. */
static int launch(moq_state *state, const moq_arg *x, const moq_quantize_plan *plan,
                  moq_quantize_call *call) {
    int64_t bytes = moq_quantize_workspace(plan);
    moq_arg workspace = {0};
    moq_status status;
    moq_err err;
    PyObject *memory = bytes ? moq_arg_new_like(state, x, MOQ_DT_U8, 1, &bytes, &workspace) : NULL;
    if (bytes && !memory)
        return -1;
    call->workspace = workspace.view.data;
    Py_BEGIN_ALLOW_THREADS;
    status = moq_run_quantize(plan, call, &err);
    Py_END_ALLOW_THREADS;
    moq_arg_release(&workspace);
    Py_XDECREF(memory);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return status == MOQ_OK ? 0 : -1;
}

static PyObject *run(moq_state *state, PyObject *const *values, const moq_arg *x,
                     const moq_arg *given, const moq_quantize_plan *plan) {
    int count = plan->scheme == MOQ_QUANTIZE_NVFP4 ? 3 : 2;
    PyObject *result[3] = {NULL, NULL, NULL}, *tuple = NULL;
    moq_arg out[3] = {0};
    void *stream;
    if (moq_stream_take(values[STREAM], x, &stream) < 0)
        return NULL;
    int failed = take_results(state, values, x, plan, result, out);
    if (!failed) {
        moq_quantize_call call = {.codes = &out[0].view,
                                  .scale = result[1] ? &out[1].view : NULL,
                                  .scale_2 = result[2] ? &out[2].view : NULL,
                                  .stream = stream};
        failed = launch(state, x, plan, &call);
    }
    for (int i = 0; i < 3; i++) {
        if (!result[i])
            continue;
        result[i] = moq_arg_finish(state, result[i], &out[i], failed);
        failed = result[i] ? failed : -1;
    }
    if (!failed) {
        for (int i = 1; i < count; i++)
            result[i] = result[i] ? result[i] : Py_NewRef(given->object);
        tuple = PyTuple_Pack(count, result[0], result[1], result[2]);
    }
    for (int i = 0; i < 3; i++)
        Py_XDECREF(result[i]);
    return tuple;
}

static PyObject *quantize(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    int64_t group_size = 0;
    moq_quantize_scheme scheme;
    moq_quantize_plan plan;
    moq_arg x = {0}, scale = {0};
    const moq_tensor *given;
    moq_err err;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    const char *name = moq_arg_text(values[SCHEME], "scheme");
    if (!name)
        return NULL;
    if (!moq_arg_absent(values[GROUP_SIZE]) &&
        moq_arg_int(values[GROUP_SIZE], "group_size", 1, INT32_MAX, &group_size) < 0)
        return NULL;
    if (moq_quantize_scheme_from_name(name, &scheme, &err) != MOQ_OK)
        return moq_raise(state, &err);
    if (moq_arg_take(state, values[X], "x", &x) < 0)
        return NULL;
    if (apply_format(values[FORMAT], &x) == 0 &&
        moq_arg_take_optional(state, values[SCALE], "scale", &scale, &given) == 0) {
        if (moq_plan_quantize(scheme, &x.view, given, group_size, &plan, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            result = run(state, values, &x, &scale, &plan);
    }
    moq_arg_release(&x);
    moq_arg_release(&scale);
    return result;
}

static PyMethodDef METHODS[] = {
    {"quantize", (PyCFunction)(void (*)(void))quantize, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.quantize."},
    {NULL, NULL, 0, NULL},
};

int moq_add_quantize(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
