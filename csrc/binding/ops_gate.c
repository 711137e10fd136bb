/* `_C.router_logits`. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "ops/gate_call.h"

enum { X, WEIGHT, DTYPE, OUT, STREAM, COUNT };

static const moq_signature SIGNATURE = {
    "router_logits", 2, 2, COUNT, {KW_x, KW_weight, KW_dtype, KW_out, KW_stream}};

static PyObject *run(moq_state *state, const moq_arg *x, const moq_arg *weight,
                     PyObject *const *values) {
    moq_dtype dtype = x->view.dtype;
    moq_gate plan;
    moq_arg out;
    moq_err err;
    void *stream;
    if (!moq_arg_absent(values[DTYPE]) && moq_arg_dtype(values[DTYPE], "dtype", &dtype) < 0)
        return NULL;
    if (moq_plan_gate(&x->view, &weight->view, dtype, &plan, &err) != MOQ_OK)
        return moq_raise(state, &err);
    if (moq_stream_take(values[STREAM], x, &stream) < 0)
        return NULL;
    const int64_t shape[] = {plan.x.shape[0], plan.weight.shape[0]};
    PyObject *result = moq_arg_output(state, values[OUT], x, dtype, 2, shape, &out);
    if (!result)
        return NULL;
    moq_long_call call;
    moq_long_call_begin(&call);
    moq_status status = moq_run_gate(&plan, &out.view, stream, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return moq_arg_finish(state, result, &out, status == MOQ_OK ? 0 : -1);
}

static PyObject *router_logits(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    moq_arg x = {0}, weight = {0};
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    if (moq_arg_take(state, values[X], "x", &x) == 0 &&
        moq_arg_take(state, values[WEIGHT], "weight", &weight) == 0)
        result = run(state, &x, &weight, values);
    moq_arg_release(&x);
    moq_arg_release(&weight);
    return result;
}

static PyMethodDef METHODS[] = {
    {"router_logits", (PyCFunction)(void (*)(void))router_logits, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.router_logits."},
    {NULL, NULL, 0, NULL},
};

int moq_add_gate(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
