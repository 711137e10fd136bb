/* The path of a call: see call.h. */
#include "binding/call.h"

#include "binding/args.h"
#include "binding/long_call.h"
#include "binding/mapping.h"
#include "binding/numpy.h"
#include "binding/stream.h"
#include "binding/workspace.h"
#include "cuda/cuda.h"

#include <string.h>

void moq_call_open(moq_call *call, moq_state *state, const moq_plan *plan, PyObject *out,
                   PyObject *stream) {
    call->state = state;
    call->plan = plan;
    call->out = out;
    call->given_stream = stream;
    call->count = 0;
}

void moq_call_release(moq_call *call) {
    for (int i = 0; i < call->count; i++)
        moq_arg_release(&call->in[i]);
}

/* ---- inputs ---- */

int moq_refuse_gradient(moq_state *state, PyObject *object, const char *name) {
    if (PyArray_CheckExact(object))
        return 0;
    PyObject *wants = PyObject_GetAttr(object, state->keyword[KW_requires_grad]);
    if (!wants) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int truth = PyObject_IsTrue(wants);
    Py_DECREF(wants);
    if (truth > 0)
        PyErr_Format(PyExc_RuntimeError,
                     "%s: expected a tensor that needs no gradient; pass %s.detach()", name, name);
    return truth == 0 ? 0 : -1;
}

/* Says what makes the codes that the layer wants. */
static int refuse_values(const moq_layer *layer, const char *got) {
    bool scaled =
        strcmp(layer->x_scheme, "fp8_tensor") == 0 || strcmp(layer->x_scheme, "nvfp4") == 0;
    PyErr_Format(PyExc_TypeError,
                 "x: expected codes of %s, got %s: quantize x%s, by moqext.ops.quantize(x, "
                 "\"%s\"%s), or make the layer without quantized_input",
                 moq_dtype_name(layer->x_dtype), got, scaled ? " with the layer's input_scale" : "",
                 layer->x_scheme, scaled ? ", scale=..." : "");
    return -1;
}

/* Says what to do where x is of another floating-point dtype than the layer. */
static int refuse_x_dtype(const moq_layer *layer, const moq_arg *x) {
    static const char *const WAYS[MOQ_DT_COUNT] = {
        [MOQ_DT_F32] = "x.to(torch.float32) or x.astype(numpy.float32)",
        [MOQ_DT_F16] = "x.to(torch.float16) or x.astype(numpy.float16)",
        [MOQ_DT_BF16] = "x.to(torch.bfloat16), x.astype(ml_dtypes.bfloat16) or to its bits as "
                        "uint16",
    };
    moq_dtype dtype = layer->x_dtype;
    const char *wanted = moq_dtype_name(dtype), *got = moq_dtype_name(x->stored);
    if (x->stored == dtype || !(WAYS[x->stored] || x->stored == MOQ_DT_F64))
        return 0;
    if (!WAYS[dtype])
        return refuse_values(layer, got);
    if (WAYS[x->stored])
        PyErr_Format(PyExc_TypeError,
                     "x: expected %s, got %s: make or load the layer with dtype=\"%s\", or convert "
                     "x, by %s",
                     wanted, got, got, WAYS[dtype]);
    else /* no layer multiplies it */
        PyErr_Format(PyExc_TypeError, "x: expected %s, got %s: convert x, by %s", wanted, got,
                     WAYS[dtype]);
    return -1;
}

int moq_call_take_x(moq_call *call, PyObject *object) {
    const moq_layer *layer = &call->plan->layer;
    moq_arg *x = &call->in[0];
    if (moq_refuse_gradient(call->state, object, "x") < 0 ||
        moq_arg_take(call->state, object, "x", x) < 0)
        return -1;
    call->count = 1;
    if (refuse_x_dtype(layer, x) < 0 || moq_arg_reinterpret(x, layer->x_dtype) < 0)
        return -1;
    return moq_arg_check_device(layer->device, x);
}

static int take_param(moq_call *call, PyObject *object, const moq_param_spec *wanted,
                      moq_tensor *view) {
    moq_arg *arg = &call->in[call->count];
    if (moq_arg_take_kept_on(call->state, call->plan->layer.device, object, wanted->name,
                             wanted->dtype, arg) < 0)
        return -1;
    call->count++;
    *view = arg->view;
    return 0;
}

