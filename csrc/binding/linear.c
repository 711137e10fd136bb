/* `_C.LinearPlan`: a linear layer resolved, planned and callable.
 *
 * The object holds a spec and a plan and no tensor; weights live in dicts of ordinary tensors that
 * the caller owns. moqext.LinearMethod is its documented face. */
#include "binding/linear.h"
#include "binding/args.h"
#include "binding/boundary.h"
#include "binding/cublaslt.h"
#include "binding/long_call.h"
#include "binding/numpy.h"
#include "binding/stream.h"
#include "binding/tensor.h"
#include "cuda/cuda.h"
#include "ops/target.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const moq_keyword MOQ_PARAM_KEYWORD[MOQ_PARAM_COUNT] = {
    [MOQ_PARAM_WEIGHT] = KW_weight,
    [MOQ_PARAM_WEIGHT_SCALE] = KW_weight_scale,
    [MOQ_PARAM_WEIGHT_SCALE_2] = KW_weight_scale_2,
    [MOQ_PARAM_OUTPUT_SCALE] = KW_output_scale,
    [MOQ_PARAM_FOLD_SCALE] = KW_fold_scale,
    [MOQ_PARAM_INPUT_SCALE] = KW_input_scale,
    [MOQ_PARAM_PRE_QUANT_SCALE] = KW_pre_quant_scale,
};

/* ---- construction ---- */

static int parse_partitions(PyObject *value, int64_t *partitions) {
    Py_ssize_t count = PySequence_Check(value) ? PySequence_Size(value) : -1;
    if (count < 1 || count > MOQ_MAX_PARTITIONS) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "out_partitions: expected a sequence of 1 to %d sizes, got %R",
                     MOQ_MAX_PARTITIONS, value);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(value, i);
        int bad = !item || moq_arg_int(item, "out_partitions", 1, INT32_MAX, &partitions[i]) < 0;
        Py_XDECREF(item);
        if (bad)
            return -1;
    }
    return (int)count;
}

static PyObject *new_plan(moq_state *state, const moq_linear_spec *spec,
                          const moq_linear_plan *plan) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(state->linear_plan_type, Py_tp_alloc);
    moq_plan_object *self = (moq_plan_object *)allocate(state->linear_plan_type, 0);
    if (self) {
        self->spec = *spec;
        self->plan = *plan;
    }
    return (PyObject *)self;
}

static const moq_signature LINEAR_PLAN = {"linear_plan",
                                          10,
                                          7,
                                          10,
                                          {KW_quant_algo, KW_in_features, KW_out_partitions,
                                           KW_group_size, KW_dtype, KW_device, KW_compute,
                                           KW_capability, KW_fast_accum, KW_one_input_scale}};

