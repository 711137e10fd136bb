/* Operations that rearrange stored tensors: `_C.swizzle_block_scales`, `_C.unswizzle_block_scales`,
 * `_C.pack_fp4`, `_C.unpack_fp4`, `_C.pack_nvfp4`, `_C.unpack_nvfp4` and `_C.requantize_to_max`;
 * and stacks of experts as engines keep them: `_C.swap_gate_up`, `_C.expert_input_scale`,
 * `_C.shared_input_scale` and `_C.expert_alphas`. */
#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/py_tensor.h"
#include "binding/stream.h"

#include "core/formats.h"
#include "ops/check.h"
#include "ops/expert_scales.h"
#include "ops/layout.h"
#include "ops/nvfp4_pack.h"

#include <stdlib.h>

/* The most partitions of a fused weight. */
#define MAX_PARTITIONS 1024

typedef moq_status (*describe_function)(const moq_tensor *, moq_tensor *, moq_err *);
typedef moq_status (*run_function)(const moq_tensor *, void *, const moq_tensor *, moq_err *);

/* Finishes the result of an operation that was run. */
static PyObject *finish_one(moq_state *state, PyObject *result, moq_arg *out, moq_status status,
                            const moq_err *err) {
    if (status != MOQ_OK)
        moq_raise(state, err);
    return moq_arg_finish(state, result, out, status == MOQ_OK ? 0 : -1);
}

/* Opens a result like the first tensor read, and finds the stream to write it on; NULL with an
 * exception. */
static PyObject *open_one(moq_state *state, PyObject *given, const moq_arg *like,
                          const moq_tensor *expected, void **stream, moq_arg *out) {
    if (moq_stream_take(NULL, like, stream) < 0)
        return NULL;
    return moq_arg_output(state, given, like, expected->dtype, expected->ndim, expected->shape,
                          out);
}

/* Runs an operation of one tensor and nothing else. */
static PyObject *rearrange(PyObject *module, const moq_signature *signature, const char *name,
                           PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                           describe_function describe, run_function run) {
    moq_state *state = moq_module_state(module);
    PyObject *values[2], *result = NULL;
    moq_arg in, out;
    moq_tensor expected;
    moq_status status;
    moq_err err;
    void *stream;
    if (moq_args_parse(state, signature, args, nargs, kwnames, values) < 0 ||
        moq_arg_take(state, values[0], name, &in) < 0)
        return NULL;
    if (describe(&in.view, &expected, &err) != MOQ_OK)
        moq_raise(state, &err);
    else
        result = open_one(state, values[1], &in, &expected, &stream, &out);
    if (result) {
        moq_long_call call;
        moq_long_call_begin(&call);
        status = run(&in.view, stream, &out.view, &err);
        status = moq_long_call_end(&call, status, &err);
        result = finish_one(state, result, &out, status, &err);
    }
    moq_arg_release(&in);
    return result;
}

static PyObject *swizzle(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames) {
    static const moq_signature signature = {"swizzle_block_scales", 1, 1, 2, {KW_scale, KW_out}};
    return rearrange(module, &signature, "scale", args, nargs, kwnames, moq_describe_swizzle,
                     moq_run_swizzle);
}

static PyObject *pack_fp4(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames) {
    static const moq_signature signature = {"pack_fp4", 1, 1, 2, {KW_codes, KW_out}};
    return rearrange(module, &signature, "codes", args, nargs, kwnames, moq_describe_pack_fp4,
                     moq_run_pack_fp4);
}

static PyObject *unpack_fp4(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    static const moq_signature signature = {"unpack_fp4", 1, 1, 2, {KW_packed, KW_out}};
    return rearrange(module, &signature, "packed", args, nargs, kwnames, moq_describe_unpack_fp4,
                     moq_run_unpack_fp4);
}

/* A sequence of at most `limit` ints from 0; returns how many, or -1 with an exception. */
static Py_ssize_t take_extents(PyObject *value, const char *name, Py_ssize_t limit, int64_t *out) {
    Py_ssize_t count =
        PySequence_Check(value) && !PyUnicode_Check(value) ? PySequence_Size(value) : -1;
    if (count < 0 || count > limit) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: expected a sequence of at most %zd ints, got %R", name,
                     limit, value);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(value, i);
        int failed = item ? moq_arg_int(item, name, 0, INT64_MAX / 256, &out[i]) : -1;
        Py_XDECREF(item);
        if (failed)
            return -1;
    }
    return count;
}

