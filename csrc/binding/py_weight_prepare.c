/* prepare() of `_C.LinearPlan`, `_C.WeightPlan` and `_C.MoEPlan`: the tensors of a checkpoint to
 * those that kernels read, into new tensors or given ones. */
#include "binding/args.h"
#include "binding/boundary.h"
#include "binding/long_call.h"
#include "binding/mapping.h"
#include "binding/py_tensor.h"
#include "binding/py_weight.h"
#include "binding/stream.h"
#include "ops/bias_prepare.h"
#include "ops/weight_prepare.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    SOURCE_WEIGHT,
    SOURCE_SCALE,
    SOURCE_SCALE_2,
    SOURCE_INPUT_SCALE,
    SOURCE_PRE_QUANT_SCALE,
    SOURCE_LORA_A,
    SOURCE_LORA_B,
    SOURCES
};

static const moq_param SOURCE_PARAM[SOURCES] = {MOQ_PARAM_WEIGHT,          MOQ_PARAM_WEIGHT_SCALE,
                                                MOQ_PARAM_WEIGHT_SCALE_2,  MOQ_PARAM_INPUT_SCALE,
                                                MOQ_PARAM_PRE_QUANT_SCALE, MOQ_PARAM_LORA_A,
                                                MOQ_PARAM_LORA_B};

/* Parameters that the caller may have computed of tensors that are still the checkpoint's. */
static const moq_param COMPUTED[] = {MOQ_PARAM_INPUT_SCALE, MOQ_PARAM_BIAS};
enum { MAX_ORIGINS = sizeof COMPUTED / sizeof *COMPUTED };

/* Outputs of a weight: its parameters and a bias. */
enum { MAX_OUTPUTS = MOQ_MAX_PARAMS + 1 };

typedef struct {
    int args, views;
    moq_arg *arg;     /* [partitions] */
    moq_tensor *view; /* [partitions]: of the matrix, or of the first expert */
    int64_t *step;    /* [partitions]: to the next expert */
} source_args;

/* The arguments of one weight. */
typedef struct {
    const moq_weight *w;
    const moq_prepared_weight *about;
    source_args source[SOURCES];
    bool has_bias;
    moq_arg bias;
    int origins;
    moq_arg origin[MAX_ORIGINS]; /* what was read before: outputs may not lie there */
    int out_count;
    char out_label[MAX_OUTPUTS][32]; /* out["weight"], for messages */
    moq_param out_id[MAX_OUTPUTS];
    PyObject *out_object[MAX_OUTPUTS];
    moq_arg out[MAX_OUTPUTS];
    moq_params params; /* views of the outputs */
} weight_args;

typedef struct {
    const moq_prepared_layer *layer;
    int count;
    weight_args part[MOQ_MAX_WEIGHTS];
} prepare_args;

static const char *name_of(const weight_args *p, moq_param id) {
    return moq_weight_param_name(p->w, id);
}

static void release_weight(weight_args *p) {
    for (int s = 0; s < SOURCES; s++) {
        for (int i = 0; i < p->source[s].args; i++)
            moq_arg_release(&p->source[s].arg[i]);
    }
    if (p->has_bias)
        moq_arg_release(&p->bias);
    for (int i = 0; i < p->origins; i++)
        moq_arg_release(&p->origin[i]);
    free(p->source[0].arg);
    free(p->source[0].view);
    free(p->source[0].step);
}

/* Room for as many tensors of each source as there are partitions. */
static int open_weight(const moq_prepared_weight *about, weight_args *p) {
    size_t parts = (size_t)about->weight->partition_count;
    moq_arg *arg = malloc(SOURCES * parts * sizeof *arg);
    moq_tensor *view = malloc(SOURCES * parts * sizeof *view);
    int64_t *step = malloc(SOURCES * parts * sizeof *step);
    p->w = about->weight;
    p->about = about;
    p->has_bias = false;
    p->origins = 0;
    p->out_count = 0;
    moq_params_clear(&p->params, 0, MOQ_PARAM_PLACES);
    for (size_t s = 0; s < SOURCES; s++)
        p->source[s] = (source_args){0, 0, arg + s * parts, view + s * parts, step + s * parts};
    if (arg && view && step)
        return 0;
    p->source[0] = (source_args){0, 0, arg, view, step};
    release_weight(p);
    PyErr_NoMemory();
    return -1;
}

