/* `_C.dequantize`: the stored weight of a layer back to numbers. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"

#include "ops/dequantize.h"

enum { WEIGHT, QUANT_ALGO, WEIGHT_SCALE, WEIGHT_SCALE_2, GROUP_SIZE, DTYPE, OUT, COUNT };

static const moq_signature SIGNATURE = {
    "dequantize",
    2,
    2,
    COUNT,
    {KW_weight, KW_quant_algo, KW_weight_scale, KW_weight_scale_2, KW_group_size, KW_dtype, KW_out},
};

static PyObject *run(moq_state *state, PyObject *given, const moq_arg *weight,
                     const moq_dequantize_plan *plan) {
    moq_arg out = {0};
    PyObject *result = moq_arg_output(state, given, weight, plan->out.dtype, plan->out.ndim,
                                      plan->out.shape, &out);
    moq_status status;
    moq_err err;
    if (!result)
        return NULL;
    moq_long_call call;
    moq_long_call_begin(&call);
    status = moq_run_dequantize(plan, &out.view, &err);
    status = moq_long_call_end(&call, status, &err);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return moq_arg_finish(state, result, &out, status == MOQ_OK ? 0 : -1);
}

static PyObject *dequantize(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    moq_state *state = moq_module_state(module);
    PyObject *values[COUNT], *result = NULL;
    moq_arg weight = {0}, scale = {0}, scale_2 = {0};
    const moq_tensor *scale_view, *scale_2_view;
    moq_dtype dtype = MOQ_DT_F32;
    int64_t group_size = 0;
    moq_dequantize_plan plan;
    moq_err err;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0)
        return NULL;
    const char *algo = moq_arg_text(values[QUANT_ALGO], "quant_algo");
    if (!algo)
        return NULL;
    if (!moq_arg_absent(values[DTYPE]) && moq_arg_dtype(values[DTYPE], "dtype", &dtype) < 0)
        return NULL;
    if (!moq_arg_absent(values[GROUP_SIZE]) &&
        moq_arg_int(values[GROUP_SIZE], "group_size", 1, INT32_MAX, &group_size) < 0)
        return NULL;
    if (moq_arg_take(state, values[WEIGHT], "weight", &weight) == 0 &&
        moq_arg_take_optional(state, values[WEIGHT_SCALE], "weight_scale", &scale, &scale_view) ==
            0 &&
        moq_arg_take_optional(state, values[WEIGHT_SCALE_2], "weight_scale_2", &scale_2,
                              &scale_2_view) == 0) {
        if (moq_plan_dequantize(algo, &weight.view, scale_view, scale_2_view, group_size, dtype,
                                &plan, &err) != MOQ_OK)
            moq_raise(state, &err);
        else
            result = run(state, values[OUT], &weight, &plan);
    }
    moq_arg_release(&weight);
    moq_arg_release(&scale);
    moq_arg_release(&scale_2);
    return result;
}

static PyMethodDef METHODS[] = {
    {"dequantize", (PyCFunction)(void (*)(void))dequantize, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.dequantize."},
    {NULL, NULL, 0, NULL},
};

int moq_add_dequantize(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