/* True if a mapping has `count` entries, as far as it says. */
static bool has_entries(PyObject *mapping, Py_ssize_t count) {
    Py_ssize_t size = PyDict_Check(mapping) ? PyDict_Size(mapping) : PyMapping_Size(mapping);
    if (size < 0)
        PyErr_Clear();
    return size == count;
}

int moq_call_take_params(moq_call *call, PyObject *mapping, moq_params *params) {
    const moq_plan *plan = call->plan;
    Py_ssize_t found = 0;
    if (moq_check_mapping(mapping, "params") < 0)
        return -1;
    for (int i = 0; i < plan->param_count; i++) {
        const moq_param_spec *wanted = &plan->param[i];
        PyObject *keyword = call->state->keyword[MOQ_PARAM_KEYWORD[wanted->id]];
        PyObject *object = moq_mapping_lookup(mapping, keyword);
        if (!object && PyErr_Occurred())
            return -1;
        found += object != NULL;
        int status =
            moq_arg_absent(object) ? 0 : take_param(call, object, wanted, &params->of[wanted->id]);
        Py_XDECREF(object);
        if (status < 0)
            return -1;
    }
    return has_entries(mapping, found) ? 0 : moq_mapping_refuse_strangers(plan, mapping, "params");
}

int moq_call_take_other(moq_call *call, PyObject *object, const char *name,
                        const moq_tensor **view) {
    const moq_layer *layer = &call->plan->layer;
    *view = NULL;
    if (moq_arg_absent(object))
        return 0;
    moq_arg *arg = &call->in[call->count];
    if (moq_arg_take_on(call->state, layer->device, object, name, MOQ_DT_NONE, false, arg) < 0)
        return -1;
    call->count++;
    *view = &arg->view;
    return 0;
}

int moq_call_find_stream(moq_call *call) {
    return moq_stream_take(call->given_stream, &call->in[0], &call->stream);
}

/* ---- the output ---- */

PyObject *moq_call_open_output(moq_call *call, int32_t ndim, const int64_t *shape) {
    const moq_layer *layer = &call->plan->layer;
    PyObject *result =
        moq_arg_output(call->state, call->out, &call->in[0], layer->dtype, ndim, shape, &call->y);
    if (!result || moq_arg_absent(call->out))
        return result;
    int status = moq_arg_check_device(layer->device, &call->y);
    for (int i = 1; i < call->count && status == 0; i++) /* moq_arg_output looked at x */
        status = moq_arg_refuse_overlap(&call->y, &call->in[i]);
    return status == 0 ? result : moq_arg_finish(call->state, result, &call->y, status);
}

/* ---- the run ---- */

/* A framework with the exchange API keeps memory of a capture for its replays; others use it again
 * when the call is over. */
static int refuse_capture(const moq_call *call, const moq_job *job) {
    if (job->bytes == 0 || call->y.exchange || call->y.view.device.kind != MOQ_CUDA ||
        !moq_cuda_is_capturing(job->stream))
        return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "stream: is being captured, and the call works in memory that %R does not keep "
                 "for the replays; use tensors of a library with the DLPack exchange API",
                 Py_TYPE(call->y.object));
    return -1;
}

/* True if memory that the call is given, a workspace or a new y, is in the order of another stream.
 * The one that was taken from x's framework is also the one of its memory. */
static int order_memory(const moq_call *call, moq_job *job) {
    if (refuse_capture(call, job) < 0)
        return -1;
    bool needs = job->bytes > 0 || moq_arg_absent(call->out);
    if (!needs || (moq_arg_absent(call->given_stream) && call->y.exchange == call->in[0].exchange))
        return 0;
    if (moq_stream_of_memory(&call->y, job->stream, &job->memory_stream) < 0)
        return -1;
    job->orders = job->memory_stream != job->stream;
    return 0;
}

int moq_call_run(moq_call *call, moq_job *job) {
    moq_workspace workspace;
    moq_err err;
    moq_status status;
    job->stream = call->stream;
    if (order_memory(call, job) < 0 ||
        moq_workspace_take(call->state, &call->y, job, &workspace) < 0)
        return -1;
    job->workspace = workspace.data;
    moq_long_call native;
    moq_long_call_begin(&native);
    status = moq_job_run(job, &err);
    status = moq_long_call_end(&native, status, &err);
    moq_workspace_release(call->state, &workspace);
    if (status != MOQ_OK)
        moq_raise(call->state, &err);
    return status == MOQ_OK ? 0 : -1;
}
