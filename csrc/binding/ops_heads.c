/* `_C.qk_norm_rope`. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "ops/heads_call.h"

enum {
    X,
    POSITIONS,
    TABLE,
    Q_HEADS,
    K_HEADS,
    Q_WEIGHT,
    K_WEIGHT,
    EPS,
    K_CACHE,
    V_CACHE,
    SLOTS,
    STREAM,
    COUNT
};

static const moq_signature SIGNATURE = {"qk_norm_rope",
                                        5,
                                        5,
                                        COUNT,
                                        {KW_x, KW_positions, KW_table, KW_q_heads, KW_k_heads,
                                         KW_q_weight, KW_k_weight, KW_eps, KW_k_cache, KW_v_cache,
                                         KW_slots, KW_stream}};

enum { READ = 5 }; /* tensors that are only read: positions, table, two weights, slots */

typedef struct {
    moq_arg x, cache[MOQ_CACHES], read[READ];
    moq_heads_given given;
} heads_inputs;

static int take_numbers(PyObject *const *values, moq_heads_given *given) {
    if (moq_arg_int(values[Q_HEADS], "q_heads", 0, INT32_MAX, &given->heads[MOQ_HEADS_Q]) < 0 ||
        moq_arg_int(values[K_HEADS], "k_heads", 0, INT32_MAX, &given->heads[MOQ_HEADS_K]) < 0)
        return -1;
    given->eps = moq_arg_absent(values[EPS]) ? 0.0 : PyFloat_AsDouble(values[EPS]);
    return given->eps == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* x and what there is of a cache, which share nothing: k and v may lie between each other. */
static int take_written(moq_state *state, PyObject *const *values, heads_inputs *in) {
    static const char *const names[MOQ_CACHES] = {"k_cache", "v_cache"};
    if (moq_arg_take_output(state, values[X], "x", &in->x) < 0)
        return -1;
    in->given.x = &in->x.view;
    for (int i = 0; i < MOQ_CACHES; i++) {
        if (moq_arg_absent(values[K_CACHE + i]))
            continue;
        if (moq_arg_take_output(state, values[K_CACHE + i], names[i], &in->cache[i]) < 0 ||
            moq_arg_refuse_both_written(&in->x, &in->cache[i]) < 0)
            return -1;
        in->given.cache[i] = &in->cache[i].view;
    }
    return 0;
}

static int take_inputs(moq_state *state, PyObject *const *values, heads_inputs *in) {
    static const struct {
        int value;
        const char *name;
    } read[READ] = {{POSITIONS, "positions"},
                    {TABLE, "table"},
                    {Q_WEIGHT, "q_weight"},
                    {K_WEIGHT, "k_weight"},
                    {SLOTS, "slots"}};
    const moq_tensor **to[READ] = {&in->given.positions, &in->given.table,
                                   &in->given.weight[MOQ_HEADS_Q], &in->given.weight[MOQ_HEADS_K],
                                   &in->given.slots};
    if (take_numbers(values, &in->given) < 0 || take_written(state, values, in) < 0)
        return -1;
    for (int i = 0; i < READ; i++) {
        moq_arg *arg = &in->read[i];
        if (read[i].value <= TABLE) {
            if (moq_arg_take(state, values[read[i].value], read[i].name, arg) < 0)
                return -1;
            *to[i] = &arg->view;
        } else if (moq_arg_take_optional(state, values[read[i].value], read[i].name, arg, to[i]) <
                   0) {
            return -1;
        }
        if (*to[i] && moq_arg_refuse_overlap(&in->x, arg) < 0)
            return -1;
    }
    return 0;
}

static PyObject *run(moq_state *state, const heads_inputs *in, PyObject *where) {
    moq_heads plan;
    moq_err err;
    void *stream;
    if (moq_plan_heads(&in->given, &plan, &err) != MOQ_OK)
        return moq_raise(state, &err);
    if (moq_stream_take(where, &in->x, &stream) < 0)
        return NULL;
    moq_long_call call;
    moq_long_call_begin(&call);
    moq_status status = moq_run_heads(&plan, stream, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status != MOQ_OK)
        return moq_raise(state, &err);
    return Py_NewRef(in->x.object);
}

static PyObject *qk_norm_rope(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    heads_inputs in = {0};
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    if (take_inputs(state, values, &in) == 0)
        result = run(state, &in, values[STREAM]);
    moq_arg_release(&in.x);
    for (int i = 0; i < MOQ_CACHES; i++)
        moq_arg_release(&in.cache[i]);
    for (int i = 0; i < READ; i++)
        moq_arg_release(&in.read[i]);
    return result;
}

static PyMethodDef METHODS[] = {
    {"qk_norm_rope", (PyCFunction)(void (*)(void))qk_norm_rope, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.qk_norm_rope."},
    {NULL, NULL, 0, NULL},
};

int moq_add_heads(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
