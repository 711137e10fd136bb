/* `_C.quantize`, `_C.silu_and_mul_quantize`, `_C.rms_norm_quantize`: activations to FP8 or NVFP4
 * codes and scales; `_C.silu_and_mul`, `_C.rms_norm`: what is before that, alone. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

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

/* The tensors that the caller gives for results, and the stream of the work; any may be NULL or
 * None. */
typedef struct {
    PyObject *out, *scale_out, *residual_out, *stream, *value_out;
} wishes;

enum { CODES, SCALES, SCALE_2, RESIDUAL, VALUES, RESULTS };

/* Takes the results a plan writes. result[i] stays NULL, and its view out of the run, where there
 * is none or the given scale is what the caller gets. */
static int take_results(moq_state *state, const wishes *w, const moq_arg *x,
                        const moq_quantize_plan *plan, PyObject **result, moq_arg *out) {
    bool fixed = plan->given.ndim >= 0, nvfp4 = moq_quantizes_to_nvfp4(plan->scheme);
    bool scaled = plan->scheme != MOQ_QUANTIZE_NOTHING;
    const moq_activation *a = &plan->activation;
    result[CODES] = take_result(state, w->out, "out", x, &plan->codes, &out[CODES]);
    if (!result[CODES])
        return -1;
    if (scaled && (nvfp4 || !fixed)) {
        result[SCALES] =
            take_result(state, w->scale_out, "scale_out", x, &plan->scale, &out[SCALES]);
        if (!result[SCALES])
            return -1;
    } else if (scaled && !moq_arg_absent(w->scale_out)) {
        PyErr_SetString(PyExc_ValueError, "scale_out: expected None where scale is given");
        return -1;
    }
    if (nvfp4 && !fixed) {
        result[SCALE_2] = take_result(state, NULL, "scale_2", x, &plan->scale_2, &out[SCALE_2]);
        if (!result[SCALE_2])
            return -1;
    }
    if (a->kind == MOQ_RMS_NORM && a->residual.ndim >= 0) {
        result[RESIDUAL] =
            take_result(state, w->residual_out, "residual_out", x, &a->residual, &out[RESIDUAL]);
        if (!result[RESIDUAL])
            return -1;
    } else if (!moq_arg_absent(w->residual_out)) {
        PyErr_SetString(PyExc_ValueError, "residual_out: expected None without a residual");
        return -1;
    }
    if (!moq_arg_absent(w->value_out)) {
        result[VALUES] = take_result(state, w->value_out, "value_out", x, &plan->x, &out[VALUES]);
        if (!result[VALUES])
            return -1;
    }
    return 0;
}

/* Runs with memory of the framework of x to work in, where the plan needs some. */
static int launch(moq_state *state, const moq_arg *x, const moq_quantize_plan *plan,
                  moq_quantize_call *call) {
    moq_arg workspace;
    moq_status status;
    moq_err err;
    if (moq_arg_take_memory(state, x, moq_quantize_workspace(plan), &workspace) < 0)
        return -1;
    call->workspace = workspace.view.data;
    moq_long_call run;
    moq_long_call_begin(&run);
    status = moq_run_quantize(plan, call, &err);
    status = moq_long_call_end(&run, status, &err);
    moq_arg_release(&workspace);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return status == MOQ_OK ? 0 : -1;
}

/* codes, scales, for NVFP4 the second-level scale, and z where there is a residual. Values have no
 * scales, and alone they are no tuple. */
static PyObject *pack(PyObject *const *result, PyObject *given, const moq_quantize_plan *plan) {
    PyObject *item[RESULTS] = {result[CODES], result[SCALES] ? result[SCALES] : given};
    Py_ssize_t count = plan->scheme == MOQ_QUANTIZE_NOTHING ? 1 : 2;
    if (moq_quantizes_to_nvfp4(plan->scheme))
        item[count++] = result[SCALE_2] ? result[SCALE_2] : given;
    if (result[RESIDUAL])
        item[count++] = result[RESIDUAL];
    if (count == 1)
        return Py_NewRef(item[0]);
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, i, Py_NewRef(item[i]));
    return tuple;
}

