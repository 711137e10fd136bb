/* `_C.MoEPlan`: a layer of experts resolved, planned and callable.
 *
 * The object holds a spec and a plan and no tensor; stacks live in dicts of ordinary tensors that
 * the caller owns. moqext.MoEMethod is its documented face. What plans have in common is in
 * plan_object.c, the path of a call in call.c. */
#include "binding/args.h"
#include "binding/call.h"
#include "binding/plan_object.h"
#include "binding/py_weight.h"
#include "ops/moe_call.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    moq_plan_object base; /* its plan points to the spec */
    moq_moe_spec spec;
    bool interleaved; /* rows of gate and up take turns in stacks of the checkpoint */
} moe_object;

/* ---- construction ---- */

enum {
    ALGO,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    ACTIVATION,
    GATED,
    GROUP,
    DTYPE,
    DEVICE,
    COMPUTE,
    GLOBAL,
    ALPHA,
    BETA,
    LIMIT,
    INTERLEAVED,
    CAPABILITY,
    QUANTIZED,
    INVARIANT,
    ARGS
};

static const moq_signature MOE_PLAN = {
    "moe_plan",
    ARGS,
    CAPABILITY,
    ARGS,
    {KW_quant_algo, KW_num_experts, KW_hidden_size, KW_intermediate_size, KW_top_k, KW_activation,
     KW_gated, KW_group_size, KW_dtype, KW_device, KW_compute, KW_global_num_experts, KW_alpha,
     KW_beta, KW_limit, KW_interleaved, KW_capability, KW_quantized_input, KW_batch_invariant}};

/* A number, or NaN where there is none. */
static int take_number(PyObject *value, const char *name, double *out) {
    *out = NAN;
    if (moq_arg_absent(value))
        return 0;
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%s: expected a number, got %R", name, Py_TYPE(value));
        return -1;
    }
    if (isnan(number)) {
        PyErr_Format(PyExc_ValueError, "%s: expected a number, got nan", name);
        return -1;
    }
    *out = number;
    return 0;
}

static int take_sizes(PyObject **v, moq_moe_names *names) {
    if (moq_arg_int(v[EXPERTS], "num_experts", 1, MOQ_MAX_EXPERTS, &names->experts) < 0 ||
        moq_arg_int(v[HIDDEN], "hidden_size", 1, INT32_MAX, &names->hidden) < 0 ||
        moq_arg_int(v[INTERMEDIATE], "intermediate_size", 1, INT32_MAX, &names->intermediate) < 0 ||
        moq_arg_int(v[TOP_K], "top_k", 1, MOQ_MOE_TOP_K, &names->top_k) < 0)
        return -1;
    if (!moq_arg_absent(v[GROUP]) &&
        moq_arg_int(v[GROUP], "group_size", 1, INT32_MAX, &names->group_size) < 0)
        return -1;
    return moq_arg_absent(v[GLOBAL]) ? 0
                                     : moq_arg_int(v[GLOBAL], "global_num_experts", 1,
                                                   MOQ_MAX_EXPERTS, &names->global_experts);
}

static int take_names(PyObject **v, moq_moe_names *names) {
    int gated = PyObject_IsTrue(v[GATED]), codes = v[QUANTIZED] ? PyObject_IsTrue(v[QUANTIZED]) : 0;
    int invariant = v[INVARIANT] ? PyObject_IsTrue(v[INVARIANT]) : 0;
    names->gated = gated > 0;
    names->quantized_input = codes > 0;
    names->batch_invariant = invariant > 0;
    if (gated < 0 || codes < 0 || invariant < 0 ||
        !(names->algo = moq_arg_text(v[ALGO], "quant_algo")) ||
        !(names->activation = moq_arg_text(v[ACTIVATION], "activation")) ||
        !(names->dtype = moq_arg_text(v[DTYPE], "dtype")) ||
        !(names->compute = moq_arg_text(v[COMPUTE], "compute")) ||
        moq_arg_device(v[DEVICE], "device", &names->device) < 0)
        return -1;
    if (take_number(v[ALPHA], "alpha", &names->alpha) < 0 ||
        take_number(v[BETA], "beta", &names->beta) < 0 ||
        take_number(v[LIMIT], "limit", &names->limit) < 0)
        return -1;
    return take_sizes(v, names);
}

