/* prepare() of `_C.LinearPlan` and `_C.WeightPlan`: the tensors of a checkpoint to those that
 * kernels read, into new tensors or given ones. */
#include "binding/args.h"
#include "binding/boundary.h"
#include "binding/long_call.h"
#include "binding/mapping.h"
#include "binding/py_weight.h"
#include "binding/stream.h"
#include "ops/weight_prepare.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    SOURCE_WEIGHT,
    SOURCE_SCALE,
    SOURCE_SCALE_2,
    SOURCE_INPUT_SCALE,
    SOURCE_PRE_QUANT_SCALE,
    SOURCES
};

typedef struct {
    int count;
    moq_arg *arg;     /* [partitions] */
    moq_tensor *view; /* of the matrix, or of the first expert */
    int64_t *step;    /* to the next expert */
} source_args;

typedef struct {
    const char *text; /* what messages call the layer */
    source_args source[SOURCES];
    int out_count;
    char out_label[MOQ_MAX_PARAMS][32]; /* out["weight"], for messages */
    const char *out_name[MOQ_MAX_PARAMS];
    PyObject *out_object[MOQ_MAX_PARAMS];
    moq_arg out[MOQ_MAX_PARAMS];
} prepare_args;

static const moq_keyword SOURCE_KEYWORD[SOURCES] = {KW_weight, KW_weight_scale, KW_weight_scale_2,
                                                    KW_input_scale, KW_pre_quant_scale};
static const char *const SOURCE_NAME[SOURCES] = {"weight", "weight_scale", "weight_scale_2",
                                                 "input_scale", "pre_quant_scale"};

static const moq_param SOURCE_PARAM[SOURCES] = {MOQ_PARAM_WEIGHT, MOQ_PARAM_WEIGHT_SCALE,
                                                MOQ_PARAM_WEIGHT_SCALE_2, MOQ_PARAM_INPUT_SCALE,
                                                MOQ_PARAM_PRE_QUANT_SCALE};

static void release_prepare(prepare_args *p) {
    for (int s = 0; s < SOURCES; s++) {
        for (int i = 0; i < p->source[s].count; i++)
            moq_arg_release(&p->source[s].arg[i]);
    }
    free(p->source[0].arg);
    free(p->source[0].view);
    free(p->source[0].step);
}

/* Room for as many tensors of each source as there are partitions. */
static int open_prepare(const moq_weight *w, prepare_args *p) {
    size_t parts = (size_t)w->partition_count;
    moq_arg *arg = malloc(SOURCES * parts * sizeof *arg);
    moq_tensor *view = malloc(SOURCES * parts * sizeof *view);
    int64_t *step = malloc(SOURCES * parts * sizeof *step);
    for (size_t s = 0; s < SOURCES; s++)
        p->source[s] = (source_args){0, arg + s * parts, view + s * parts, step + s * parts};
    p->out_count = 0;
    if (arg && view && step)
        return 0;
    p->source[0] = (source_args){0, arg, view, step};
    release_prepare(p);
    PyErr_NoMemory();
    return -1;
}

static moq_dtype source_dtype(const moq_weight *w, int which) {
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    if (which == SOURCE_WEIGHT)
        return e2m1 ? MOQ_DT_E2M1X2 : MOQ_DT_E4M3;
    return which == SOURCE_SCALE && e2m1 ? MOQ_DT_E4M3 : MOQ_DT_NONE;
}

