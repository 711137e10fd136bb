/* Tuning of `_C.LinearPlan`: measure() times its kernels, keep() holds on to one. */
#include "binding/args.h"
#include "binding/linear.h"
#include "binding/long_call.h"
#include "ops/tune.h"

/* One (kernel, variant, seconds) each, the fastest first. */
static PyObject *describe_timings(const moq_linear_timing *timings, int count) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        const moq_linear_kernel *kernel = timings[i].choice.kernel;
        PyObject *name = PyUnicode_FromFormat("%s:%s", kernel->family, kernel->name);
        PyObject *row =
            name ? Py_BuildValue("(Nid)", name, (int)timings[i].choice.variant, timings[i].seconds)
                 : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *measure_with(moq_state *state, const moq_plan_object *self, int64_t m,
                              PyObject *mapping, moq_run_args *a) {
    moq_linear_params params = {0};
    moq_linear_timing timings[MOQ_MAX_TIMINGS];
    int count = 0;
    moq_err err;
    moq_status status;
    if (moq_run_take_params(state, self, mapping, a, &params) < 0)
        return NULL;
    status = moq_linear_check_params(&self->spec, &params, "params", &err);
    moq_long_call call;
    moq_long_call_begin(&call);
    if (status == MOQ_OK)
        status = moq_linear_measure(&self->spec, &self->plan, &params, m, timings, &count, &err);
    status = moq_long_call_end(&call, status, &err);
    return status == MOQ_OK ? describe_timings(timings, count) : moq_raise(state, &err);
}

static const moq_signature MEASURE = {"measure", 2, 2, 2, {KW_tokens, KW_params}};

PyObject *moq_plan_measure(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                           PyObject *kwnames) {
    moq_state *state = moq_plan_state(self);
    PyObject *v[2];
    int64_t m;
    moq_run_args a;
    a.count = 0;
    if (moq_args_parse(state, &MEASURE, values, nargs, kwnames, v) < 0 ||
        moq_arg_int(v[0], "tokens", 1, INT32_MAX, &m) < 0)
        return NULL;
    PyObject *result = measure_with(state, (moq_plan_object *)self, m, v[1], &a);
    moq_run_release(&a);
    return result;
}

static const moq_signature KEEP = {"keep", 3, 3, 3, {KW_tokens, KW_kernel, KW_variant}};

/* The choices are written with the GIL held, as they are read. */
PyObject *moq_plan_keep(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                        PyObject *kwnames) {
    moq_state *state = moq_plan_state(self);
    moq_plan_object *plan = (moq_plan_object *)self;
    PyObject *v[3];
    int64_t m, variant;
    moq_err err;
    if (moq_args_parse(state, &KEEP, values, nargs, kwnames, v) < 0 ||
        moq_arg_int(v[0], "tokens", 1, INT32_MAX, &m) < 0)
        return NULL;
    const char *kernel = moq_arg_text(v[1], "kernel");
    if (!kernel || moq_arg_int(v[2], "variant", 0, MOQ_MAX_VARIANTS - 1, &variant) < 0)
        return NULL;
    if (moq_linear_keep(&plan->plan, &plan->spec, m, kernel, (int32_t)variant, &err) != MOQ_OK)
        return moq_raise(state, &err);
    Py_RETURN_NONE;
}