/* Rows can take turns where there are two halves, and where a row has scales of its own. */
static int take_interleaving(PyObject *value, moe_object *self) {
    const moq_linear_spec *w13 = &self->spec.w13;
    int truth = PyObject_IsTrue(value);
    bool blocks = moq_weight_has_scale_matrix(&w13->matrix);
    self->interleaved = truth > 0;
    if (truth > 0 && (!self->spec.gated || blocks)) {
        PyErr_Format(PyExc_ValueError, "interleaved: rows of gate and up cannot take turns in %s",
                     !self->spec.gated                      ? "one projection"
                     : w13->weight == MOQ_WEIGHT_E4M3_BLOCK ? "blocks of 128 x 128"
                                                            : "pairs of rows");
        return -1;
    }
    return truth < 0 ? -1 : 0;
}

/* Reads the arguments of moe_plan(). */
static int resolve(moq_state *state, PyObject **v, moe_object *self) {
    moq_linear_spec *w13 = &self->spec.w13;
    moq_moe_names names = {0};
    moq_err err;
    if (take_names(v, &names) < 0)
        return -1;
    if (moq_moe_resolve(&names, &self->spec, &err) != MOQ_OK) {
        moq_raise(state, &err);
        return -1;
    }
    if (moq_plan_find_target(state, v[CAPABILITY], false, w13->device, &w13->target) < 0)
        return -1;
    self->spec.w2.target = w13->target;
    return take_interleaving(v[INTERLEAVED], self);
}

static PyObject *moe_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[ARGS];
    moq_err err;
    if (moq_args_parse(state, &MOE_PLAN, args, nargs, kwnames, v) < 0)
        return NULL;
    PyObject *object = moq_plan_object_new(state->moe_plan_type);
    moe_object *self = (moe_object *)object;
    if (object && resolve(state, v, self) < 0)
        Py_CLEAR(object);
    if (object && moq_plan_make(&MOQ_MOE, &self->spec, getenv("MOQEXT_KERNEL"), &self->base.plan,
                                &err) != MOQ_OK) {
        moq_raise(state, &err);
        Py_CLEAR(object);
    }
    return object;
}

/* ---- run ---- */

enum { X, PARAMS, WEIGHTS, IDS, MAP, ON_INPUT, OUT, ACCUMULATE, STREAM, X_SCALE, RUN_ARGS };

static const moq_signature RUN = {"run",
                                  RUN_ARGS,
                                  4,
                                  RUN_ARGS,
                                  {KW_x, KW_params, KW_topk_weights, KW_topk_ids, KW_expert_map,
                                   KW_apply_router_weight_on_input, KW_out, KW_accumulate,
                                   KW_stream, KW_x_scale}};

static int take_flag(PyObject *value, bool *out) {
    int truth = moq_arg_absent(value) ? 0 : PyObject_IsTrue(value);
    *out = truth > 0;
    return truth < 0 ? -1 : 0;
}

/* The scales beside codes, or NULL; block scales may come as bytes. */
static int take_x_scale(moq_call *call, const moq_moe_spec *spec, PyObject *object,
                        const moq_tensor **view) {
    int index = call->count;
    if (moq_call_take_other(call, object, "x_scale", view) < 0)
        return -1;
    if (!*view || moq_moe_x_scales(spec) == 0)
        return 0;
    return moq_arg_reinterpret(&call->in[index], moq_moe_x_scale_dtype(spec));
}

static int take_routing(moq_call *call, PyObject **v, moq_moe_inputs *inputs) {
    if (moq_arg_absent(v[WEIGHTS]) || moq_arg_absent(v[IDS])) {
        PyErr_Format(PyExc_TypeError, "%s: expected a tensor, got None",
                     moq_arg_absent(v[WEIGHTS]) ? "topk_weights" : "topk_ids");
        return -1;
    }
    if (moq_refuse_gradient(call->state, v[WEIGHTS], "topk_weights") < 0 ||
        moq_call_take_other(call, v[WEIGHTS], "topk_weights", &inputs->weights) < 0 ||
        moq_call_take_other(call, v[IDS], "topk_ids", &inputs->ids) < 0 ||
        moq_call_take_other(call, v[MAP], "expert_map", &inputs->expert_map) < 0)
        return -1;
    if (take_flag(v[ON_INPUT], &inputs->weights_on_input) < 0 ||
        take_flag(v[ACCUMULATE], &inputs->accumulate) < 0)
        return -1;
    if (inputs->accumulate && moq_arg_absent(v[OUT])) {
        PyErr_SetString(PyExc_ValueError, "accumulate: expected out=, to which experts are added");
        return -1;
    }
    return 0;
}

