/* `_C.WeightPlan`: a matrix or a stack of experts resolved: which tensors a checkpoint holds for
 * it, which ones its kernels read, and how the one becomes the other. What multiplies with it is
 * not known here. */
#include "binding/py_weight.h"
#include "binding/args.h"
#include "binding/plan_object.h"

#include <stdlib.h>

typedef struct {
    PyObject_HEAD
    moq_weight weight;
    int64_t *partitions; /* what the weight points to */
} weight_object;

int moq_take_partitions(PyObject *value, int64_t **partitions) {
    Py_ssize_t count = PySequence_Check(value) ? PySequence_Size(value) : -1;
    *partitions = NULL;
    if (count < 1 || count > MOQ_MAX_PARTITIONS) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "out_partitions: expected a sequence of 1 to %d sizes, got %R%s",
                     MOQ_MAX_PARTITIONS, value,
                     PyLong_Check(value) ? ": a layer alone has one size, [N]" : "");
        return -1;
    }
    int64_t *sizes = malloc((size_t)count * sizeof *sizes);
    if (!sizes) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(value, i);
        int bad = !item || moq_arg_int(item, "out_partitions", 1, INT32_MAX, &sizes[i]) < 0;
        Py_XDECREF(item);
        if (bad) {
            free(sizes);
            return -1;
        }
    }
    *partitions = sizes;
    return (int)count;
}

static const moq_signature WEIGHT_PLAN = {"weight_plan",
                                          8,
                                          3,
                                          8,
                                          {KW_quant_algo, KW_in_features, KW_out_partitions,
                                           KW_group_size, KW_device, KW_compute, KW_experts,
                                           KW_one_input_scale}};

static int promise_one_input_scale(moq_state *state, PyObject *value, moq_weight *weight) {
    moq_err err;
    int promised = value ? PyObject_IsTrue(value) : 0;
    if (promised <= 0 || moq_weight_promise_one_input_scale(weight, &err) == MOQ_OK)
        return promised < 0 ? -1 : 0;
    moq_raise(state, &err);
    return -1;
}

/* Reads the arguments of weight_plan(). */
static int resolve(moq_state *state, PyObject **v, weight_object *self) {
    moq_weight_names names = {.compute = "exact"};
    int64_t experts = 0;
    moq_err err;
    names.algo = moq_arg_text(v[0], "quant_algo");
    if (!names.algo || moq_arg_int(v[1], "in_features", 1, INT32_MAX, &names.in_features) < 0)
        return -1;
    names.partition_count = moq_take_partitions(v[2], &self->partitions);
    names.partitions = self->partitions;
    if (names.partition_count < 0 ||
        (!moq_arg_absent(v[3]) &&
         moq_arg_int(v[3], "group_size", 1, INT32_MAX, &names.group_size) < 0) ||
        (!moq_arg_absent(v[4]) && moq_arg_device(v[4], "device", &names.device) < 0) ||
        (!moq_arg_absent(v[5]) && !(names.compute = moq_arg_text(v[5], "compute"))) ||
        (!moq_arg_absent(v[6]) && moq_arg_int(v[6], "experts", 1, MOQ_MAX_EXPERTS, &experts) < 0))
        return -1;
    names.experts = (int32_t)experts;
    if (moq_weight_resolve(&names, &self->weight, &err) != MOQ_OK) {
        moq_raise(state, &err);
        return -1;
    }
    return promise_one_input_scale(state, v[7], &self->weight);
}

static PyObject *weight_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[8];
    if (moq_args_parse(state, &WEIGHT_PLAN, args, nargs, kwnames, v) < 0)
        return NULL;
    PyObject *self = moq_plan_object_new(state->weight_plan_type);
    if (self && resolve(state, v, (weight_object *)self) < 0)
        Py_CLEAR(self);
    return self;
}

/* ---- the type ---- */

static PyObject *checkpoint_params(PyObject *self, PyObject *unused) {
    moq_param_spec params[MOQ_MAX_PARAMS];
    (void)unused;
    return moq_describe_params(
        params, moq_weight_checkpoint_params(&((weight_object *)self)->weight, params));
}

static PyObject *prepared_params(PyObject *self, PyObject *unused) {
    moq_param_spec params[MOQ_MAX_PARAMS];
    (void)unused;
    return moq_describe_params(
        params, moq_weight_prepared_params(&((weight_object *)self)->weight, params));
}

static PyObject *prepare(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
    const moq_weight *weight = &((weight_object *)self)->weight;
    char text[160];
    moq_weight_text(weight, text, sizeof text);
    moq_prepared_layer layer = {.text = text, .count = 1, .weight = {{.weight = weight}}};
    return moq_weight_prepare_call(moq_plan_state(self), &layer, args, nargs, kwnames);
}

static void deallocate(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(((weight_object *)self)->partitions);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef WEIGHT_METHODS[] = {
    {"checkpoint_params", checkpoint_params, METH_NOARGS,
     "checkpoint_params() -> list of (name, shape, dtype, role, required)"},
    {"prepared_params", prepared_params, METH_NOARGS,
     "prepared_params() -> list of (name, shape, dtype, role, required)"},
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL | METH_KEYWORDS,
     "prepare(params, out=None) -> dict of prepared tensors"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot WEIGHT_SLOTS[] = {
    {Py_tp_doc, "A weight, or a stack of experts' weights, resolved; made by weight_plan()."},
    {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, WEIGHT_METHODS},
    {0, NULL},
};

static PyType_Spec WEIGHT_TYPE = {
    .name = "moqext._C.WeightPlan",
    .basicsize = sizeof(weight_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = WEIGHT_SLOTS,
};

static PyMethodDef METHODS[] = {
    {"weight_plan", (PyCFunction)(void (*)(void))weight_plan, METH_FASTCALL | METH_KEYWORDS,
     "weight_plan(quant_algo, in_features, out_partitions, group_size=None, device=\"cpu\", "
     "compute=\"exact\", experts=None, one_input_scale=False) -> WeightPlan; experts=None: a "
     "matrix"},
    {NULL, NULL, 0, NULL},
};

int moq_add_weight(PyObject *module, moq_state *state) {
    state->weight_plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &WEIGHT_TYPE, NULL);
    if (!state->weight_plan_type || PyModule_AddType(module, state->weight_plan_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, METHODS);
}