static PyObject *unswizzle(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames) {
    static const moq_signature signature = {
        "unswizzle_block_scales", 2, 2, 3, {KW_swizzled, KW_shape, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3], *result = NULL;
    int64_t shape[3];
    moq_arg in, out;
    moq_tensor expected;
    moq_status status;
    moq_err err;
    void *stream;
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0)
        return NULL;
    Py_ssize_t ndim = take_extents(values[1], "shape", 3, shape);
    if (ndim < 0 || moq_arg_take(state, values[0], "swizzled", &in) < 0)
        return NULL;
    if (moq_describe_unswizzle(&in.view, (int32_t)ndim, shape, &expected, &err) != MOQ_OK)
        moq_raise(state, &err);
    else
        result = open_one(state, values[2], &in, &expected, &stream, &out);
    if (result) {
        moq_long_call call;
        moq_long_call_begin(&call);
        status = moq_run_unswizzle(&in.view, &expected, stream, &out.view, &err);
        status = moq_long_call_end(&call, status, &err);
        result = finish_one(state, result, &out, status, &err);
    }
    moq_arg_release(&in);
    return result;
}

/* Hands back the two results of an operation, which may be missing where it failed, as a tuple. */
static PyObject *finish_two(moq_state *state, PyObject *first, moq_arg *first_arg, PyObject *second,
                            moq_arg *second_arg, int failed) {
    PyObject *result = NULL;
    first = first ? moq_arg_finish(state, first, first_arg, failed) : NULL;
    second = second ? moq_arg_finish(state, second, second_arg, failed) : NULL;
    if (first && second)
        result = PyTuple_Pack(2, first, second);
    Py_XDECREF(first);
    Py_XDECREF(second);
    return result;
}

/* Runs pack_nvfp4 of tensors that were taken. */
static PyObject *run_pack_nvfp4(moq_state *state, PyObject *given, const moq_arg *weight,
                                const moq_arg *scale) {
    moq_arg out;
    moq_tensor expected;
    moq_status status;
    moq_err err;
    void *stream;
    if (moq_describe_pack_nvfp4(&weight->view, &scale->view, &expected, &err) != MOQ_OK)
        return moq_raise(state, &err);
    PyObject *result = open_one(state, given, weight, &expected, &stream, &out);
    if (!result)
        return NULL;
    moq_long_call call;
    moq_long_call_begin(&call);
    status = moq_run_pack_nvfp4(&weight->view, &scale->view, stream, &out.view, &err);
    status = moq_long_call_end(&call, status, &err);
    return finish_one(state, result, &out, status, &err);
}

static PyObject *pack_nvfp4(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    static const moq_signature signature = {
        "pack_nvfp4", 2, 2, 3, {KW_weight, KW_weight_scale, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3], *result = NULL;
    moq_arg weight = {0}, scale = {0};
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0)
        return NULL;
    if (moq_arg_take(state, values[0], "weight", &weight) == 0 &&
        moq_arg_take(state, values[1], "weight_scale", &scale) == 0)
        result = run_pack_nvfp4(state, values[2], &weight, &scale);
    moq_arg_release(&weight);
    moq_arg_release(&scale);
    return result;
}

/* A result of unpack_nvfp4: the tensor given for it, or a new one. The operation checks it. */
static PyObject *take_result(moq_state *state, PyObject *given, const char *name,
                             const moq_arg *like, const moq_tensor *expected, moq_arg *out) {
    if (moq_arg_absent(given))
        return moq_arg_new_like(state, like, expected->dtype, expected->ndim, expected->shape, out);
    return moq_arg_take_output(state, given, name, out) < 0 ? NULL : Py_NewRef(given);
}

/* Runs unpack_nvfp4 into (out, scale_out). */
static PyObject *run_unpack_nvfp4(moq_state *state, PyObject *const *given, const moq_arg *packed,
                                  int32_t ndim, const int64_t *shape, int64_t group_size) {
    moq_arg weight = {0}, scale = {0};
    PyObject *codes = NULL, *scales = NULL;
    moq_tensor expected, expected_scale;
    moq_status status;
    moq_err err;
    void *stream;
    int failed = -1;
    if (moq_describe_unpack_nvfp4(&packed->view, ndim, shape, group_size, &expected,
                                  &expected_scale, &err) != MOQ_OK)
        return moq_raise(state, &err);
    if (moq_stream_take(NULL, packed, &stream) < 0)
        return NULL;
    codes = take_result(state, given[0], "out", packed, &expected, &weight);
    if (codes)
        scales = take_result(state, given[1], "scale_out", packed, &expected_scale, &scale);
    if (scales) {
        moq_long_call call;
        moq_long_call_begin(&call);
        status = moq_run_unpack_nvfp4(&packed->view, ndim, shape, group_size, stream, &weight.view,
                                      &scale.view, &err);
        status = moq_long_call_end(&call, status, &err);
        failed = status == MOQ_OK ? 0 : -1;
        if (failed)
            moq_raise(state, &err);
    }
    return finish_two(state, codes, &weight, scales, &scale, failed);
}

