/* `_C.algorithms()`, `_C.cache_algorithms()` and `_C.names()`: the tables of the core, handed to
 * the Python package once, when it is imported. */
#include "binding/state.h"
#include "core/algo.h"
#include "core/names.h"

/* The names by which Python knows the values of each enumeration, in its order. */
static const char *const CODES[] = {NULL, "e4m3", "e2m1", "int4", "int8"};
static const char *const SCALES[] = {"tensor", "rows", "blocks", "groups"};
static const char *const SECOND[] = {NULL, "factor", "parts", "unused"};
static const char *const INPUT_SCALE[] = {NULL, "optional", "expected"};
static const char *const INPUT[] = {"as_is",      "e4m3_tensor", "e4m3_token",
                                    "e4m3_group", "nvfp4",       "int8"};

/* Texts up to the first NULL, `most` at most. */
static PyObject *texts_to_python(const char *const *texts, int most) {
    int count = 0;
    while (count < most && texts[count])
        count++;
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *text = PyUnicode_FromString(texts[i]);
        if (!text || PyTuple_SetItem(tuple, i, text) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *sizes_to_python(const moq_algo_facts *facts) {
    if (facts->groups[0] == 0)
        return PyTuple_New(0);
    return facts->groups[1] ? Py_BuildValue("(ii)", facts->groups[0], facts->groups[1])
                            : Py_BuildValue("(i)", facts->groups[0]);
}

static PyObject *size_or_none(int32_t size) {
    if (size == 0)
        Py_RETURN_NONE;
    return PyLong_FromLong(size);
}

static PyObject *facts_to_python(const moq_algo_facts *facts) {
    bool has_weight = facts->codes != MOQ_STORED_NONE;
    return Py_BuildValue(
        "{s:s,s:N,s:z,s:z,s:z,s:z,s:z,s:N,s:N,s:N,s:N,s:z,s:d,s:z,s:N}", "name", facts->name,
        "aliases", texts_to_python(facts->aliases, MOQ_ALIASES_MAX), "family",
        moq_family_name(facts->family), "codes", CODES[facts->codes], "scales",
        has_weight ? SCALES[facts->scales] : NULL, "scale_dtype",
        has_weight ? moq_dtype_name(facts->scale_dtype) : NULL, "second", SECOND[facts->second],
        "group_size", size_or_none(facts->group), "group_sizes", sizes_to_python(facts),
        "pre_quant_scale", PyBool_FromLong(facts->pre_quant_scale), "low_rank",
        PyBool_FromLong(facts->low_rank), "input_scale", INPUT_SCALE[facts->input_scale],
        "input_max", (double)facts->input_max, "linear", has_weight ? INPUT[facts->input] : NULL,
        "by_token", PyBool_FromLong(facts->by_token));
}

/* Appends a new reference, and takes it; -1 where it is NULL or does not fit. */
static int append(PyObject *list, PyObject *item) {
    int done = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return done;
}

static PyObject *algorithms(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    for (int algo = MOQ_ALGO_NONE + 1; list && algo < MOQ_ALGO_COUNT; algo++) {
        if (append(list, facts_to_python(moq_algo_facts_of((moq_algo)algo))) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *cache_algorithms(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *dict = PyDict_New();
    for (int kv = MOQ_KV_NONE + 1; dict && kv < MOQ_KV_COUNT; kv++) {
        PyObject *has_method = PyBool_FromLong(moq_kv_has_method((moq_kv)kv));
        if (PyDict_SetItemString(dict, moq_kv_name((moq_kv)kv), has_method) < 0)
            Py_CLEAR(dict);
        Py_DECREF(has_method);
    }
    return dict;
}

/* Texts up to the first empty one, `most` at most. */
static PyObject *components_to_python(const moq_text *texts, size_t most) {
    PyObject *list = PyList_New(0), *tuple = NULL;
    for (size_t i = 0; list && i < most && texts[i].size; i++) {
        if (append(list, PyUnicode_FromStringAndSize(texts[i].data, (Py_ssize_t)texts[i].size)) < 0)
            Py_CLEAR(list);
    }
    if (list)
        tuple = PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

static PyObject *fused_to_python(void) {
    PyObject *list = PyList_New(0);
    for (const moq_fused_group *group = moq_fused_groups(); list && group->count; group++) {
        PyObject *pair = Py_BuildValue("(NN)", components_to_python(group->part, group->count),
                                       components_to_python(group->name, MOQ_FUSED_NAMES_MAX));
        if (append(list, pair) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *projections_to_python(void) {
    PyObject *list = PyList_New(0);
    for (const moq_expert_projection *known = moq_expert_projections(); list && known->name.size;
         known++) {
        PyObject *name =
            PyUnicode_FromStringAndSize(known->name.data, (Py_ssize_t)known->name.size);
        PyObject *row = Py_BuildValue("(NsN)", name, known->role, PyBool_FromLong(known->stacks));
        if (append(list, row) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *names(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("{s:N,s:N,s:N,s:s,s:s}", "prefixes",
                         components_to_python(moq_name_prefixes(), SIZE_MAX), "fused",
                         fused_to_python(), "projections", projections_to_python(), "experts_tail",
                         MOQ_EXPERTS_TAIL, "shared_experts_head", MOQ_SHARED_EXPERTS_HEAD);
}

static PyMethodDef METHODS[] = {
    {"algorithms", algorithms, METH_NOARGS, "algorithms() -> list of the facts of each, as a dict"},
    {"cache_algorithms", cache_algorithms, METH_NOARGS,
     "cache_algorithms() -> {name: whether there is a method}"},
    {"names", names, METH_NOARGS, "names() -> prefixes, fused linears and expert projections"},
    {NULL, NULL, 0, NULL},
};

int moq_add_tables(PyObject *module, moq_state *state) {
    (void)state;
    return PyModule_AddFunctions(module, METHODS);
}
