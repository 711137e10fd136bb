/* `_C.LinearPlan`: a linear layer resolved, planned and callable.
 *
 * The object holds a spec and a plan and no tensor; weights live in dicts of ordinary tensors that
 * the caller owns. moqext.LinearMethod is its documented face. What it does beside linears alone
 * (choices, tuning, descriptions) is in plan_object.c, the path of its call in call.c. */
#include "binding/args.h"
#include "binding/call.h"
#include "binding/plan_object.h"
#include "binding/py_weight.h"
#include "ops/linear_call.h"

#include <stdlib.h>

typedef struct {
    moq_plan_object base; /* its plan points to the spec */
    moq_linear_spec spec;
    int64_t *partitions; /* what the spec points to */
} linear_object;

/* ---- construction ---- */

static const moq_signature LINEAR_PLAN = {
    "linear_plan",
    14,
    7,
    14,
    {KW_quant_algo, KW_in_features, KW_out_partitions, KW_group_size, KW_dtype, KW_device,
     KW_compute, KW_capability, KW_fast_accum, KW_one_input_scale, KW_quantized_input, KW_rank,
     KW_batch_invariant, KW_pretend}};

/* fast_accum, one_input_scale, quantized_input and batch_invariant, each of which may be absent, of
 * all arguments. */
