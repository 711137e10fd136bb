/* `_C.turn_heads`. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "ops/heads_call.h"

enum { X, POSITIONS, TABLE, Q_HEADS, K_HEADS, Q_WEIGHT, K_WEIGHT, EPS, STREAM, COUNT };

static const moq_signature SIGNATURE = {"turn_heads",
                                        5,
                                        5,
                                        COUNT,
                                        {KW_x, KW_positions, KW_table, KW_q_heads, KW_k_heads,
                                         KW_q_weight, KW_k_weight, KW_eps, KW_stream}};

typedef struct {
    moq_arg x, positions, table, weight[MOQ_HEADS_KINDS];
    const moq_tensor *weights[MOQ_HEADS_KINDS];
    int64_t heads[MOQ_HEADS_KINDS];
    double eps;
} heads_inputs;

static int take_inputs(moq_state *state, PyObject *const *values, heads_inputs *in) {
    if (moq_arg_int(values[Q_HEADS], "q_heads", 0, INT32_MAX, &in->heads[MOQ_HEADS_Q]) < 0 ||
        moq_arg_int(values[K_HEADS], "k_heads", 0, INT32_MAX, &in->heads[MOQ_HEADS_K]) < 0)
        return -1;
    in->eps = moq_arg_absent(values[EPS]) ? 0.0 : PyFloat_AsDouble(values[EPS]);
    if (in->eps == -1.0 && PyErr_Occurred())
        return -1;
    if (moq_arg_take_output(state, values[X], "x", &in->x) < 0 ||
        moq_arg_take(state, values[POSITIONS], "positions", &in->positions) < 0 ||
        moq_arg_take(state, values[TABLE], "table", &in->table) < 0 ||
        moq_arg_take_optional(state, values[Q_WEIGHT], "q_weight", &in->weight[MOQ_HEADS_Q],
                              &in->weights[MOQ_HEADS_Q]) < 0 ||
        moq_arg_take_optional(state, values[K_WEIGHT], "k_weight", &in->weight[MOQ_HEADS_K],
                              &in->weights[MOQ_HEADS_K]) < 0)
        return -1;
    if (moq_arg_refuse_overlap(&in->x, &in->positions) < 0 ||
        moq_arg_refuse_overlap(&in->x, &in->table) < 0)
        return -1;
    for (int i = 0; i < MOQ_HEADS_KINDS; i++) {
        if (in->weights[i] && moq_arg_refuse_overlap(&in->x, &in->weight[i]) < 0)
            return -1;
    }
    return 0;
}

static PyObject *run(moq_state *state, const heads_inputs *in, PyObject *where) {
    moq_heads plan;
    moq_err err;
    void *stream;
    if (moq_plan_heads(&in->x.view, &in->positions.view, &in->table.view, in->weights, in->heads,
                       in->eps, &plan, &err) != MOQ_OK)
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

static PyObject *turn_heads(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    heads_inputs in = {0};
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    if (take_inputs(state, values, &in) == 0)
        result = run(state, &in, values[STREAM]);
    moq_arg_release(&in.x);
    moq_arg_release(&in.positions);
    moq_arg_release(&in.table);
    for (int i = 0; i < MOQ_HEADS_KINDS; i++)
        moq_arg_release(&in.weight[i]);
    return result;
}

static PyMethodDef METHODS[] = {
    {"turn_heads", (PyCFunction)(void (*)(void))turn_heads, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.turn_heads."},
    {NULL, NULL, 0, NULL},
};

int moq_add_heads(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
