/* The methods of every plan: see plan_object.h. */
#include "binding/plan_object.h"

#include "binding/args.h"
#include "binding/call.h"
#include "binding/long_call.h"
#include "binding/py_cublaslt.h"
#include "ops/target.h"
#include "ops/tune.h"

PyObject *moq_plan_object_new(PyTypeObject *type) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

int moq_plan_find_target(moq_state *state, PyObject *capability, bool pretend, moq_device device,
                         moq_target *target) {
    moq_err err;
    if (moq_arg_absent(capability)) {
        char reason[256]; /* the target has it */
        if (device.kind == MOQ_CUDA)
            moq_cublaslt_find_in_path(reason, sizeof reason);
        Py_BEGIN_ALLOW_THREADS /* the first question to a driver takes its time */
        *target = moq_find_target(device);
        Py_END_ALLOW_THREADS
        return 0;
    }
    const char *text = moq_arg_text(capability, "capability");
    if (!text)
        return -1;
    if (moq_assume_target(device, text, pretend, target, &err) == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

static moq_plan *plan_of(PyObject *self) {
    return &((moq_plan_object *)self)->plan;
}

static PyObject *name_of(const moq_kernel *kernel) {
    return PyUnicode_FromFormat("%s:%s", kernel->family, kernel->name);
}

/* Steals `row`; 0, or -1 with an exception where there is none. */
static int append(PyObject *list, PyObject *row) {
    int status = row ? PyList_Append(list, row) : -1;
    Py_XDECREF(row);
    return status;
}

/* Returns the list, or NULL where filling the list failed. */
static PyObject *finish(PyObject *list, int status) {
    if (status < 0)
        Py_CLEAR(list);
    return list;
}

int moq_append_kernels(const moq_operation *operation, PyObject *list) {
    int status = 0;
    for (int i = 0; i < operation->kernel_count && status == 0; i++)
        status = append(list, name_of(operation->kernels[i]));
    return status;
}

/* ---- the layer ---- */

/* (name, shape, dtype, role, required) */
static PyObject *describe_param(const moq_param_spec *p) {
    PyObject *shape = PyTuple_New(p->ndim);
    for (int d = 0; shape && d < p->ndim; d++) {
        PyObject *extent = PyLong_FromLongLong(p->shape[d]);
        if (!extent || PyTuple_SetItem(shape, d, extent) < 0)
            Py_CLEAR(shape);
    }
    return shape ? Py_BuildValue("(sNssO)", p->name, shape, moq_dtype_name(p->dtype), p->role,
                                 p->required ? Py_True : Py_False)
                 : NULL;
}

PyObject *moq_describe_params(const moq_param_spec *params, int count) {
    PyObject *list = PyList_New(0);
    int status = list ? 0 : -1;
    for (int i = 0; i < count && status == 0; i++)
        status = append(list, describe_param(&params[i]));
    return finish(list, status);
}

static PyObject *checkpoint_params(PyObject *self, PyObject *unused) {
    const moq_plan *plan = plan_of(self);
    moq_param_spec params[MOQ_MAX_LAYER_PARAMS];
    (void)unused;
    return moq_describe_params(params, plan->operation->checkpoint_params(plan->problem, params));
}

static PyObject *prepared_params(PyObject *self, PyObject *unused) {
    (void)unused;
    return moq_describe_params(plan_of(self)->param, plan_of(self)->param_count);
}

static PyObject *quant_algo(PyObject *self, void *unused) {
    (void)unused;
    return PyUnicode_FromString(plan_of(self)->layer.algo);
}

static PyObject *group_size(PyObject *self, void *unused) {
    int32_t group = plan_of(self)->layer.group_size;
    (void)unused;
    return group ? PyLong_FromLong(group) : Py_NewRef(Py_None);
}

static PyObject *dtype(PyObject *self, void *unused) {
    (void)unused;
    return PyUnicode_FromString(moq_dtype_name(plan_of(self)->layer.dtype));
}

static PyObject *device(PyObject *self, void *unused) {
    char text[32];
    (void)unused;
    return PyUnicode_FromString(moq_device_text(plan_of(self)->layer.device, text, sizeof text));
}

/* How fast the memory of the device is beside an H200's. */
static PyObject *memory(PyObject *self, void *unused) {
    (void)unused;
    return PyFloat_FromDouble((double)plan_of(self)->layer.target->memory);
}

/* ---- the choice ---- */

/* Picks the kernel that runs so many tokens, of which there are `least` at least, in a call that
 * brings the scale of x unless `scaled` is false; -1 with an exception. */
static int pick(PyObject *self, PyObject *tokens, int64_t least, PyObject *scaled,
                moq_choice *choice) {
    int64_t m;
    moq_err err;
    int with_scale = scaled ? PyObject_IsTrue(scaled) : 1;
    if (with_scale < 0 || moq_arg_int(tokens, "tokens", least, INT64_MAX, &m) < 0)
        return -1;
    if (moq_plan_pick(plan_of(self), m, with_scale, choice, &err) == MOQ_OK)
        return 0;
    moq_raise(moq_plan_state(self), &err);
    return -1;
}

/* Reads (tokens, input_scale=True), and picks. */
static int pick_for(PyObject *self, const moq_signature *signature, PyObject *const *values,
                    Py_ssize_t nargs, PyObject *kwnames, moq_choice *choice) {
    PyObject *v[2];
    return moq_args_parse(moq_plan_state(self), signature, values, nargs, kwnames, v) < 0
               ? -1
               : pick(self, v[0], 0, v[1], choice);
}

static const moq_signature BACKEND = {"backend", 2, 1, 2, {KW_tokens, KW_input_scale}};

static PyObject *backend(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                         PyObject *kwnames) {
    moq_choice choice;
    if (pick_for(self, &BACKEND, values, nargs, kwnames, &choice) < 0)
        return NULL;
    return name_of(plan_of(self)->operation->kernels[choice.kernel]);
}

static const moq_signature COMPUTE_FOR = {"compute_for", 2, 1, 2, {KW_tokens, KW_input_scale}};

static PyObject *compute_for(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                             PyObject *kwnames) {
    moq_choice choice;
    if (pick_for(self, &COMPUTE_FOR, values, nargs, kwnames, &choice) < 0)
        return NULL;
    return PyUnicode_FromString(moq_compute_name(moq_plan_compute(plan_of(self), choice.kernel)));
}

static const moq_signature CONFIG = {"config", 2, 1, 2, {KW_tokens, KW_input_scale}};

/* The config that runs so many tokens, whose x comes with a scale or not. */
static PyObject *config(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                        PyObject *kwnames) {
    const moq_plan *plan = plan_of(self);
    PyObject *v[2];
    moq_choice choice;
    if (moq_args_parse(moq_plan_state(self), &CONFIG, values, nargs, kwnames, v) < 0 ||
        pick(self, v[0], 1, v[1], &choice) < 0)
        return NULL;
    int64_t m = PyLong_AsLongLong(v[0]);
    int scaled = v[1] ? PyObject_IsTrue(v[1]) : 1;
    if (scaled < 0)
        return NULL;
    PyObject *name = name_of(plan->operation->kernels[choice.kernel]);
    const moq_configs *family = plan->operation->kernels[choice.kernel]->configs;
    int blocks = moq_tiling_blocks(scaled ? choice.config.tiling : choice.config.dynamic_tiling);
    int config = family ? moq_config_of(family, choice.config, scaled) : 0;
    moq_problem p = moq_plan_problem(plan, m);
    p.scaled = scaled;
    double seconds =
        family ? moq_try_config(family, &p, config).seconds : moq_plan_cost(plan, choice.kernel, m);
    return name
               ? Py_BuildValue("(Niiid)", name, (int)choice.config.variant, config, blocks, seconds)
               : NULL;
}

/* (kernel, config, row of rates, counts, seconds) of a config, or None where it cannot be. */
static PyObject *describe_config(const moq_plan *plan, int kernel, const moq_problem *p,
                                 int config) {
    const moq_configs *family = plan->operation->kernels[kernel]->configs;
    moq_load w = {.rates = config};
    if (!(moq_try_config(family, p, config).seconds < INFINITY))
        return Py_NewRef(Py_None);
    family->work(p, config, &w);
    PyObject *name = name_of(plan->operation->kernels[kernel]);
    return name ? Py_BuildValue("(Nii(ddddddd)d)", name, config, w.rates, w.bytes, w.inside[0],
                                w.inside[1], w.inside[2], w.beside[0], w.beside[1], w.beside[2],
                                moq_try_config(family, p, config).seconds)
                : NULL;
}

static int append_configs(PyObject *list, const moq_plan *plan, int kernel, const moq_problem *p) {
    int configs = plan->operation->kernels[kernel]->configs->configs, status = 0;
    for (int i = 0; i < configs && status == 0; i++) {
        PyObject *row = describe_config(plan, kernel, p, i);
        status = row && row != Py_None ? PyList_Append(list, row) : row ? 0 : -1;
        Py_XDECREF(row);
    }
    return status;
}

/* Every config that is compared for so many tokens, of all kernels that can run them. */
static PyObject *configs(PyObject *self, PyObject *tokens) {
    const moq_plan *plan = plan_of(self);
    char reason[MOQ_REASON_SIZE];
    int64_t m;
    if (moq_arg_int(tokens, "tokens", 1, INT64_MAX, &m) < 0)
        return NULL;
    moq_problem p = moq_plan_problem(plan, m);
    PyObject *list = PyList_New(0);
    int status = list ? 0 : -1;
    for (int i = 0; i < plan->count && status == 0; i++)
        if (plan->operation->kernels[plan->kernel[i]]->configs &&
            moq_plan_can_run(plan, plan->kernel[i], m, reason))
            status = append_configs(list, plan, plan->kernel[i], &p);
    return finish(list, status);
}

/* The estimates that the plan compares: (kernel, variant, seconds) of each kernel that runs so many
 * tokens. */
static PyObject *estimates(PyObject *self, PyObject *tokens) {
    const moq_plan *plan = plan_of(self);
    const moq_operation *operation = plan->operation;
    char reason[MOQ_REASON_SIZE];
    int64_t m;
    if (moq_arg_int(tokens, "tokens", 1, INT64_MAX, &m) < 0)
        return NULL;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < plan->count; i++) {
        int kernel = plan->kernel[i];
        if (!moq_plan_can_run(plan, kernel, m, reason))
            continue;
        PyObject *name = name_of(operation->kernels[kernel]);
        PyObject *row =
            name ? Py_BuildValue("(Nid)", name, (int)moq_plan_config(plan, kernel, m, 0).variant,
                                 moq_plan_cost(plan, kernel, m))
                 : NULL;
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static const moq_signature EXPLAIN = {"explain", 1, 0, 1, {KW_tokens}};

/* 0 tokens are explained as 1 is. */
static PyObject *explain(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                         PyObject *kwnames) {
    const moq_plan *plan = plan_of(self);
    PyObject *v[1];
    int64_t m = MOQ_ANY_TOKENS;
    if (moq_args_parse(moq_plan_state(self), &EXPLAIN, values, nargs, kwnames, v) < 0)
        return NULL;
    if (!moq_arg_absent(v[0])) {
        if (moq_arg_int(v[0], "tokens", 0, INT64_MAX, &m) < 0)
            return NULL;
        m = m < 1 ? 1 : m;
    }
    PyObject *list = PyList_New(0);
    int status = list ? 0 : -1;
    for (int i = 0; i < plan->operation->kernel_count && status == 0; i++) {
        char reason[MOQ_REASON_SIZE];
        bool can = moq_plan_can_run(plan, i, m, reason);
        PyObject *name = name_of(plan->operation->kernels[i]);
        status = append(list, name ? Py_BuildValue("(Nz)", name, can ? NULL : reason) : NULL);
    }
    return finish(list, status);
}

/* Notes about kernels, whatever the layer: [(name, note)]. */
static PyObject *notes(PyObject *self, PyObject *unused) {
    const moq_operation *operation = plan_of(self)->operation;
    PyObject *list = PyList_New(0);
    int status = list ? 0 : -1;
    (void)unused;
    for (int i = 0; i < operation->kernel_count && status == 0; i++) {
        const moq_kernel *kernel = operation->kernels[i];
        PyObject *name = kernel->note ? name_of(kernel) : NULL;
        if (kernel->note)
            status = append(list, name ? Py_BuildValue("(Ns)", name, kernel->note) : NULL);
    }
    return finish(list, status);
}

/* ---- tuning ---- */

/* A list of (kernel, variant, seconds), the fastest first. */
static PyObject *describe_timings(const moq_operation *operation, const moq_timing *timings,
                                  int count) {
    PyObject *list = PyList_New(0);
    int status = list ? 0 : -1;
    for (int i = 0; i < count && status == 0; i++) {
        PyObject *name = name_of(operation->kernels[timings[i].kernel]);
        status = append(
            list, name ? Py_BuildValue("(Nid)", name, (int)timings[i].variant, timings[i].seconds)
                       : NULL);
    }
    return finish(list, status);
}

static PyObject *measure_with(moq_call *call, moq_plan *plan, int64_t m, PyObject *mapping,
                              bool chosen) {
    moq_choice choice;
    moq_params params;
    moq_timing timings[MOQ_MAX_TIMINGS];
    int count = 0;
    moq_err err;
    moq_status status;
    moq_params_clear(&params, 0, MOQ_PARAM_PLACES);
    if (moq_call_take_params(call, mapping, &params) < 0)
        return NULL;
    status = moq_check_params(plan->param, plan->param_count, &params, "params", &err);
    bool scaled = params.of[MOQ_PARAM_INPUT_SCALE].data != NULL;
    if (status == MOQ_OK && chosen)
        status = moq_plan_pick(plan, m, scaled, &choice, &err);
    moq_long_call native;
    moq_long_call_begin(&native);
    if (status == MOQ_OK)
        status = plan->operation->measure(plan, &params, m, chosen ? &choice : NULL, timings,
                                          &count, &err);
    status = moq_long_call_end(&native, status, &err);
    return status == MOQ_OK ? describe_timings(plan->operation, timings, count)
                            : moq_raise(call->state, &err);
}

static const moq_signature MEASURE = {"measure", 3, 2, 3, {KW_tokens, KW_params, KW_chosen}};

static PyObject *measure(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                         PyObject *kwnames) {
    moq_state *state = moq_plan_state(self);
    PyObject *v[3];
    int64_t m;
    moq_call call;
    if (moq_args_parse(state, &MEASURE, values, nargs, kwnames, v) < 0 ||
        moq_arg_int(v[0], "tokens", 1, INT32_MAX, &m) < 0)
        return NULL;
    int chosen = v[2] ? PyObject_IsTrue(v[2]) : 0;
    if (chosen < 0)
        return NULL;
    moq_call_open(&call, state, plan_of(self), NULL, NULL);
    PyObject *result = measure_with(&call, plan_of(self), m, v[1], chosen != 0);
    moq_call_release(&call);
    return result;
}

/* A number of tokens, a kernel and a variant of it. */
typedef struct {
    int64_t tokens, variant;
    const char *kernel;
} kept;

static int take_kept(PyObject *self, const moq_signature *signature, PyObject *const *values,
                     Py_ssize_t nargs, PyObject *kwnames, kept *choice) {
    PyObject *v[3];
    if (moq_args_parse(moq_plan_state(self), signature, values, nargs, kwnames, v) < 0 ||
        moq_arg_int(v[0], "tokens", 1, INT32_MAX, &choice->tokens) < 0)
        return -1;
    choice->kernel = moq_arg_text(v[1], "kernel");
    return choice->kernel &&
                   moq_arg_int(v[2], "variant", 0, MOQ_MAX_VARIANTS - 1, &choice->variant) == 0
               ? 0
               : -1;
}

static const moq_signature KEEP = {"keep", 3, 3, 3, {KW_tokens, KW_kernel, KW_variant}};

/* The choices are written with the GIL held, as they are read. */
static PyObject *keep(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                      PyObject *kwnames) {
    kept c;
    moq_err err;
    if (take_kept(self, &KEEP, values, nargs, kwnames, &c) < 0)
        return NULL;
    if (moq_plan_keep(plan_of(self), c.tokens, c.kernel, (int32_t)c.variant, &err) != MOQ_OK)
        return moq_raise(moq_plan_state(self), &err);
    Py_RETURN_NONE;
}

static const moq_signature HAS_VARIANT = {
    "has_variant", 3, 3, 3, {KW_tokens, KW_kernel, KW_variant}};

static PyObject *has_variant(PyObject *self, PyObject *const *values, Py_ssize_t nargs,
                             PyObject *kwnames) {
    kept c;
    if (take_kept(self, &HAS_VARIANT, values, nargs, kwnames, &c) < 0)
        return NULL;
    return PyBool_FromLong(
        moq_plan_has_variant(plan_of(self), c.tokens, c.kernel, (int32_t)c.variant));
}

/* The largest number of tokens that shares the choice for so many. */
static PyObject *bucket(PyObject *self, PyObject *tokens) {
    int64_t m;
    (void)self;
    if (moq_arg_int(tokens, "tokens", 1, INT32_MAX, &m) < 0)
        return NULL;
    return PyLong_FromLongLong(moq_token_bucket(m));
}

static PyObject *is_tuned(PyObject *self, PyObject *tokens) {
    int64_t m;
    if (moq_arg_int(tokens, "tokens", 0, INT64_MAX, &m) < 0)
        return NULL;
    return PyBool_FromLong(moq_plan_is_tuned(plan_of(self), m));
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
    {"backend", (PyCFunction)(void (*)(void))backend, METH_FASTCALL | METH_KEYWORDS,
     "backend(tokens, input_scale=True) -> str: the kernel for that many tokens"},
    {"compute_for", (PyCFunction)(void (*)(void))compute_for, METH_FASTCALL | METH_KEYWORDS,
     "compute_for(tokens, input_scale=True) -> str: what that many tokens are multiplied as"},
    {"config", (PyCFunction)(void (*)(void))config, METH_FASTCALL | METH_KEYWORDS,
     "config(tokens, input_scale=True) -> (kernel, variant, config, blocks that share, seconds) of "
     "a "
     "call of so many, as the plan keeps it; input_scale: whether the layer has one"},
    {"configs", configs, METH_O,
     "configs(tokens) -> list of (kernel, config, row of rates, counts, seconds): what is compared "
     "for "
     "so many"},
    {"estimates", estimates, METH_O,
     "estimates(tokens) -> list of (kernel, variant, seconds) of those that run so many"},
    {"explain", (PyCFunction)(void (*)(void))explain, METH_FASTCALL | METH_KEYWORDS,
     "explain(tokens=None) -> list of (kernel, reason it cannot run so many, or any, or None)"},
    {"notes", notes, METH_NOARGS, "notes() -> list of (kernel, what else there is to know)"},
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL | METH_KEYWORDS,
     "measure(tokens, params, chosen=False) -> list of (kernel, variant, seconds), the fastest "
     "first; "
     "chosen: of what the plan takes alone"},
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL | METH_KEYWORDS,
     "keep(tokens, kernel, variant): what runs about so many tokens from now on"},
    {"has_variant", (PyCFunction)(void (*)(void))has_variant, METH_FASTCALL | METH_KEYWORDS,
     "has_variant(tokens, kernel, variant) -> bool: whether it could be kept as it is"},
    {"bucket", bucket, METH_O,
     "bucket(tokens) -> int: the largest number of tokens that shares the choice for so many"},
    {"is_tuned", is_tuned, METH_O,
     "is_tuned(tokens) -> bool: whether a choice is kept for so many tokens"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef PLAN_ATTRIBUTES[] = {
    {"quant_algo", quant_algo, NULL, "canonical name of the algorithm", NULL},
    {"group_size", group_size, NULL, "columns that share a block scale, or None", NULL},
    {"dtype", dtype, NULL, "full name of the dtype of x and y", NULL},
    {"device", device, NULL, "\"cpu\" or \"cuda:N\"", NULL},
    {"memory", memory, NULL, "how fast the memory of the device is beside an H200's", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot PLAN_SLOTS[] = {
    {Py_tp_doc, "A layer, resolved and planned: which kernel runs it, and why."},
    {Py_tp_dealloc, (void *)deallocate},
    {Py_tp_methods, PLAN_METHODS},
    {Py_tp_getset, PLAN_ATTRIBUTES},
    {0, NULL},
};

static PyType_Spec PLAN_TYPE = {
    .name = "moqext._C.Plan",
    .basicsize = sizeof(moq_plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = PLAN_SLOTS,
};

int moq_add_plan(PyObject *module, moq_state *state) {
    state->plan_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &PLAN_TYPE, NULL);
    return state->plan_type ? PyModule_AddType(module, state->plan_type) : -1;
}
