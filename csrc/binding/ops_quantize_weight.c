/* `_C.quantize_weight` and `_C.weight_amax`: weights to codes and scales. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "ops/quantize_weight.h"

#include <math.h>

enum { WEIGHT, QUANT_ALGO, AMAX, GROUP_SIZE, SEARCH, COUNT };

static const moq_signature SIGNATURE = {
    "quantize_weight", 2, 2, COUNT, {KW_weight, KW_quant_algo, KW_amax, KW_group_size, KW_search},
};

/* NumPy has no bfloat16, so a raw array of its width is one. */
static int take_weight(moq_state *state, PyObject *object, moq_arg *weight) {
    if (moq_arg_take(state, object, "weight", weight) < 0)
        return -1;
    if (weight->stored == MOQ_DT_U16 || weight->stored == MOQ_DT_I16)
        weight->view.dtype = MOQ_DT_BF16;
    return 0;
}

static int take_amax(PyObject *object, float *amax) {
    *amax = -1.0f;
    if (moq_arg_absent(object))
        return 0;
    double value = PyFloat_AsDouble(object);
    bool failed = value == -1.0 && PyErr_Occurred();
    *amax = (float)value;
    if (!failed && value >= 0.0 && isfinite(*amax))
        return 0;
    PyErr_Clear();
    PyErr_Format(failed ? PyExc_TypeError : PyExc_ValueError,
                 "amax: expected a finite number from 0 on, got %R", object);
    return -1;
}

static int take_search(moq_state *state, PyObject *object, moq_scale_search *search) {
    moq_err err;
    *search = MOQ_SEARCH_NONE;
    if (moq_arg_absent(object))
        return 0;
    const char *name = moq_arg_text(object, "search");
    if (name && moq_scale_search_from_name(name, search, &err) != MOQ_OK)
        moq_raise(state, &err);
    return name && !PyErr_Occurred() ? 0 : -1;
}

static int launch(moq_state *state, const moq_quantize_weight_plan *plan, const moq_arg *codes,
                  const moq_arg *scales, void *stream) {
    moq_err err;
    moq_long_call call;
    moq_long_call_begin(&call);
    moq_status status = moq_run_quantize_weight(plan, &codes->view, &scales->view, stream, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* (codes, scales, weight_scale_2 or None) */
static PyObject *run(moq_state *state, const moq_arg *weight, const moq_quantize_weight_plan *plan,
                     void *stream) {
    moq_arg codes = {0}, scales = {0};
    const moq_tensor *c = &plan->codes, *s = &plan->scales;
    PyObject *made = moq_arg_new_like(state, weight, c->dtype, c->ndim, c->shape, &codes);
    if (!made)
        return NULL;
    PyObject *beside = moq_arg_new_like(state, weight, s->dtype, s->ndim, s->shape, &scales);
    int status = beside ? launch(state, plan, &codes, &scales, stream) : -1;
    made = moq_arg_finish(state, made, &codes, status);
    if (beside)
        beside = moq_arg_finish(state, beside, &scales, made ? 0 : -1);
    PyObject *second =
        plan->second > 0.0f ? PyFloat_FromDouble((double)plan->second) : Py_NewRef(Py_None);
    PyObject *result = made && beside && second ? PyTuple_Pack(3, made, beside, second) : NULL;
    Py_XDECREF(made);
    Py_XDECREF(beside);
    Py_XDECREF(second);
    return result;
}

static PyObject *quantize_weight(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    moq_quantize_weight_plan plan;
    moq_scale_search search;
    int64_t group_size = 0;
    moq_arg weight;
    void *stream;
    moq_err err;
    float amax;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    const char *algo = moq_arg_text(values[QUANT_ALGO], "quant_algo");
    if (!algo || take_amax(values[AMAX], &amax) < 0 ||
        take_search(state, values[SEARCH], &search) < 0)
        return NULL;
    if (!moq_arg_absent(values[GROUP_SIZE]) &&
        moq_arg_int(values[GROUP_SIZE], "group_size", 1, INT32_MAX, &group_size) < 0)
        return NULL;
    if (take_weight(state, values[WEIGHT], &weight) < 0)
        return NULL;
    if (moq_stream_take(NULL, &weight, &stream) == 0) {
        moq_long_call call;
        moq_long_call_begin(&call);
        moq_status status = moq_plan_quantize_weight(algo, &weight.view, amax, group_size, search,
                                                     stream, &plan, &err);
        if (moq_long_call_end(&call, status, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            result = run(state, &weight, &plan, stream);
    }
    moq_arg_release(&weight);
    return result;
}

static PyObject *weight_amax(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    static const moq_signature signature = {"weight_amax", 1, 1, 1, {KW_weight}};
    moq_state *state = moq_module_state(module);
    PyObject *values[1], *result = NULL;
    moq_long_call call;
    moq_arg weight;
    void *stream;
    moq_err err;
    float amax = 0.0f;
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0 ||
        take_weight(state, values[0], &weight) < 0)
        return NULL;
    if (moq_stream_take(NULL, &weight, &stream) < 0) {
        moq_arg_release(&weight);
        return NULL;
    }
    moq_long_call_begin(&call);
    moq_status status = moq_weight_amax(&weight.view, stream, &amax, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status == MOQ_OK)
        result = PyFloat_FromDouble((double)amax);
    else
        moq_raise(state, &err);
    moq_arg_release(&weight);
    return result;
}

static PyMethodDef METHODS[] = {
    {"quantize_weight", (PyCFunction)(void (*)(void))quantize_weight, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.quantize_weight."},
    {"weight_amax", (PyCFunction)(void (*)(void))weight_amax, METH_FASTCALL | METH_KEYWORDS,
     "weight_amax(weight): the largest magnitude; NaN where a value is one"},
    {NULL, NULL, 0, NULL},
};

int moq_add_quantize_weight(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