/* ---- the tensors of the checkpoint ---- */

static moq_dtype source_dtype(const moq_weight *w, int which) {
    if (which == SOURCE_WEIGHT)
        return moq_weight_code_dtype(w);
    bool e2m1 = w->checkpoint == MOQ_WEIGHT_E2M1;
    if (which != SOURCE_SCALE || (!e2m1 && w->checkpoint != MOQ_WEIGHT_E4M3_GROUP))
        return MOQ_DT_NONE;
    return e2m1 && !w->mx_scales ? MOQ_DT_E4M3 : MOQ_DT_E8M0;
}

/* Reads numbers where NumPy has no dtype of theirs: bfloat16 arrives as uint16, powers of two as
 * bytes. Only scales of blocks are stored as powers of two. */
static int read_numbers(moq_arg *arg, bool may_be_powers) {
    if (arg->view.dtype == MOQ_DT_U16)
        arg->view.dtype = MOQ_DT_BF16;
    if (arg->view.dtype == MOQ_DT_U8 && may_be_powers)
        arg->view.dtype = MOQ_DT_E8M0;
    if (arg->view.dtype != MOQ_DT_E8M0 || may_be_powers)
        return 0;
    PyErr_Format(PyExc_TypeError,
                 "%s: expected float32, bfloat16, float16 or float64, got float8_e8m0fnu",
                 arg->name);
    return -1;
}

static int take_part(moq_state *state, weight_args *p, PyObject *object, int which) {
    const moq_weight *w = p->w;
    source_args *source = &p->source[which];
    moq_arg *arg = &source->arg[source->args];
    const char *name = name_of(p, SOURCE_PARAM[which]);
    moq_err err;
    moq_dtype dtype = source_dtype(w, which);
    if (moq_arg_take_on(state, w->device, object, name, dtype, dtype == MOQ_DT_NONE, arg) < 0)
        return -1;
    source->args++;
    if (dtype == MOQ_DT_NONE &&
        read_numbers(arg, which == SOURCE_SCALE && w->checkpoint == MOQ_WEIGHT_E4M3_BLOCK) < 0)
        return -1;
    int at = source->views++;
    source->view[at] = arg->view;
    if (!w->experts || moq_stack_open(w, SOURCE_PARAM[which], name, &source->view[at],
                                      &source->step[at], &err) == MOQ_OK)
        return 0;
    moq_raise(state, &err);
    return -1;
}

/* Separates the rows of a tensor that are by turns of the first and of the second partition. */
static void separate_rows(source_args *source) {
    moq_tensor *first = &source->view[0], *second = &source->view[1];
    first->shape[0] /= 2;
    *second = *first;
    second->data = (char *)first->data + first->stride[0] * (int64_t)moq_dtype_size(first->dtype);
    first->stride[0] *= 2;
    second->stride[0] *= 2;
    source->step[1] = source->step[0];
    source->views = 2;
}

/* Codes, scales of their groups and scales of rows have a row for each row of the weight. */
static bool has_rows(const moq_weight *w, int which, const moq_tensor *view) {
    bool by_row = which == SOURCE_WEIGHT ||
                  (which == SOURCE_SCALE && (w->checkpoint == MOQ_WEIGHT_E2M1 || w->per_row_scale ||
                                             w->checkpoint == MOQ_WEIGHT_E4M3_GROUP));
    return by_row && view->ndim > 0 && view->shape[0] == w->out_features;
}

/* A tensor, or a list or tuple of one tensor per partition. */
static int take_source(moq_state *state, weight_args *p, PyObject *object, int which) {
    source_args *source = &p->source[which];
    if (!PyList_Check(object) && !PyTuple_Check(object)) {
        if (take_part(state, p, object, which) < 0)
            return -1;
        if (p->about->alternates && has_rows(p->w, which, &source->view[0]))
            separate_rows(source);
        return 0;
    }
    Py_ssize_t count = PySequence_Size(object);
    if (count != p->w->partition_count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %d tensors, one a partition, got %zd",
                     name_of(p, SOURCE_PARAM[which]), (int)p->w->partition_count, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        int status = item ? take_part(state, p, item, which) : -1;
        Py_XDECREF(item);
        if (status < 0)
            return -1;
    }
    return 0;
}