static PyObject *run(moq_state *state, const wishes *w, const moq_arg *x, const moq_arg *given,
                     const moq_quantize_plan *plan) {
    PyObject *result[RESULTS] = {NULL}, *tuple = NULL;
    moq_arg out[RESULTS] = {0};
    void *stream;
    if (moq_stream_take(w->stream, x, &stream) < 0)
        return NULL;
    int failed = take_results(state, w, x, plan, result, out);
    if (!failed) {
        moq_quantize_call call = {.codes = &out[CODES].view,
                                  .scale = result[SCALES] ? &out[SCALES].view : NULL,
                                  .scale_2 = result[SCALE_2] ? &out[SCALE_2].view : NULL,
                                  .residual_out = result[RESIDUAL] ? &out[RESIDUAL].view : NULL,
                                  .value_out = result[VALUES] ? &out[VALUES].view : NULL,
                                  .stream = stream};
        failed = launch(state, x, plan, &call);
    }
    for (int i = 0; i < RESULTS; i++) {
        if (!result[i])
            continue;
        result[i] = moq_arg_finish(state, result[i], &out[i], failed);
        failed = result[i] ? failed : -1;
    }
    if (!failed)
        tuple = pack(result, given->object, plan);
    for (int i = 0; i < RESULTS; i++)
        Py_XDECREF(result[i]);
    return tuple;
}

static int take_scheme(moq_state *state, PyObject *object, moq_quantize_scheme *scheme) {
    moq_err err;
    const char *name = moq_arg_text(object, "scheme");
    if (name && moq_quantize_scheme_from_name(name, scheme, &err) != MOQ_OK) {
        moq_raise(state, &err);
        return -1;
    }
    return name ? 0 : -1;
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
    wishes w = {values[OUT], values[SCALE_OUT], NULL, values[STREAM]};
    if (!moq_arg_absent(values[GROUP_SIZE]) &&
        moq_arg_int(values[GROUP_SIZE], "group_size", 1, INT32_MAX, &group_size) < 0)
        return NULL;
    if (take_scheme(state, values[SCHEME], &scheme) < 0 ||
        moq_arg_take(state, values[X], "x", &x) < 0)
        return NULL;
    if (apply_format(values[FORMAT], &x) == 0 &&
        moq_arg_take_optional(state, values[SCALE], "scale", &scale, &given) == 0) {
        if (moq_plan_quantize(scheme, &x.view, given, group_size, &plan, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            result = run(state, &w, &x, &scale, &plan);
    }
    moq_arg_release(&x);
    moq_arg_release(&scale);
    return result;
}

/* ---- after an activation ---- */

/* The tensors that an activation may read; absent ones stay empty. */
typedef struct {
    moq_arg x, weight, residual, scale;
} activation_args;

static PyObject *run_activation(moq_state *state, const wishes *w, moq_quantize_scheme scheme,
                                moq_activation *a, const activation_args *in,
                                const moq_tensor *given) {
    moq_quantize_plan plan;
    moq_err err;
    a->x = in->x.view;
    if (moq_plan_activation(scheme, a, given, &plan, &err) == MOQ_OK)
        return run(state, w, &in->x, &in->scale, &plan);
    return moq_raise(state, &err);
}

static void release_activation(activation_args *in) {
    moq_arg_release(&in->x);
    moq_arg_release(&in->weight);
    moq_arg_release(&in->residual);
    moq_arg_release(&in->scale);
}

static const moq_signature SILU = {
    "silu_and_mul_quantize",
    2,
    2,
    7,
    {KW_x, KW_scheme, KW_scale, KW_out, KW_scale_out, KW_format, KW_stream},
};

static PyObject *silu_and_mul_quantize(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                       PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[7], *result = NULL;
    moq_quantize_scheme scheme;
    moq_activation a = {.kind = MOQ_SILU_AND_MUL, .residual = {.ndim = -1}};
    activation_args in = {0};
    const moq_tensor *given;
    if (moq_args_parse(state, &SILU, args, nargs, kwnames, v) < 0 ||
        take_scheme(state, v[1], &scheme) < 0)
        return NULL;
    wishes w = {v[3], v[4], NULL, v[6]};
    if (moq_arg_take(state, v[0], "x", &in.x) == 0 && apply_format(v[5], &in.x) == 0 &&
        moq_arg_take_optional(state, v[2], "scale", &in.scale, &given) == 0)
        result = run_activation(state, &w, scheme, &a, &in, given);
    release_activation(&in);
    return result;
}

static PyObject *silu_and_mul(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    static const moq_signature signature = {
        "silu_and_mul", 1, 1, 4, {KW_x, KW_out, KW_format, KW_stream}};
    moq_state *state = moq_module_state(module);
    PyObject *v[4], *result = NULL;
    moq_activation a = {.kind = MOQ_SILU_AND_MUL, .residual = {.ndim = -1}};
    activation_args in = {0};
    if (moq_args_parse(state, &signature, args, nargs, kwnames, v) < 0)
        return NULL;
    wishes w = {v[1], NULL, NULL, v[3]};
    if (moq_arg_take(state, v[0], "x", &in.x) == 0 && apply_format(v[2], &in.x) == 0)
        result = run_activation(state, &w, MOQ_QUANTIZE_NOTHING, &a, &in, NULL);
    release_activation(&in);
    return result;
}

static const moq_signature NORM = {
    "rms_norm_quantize",
    4,
    4,
    12,
    {KW_x, KW_weight, KW_eps, KW_scheme, KW_residual, KW_scale, KW_out, KW_scale_out,
     KW_residual_out, KW_value_out, KW_format, KW_stream},
};

static int take_eps(PyObject *object, float *eps) {
    double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "eps: expected a number, got %R", Py_TYPE(object));
        return -1;
    }
    *eps = (float)value;
    return 0;
}