static PyObject *unpack_nvfp4(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    static const moq_signature signature = {
        "unpack_nvfp4", 3, 2, 5, {KW_packed, KW_shape, KW_group_size, KW_out, KW_scale_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[5], *result = NULL;
    int64_t shape[3], group_size = MOQ_NVFP4_GROUP;
    moq_arg packed;
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0)
        return NULL;
    Py_ssize_t count = take_extents(values[1], "shape", 3, shape);
    if (count >= 0 && count < 2)
        PyErr_Format(PyExc_ValueError, "shape: expected rows and columns, got %R", values[1]);
    if (count < 2 || (!moq_arg_absent(values[2]) &&
                      moq_arg_int(values[2], "group_size", 1, INT32_MAX, &group_size) < 0))
        return NULL;
    if (moq_arg_take(state, values[0], "packed", &packed) < 0)
        return NULL;
    result = run_unpack_nvfp4(state, values + 3, &packed, (int32_t)count, shape, group_size);
    moq_arg_release(&packed);
    return result;
}

/* Runs requantize into (out, max_scale). */
static PyObject *run_requantize(moq_state *state, PyObject *given, const moq_arg *weight,
                                const moq_arg *scale, const int64_t *partitions, int64_t count) {
    moq_arg out = {0}, max_scale = {0};
    PyObject *codes = NULL, *largest = NULL;
    moq_tensor expected;
    moq_status status;
    moq_err err;
    void *stream;
    int failed = -1;
    if (moq_describe_requantize(&weight->view, &scale->view, partitions, count, &expected, &err) !=
        MOQ_OK)
        return moq_raise(state, &err);
    if (moq_stream_take(NULL, weight, &stream) < 0)
        return NULL;
    codes = moq_arg_output(state, given, weight, MOQ_DT_E4M3, expected.ndim, expected.shape, &out);
    if (codes)
        largest = moq_arg_new_like(state, scale, MOQ_DT_F32, expected.ndim - 2, expected.shape,
                                   &max_scale);
    if (largest) {
        moq_long_call call;
        moq_long_call_begin(&call);
        status = moq_run_requantize(&weight->view, &scale->view, partitions, count, stream,
                                    &out.view, &max_scale.view, &err);
        status = moq_long_call_end(&call, status, &err);
        failed = status == MOQ_OK ? 0 : -1;
        if (failed)
            moq_raise(state, &err);
    }
    return finish_two(state, codes, &out, largest, &max_scale, failed);
}

static PyObject *requantize(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    static const moq_signature signature = {
        "requantize_to_max", 3, 3, 4, {KW_weight, KW_weight_scale, KW_partitions, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[4], *result = NULL;
    int64_t partitions[MAX_PARTITIONS];
    moq_arg weight = {0}, scale = {0};
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0)
        return NULL;
    Py_ssize_t count = take_extents(values[2], "partitions", MAX_PARTITIONS, partitions);
    if (count >= 0 && moq_arg_take(state, values[0], "weight", &weight) == 0 &&
        moq_arg_reinterpret(&weight, MOQ_DT_E4M3) == 0 &&
        moq_arg_take(state, values[1], "weight_scale", &scale) == 0)
        result = run_requantize(state, values[3], &weight, &scale, partitions, count);
    moq_arg_release(&weight);
    moq_arg_release(&scale);
    return result;
}

/* ---- experts as engines keep them ---- */

static PyObject *swap_gate_up(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames) {
    static const moq_signature signature = {"swap_gate_up", 1, 1, 2, {KW_stack, KW_out}};
    return rearrange(module, &signature, "stack", args, nargs, kwnames, moq_describe_swap_gate_up,
                     moq_run_swap_gate_up);
}

static PyObject *expert_input_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames) {
    static const moq_signature signature = {
        "expert_input_scale", 1, 1, 2, {KW_input_scale, KW_out}};
    return rearrange(module, &signature, "input_scale", args, nargs, kwnames,
                     moq_describe_expert_input_scale, moq_run_expert_input_scale);
}

static PyObject *shared_input_scale(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames) {
    static const moq_signature signature = {
        "shared_input_scale", 2, 1, 3, {KW_input_scale, KW_shape, KW_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3], *result = NULL;
    int64_t shape[3] = {0};
    Py_ssize_t ndim = 0;
    moq_arg in, out;
    moq_tensor expected;
    moq_err err;
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0)
        return NULL;
    if (!moq_arg_absent(values[1]))
        ndim = take_extents(values[1], "shape", 3, shape);
    if (ndim < 0 || moq_arg_take(state, values[0], "input_scale", &in) < 0)
        return NULL;
    expected = moq_describe(MOQ_DT_F32, (int32_t)ndim, shape);
    if (moq_check_input_scales(&in.view, &err) != MOQ_OK)
        moq_raise(state, &err);
    else
        result =
            moq_arg_output(state, values[2], &in, MOQ_DT_F32, expected.ndim, expected.shape, &out);
    if (result) {
        moq_status status = moq_run_shared_input_scale(&in.view, &expected, &out.view, &err);
        result = finish_one(state, result, &out, status, &err);
    }
    moq_arg_release(&in);
    return result;
}

/* Runs expert_alphas of tensors that were taken. */
static PyObject *run_alphas(moq_state *state, PyObject *const *given, const moq_arg *scale,
                            const moq_arg *second) {
    moq_arg alpha = {0}, reciprocal = {0};
    PyObject *alphas = NULL, *reciprocals = NULL;
    moq_tensor expected;
    moq_err err;
    int failed = -1;
    if (moq_describe_expert_alphas(&scale->view, &second->view, &expected, &err) != MOQ_OK)
        return moq_raise(state, &err);
    alphas = take_result(state, given[0], "out", scale, &expected, &alpha);
    if (alphas)
        reciprocals = take_result(state, given[1], "scale_out", scale, &expected, &reciprocal);
    if (reciprocals) {
        moq_status status =
            moq_run_expert_alphas(&scale->view, &second->view, &alpha.view, &reciprocal.view, &err);
        failed = status == MOQ_OK ? 0 : -1;
        if (failed)
            moq_raise(state, &err);
    }
    return finish_two(state, alphas, &alpha, reciprocals, &reciprocal, failed);
}

static PyObject *expert_alphas(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames) {
    static const moq_signature signature = {
        "expert_alphas", 2, 2, 4, {KW_input_scale, KW_weight_scale_2, KW_out, KW_scale_out}};
    moq_state *state = moq_module_state(module);
    PyObject *values[4], *result = NULL;
    moq_arg scale = {0}, second = {0};
    if (moq_args_parse(state, &signature, args, nargs, kwnames, values) < 0)
        return NULL;
    if (moq_arg_take(state, values[0], "input_scale", &scale) == 0 &&
        moq_arg_take(state, values[1], "weight_scale_2", &second) == 0)
        result = run_alphas(state, values + 2, &scale, &second);
    moq_arg_release(&scale);
    moq_arg_release(&second);
    return result;
}

static PyMethodDef METHODS[] = {
    {"swizzle_block_scales", (PyCFunction)(void (*)(void))swizzle, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.swizzle_block_scales."},
    {"unswizzle_block_scales", (PyCFunction)(void (*)(void))unswizzle,
     METH_FASTCALL | METH_KEYWORDS, "See moqext.ops.unswizzle_block_scales."},
    {"pack_fp4", (PyCFunction)(void (*)(void))pack_fp4, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.pack_fp4."},
    {"unpack_fp4", (PyCFunction)(void (*)(void))unpack_fp4, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.unpack_fp4."},
    {"pack_nvfp4", (PyCFunction)(void (*)(void))pack_nvfp4, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.pack_nvfp4."},
    {"unpack_nvfp4", (PyCFunction)(void (*)(void))unpack_nvfp4, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.unpack_nvfp4."},
    {"requantize_to_max", (PyCFunction)(void (*)(void))requantize, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.requantize_to_max."},
    {"swap_gate_up", (PyCFunction)(void (*)(void))swap_gate_up, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.swap_gate_up."},
    {"expert_input_scale", (PyCFunction)(void (*)(void))expert_input_scale,
     METH_FASTCALL | METH_KEYWORDS, "See moqext.ops.expert_input_scale."},
    {"shared_input_scale", (PyCFunction)(void (*)(void))shared_input_scale,
     METH_FASTCALL | METH_KEYWORDS, "See moqext.ops.shared_input_scale."},
    {"expert_alphas", (PyCFunction)(void (*)(void))expert_alphas, METH_FASTCALL | METH_KEYWORDS,
     "See moqext.ops.expert_alphas."},
    {NULL, NULL, 0, NULL},
};

int moq_add_layout(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