static bool has_source(const moq_weight *w, int which) {
    if (which == SOURCE_SCALE_2)
        return (w->checkpoint == MOQ_WEIGHT_E2M1 && !w->mx_scales) || w->unused_scale_2;
    if (which == SOURCE_LORA_A || which == SOURCE_LORA_B)
        return w->rank > 0;
    return which != SOURCE_PRE_QUANT_SCALE || w->pre_quant_scale;
}

/* Names that mean something for this layer; every other one belongs to another kind of layer. */
static int check_names(const prepare_args *args, PyObject *params) {
    const char *names[MOQ_MAX_WEIGHTS * (SOURCES + 1)];
    int count = 0;
    PyObject *key;
    for (int i = 0; i < args->count; i++) {
        const weight_args *p = &args->part[i];
        for (int s = 0; s < SOURCES; s++) {
            if (has_source(p->w, s))
                names[count++] = name_of(p, SOURCE_PARAM[s]);
        }
        if (p->about->bias)
            names[count++] = name_of(p, MOQ_PARAM_BIAS);
    }
    int found = moq_mapping_find_stranger(params, names, count, &key);
    if (found > 0)
        PyErr_Format(PyExc_ValueError, "params: %R does not belong to %s of %s", key,
                     args->count > 1 ? "experts" : "a linear", args->part[0].w->algo);
    Py_XDECREF(key);
    return found == 0 ? 0 : -1;
}

/* The tensor of a parameter, NULL where it is absent, which may be an exception. */
static PyObject *find_source(moq_state *state, const weight_args *p, PyObject *params,
                             moq_param id) {
    moq_keyword keyword = MOQ_PARAM_KEYWORD[p->w->place + (int)id];
    PyObject *object = moq_mapping_lookup(params, state->keyword[keyword]);
    if (object && moq_arg_absent(object))
        Py_CLEAR(object);
    return object;
}

static int take_bias(moq_state *state, PyObject *params, weight_args *p) {
    PyObject *object = find_source(state, p, params, MOQ_PARAM_BIAS);
    if (!object)
        return PyErr_Occurred() ? -1 : 0;
    int status = moq_arg_take_on(state, p->w->device, object, name_of(p, MOQ_PARAM_BIAS),
                                 MOQ_DT_NONE, true, &p->bias);
    p->has_bias = status == 0;
    if (p->has_bias)
        status = read_numbers(&p->bias, false);
    Py_DECREF(object);
    return status;
}

static int take_sources(moq_state *state, PyObject *params, weight_args *p) {
    for (int s = 0; s < SOURCES; s++) {
        PyObject *object =
            has_source(p->w, s) ? find_source(state, p, params, SOURCE_PARAM[s]) : NULL;
        int status = object ? take_source(state, p, object, s) : PyErr_Occurred() ? -1 : 0;
        Py_XDECREF(object);
        if (status < 0)
            return -1;
    }
    if (p->source[SOURCE_WEIGHT].args == 0) {
        PyErr_Format(PyExc_ValueError, "params: \"%s\" is missing", name_of(p, MOQ_PARAM_WEIGHT));
        return -1;
    }
    return p->about->bias ? take_bias(state, params, p) : 0;
}