/* Takes weight and residual; raw 16-bit tensors are read as the dtype of x. */
static int take_norm(moq_state *state, PyObject *weight, PyObject *other, activation_args *in,
                     moq_activation *a) {
    const moq_tensor *residual;
    bool wide;
    if (moq_arg_take(state, weight, "weight", &in->weight) < 0 ||
        moq_arg_take_optional(state, other, "residual", &in->residual, &residual) < 0)
        return -1;
    wide = in->weight.view.dtype == MOQ_DT_F32;
    if ((!wide && moq_arg_reinterpret(&in->weight, in->x.view.dtype) < 0) ||
        (residual && moq_arg_reinterpret(&in->residual, in->x.view.dtype) < 0))
        return -1;
    a->weight = in->weight.view;
    if (residual)
        a->residual = in->residual.view;
    return 0;
}

static PyObject *rms_norm_quantize(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                   PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[12], *result = NULL;
    moq_quantize_scheme scheme;
    moq_activation a = {.kind = MOQ_RMS_NORM, .residual = {.ndim = -1}};
    activation_args in = {0};
    const moq_tensor *given;
    if (moq_args_parse(state, &NORM, args, nargs, kwnames, v) < 0 || take_eps(v[2], &a.eps) < 0 ||
        take_scheme(state, v[3], &scheme) < 0)
        return NULL;
    wishes w = {v[6], v[7], v[8], v[11], v[9]};
    if (moq_arg_take(state, v[0], "x", &in.x) == 0 && apply_format(v[10], &in.x) == 0 &&
        take_norm(state, v[1], v[4], &in, &a) == 0 &&
        moq_arg_take_optional(state, v[5], "scale", &in.scale, &given) == 0)
        result = run_activation(state, &w, scheme, &a, &in, given);
    release_activation(&in);
    return result;
}

static PyObject *rms_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames) {
    static const moq_signature signature = {
        "rms_norm",
        3,
        3,
        8,
        {KW_x, KW_weight, KW_eps, KW_residual, KW_out, KW_residual_out, KW_format, KW_stream}};
    moq_state *state = moq_module_state(module);
    PyObject *v[8], *result = NULL;
    moq_activation a = {.kind = MOQ_RMS_NORM, .residual = {.ndim = -1}};
    activation_args in = {0};
    if (moq_args_parse(state, &signature, args, nargs, kwnames, v) < 0 ||
        take_eps(v[2], &a.eps) < 0)
        return NULL;
    wishes w = {v[4], NULL, v[5], v[7]};
    if (moq_arg_take(state, v[0], "x", &in.x) == 0 && apply_format(v[6], &in.x) == 0 &&
        take_norm(state, v[1], v[3], &in, &a) == 0)
        result = run_activation(state, &w, MOQ_QUANTIZE_NOTHING, &a, &in, NULL);
    release_activation(&in);
    return result;
}

static PyMethodDef METHODS[] = {
    {"quantize", (PyCFunction)(void (*)(void))quantize, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.quantize."},
    {"silu_and_mul_quantize", (PyCFunction)(void (*)(void))silu_and_mul_quantize,
     METH_FASTCALL | METH_KEYWORDS, "See moqext.ops.silu_and_mul_quantize."},
    {"rms_norm_quantize", (PyCFunction)(void (*)(void))rms_norm_quantize,
     METH_FASTCALL | METH_KEYWORDS, "See moqext.ops.rms_norm_quantize."},
    {"silu_and_mul", (PyCFunction)(void (*)(void))silu_and_mul, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.silu_and_mul."},
    {"rms_norm", (PyCFunction)(void (*)(void))rms_norm, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.rms_norm."},
    {NULL, NULL, 0, NULL},
};

int moq_add_quantize(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
