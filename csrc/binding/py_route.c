/* `_C.route`: router logits to experts and weights. */
#include "binding/args.h"
#include "binding/call.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "ops/route_call.h"

enum {
    LOGITS,
    TOP_K,
    SCORING,
    RENORMALIZE,
    GROUPS,
    TOP_GROUPS,
    BIAS,
    FACTOR,
    PADDING,
    OUT,
    STREAM,
    COUNT
};

static const moq_signature SIGNATURE = {
    "route",
    3,
    3,
    COUNT,
    {KW_router_logits, KW_top_k, KW_scoring, KW_renormalize, KW_num_groups, KW_topk_groups,
     KW_correction_bias, KW_routed_scaling_factor, KW_padding, KW_out, KW_stream},
};

static int take_count(PyObject *value, const char *name, int32_t *out) {
    int64_t count;
    if (moq_arg_int(value, name, 1, INT32_MAX, &count) < 0)
        return -1;
    *out = (int32_t)count;
    return 0;
}

static int take_truth(PyObject *value, const char *name, bool *out) {
    *out = value == Py_True;
    if (value && !PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: expected True or False, got %R", name, Py_TYPE(value));
        return -1;
    }
    return 0;
}

static int take_factor(PyObject *value, float *out) {
    double factor = value ? PyFloat_AsDouble(value) : 1.0;
    if (factor == -1.0 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "routed_scaling_factor: expected a number, got %R",
                     Py_TYPE(value));
        return -1;
    }
    *out = (float)factor;
    return 0;
}

/* Takes all options that are no tensor. */
static int take_options(moq_state *state, PyObject *const *v, moq_route *route) {
    moq_err err;
    const char *scoring = moq_arg_text(v[SCORING], "scoring");
    if (!scoring)
        return -1;
    if (moq_route_scoring_from_name(scoring, &route->scoring, &err) != MOQ_OK) {
        moq_raise(state, &err);
        return -1;
    }
    if (take_count(v[TOP_K], "top_k", &route->top_k) < 0 ||
        take_truth(v[RENORMALIZE], "renormalize", &route->renormalize) < 0 ||
        (v[GROUPS] && take_count(v[GROUPS], "num_groups", &route->groups) < 0) ||
        (!moq_arg_absent(v[TOP_GROUPS]) &&
         take_count(v[TOP_GROUPS], "topk_groups", &route->top_groups) < 0))
        return -1;
    return take_factor(v[FACTOR], &route->factor);
}

/* A raw array of 16 bits is bfloat16, which NumPy lacks. */
static int take_floats(moq_state *state, PyObject *object, const char *name, moq_arg *arg) {
    if (moq_arg_take(state, object, name, arg) < 0)
        return -1;
    if (arg->stored == MOQ_DT_U16 || arg->stored == MOQ_DT_I16)
        arg->view.dtype = MOQ_DT_BF16;
    return 0;
}

/* The two tensors of `out`, borrowed; NULL and NULL where it is absent. */
static int take_pair(PyObject *out, PyObject **weights, PyObject **ids) {
    *weights = *ids = NULL;
    if (moq_arg_absent(out))
        return 0;
    if (!PyTuple_Check(out) || PyTuple_Size(out) != 2) {
        PyErr_Format(PyExc_TypeError, "out: expected a tuple (weights, ids), got %R", Py_TYPE(out));
        return -1;
    }
    *weights = PyTuple_GetItem(out, 0);
    *ids = PyTuple_GetItem(out, 1);
    return 0;
}

/* A result: the tensor given for it, which the operation checks, or a new one. */
static PyObject *take_result(moq_state *state, PyObject *given, const char *name,
                             const moq_arg *like, const moq_tensor *expected, moq_arg *out) {
    if (!given)
        return moq_arg_new_like(state, like, expected->dtype, expected->ndim, expected->shape, out);
    return moq_arg_take_output(state, given, name, out) < 0 ? NULL : Py_NewRef(given);
}

static PyObject *run(moq_state *state, PyObject *const *v, const moq_arg *logits,
                     const moq_route_plan *plan) {
    PyObject *given[2], *result[2] = {NULL}, *pair = NULL;
    moq_arg out[2] = {0};
    void *stream;
    int failed = -1;
    if (moq_stream_take(v[STREAM], logits, &stream) < 0 ||
        take_pair(v[OUT], &given[0], &given[1]) < 0)
        return NULL;
    result[0] = take_result(state, given[0], "out[0]", logits, &plan->weights, &out[0]);
    if (result[0])
        result[1] = take_result(state, given[1], "out[1]", logits, &plan->ids, &out[1]);
    if (result[1]) {
        moq_long_call call;
        moq_err err;
        moq_long_call_begin(&call);
        moq_status status = moq_run_route(plan, &out[0].view, &out[1].view, stream, &err);
        status = moq_long_call_end(&call, status, &err);
        failed = status == MOQ_OK ? 0 : -1;
        if (failed)
            moq_raise(state, &err);
    }
    for (int i = 0; i < 2; i++) {
        if (!result[i])
            continue;
        result[i] = moq_arg_finish(state, result[i], &out[i], failed);
        failed = result[i] ? failed : -1;
    }
    if (!failed)
        pair = PyTuple_Pack(2, result[0], result[1]);
    Py_XDECREF(result[0]);
    Py_XDECREF(result[1]);
    return pair;
}

static PyObject *route(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[COUNT], *result = NULL;
    moq_route asked = {.groups = 1, .bias = {.ndim = -1}, .padding = {.ndim = -1}};
    moq_route_plan plan;
    moq_arg logits = {0}, bias = {0}, padding = {0};
    const moq_tensor *padded;
    moq_err err;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, v) < 0 ||
        take_options(state, v, &asked) < 0)
        return NULL;
    bool biased = !moq_arg_absent(v[BIAS]);
    if (moq_refuse_gradient(state, v[LOGITS], "router_logits") == 0 &&
        take_floats(state, v[LOGITS], "router_logits", &logits) == 0 &&
        (!biased || take_floats(state, v[BIAS], "correction_bias", &bias) == 0) &&
        moq_arg_take_optional(state, v[PADDING], "padding", &padding, &padded) == 0) {
        asked.logits = logits.view;
        if (biased)
            asked.bias = bias.view;
        if (padded)
            asked.padding = *padded;
        if (moq_plan_route(&asked, &plan, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            result = run(state, v, &logits, &plan);
    }
    moq_arg_release(&logits);
    moq_arg_release(&bias);
    moq_arg_release(&padding);
    return result;
}

static PyMethodDef METHODS[] = {
    {"route", (PyCFunction)(void (*)(void))route, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.route."},
    {NULL, NULL, 0, NULL},
};

int moq_add_route(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
