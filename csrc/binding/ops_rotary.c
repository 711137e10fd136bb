/* `_C.rotary_embedding`. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "ops/rotary_call.h"

enum { X, COS, SIN, OUT, STREAM, COUNT };

static const moq_signature SIGNATURE = {
    "rotary_embedding", 3, 3, COUNT, {KW_x, KW_cos, KW_sin, KW_out, KW_stream}};

typedef struct {
    moq_arg x, cos, sin;
} rotary_inputs;

/* Raw 16-bit arrays are bfloat16, which NumPy lacks. */
static int take_inputs(moq_state *state, PyObject *const *values, rotary_inputs *in) {
    if (moq_arg_take(state, values[X], "x", &in->x) < 0 ||
        moq_arg_take(state, values[COS], "cos", &in->cos) < 0 ||
        moq_arg_take(state, values[SIN], "sin", &in->sin) < 0)
        return -1;
    if (in->x.stored != MOQ_DT_U16 && in->x.stored != MOQ_DT_I16)
        return 0;
    in->x.view.dtype = MOQ_DT_BF16;
    return moq_arg_reinterpret(&in->cos, MOQ_DT_BF16) < 0 ||
                   moq_arg_reinterpret(&in->sin, MOQ_DT_BF16) < 0
               ? -1
               : 0;
}

static PyObject *run(moq_state *state, const rotary_inputs *in, PyObject *given, PyObject *where) {
    moq_rotary plan;
    moq_arg out;
    moq_err err;
    void *stream;
    PyObject *result;
    if (moq_plan_rotary(&in->x.view, &in->cos.view, &in->sin.view, &plan, &err) != MOQ_OK)
        return moq_raise(state, &err);
    if (moq_stream_take(where, &in->x, &stream) < 0)
        return NULL;
    result = moq_arg_output(state, given, &in->x, plan.x.dtype, plan.x.ndim, plan.x.shape, &out);
    if (!result)
        return NULL;
    moq_long_call call;
    moq_long_call_begin(&call);
    moq_status status = moq_run_rotary(&plan, &out.view, stream, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return moq_arg_finish(state, result, &out, status == MOQ_OK ? 0 : -1);
}

static PyObject *rotary_embedding(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                  PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    rotary_inputs in = {0};
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    if (take_inputs(state, values, &in) == 0)
        result = run(state, &in, values[OUT], values[STREAM]);
    moq_arg_release(&in.x);
    moq_arg_release(&in.cos);
    moq_arg_release(&in.sin);
    return result;
}

static PyMethodDef METHODS[] = {
    {"rotary_embedding", (PyCFunction)(void (*)(void))rotary_embedding,
     METH_FASTCALL | METH_KEYWORDS, "See moqext.ops.rotary_embedding."},
    {NULL, NULL, 0, NULL},
};

int moq_add_rotary(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