static int parse_options(moq_state *state, PyObject *fast, PyObject *one, moq_linear_spec *spec) {
    moq_err err;
    int fast_accum = fast ? PyObject_IsTrue(fast) : 0;
    int one_input_scale = one ? PyObject_IsTrue(one) : 0;
    if (fast_accum < 0 || one_input_scale < 0)
        return -1;
    if (moq_linear_apply_options(fast_accum, one_input_scale, spec, &err) == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* What the layer's device is, or what `capability` says it is. */
static int find_target(moq_state *state, PyObject *capability, moq_linear_spec *spec) {
    moq_err err;
    if (moq_arg_absent(capability)) {
        char reason[256]; /* the target has it */
        if (spec->device.kind == MOQ_CUDA)
            moq_cublaslt_find_in_path(reason, sizeof reason);
        Py_BEGIN_ALLOW_THREADS /* the first question to a driver takes its time */
        spec->target = moq_find_target(spec->device);
        Py_END_ALLOW_THREADS
        return 0;
    }
    const char *text = moq_arg_text(capability, "capability");
    if (!text)
        return -1;
    if (moq_assume_target(spec->device, text, &spec->target, &err) == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

static PyObject *linear_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *v[10];
    int64_t in_features, partitions[MOQ_MAX_PARTITIONS], group = 0;
    moq_device device;
    moq_linear_spec spec;
    moq_linear_plan plan;
    moq_err err;
    if (moq_args_parse(state, &LINEAR_PLAN, args, nargs, kwnames, v) < 0)
        return NULL;
    const char *algo = moq_arg_text(v[0], "quant_algo");
    const char *dtype = algo ? moq_arg_text(v[4], "dtype") : NULL;
    const char *compute = dtype ? moq_arg_text(v[6], "compute") : NULL;
    if (!compute || moq_arg_int(v[1], "in_features", 1, INT32_MAX, &in_features) < 0)
        return NULL;
    int count = parse_partitions(v[2], partitions);
    if (count < 0 || moq_arg_device(v[5], "device", &device) < 0)
        return NULL;
    if (!moq_arg_absent(v[3]) && moq_arg_int(v[3], "group_size", 1, INT32_MAX, &group) < 0)
        return NULL;
    if (moq_linear_resolve(algo, compute, dtype, device, in_features, partitions, count, group,
                           &spec, &err) != MOQ_OK)
        return moq_raise(state, &err);
    if (parse_options(state, v[8], v[9], &spec) < 0 || find_target(state, v[7], &spec) < 0)
        return NULL;
    if (moq_linear_make_plan(&spec, getenv("MOQEXT_KERNEL"), &plan, &err) != MOQ_OK)
        return moq_raise(state, &err);
    return new_plan(state, &spec, &plan);
}

/* ---- description ---- */

static PyObject *describe_params(const moq_param_spec *params, int count) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        const moq_param_spec *p = &params[i];
        PyObject *shape = PyTuple_New(p->ndim);
        for (int d = 0; shape && d < p->ndim; d++) {
            PyObject *extent = PyLong_FromLongLong(p->shape[d]);
            if (!extent || PyTuple_SetItem(shape, d, extent) < 0)
                Py_CLEAR(shape);
        }
        PyObject *row = shape ? Py_BuildValue("(sNssO)", p->name, shape, moq_dtype_name(p->dtype),
                                              p->role, p->required ? Py_True : Py_False)
                              : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *checkpoint_params(PyObject *self, PyObject *unused) {
    moq_param_spec params[MOQ_MAX_PARAMS];
    (void)unused;
    return describe_params(params,
                           moq_linear_checkpoint_params(&((moq_plan_object *)self)->spec, params));
}

static PyObject *prepared_params(PyObject *self, PyObject *unused) {
    (void)unused;
    const moq_linear_plan *plan = &((moq_plan_object *)self)->plan;
    return describe_params(plan->param, plan->param_count);
}

static PyObject *backend(PyObject *self, PyObject *rows) {
    moq_plan_object *plan = (moq_plan_object *)self;
    int64_t m;
    if (moq_arg_int(rows, "tokens", 0, INT64_MAX, &m) < 0)
        return NULL;
    const moq_linear_kernel *kernel = moq_linear_pick(&plan->plan, &plan->spec, m).kernel;
    return PyUnicode_FromFormat("%s:%s", kernel->family, kernel->name);
}

static PyObject *compute_for(PyObject *self, PyObject *rows) {
    moq_plan_object *plan = (moq_plan_object *)self;
    int64_t m;
    if (moq_arg_int(rows, "tokens", 0, INT64_MAX, &m) < 0)
        return NULL;
    return PyUnicode_FromString(
        moq_compute_name(moq_linear_pick_compute(&plan->plan, &plan->spec, m)));
}

static PyObject *explain(PyObject *self, PyObject *unused) {
    const moq_linear_spec *spec = &((moq_plan_object *)self)->spec;
    PyObject *list = PyList_New(0);
    const moq_linear_kernel *kernel;
    (void)unused;
    for (int i = 0; list && (kernel = moq_linear_kernel_at(i)); i++) {
        char reason[256];
        bool can = kernel->can_run(spec, reason, sizeof reason);
        PyObject *name = PyUnicode_FromFormat("%s:%s", kernel->family, kernel->name);
        PyObject *row = name ? Py_BuildValue("(Nz)", name, can ? NULL : reason) : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* What there is to know about kernels beside the layer: [(name, note)]. */
static PyObject *notes(PyObject *self, PyObject *unused) {
    PyObject *list = PyList_New(0);
    const moq_linear_kernel *kernel;
    (void)self;
    (void)unused;
    for (int i = 0; list && (kernel = moq_linear_kernel_at(i)); i++) {
        if (!kernel->note)
            continue;
        PyObject *name = PyUnicode_FromFormat("%s:%s", kernel->family, kernel->name);
        PyObject *row = name ? Py_BuildValue("(Ns)", name, kernel->note) : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *quant_algo(PyObject *self, void *unused) {
    (void)unused;
    return PyUnicode_FromString(((moq_plan_object *)self)->spec.algo);
}

static PyObject *group_size(PyObject *self, void *unused) {
    int32_t group = ((moq_plan_object *)self)->spec.group_size;
    (void)unused;
    return group ? PyLong_FromLong(group) : Py_NewRef(Py_None);
}

static PyObject *dtype(PyObject *self, void *unused) {
    (void)unused;
    return PyUnicode_FromString(moq_dtype_name(((moq_plan_object *)self)->spec.dtype));
}

static PyObject *device(PyObject *self, void *unused) {
    char text[32];
    (void)unused;
    return PyUnicode_FromString(
        moq_device_text(((moq_plan_object *)self)->spec.device, text, sizeof text));
}

/* ---- shared by prepare and run ---- */

int moq_plan_check_mapping(PyObject *object, const char *name) {
    if (PyDict_Check(object) || (PyMapping_Check(object) && PyObject_HasAttrString(object, "keys")))
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected a mapping of names to tensors, got %R", name,
                 Py_TYPE(object));
    return -1;
}

PyObject *moq_plan_lookup(PyObject *mapping, PyObject *keyword) {
    if (PyDict_Check(mapping))
        return Py_XNewRef(PyDict_GetItemWithError(mapping, keyword));
    PyObject *value = PyObject_GetItem(mapping, keyword);
    if (!value && PyErr_ExceptionMatches(PyExc_KeyError))
        PyErr_Clear();
    return value;
}

int moq_plan_check_device(const moq_linear_spec *spec, const moq_arg *arg) {
    if (arg->view.device.kind == spec->device.kind &&
        (spec->device.kind == MOQ_CPU || arg->view.device.index == spec->device.index))
        return 0;
    char expected[32], got[32];
    PyErr_Format(PyExc_ValueError, "%s: expected a tensor on %s, got one on %s", arg->name,
                 moq_device_text(spec->device, expected, sizeof expected),
                 moq_device_text(arg->view.device, got, sizeof got));
    return -1;
}

/* 1 where `key` is one of the names. */
static int is_among(PyObject *key, const char *const *names, int count) {
    for (int i = 0; i < count && PyUnicode_Check(key); i++) {
        if (PyUnicode_CompareWithASCIIString(key, names[i]) == 0)
            return 1;
    }
    return 0;
}

int moq_plan_find_stranger(PyObject *mapping, const char *const *names, int count, PyObject **key) {
    PyObject *keys = PyMapping_Keys(mapping);
    Py_ssize_t size = keys ? PyList_Size(keys) : -1;
    *key = NULL;
    for (Py_ssize_t i = 0; i < size && !*key; i++) {
        PyObject *candidate = PyList_GetItem(keys, i);
        if (!is_among(candidate, names, count))
            *key = Py_NewRef(candidate);
    }
    Py_XDECREF(keys);
    return size < 0 ? -1 : *key != NULL;
}

int moq_plan_refuse_strangers(const moq_plan_object *self, PyObject *mapping, const char *name) {
    const char *names[MOQ_MAX_PARAMS];
    char text[160], all[160] = "";
    PyObject *key;
    for (int i = 0; i < self->plan.param_count; i++) {
        size_t used = strlen(all);
        names[i] = self->plan.param[i].name;
        snprintf(all + used, sizeof all - used, "%s%s", used ? ", " : "", names[i]);
    }
    int found = moq_plan_find_stranger(mapping, names, self->plan.param_count, &key);
    if (found > 0)
        PyErr_Format(PyExc_ValueError, "%s: %R is no prepared parameter of %s, which has %s", name,
                     key, moq_linear_text(&self->spec, text, sizeof text), all);
    Py_XDECREF(key);
    return found == 0 ? 0 : -1;
}

/* Reads a taken tensor as the layer does, or releases it with an exception. */
static int fit(const moq_linear_spec *spec, moq_dtype dtype, bool host, moq_arg *arg) {
    bool anywhere = host && arg->view.device.kind == MOQ_CPU;
    if ((dtype != MOQ_DT_NONE && moq_arg_reinterpret(arg, dtype) < 0) ||
        (!anywhere && moq_plan_check_device(spec, arg) < 0)) {
        moq_arg_release(arg);
        return -1;
    }
    return 0;
}

int moq_plan_take(moq_state *state, const moq_linear_spec *spec, PyObject *object, const char *name,
                  moq_dtype dtype, bool host, moq_arg *arg) {
    return moq_arg_take(state, object, name, arg) < 0 ? -1 : fit(spec, dtype, host, arg);
}

/* ---- run ---- */

void moq_run_release(moq_run_args *a) {
    for (int i = 0; i < a->count; i++)
        moq_arg_release(&a->in[i]);
}

/* Says what to do where x is of another floating-point dtype than the layer. */
static int refuse_x_dtype(const moq_linear_spec *spec, const moq_arg *x) {
    static const char *const WAYS[MOQ_DT_COUNT] = {
        [MOQ_DT_F32] = "x.to(torch.float32) or x.astype(numpy.float32)",
        [MOQ_DT_F16] = "x.to(torch.float16) or x.astype(numpy.float16)",
        [MOQ_DT_BF16] = "x.to(torch.bfloat16), x.astype(ml_dtypes.bfloat16) or to its bits as "
                        "uint16",
    };
    const char *wanted = moq_dtype_name(spec->dtype), *got = moq_dtype_name(x->stored);
    if (x->stored == spec->dtype || !(WAYS[x->stored] || x->stored == MOQ_DT_F64))
        return 0;
    if (WAYS[x->stored])
        PyErr_Format(PyExc_TypeError,
                     "x: expected %s, got %s: make or load the layer with dtype=\"%s\", or convert "
                     "x, by %s",
                     wanted, got, got, WAYS[spec->dtype]);
    else /* no layer multiplies it */
        PyErr_Format(PyExc_TypeError, "x: expected %s, got %s: convert x, by %s", wanted, got,
                     WAYS[spec->dtype]);
    return -1;
}

static int take_x(moq_state *state, const moq_linear_spec *spec, PyObject *object,
                  moq_run_args *a) {
    moq_arg *x = &a->in[0];
    if (moq_arg_take(state, object, "x", x) < 0)
        return -1;
    a->count = 1;
    if (refuse_x_dtype(spec, x) < 0 || moq_arg_reinterpret(x, spec->dtype) < 0)
        return -1;
    return moq_plan_check_device(spec, x);
}

static int take_param(moq_state *state, const moq_linear_spec *spec, PyObject *object,
                      const moq_param_spec *wanted, moq_run_args *a, moq_tensor *view) {
    moq_arg *arg = &a->in[a->count];
    if (moq_arg_take_kept(state, object, wanted->name, arg) < 0 ||
        fit(spec, wanted->dtype, false, arg) < 0)
        return -1;
    a->count++;
    *view = arg->view;
    return 0;
}

/* Whether a mapping has that many entries, as far as it says. */
static bool has_entries(PyObject *mapping, Py_ssize_t count) {
    Py_ssize_t size = PyDict_Check(mapping) ? PyDict_Size(mapping) : PyMapping_Size(mapping);
    if (size < 0)
        PyErr_Clear();
    return size == count;
}

int moq_run_take_params(moq_state *state, const moq_plan_object *self, PyObject *mapping,
                        moq_run_args *a, moq_linear_params *params) {
    Py_ssize_t found = 0;
    if (moq_plan_check_mapping(mapping, "params") < 0)
        return -1;
    for (int i = 0; i < self->plan.param_count; i++) {
        const moq_param_spec *wanted = &self->plan.param[i];
        moq_tensor *view = moq_linear_param(params, wanted->id);
        PyObject *object = moq_plan_lookup(mapping, state->keyword[MOQ_PARAM_KEYWORD[wanted->id]]);
        if (!object && PyErr_Occurred())
            return -1;
        found += object != NULL;
        int status =
            moq_arg_absent(object) ? 0 : take_param(state, &self->spec, object, wanted, a, view);
        Py_XDECREF(object);
        if (status < 0)
            return -1;
    }
    return has_entries(mapping, found) ? 0 : moq_plan_refuse_strangers(self, mapping, "params");
}

/* y: `out`, apart from everything that is read, or a new tensor of x's kind. */
static PyObject *open_y(moq_state *state, const moq_linear_spec *spec, PyObject *out,
                        moq_run_args *a) {
    int64_t shape[MOQ_MAX_NDIM];
    const moq_arg *x = &a->in[0];
    moq_err err;
    if (moq_linear_output_shape(spec, &x->view, shape, &err) != MOQ_OK)
        return moq_raise(state, &err);
    PyObject *result = moq_arg_output(state, out, x, spec->dtype, x->view.ndim, shape, &a->y);
    if (!result || moq_arg_absent(out))
        return result;
    int status = moq_plan_check_device(spec, &a->y);
    for (int i = 1; i < a->count && status == 0; i++) /* moq_arg_output looked at x */
        status = moq_arg_refuse_overlap(&a->y, &a->in[i]);
    return status == 0 ? result : moq_arg_finish(state, result, &a->y, status);
}

/* The bias, or *bias = NULL where there is none. */
static int take_bias(moq_state *state, const moq_linear_spec *spec, PyObject *object,
                     moq_run_args *a, const moq_tensor **bias) {
    *bias = NULL;
    if (moq_arg_absent(object))
        return 0;
    moq_arg *arg = &a->in[a->count];
    if (moq_plan_take(state, spec, object, "bias", MOQ_DT_NONE, false, arg) < 0)
        return -1;
    a->count++;
    *bias = &arg->view;
    return arg->view.dtype == MOQ_DT_F32 ? 0 : moq_arg_reinterpret(arg, spec->dtype);
}

static int run_job(moq_state *state, moq_linear_job *job, const moq_arg *y) {
    moq_arg workspace;
    moq_err err;
    moq_status status;
    if (moq_arg_take_memory(state, y, moq_linear_workspace(job), &workspace) < 0)
        return -1;
    job->call.workspace = workspace.view.data;
    moq_long_call call;
    moq_long_call_begin(&call);
    status = moq_linear_run(job, &err);
    status = moq_long_call_end(&call, status, &err);
    moq_arg_release(&workspace);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return status == MOQ_OK ? 0 : -1;
}

/* A framework with the exchange API keeps memory of a capture for its replays; others use it again
 * when the call is over. */
static int refuse_capture(const moq_linear_job *job, const moq_arg *y) {
    if (moq_linear_workspace(job) == 0 || y->exchange || y->view.device.kind != MOQ_CUDA ||
        !moq_cuda_is_capturing(job->call.stream))
        return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "stream: is being captured, and the call works in memory that %R does not keep "
                 "for the replays; use tensors of a library with the DLPack exchange API",
                 Py_TYPE(y->object));
    return -1;
}

/* Whether memory that the call is given, a workspace or a new y, is in the order of another stream.
 * The one that was taken from x's framework is also the one of its memory. */
static int order_memory(moq_linear_job *job, PyObject **v, const moq_run_args *a) {
    if (refuse_capture(job, &a->y) < 0)
        return -1;
    bool needs = moq_linear_workspace(job) > 0 || moq_arg_absent(v[3]);
    if (!needs || (moq_arg_absent(v[4]) && a->y.exchange == a->in[0].exchange))
        return 0;
    if (moq_stream_of_memory(&a->y, job->call.stream, &job->memory_stream) < 0)
        return -1;
    job->orders = job->memory_stream != job->call.stream;
    return 0;
}

static PyObject *run_with(moq_state *state, moq_plan_object *self, PyObject **v, moq_run_args *a) {
    const moq_linear_spec *spec = &self->spec;
    const moq_tensor *bias;
    moq_linear_params params = {0};
    moq_linear_job job;
    moq_err err;
    if (take_x(state, spec, v[0], a) < 0 ||
        moq_run_take_params(state, self, v[1], a, &params) < 0 ||
        take_bias(state, spec, v[2], a, &bias) < 0)
        return NULL;
    void *stream;
    if (moq_stream_take(v[4], &a->in[0], &stream) < 0)
        return NULL;
    PyObject *result = open_y(state, spec, v[3], a);
    if (!result)
        return NULL;
    int status = -1;
    if (moq_linear_open(spec, &self->plan, &params, &a->in[0].view, bias, &a->y.view, &job, &err) !=
        MOQ_OK) {
        moq_raise(state, &err);
    } else {
        job.call.stream = stream;
        status = order_memory(&job, v, a) < 0 ? -1 : run_job(state, &job, &a->y);
    }
    return moq_arg_finish(state, result, &a->y, status);
}

/* Results carry no history, so a tensor that wants one must not be multiplied without notice. */
static int refuse_gradient(moq_state *state, PyObject *x) {
    if (PyArray_CheckExact(x))
        return 0;
    PyObject *wants = PyObject_GetAttr(x, state->keyword[KW_requires_grad]);
    if (!wants) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int truth = PyObject_IsTrue(wants);
    Py_DECREF(wants);
    if (truth > 0)
        PyErr_SetString(PyExc_RuntimeError,
                        "x: expected a tensor that needs no gradient; pass x.detach()");
    return truth == 0 ? 0 : -1;
}

static const moq_signature RUN = {"run", 5, 2, 5, {KW_x, KW_params, KW_bias, KW_out, KW_stream}};

static PyObject *run(PyObject *self, PyObject *const *values, Py_ssize_t nargs, PyObject *kwnames) {
    moq_state *state = moq_plan_state(self);
    PyObject *v[5];
    moq_run_args a;
    a.count = 0;
    if (moq_args_parse(state, &RUN, values, nargs, kwnames, v) < 0 ||
        refuse_gradient(state, v[0]) < 0)
        return NULL;
    PyObject *result = run_with(state, (moq_plan_object *)self, v, &a);
    moq_run_release(&a);
    return result;
}

/* ---- the type ---- */

static void deallocate(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef PLAN_METHODS[] = {
    {"checkpoint_params", checkpoint_params, METH_NOARGS,
     "checkpoint_params() -> list of (name, shape, dtype, role, required)"},
    {"prepared_params", prepared_params, METH_NOARGS,
     "prepared_params() -> list of (name, shape, dtype, role, required)"},
    {"backend", backend, METH_O, "backend(tokens) -> str: the kernel for that many rows"},
    {"compute_for", compute_for, METH_O,
     "compute_for(tokens) -> str: what that many rows are multiplied as"},
    {"explain", explain, METH_NOARGS,
     "explain() -> list of (kernel, reason it cannot run or None)"},
    {"notes", notes, METH_NOARGS, "notes() -> list of (kernel, what else there is to know)"},
    {"prepare", (PyCFunction)(void (*)(void))moq_plan_prepare, METH_FASTCALL | METH_KEYWORDS,
     "prepare(params, out=None) -> dict of prepared tensors"},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
     "run(x, params, bias=None, out=None, stream=None) -> y"},
    {"measure", (PyCFunction)(void (*)(void))moq_plan_measure, METH_FASTCALL | METH_KEYWORDS,
     "measure(tokens, params) -> list of (kernel, variant, seconds), the fastest first"},
    {"keep", (PyCFunction)(void (*)(void))moq_plan_keep, METH_FASTCALL | METH_KEYWORDS,
     "keep(tokens, kernel, variant): what runs about so many tokens from now on"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef PLAN_ATTRIBUTES[] = {
    {"quant_algo", quant_algo, NULL, "canonical name of the algorithm", NULL},
    {"group_size", group_size, NULL, "columns that share a block scale, or None", NULL},
    {"dtype", dtype, NULL, "full name of the dtype of x and y", NULL},
    {"device", device, NULL, "\"cpu\" or \"cuda:N\"", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot PLAN_SLOTS[] = {
    {Py_tp_doc, "A linear layer, resolved and planned; made by linear_plan()."},
    {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, PLAN_METHODS},
    {Py_tp_getset, PLAN_ATTRIBUTES},
    {0, NULL},
};

static PyType_Spec PLAN_TYPE = {
    .name = "moqext._C.LinearPlan",
    .basicsize = sizeof(moq_plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = PLAN_SLOTS,
};

static PyMethodDef METHODS[] = {
    {"linear_plan", (PyCFunction)(void (*)(void))linear_plan, METH_FASTCALL | METH_KEYWORDS,
     "linear_plan(quant_algo, in_features, out_partitions, group_size, dtype, device, compute, "
     "capability=None, fast_accum=False, one_input_scale=False) -> LinearPlan; capability: \"9.0\" "
     "plans for a chip that may not be here"},
    {NULL, NULL, 0, NULL},
};

int moq_add_linear(PyObject *module, moq_state *state) {
    state->linear_plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &PLAN_TYPE, NULL);
    if (!state->linear_plan_type || PyModule_AddType(module, state->linear_plan_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, METHODS);
}