static int parse_options(moq_state *state, PyObject **v, moq_linear_spec *spec) {
    static const int PLACES[] = {8, 9, 10, 12};
    moq_err err;
    int given[4];
    for (int i = 0; i < 4; i++) {
        PyObject *value = v[PLACES[i]];
        if ((given[i] = value ? PyObject_IsTrue(value) : 0) < 0)
            return -1;
    }
    moq_linear_options options = {given[0], given[1], given[2], given[3]};
    if (moq_linear_apply_options(&options, spec, &err) == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* Reads the arguments of linear_plan(). */
static int resolve(moq_state *state, PyObject **v, linear_object *self) {
    moq_linear_spec *spec = &self->spec;
    moq_weight_names names = {.algo = moq_arg_text(v[0], "quant_algo")};
    const char *dtype = names.algo ? moq_arg_text(v[4], "dtype") : NULL;
    moq_err err;
    if (!dtype || !(names.compute = moq_arg_text(v[6], "compute")) ||
        moq_arg_int(v[1], "in_features", 1, INT32_MAX, &names.in_features) < 0)
        return -1;
    names.partition_count = moq_take_partitions(v[2], &self->partitions);
    names.partitions = self->partitions;
    if (names.partition_count < 0 || moq_arg_device(v[5], "device", &names.device) < 0)
        return -1;
    if (!moq_arg_absent(v[3]) &&
        moq_arg_int(v[3], "group_size", 1, INT32_MAX, &names.group_size) < 0)
        return -1;
    if (!moq_arg_absent(v[11]) && moq_arg_int(v[11], "rank", 1, INT32_MAX, &names.rank) < 0)
        return -1;
    if (moq_linear_resolve(&names, dtype, spec, &err) != MOQ_OK) {
        moq_raise(state, &err);
        return -1;
    }
    int pretend = v[13] ? PyObject_IsTrue(v[13]) : 0;
    if (pretend < 0 || parse_options(state, v, spec) < 0 ||
        moq_plan_find_target(state, v[7], pretend, spec->device, &spec->target) < 0)
        return -1;
    moq_linear_settle_choice(spec);
    return 0;
}

static PyObject *linear_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[14];
    moq_err err;
    if (moq_args_parse(state, &LINEAR_PLAN, args, nargs, kwnames, v) < 0)
        return NULL;
    PyObject *object = moq_plan_object_new(state->linear_plan_type);
    linear_object *self = (linear_object *)object;
    if (self && resolve(state, v, self) < 0)
        Py_CLEAR(object);
    if (object && moq_plan_make(&MOQ_LINEAR, &self->spec, getenv("MOQEXT_KERNEL"), &self->base.plan,
                                &err) != MOQ_OK) {
        moq_raise(state, &err);
        Py_CLEAR(object);
    }
    return object;
}

/* ---- run ---- */

/* The bias, or *bias = NULL where there is none: of float32, or as the layer's dtype. */
static int take_bias(moq_call *call, PyObject *object, const moq_tensor **bias) {
    int index = call->count;
    if (moq_call_take_other(call, object, "bias", bias) < 0)
        return -1;
    return !*bias || (*bias)->dtype == MOQ_DT_F32
               ? 0
               : moq_arg_reinterpret(&call->in[index], call->plan->layer.dtype);
}

static int run_job(moq_call *call, moq_plan *plan, const moq_params *params,
                   const moq_tensor *bias) {
    moq_linear_job job;
    moq_err err;
    if (moq_linear_open(plan, params, &call->in[0].view, bias, &call->y.view, &job, &err) == MOQ_OK)
        return moq_call_run(call, &job.job);
    moq_raise(call->state, &err);
    return -1;
}

static PyObject *run_with(moq_call *call, moq_plan *plan, PyObject **v) {
    const moq_tensor *bias;
    moq_params params;
    int64_t shape[MOQ_MAX_NDIM];
    moq_err err;
    moq_params_clear(&params, 0, MOQ_PARAM_COUNT);
    if (moq_call_take_x(call, v[0]) < 0 || moq_call_take_params(call, v[1], &params) < 0 ||
        take_bias(call, v[2], &bias) < 0 || moq_call_find_stream(call) < 0)
        return NULL;
    const moq_tensor *x = &call->in[0].view;
    if (moq_linear_output_shape(plan->problem, x, shape, &err) != MOQ_OK)
        return moq_raise(call->state, &err);
    PyObject *result = moq_call_open_output(call, x->ndim, shape);
    if (!result)
        return NULL;
    int status = run_job(call, plan, &params, bias);
    return moq_arg_finish(call->state, result, &call->y, status);
}

static const moq_signature RUN = {"run", 5, 2, 5, {KW_x, KW_params, KW_bias, KW_out, KW_stream}};

static PyObject *run(PyObject *self, PyObject *const *values, Py_ssize_t nargs, PyObject *kwnames) {
    moq_state *state = moq_plan_state(self);
    moq_plan *plan = &((moq_plan_object *)self)->plan;
    PyObject *v[5];
    moq_call call;
    if (moq_args_parse(state, &RUN, values, nargs, kwnames, v) < 0)
        return NULL;
    moq_call_open(&call, state, plan, v[3], v[4]);
    PyObject *result = run_with(&call, plan, v);
    moq_call_release(&call);
    return result;
}

/* ---- the type ---- */

static PyObject *prepare(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                         PyObject *kwnames) {
    const moq_linear_spec *spec = &((linear_object *)self)->spec;
    char text[160];
    moq_linear_text(spec, text, sizeof text);
    moq_prepared_layer layer = {.text = text, .count = 1, .weight = {{.weight = &spec->matrix}}};
    return moq_weight_prepare_call(moq_plan_state(self), &layer, values, nargs, kwnames);
}

static void deallocate(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(((linear_object *)self)->partitions);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef LINEAR_METHODS[] = {
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL | METH_KEYWORDS,
     "prepare(params, out=None) -> dict of prepared tensors"},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
     "run(x, params, bias=None, out=None, stream=None) -> y"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot LINEAR_SLOTS[] = {
    {Py_tp_doc, "A linear layer, resolved and planned; made by linear_plan()."},
    {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, LINEAR_METHODS},
    {0, NULL},
};

static PyType_Spec LINEAR_TYPE = {
    .name = "moqext._C.LinearPlan",
    .basicsize = sizeof(linear_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = LINEAR_SLOTS,
};

static PyMethodDef METHODS[] = {
    {"linear_plan", (PyCFunction)(void (*)(void))linear_plan, METH_FASTCALL | METH_KEYWORDS,
     "linear_plan(quant_algo, in_features, out_partitions, group_size, dtype, device, compute, "
     "capability=None, fast_accum=False, one_input_scale=False, quantized_input=False, "
     "rank=None, batch_invariant=False, pretend=False) -> LinearPlan; capability: \"9.0\" plans "
     "for a chip that may not be here; pretend: and asks cuBLASLt, and runs on the device that is"},
    {NULL, NULL, 0, NULL},
};

int moq_add_linear(PyObject *module, moq_state *state) {
    state->linear_plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(
        module, &LINEAR_TYPE, (PyObject *)state->plan_type);
    if (!state->linear_plan_type || PyModule_AddType(module, state->linear_plan_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, METHODS);
}