static int run_job(moq_call *call, moq_plan *plan, const moq_params *params,
                   moq_moe_inputs *inputs) {
    moq_moe_job job;
    moq_err err;
    inputs->y = &call->y.view;
    if (moq_moe_open(plan, params, inputs, &job, &err) == MOQ_OK)
        return moq_call_run(call, &job.job);
    moq_raise(call->state, &err);
    return -1;
}

static PyObject *run_with(moq_call *call, moq_plan *plan, PyObject **v) {
    const moq_moe_spec *spec = plan->problem;
    moq_moe_inputs inputs = {0};
    moq_params params;
    int64_t shape[MOQ_MAX_NDIM];
    moq_params_clear(&params, MOQ_PARAM_OF_W13, MOQ_PARAM_PLACES);
    if (moq_call_take_x(call, v[X]) < 0 || moq_call_take_params(call, v[PARAMS], &params) < 0 ||
        take_x_scale(call, spec, v[X_SCALE], &inputs.x_scale) < 0 ||
        take_routing(call, v, &inputs) < 0 || moq_call_find_stream(call) < 0)
        return NULL;
    inputs.x = &call->in[0].view;
    memcpy(shape, inputs.x->shape, sizeof shape);
    if (inputs.x->ndim > 0)
        shape[inputs.x->ndim - 1] = spec->w13.in_features;
    PyObject *result = moq_call_open_output(call, inputs.x->ndim, shape);
    if (!result)
        return NULL;
    int status = run_job(call, plan, &params, &inputs);
    return moq_arg_finish(call->state, result, &call->y, status);
}

static PyObject *run(PyObject *self, PyObject *const *values, Py_ssize_t nargs, PyObject *kwnames) {
    moq_state *state = moq_plan_state(self);
    moq_plan *plan = &((moq_plan_object *)self)->plan;
    PyObject *v[RUN_ARGS];
    moq_call call;
    if (moq_args_parse(state, &RUN, values, nargs, kwnames, v) < 0)
        return NULL;
    moq_call_open(&call, state, plan, v[OUT], v[STREAM]);
    PyObject *result = run_with(&call, plan, v);
    moq_call_release(&call);
    return result;
}

/* ---- prepare ---- */

static PyObject *prepare(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                         PyObject *kwnames) {
    const moe_object *object = (moe_object *)self;
    moq_weight w13 = moq_moe_stack13(&object->spec), w2 = moq_moe_stack2(&object->spec);
    char text[160];
    moq_moe_text(&object->spec, text, sizeof text);
    moq_prepared_layer layer = {
        .text = text,
        .count = 2,
        .weight = {{.weight = &w13, .alternates = object->interleaved, .bias = true},
                   {.weight = &w2, .bias = true}}};
    return moq_weight_prepare_call(moq_plan_state(self), &layer, values, nargs, kwnames);
}

/* ---- the type ---- */

static void deallocate(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef MOE_METHODS[] = {
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL | METH_KEYWORDS,
     "prepare(params, out=None, origins=None) -> dict of prepared tensors; origins: what biases "
     "and input scales were computed of, which out may not share memory with"},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
     "run(x, params, topk_weights, topk_ids, expert_map=None, "
     "apply_router_weight_on_input=False, out=None, accumulate=False, stream=None, x_scale=None) "
     "-> y"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot MOE_SLOTS[] = {
    {Py_tp_doc, "A layer of experts, resolved and planned; made by moe_plan()."},
    {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, MOE_METHODS},
    {0, NULL},
};

static PyType_Spec MOE_TYPE = {
    .name = "moqext._C.MoEPlan",
    .basicsize = sizeof(moe_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = MOE_SLOTS,
};

static PyMethodDef METHODS[] = {
    {"moe_plan", (PyCFunction)(void (*)(void))moe_plan, METH_FASTCALL | METH_KEYWORDS,
     "moe_plan(quant_algo, num_experts, hidden_size, intermediate_size, top_k, activation, gated, "
     "group_size, dtype, device, compute, global_num_experts, alpha, beta, limit, interleaved, "
     "capability=None, quantized_input=False, batch_invariant=False) -> MoEPlan"},
    {NULL, NULL, 0, NULL},
};

int moq_add_moe(PyObject *module, moq_state *state) {
    state->moe_plan_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &MOE_TYPE, (PyObject *)state->plan_type);
    if (!state->moe_plan_type || PyModule_AddType(module, state->moe_plan_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, METHODS);
}