static int take_origins(moq_state *state, PyObject *origins, weight_args *p) {
    if (moq_arg_absent(origins))
        return 0;
    for (int i = 0; i < MAX_ORIGINS; i++) {
        PyObject *object = find_source(state, p, origins, COMPUTED[i]);
        int status =
            object ? moq_arg_take(state, object, name_of(p, COMPUTED[i]), &p->origin[p->origins])
                   : 0;
        p->origins += object && status == 0;
        Py_XDECREF(object);
        if (status < 0 || PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* ---- the prepared tensors ---- */

/* Tells whether a prepared parameter exists: scales of x only where the checkpoint has them. */
static bool is_wanted(const weight_args *p, const moq_param_spec *param) {
    if (param->id == MOQ_PARAM_BIAS)
        return p->has_bias;
    int s = param->id == MOQ_PARAM_PRE_QUANT_SCALE ? SOURCE_PRE_QUANT_SCALE : SOURCE_INPUT_SCALE;
    return param->required || p->source[s].args > 0;
}

/* The tensor that a result is made like: block scales like those given, if they are where the
 * weight is. */
static const moq_arg *model_for(const weight_args *p, moq_param id) {
    const moq_arg *weight = &p->source[SOURCE_WEIGHT].arg[0];
    const moq_arg *scale = &p->source[SOURCE_SCALE].arg[0];
    bool like_scale = id == MOQ_PARAM_WEIGHT_SCALE && p->source[SOURCE_SCALE].args &&
                      scale->view.device.kind == weight->view.device.kind;
    return like_scale ? scale : weight;
}

/* A result that holds what one tensor of the checkpoint does and may take its very place. */
static bool is_in_place(const weight_args *p, moq_param id, const moq_tensor *out, int s) {
    const moq_weight *w = p->w;
    const moq_tensor *in = &p->source[s].arg[0].view;
    bool all = w->weight == w->checkpoint && !p->about->alternates;
    bool same =
        s == SOURCE_WEIGHT
            ? id == MOQ_PARAM_WEIGHT && (all || w->weight == MOQ_WEIGHT_E2M1_SWIZZLED)
            : s == SOURCE_SCALE && id == MOQ_PARAM_WEIGHT_SCALE && all && in->dtype == out->dtype;
    return same && p->source[s].args == 1 && in->data == out->data &&
           moq_tensor_numel(in) == moq_tensor_numel(out) && moq_tensor_is_contiguous(in);
}

/* An output of weight `of` shares no memory with the sources of weight `p`, but in its place. */
static int refuse_sources(const weight_args *of, moq_param id, const moq_arg *out,
                          const weight_args *p) {
    for (int s = 0; s < SOURCES; s++) {
        for (int i = 0; i < p->source[s].args; i++) {
            bool in_place = of == p && is_in_place(p, id, &out->view, s);
            if (!in_place && moq_arg_refuse_overlap(out, &p->source[s].arg[i]) < 0)
                return -1;
        }
    }
    for (int i = 0; i < p->origins; i++) {
        if (moq_arg_refuse_overlap(out, &p->origin[i]) < 0)
            return -1;
    }
    return p->has_bias ? moq_arg_refuse_overlap(out, &p->bias) : 0;
}

/* The output opened last shares memory with no other one, and with no source but in its place. */
static int refuse_overlaps(const prepare_args *args, const weight_args *of, moq_param id) {
    const moq_arg *out = &of->out[of->out_count - 1];
    for (int i = 0; i < args->count; i++) {
        const weight_args *p = &args->part[i];
        for (const moq_arg *other = p->out; other < p->out + p->out_count; other++) {
            if (other != out && moq_arg_refuse_both_written(out, other) < 0)
                return -1;
        }
        if (refuse_sources(of, id, out, p) < 0)
            return -1;
    }
    return 0;
}

/* The next output is `object`, whose reference it takes, with its view in p->out. */
static void add_output(weight_args *p, moq_param id, PyObject *object) {
    p->out_object[p->out_count] = object;
    p->out_id[p->out_count++] = id;
}

/* A new tensor of the source's kind. */
static int make_output(moq_state *state, const moq_param_spec *wanted, weight_args *p) {
    PyObject *object = moq_arg_new_like(state, model_for(p, wanted->id), wanted->dtype,
                                        wanted->ndim, wanted->shape, &p->out[p->out_count]);
    if (object)
        add_output(p, wanted->id, object);
    return object ? 0 : -1;
}

/* The tensor of the mapping `out`. */
static int take_output(moq_state *state, const prepare_args *args, PyObject *given,
                       const moq_param_spec *wanted, weight_args *p) {
    moq_arg *arg = &p->out[p->out_count];
    char *label = p->out_label[p->out_count];
    snprintf(label, sizeof p->out_label[0], "out[\"%s\"]", name_of(p, wanted->id));
    if (moq_arg_take_output(state, given, label, arg) < 0)
        return -1;
    add_output(p, wanted->id, Py_NewRef(given));
    if (moq_arg_reinterpret(arg, wanted->dtype) < 0 || moq_arg_check_device(p->w->device, arg) < 0)
        return -1;
    return refuse_overlaps(args, p, wanted->id);
}

/* `out` has what the sources fill and nothing else: what stayed there would be an earlier
 * checkpoint's, and no value of an input_scale means that there is none. */
static int refuse_output(const weight_args *p, const moq_param_spec *param, bool wanted) {
    const char *name = name_of(p, param->id);
    if (wanted)
        PyErr_Format(PyExc_ValueError, "out[\"%s\"]: missing%s", name,
                     param->required ? "" : ", and params have one");
    else
        PyErr_Format(PyExc_ValueError,
                     "out[\"%s\"]: params have no %s to write there, and the one that is there "
                     "would be used; prepare without out, or without this entry of it",
                     name, name);
    return -1;
}

/* A tensor that prepare may write, as the mapping `out` has it. */
static int open_given(moq_state *state, const prepare_args *args, PyObject *out,
                      const moq_param_spec *param, weight_args *p) {
    PyObject *given = find_source(state, p, out, param->id);
    bool wanted = is_wanted(p, param);
    int status = 0;
    if (!given && PyErr_Occurred())
        return -1;
    if (wanted != (given != NULL))
        status = refuse_output(p, param, wanted);
    else if (wanted)
        status = take_output(state, args, given, param, p);
    Py_XDECREF(given);
    return status;
}

/* The prepared parameters of a weight, as it knows them itself, and its bias. */
static int find_wanted(const weight_args *p, moq_param_spec *wanted) {
    int count = moq_weight_prepared_params(p->w, wanted);
    if (p->about->bias)
        wanted[count++] = (moq_param_spec){.id = MOQ_PARAM_BIAS,
                                           .name = moq_param_name(0, MOQ_PARAM_BIAS),
                                           .dtype = MOQ_DT_F32,
                                           .ndim = 2,
                                           .shape = {p->w->experts, p->w->out_features}};
    return count;
}

static int open_outputs(moq_state *state, const prepare_args *args, PyObject *out, weight_args *p) {
    moq_param_spec wanted[MAX_OUTPUTS];
    int count = find_wanted(p, wanted);
    for (int i = 0; i < count; i++) {
        const moq_param_spec *param = &wanted[i];
        int before = p->out_count;
        if (!moq_arg_absent(out) ? open_given(state, args, out, param, p) < 0
                                 : is_wanted(p, param) && make_output(state, param, p) < 0)
            return -1;
        if (p->out_count > before)
            p->params.of[param->id] = p->out[before].view;
    }
    return 0;
}

/* Refuses what is no mapping of prepared parameters. */
static int check_out(const prepare_args *args, PyObject *out) {
    moq_param_spec wanted[MOQ_MAX_WEIGHTS * MAX_OUTPUTS];
    int count = 0;
    if (moq_arg_absent(out))
        return 0;
    for (int i = 0; i < args->count; i++) {
        const weight_args *p = &args->part[i];
        int own = find_wanted(p, wanted + count);
        for (int j = 0; j < own; j++, count++)
            wanted[count].name = name_of(p, wanted[count].id);
    }
    if (moq_check_mapping(out, "out") < 0)
        return -1;
    return moq_mapping_refuse_others(wanted, count, args->layer->text, out, "out");
}

/* ---- values ---- */

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

static moq_weight_sources sources_of(const weight_args *p) {
    moq_source source[SOURCES];
    for (int s = 0; s < SOURCES; s++)
        source[s] = (moq_source){.count = p->source[s].views,
                                 .part = p->source[s].view,
                                 .step = p->w->experts ? p->source[s].step : NULL};
    return (moq_weight_sources){
        .weight = source[SOURCE_WEIGHT],
        .weight_scale = source[SOURCE_SCALE],
        .weight_scale_2 = source[SOURCE_SCALE_2],
        .input_scale = source[SOURCE_INPUT_SCALE],
        .pre_quant_scale = source[SOURCE_PRE_QUANT_SCALE],
        .lora_a = source[SOURCE_LORA_A],
        .lora_b = source[SOURCE_LORA_B],
    };
}

static moq_status prepare_bias(const weight_args *p, moq_prepare_mode mode, moq_err *err) {
    moq_param_spec wanted[MAX_OUTPUTS];
    int count = find_wanted(p, wanted);
    MOQ_TRY(moq_check_params(wanted + count - 1, 1, &p->params, "out", err));
    return moq_bias_prepare(p->w, &p->bias.view, mode, &p->params.of[MOQ_PARAM_BIAS], err);
}

/* Checks or writes one weight, without the GIL. */
static int prepare_values(moq_state *state, weight_args *p, moq_prepare_mode mode) {
    moq_weight_sources sources = sources_of(p);
    const moq_arg *weight = &p->source[SOURCE_WEIGHT].arg[0];
    moq_arg workspace;
    moq_status status;
    moq_err err;
    if (moq_stream_take(NULL, weight, &mode.stream) < 0 ||
        take_prepare_memory(state, p->w, mode.fresh, weight, &workspace) < 0)
        return -1;
    mode.workspace = workspace.view.data;
    moq_long_call call;
    moq_long_call_begin(&call);
    status = moq_weight_prepare(p->w, &sources, mode, &p->params, &err);
    if (status == MOQ_OK && p->has_bias)
        status = prepare_bias(p, mode, &err);
    status = moq_long_call_end(&call, status, &err);
    moq_arg_release(&workspace);
    if (status != MOQ_OK)
        moq_raise(state, &err);
    return status == MOQ_OK ? 0 : -1;
}

static int prepare_all(moq_state *state, prepare_args *args, bool fresh) {
    moq_prepare_mode mode = {.fresh = fresh};
    bool given = args->count > 1 && !fresh;
    for (int round = given ? 0 : 1; round < 2; round++) {
        mode.only_checks = round == 0;
        mode.checked = given && round == 1;
        for (int i = 0; i < args->count; i++) {
            if (prepare_values(state, &args->part[i], mode) < 0)
                return -1;
        }
    }
    return 0;
}

/* ---- the call ---- */

/* Hands every output back, filled or not, and gathers them: `out` itself, or a new dict. */
static PyObject *close_outputs(moq_state *state, PyObject *out, prepare_args *args, int status) {
    bool given = !moq_arg_absent(out);
    PyObject *result = status < 0 ? NULL : given ? Py_NewRef(out) : PyDict_New();
    for (int w = 0; w < args->count; w++) {
        weight_args *p = &args->part[w];
        for (int i = 0; i < p->out_count; i++) {
            PyObject *object = moq_arg_finish(state, p->out_object[i], &p->out[i], result ? 0 : -1);
            if (!object ||
                (!given && PyDict_SetItemString(result, name_of(p, p->out_id[i]), object) < 0))
                Py_CLEAR(result);
            Py_XDECREF(object);
        }
    }
    return result;
}

static int take_all(moq_state *state, PyObject *params, PyObject *out, PyObject *origins,
                    prepare_args *args) {
    if (moq_check_mapping(params, "params") < 0 || check_names(args, params) < 0)
        return -1;
    for (int i = 0; i < args->count; i++) {
        if (take_sources(state, params, &args->part[i]) < 0 ||
            take_origins(state, origins, &args->part[i]) < 0)
            return -1;
    }
    if (check_out(args, out) < 0)
        return -1;
    for (int i = 0; i < args->count; i++) {
        if (open_outputs(state, args, out, &args->part[i]) < 0)
            return -1;
    }
    return prepare_all(state, args, moq_arg_absent(out));
}

static const moq_signature PREPARE = {"prepare", 3, 1, 3, {KW_params, KW_out, KW_origins}};

PyObject *moq_weight_prepare_call(moq_state *state, const moq_prepared_layer *layer,
                                  PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *v[3], *result = NULL;
    if (moq_args_parse(state, &PREPARE, args, nargs, kwnames, v) < 0)
        return NULL;
    prepare_args *p = malloc(sizeof *p);
    if (!p)
        return PyErr_NoMemory();
    p->layer = layer;
    for (p->count = 0; p->count < layer->count; p->count++) {
        if (open_weight(&layer->weight[p->count], &p->part[p->count]) < 0)
            break;
    }
    if (p->count == layer->count)
        result = close_outputs(state, v[1], p, take_all(state, v[0], v[1], v[2], p));
    for (int i = 0; i < p->count; i++)
        release_weight(&p->part[i]);
    free(p);
    return result;
}