static int take_part(moq_state *state, const moq_weight *w, PyObject *object, int which,
                     source_args *source) {
    moq_arg *arg = &source->arg[source->count];
    moq_err err;
    moq_dtype dtype = source_dtype(w, which);
    if (moq_arg_take_on(state, w->device, object, SOURCE_NAME[which], dtype, dtype == MOQ_DT_NONE,
                        arg) < 0)
        return -1;
    /* Where NumPy has no bfloat16, scales in it arrive as uint16, and powers of two as bytes. */
    if (arg->view.dtype == MOQ_DT_U16)
        arg->view.dtype = MOQ_DT_BF16;
    if (arg->view.dtype == MOQ_DT_U8 && dtype == MOQ_DT_NONE && which == SOURCE_SCALE &&
        w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK)
        arg->view.dtype = MOQ_DT_E8M0;
    int at = source->count++;
    source->view[at] = arg->view;
    if (!w->experts || moq_stack_open(w, SOURCE_PARAM[which], SOURCE_NAME[which], &source->view[at],
                                      &source->step[at], &err) == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* A tensor, or a list or tuple of one tensor per partition. */
static int take_source(moq_state *state, const moq_weight *w, PyObject *object, int which,
                       source_args *source) {
    if (!PyList_Check(object) && !PyTuple_Check(object))
        return take_part(state, w, object, which, source);
    Py_ssize_t count = PySequence_Size(object);
    if (count != w->partition_count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %d tensors, one a partition, got %zd",
                     SOURCE_NAME[which], (int)w->partition_count, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        int status = item ? take_part(state, w, item, which, source) : -1;
        Py_XDECREF(item);
        if (status < 0)
            return -1;
    }
    return 0;
}

static bool has_source(const moq_weight *w, int which) {
    if (which == SOURCE_SCALE_2)
        return w->checkpoint == MOQ_WEIGHT_E2M1;
    return which != SOURCE_PRE_QUANT_SCALE || w->pre_quant_scale;
}

/* Names that mean something for this layer; every other one belongs to another kind of layer. */
static int check_names(const moq_weight *w, PyObject *params) {
    const char *names[SOURCES];
    int count = 0;
    PyObject *key;
    for (int s = 0; s < SOURCES; s++) {
        if (has_source(w, s))
            names[count++] = SOURCE_NAME[s];
    }
    int found = moq_mapping_find_stranger(params, names, count, &key);
    if (found > 0)
        PyErr_Format(PyExc_ValueError, "params: %R does not belong to a linear of %s", key,
                     w->algo);
    Py_XDECREF(key);
    return found == 0 ? 0 : -1;
}

static int take_sources(moq_state *state, const moq_weight *w, PyObject *params, prepare_args *p) {
    if (moq_check_mapping(params, "params") < 0 || check_names(w, params) < 0)
        return -1;
    for (int s = 0; s < SOURCES; s++) {
        PyObject *object = moq_mapping_lookup(params, state->keyword[SOURCE_KEYWORD[s]]);
        int status = !moq_arg_absent(object) ? take_source(state, w, object, s, &p->source[s])
                     : PyErr_Occurred()      ? -1
                                             : 0;
        Py_XDECREF(object);
        if (status < 0)
            return -1;
    }
    if (p->source[SOURCE_WEIGHT].count == 0) {
        PyErr_SetString(PyExc_ValueError, "params: \"weight\" is missing");
        return -1;
    }
    return 0;
}

/* Which of the prepared parameters exist: scales of x only where the checkpoint has them. */
static bool is_wanted(const prepare_args *p, const moq_param_spec *param) {
    int s = param->id == MOQ_PARAM_PRE_QUANT_SCALE ? SOURCE_PRE_QUANT_SCALE : SOURCE_INPUT_SCALE;
    return param->required || p->source[s].count > 0;
}

/* What a result is made like: block scales like those given, if they are where the weight is. */
static const moq_arg *model_for(const prepare_args *p, moq_param id) {
    const moq_arg *weight = &p->source[SOURCE_WEIGHT].arg[0];
    const moq_arg *scale = &p->source[SOURCE_SCALE].arg[0];
    bool like_scale = id == MOQ_PARAM_WEIGHT_SCALE && p->source[SOURCE_SCALE].count &&
                      scale->view.device.kind == weight->view.device.kind;
    return like_scale ? scale : weight;
}

/* A result that holds what one tensor of the checkpoint does and may take its very place. */
static bool is_in_place(const moq_weight *w, moq_param id, const moq_tensor *out,
                        const prepare_args *p, int s) {
    const moq_tensor *in = &p->source[s].arg[0].view;
    bool all = w->weight == w->checkpoint;
    bool same =
        s == SOURCE_WEIGHT
            ? id == MOQ_PARAM_WEIGHT && (all || w->weight == MOQ_WEIGHT_E2M1_SWIZZLED)
            : s == SOURCE_SCALE && id == MOQ_PARAM_WEIGHT_SCALE && all && in->dtype == out->dtype;
    return same && p->source[s].count == 1 && in->data == out->data &&
           moq_tensor_numel(in) == moq_tensor_numel(out) && moq_tensor_is_contiguous(in);
}

/* The output opened last shares memory with no other one, and with no source but in its place. */
static int refuse_overlaps(const moq_weight *w, moq_param id, const prepare_args *p) {
    const moq_arg *out = &p->out[p->out_count - 1];
    for (const moq_arg *other = p->out; other < out; other++) {
        if (moq_arg_refuse_both_written(out, other) < 0)
            return -1;
    }
    for (int s = 0; s < SOURCES; s++) {
        for (int i = 0; i < p->source[s].count; i++) {
            if (!is_in_place(w, id, &out->view, p, s) &&
                moq_arg_refuse_overlap(out, &p->source[s].arg[i]) < 0)
                return -1;
        }
    }
    return 0;
}

/* The next output is `object`, whose reference it takes, with its view in p->out. */
static void add_output(prepare_args *p, const moq_param_spec *wanted, PyObject *object) {
    p->out_object[p->out_count] = object;
    p->out_name[p->out_count++] = wanted->name;
}

/* A new tensor of the source's kind. */
static int make_output(moq_state *state, const moq_param_spec *wanted, prepare_args *p) {
    PyObject *object = moq_arg_new_like(state, model_for(p, wanted->id), wanted->dtype,
                                        wanted->ndim, wanted->shape, &p->out[p->out_count]);
    if (object)
        add_output(p, wanted, object);
    return object ? 0 : -1;
}

/* The tensor of the mapping `out`. */
static int take_output(moq_state *state, const moq_weight *w, PyObject *given,
                       const moq_param_spec *wanted, prepare_args *p) {
    moq_arg *arg = &p->out[p->out_count];
    char *label = p->out_label[p->out_count];
    snprintf(label, sizeof p->out_label[0], "out[\"%s\"]", wanted->name);
    if (moq_arg_take_output(state, given, label, arg) < 0)
        return -1;
    add_output(p, wanted, Py_NewRef(given));
    if (moq_arg_reinterpret(arg, wanted->dtype) < 0 || moq_arg_check_device(w->device, arg) < 0)
        return -1;
    return refuse_overlaps(w, wanted->id, p);
}

/* `out` has what the sources fill and nothing else: what stayed there would be an earlier
 * checkpoint's, and no value of an input_scale means that there is none. */
static int refuse_output(const moq_param_spec *param, bool wanted) {
    if (wanted)
        PyErr_Format(PyExc_ValueError, "out[\"%s\"]: missing%s", param->name,
                     param->required ? "" : ", and params have one");
    else
        PyErr_Format(PyExc_ValueError,
                     "out[\"%s\"]: params have no %s to write there, and the one that is there "
                     "would be used; prepare without out, or without this entry of it",
                     param->name, param->name);
    return -1;
}

/* A tensor that prepare may write, as the mapping `out` has it. */
static int open_given(moq_state *state, const moq_weight *w, PyObject *out,
                      const moq_param_spec *param, prepare_args *p) {
    PyObject *given = moq_mapping_lookup(out, state->keyword[MOQ_PARAM_KEYWORD[param->id]]);
    bool wanted = is_wanted(p, param);
    int status = 0;
    if (!given && PyErr_Occurred())
        return -1;
    if (wanted == moq_arg_absent(given))
        status = refuse_output(param, wanted);
    else if (wanted)
        status = take_output(state, w, given, param, p);
    Py_XDECREF(given);
    return status;
}

static int open_outputs(moq_state *state, const moq_weight *w, PyObject *out, prepare_args *p,
                        moq_params *params) {
    moq_param_spec wanted[MOQ_MAX_PARAMS];
    int count = moq_weight_prepared_params(w, wanted);
    bool fresh = moq_arg_absent(out);
    if (!fresh && (moq_check_mapping(out, "out") < 0 ||
                   moq_mapping_refuse_others(wanted, count, p->text, out, "out") < 0))
        return -1;
    for (int i = 0; i < count; i++) {
        const moq_param_spec *param = &wanted[i];
        int before = p->out_count;
        if (!fresh ? open_given(state, w, out, param, p) < 0
                   : is_wanted(p, param) && make_output(state, param, p) < 0)
            return -1;
        if (p->out_count > before)
            params->of[param->id] = p->out[before].view;
    }
    return 0;
}

/* Device memory to process weights in. */
static int take_prepare_memory(moq_state *state, const moq_weight *w, bool fresh,
                               const moq_arg *weight, moq_arg *out) {
    int64_t bytes = moq_prepare_workspace(w, fresh);
    if (bytes == 0 || weight->exchange)
        return moq_arg_take_memory(state, weight, bytes, out);
    *out = (moq_arg){.name = "workspace"};
    out->object = moq_owned_new(state, MOQ_DT_U8, w->device, 1, &bytes, &out->view);
    return out->object ? 0 : -1;
}

static int prepare_values(moq_state *state, const moq_weight *w, const prepare_args *p,
                          moq_prepare_way way, moq_params *params) {
    moq_source source[SOURCES];
    moq_status status;
    moq_err err;
    const moq_arg *weight = &p->source[SOURCE_WEIGHT].arg[0];
    if (moq_stream_take(NULL, weight, &way.stream) < 0)
        return -1;
    for (int s = 0; s < SOURCES; s++)
        source[s] = (moq_source){.count = p->source[s].count,
                                 .part = p->source[s].view,
                                 .step = w->experts ? p->source[s].step : NULL};
    moq_weight_sources sources = {
        .weight = source[SOURCE_WEIGHT],
        .weight_scale = source[SOURCE_SCALE],
        .weight_scale_2 = source[SOURCE_SCALE_2],
        .input_scale = source[SOURCE_INPUT_SCALE],
        .pre_quant_scale = source[SOURCE_PRE_QUANT_SCALE],
    };
    moq_arg workspace;
    if (take_prepare_memory(state, w, way.fresh, weight, &workspace) < 0)
        return -1;
    way.workspace = workspace.view.data;
    moq_long_call call;
    moq_long_call_begin(&call);
    status = moq_weight_prepare(w, &sources, way, params, &err);
    status = moq_long_call_end(&call, status, &err);
    moq_arg_release(&workspace);
    if (status == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* Hands every output back, filled or not, and gathers them: `out` itself, or a new dict. */
static PyObject *close_outputs(moq_state *state, PyObject *out, prepare_args *p, int status) {
    bool given = !moq_arg_absent(out);
    PyObject *result = status < 0 ? NULL : given ? Py_NewRef(out) : PyDict_New();
    for (int i = 0; i < p->out_count; i++) {
        PyObject *object = moq_arg_finish(state, p->out_object[i], &p->out[i], result ? 0 : -1);
        if (!object || (!given && PyDict_SetItemString(result, p->out_name[i], object) < 0))
            Py_CLEAR(result);
        Py_XDECREF(object);
    }
    return result;
}

static PyObject *prepare_with(moq_state *state, const moq_weight *w, PyObject *sources,
                              PyObject *out, bool only_checks, prepare_args *p) {
    moq_prepare_way way = {.fresh = moq_arg_absent(out), .only_checks = only_checks};
    moq_params params = {0};
    int status = -1;
    if (take_sources(state, w, sources, p) == 0 && open_outputs(state, w, out, p, &params) == 0)
        status = prepare_values(state, w, p, way, &params);
    return close_outputs(state, out, p, status);
}

static const moq_signature PREPARE = {"prepare", 3, 1, 3, {KW_params, KW_out, KW_only_checks}};

PyObject *moq_weight_prepare_call(moq_state *state, const moq_weight *w, const char *text,
                                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *v[3];
    prepare_args p;
    if (moq_args_parse(state, &PREPARE, args, nargs, kwnames, v) < 0)
        return NULL;
    int only_checks = v[2] ? PyObject_IsTrue(v[2]) : 0;
    if (only_checks < 0 || open_prepare(w, &p) < 0)
        return NULL;
    p.text = text;
    PyObject *result = prepare_with(state, w, v[0], v[1], only_checks > 0, &p);
    release_prepare(&p);
    return result;
}
