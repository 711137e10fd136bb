/* Mappings of names to tensors: see mapping.h. */
#include "binding/mapping.h"

#include <stdio.h>
#include <string.h>

const moq_keyword MOQ_PARAM_KEYWORD[MOQ_PARAM_PLACES] = {
    [MOQ_PARAM_WEIGHT] = KW_weight,
    [MOQ_PARAM_WEIGHT_SCALE] = KW_weight_scale,
    [MOQ_PARAM_WEIGHT_SCALE_2] = KW_weight_scale_2,
    [MOQ_PARAM_OUTPUT_SCALE] = KW_output_scale,
    [MOQ_PARAM_FOLD_SCALE] = KW_fold_scale,
    [MOQ_PARAM_INPUT_SCALE] = KW_input_scale,
    [MOQ_PARAM_PRE_QUANT_SCALE] = KW_pre_quant_scale,
    [MOQ_PARAM_LORA_A] = KW_lora_a,
    [MOQ_PARAM_LORA_B] = KW_lora_b,
#define OF_WEIGHT(w, place)                                                                        \
    [place + MOQ_PARAM_WEIGHT] = KW_##w##_weight,                                                  \
             [place + MOQ_PARAM_WEIGHT_SCALE] = KW_##w##_weight_scale,                             \
             [place + MOQ_PARAM_WEIGHT_SCALE_2] = KW_##w##_weight_scale_2,                         \
             [place + MOQ_PARAM_OUTPUT_SCALE] = KW_##w##_output_scale,                             \
             [place + MOQ_PARAM_FOLD_SCALE] = KW_##w##_fold_scale,                                 \
             [place + MOQ_PARAM_INPUT_SCALE] = KW_##w##_input_scale,                               \
             [place + MOQ_PARAM_PRE_QUANT_SCALE] = KW_##w##_pre_quant_scale,                       \
             [place + MOQ_PARAM_BIAS] = KW_##w##_bias
    OF_WEIGHT(w13, MOQ_PARAM_OF_W13),
    OF_WEIGHT(w2, MOQ_PARAM_OF_W2),
#undef OF_WEIGHT
};

int moq_check_mapping(PyObject *object, const char *name) {
    if (PyDict_Check(object) || (PyMapping_Check(object) && PyObject_HasAttrString(object, "keys")))
        return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected a mapping of names to tensors, got %R", name,
                 Py_TYPE(object));
    return -1;
}

PyObject *moq_mapping_lookup(PyObject *mapping, PyObject *keyword) {
    if (PyDict_Check(mapping))
        return Py_XNewRef(PyDict_GetItemWithError(mapping, keyword));
    PyObject *value = PyObject_GetItem(mapping, keyword);
    if (!value && PyErr_ExceptionMatches(PyExc_KeyError))
        PyErr_Clear();
    return value;
}

int moq_arg_check_device(moq_device device, const moq_arg *arg) {
    if (arg->view.device.kind == device.kind &&
        (device.kind == MOQ_CPU || arg->view.device.index == device.index))
        return 0;
    char expected[32], got[32];
    PyErr_Format(PyExc_ValueError, "%s: expected a tensor on %s, got one on %s", arg->name,
                 moq_device_text(device, expected, sizeof expected),
                 moq_device_text(arg->view.device, got, sizeof got));
    return -1;
}

/* 1 where `key` is one of the names. */
static int is_among(PyObject *key, const char *const *names, int count) {
    for (int i = 0; i < count && PyUnicode_Check(key); i++) {
        if (PyUnicode_CompareWithASCIIString(key, names[i]) == 0)
            return 1;
    }
    return 0;
}

int moq_mapping_find_stranger(PyObject *mapping, const char *const *names, int count,
                              PyObject **key) {
    PyObject *keys = PyMapping_Keys(mapping);
    Py_ssize_t size = keys ? PyList_Size(keys) : -1;
    *key = NULL;
    for (Py_ssize_t i = 0; i < size && !*key; i++) {
        PyObject *candidate = PyList_GetItem(keys, i);
        if (!is_among(candidate, names, count))
            *key = Py_NewRef(candidate);
    }
    Py_XDECREF(keys);
    return size < 0 ? -1 : *key != NULL;
}

int moq_mapping_refuse_others(const moq_param_spec *params, int count, const char *text,
                              PyObject *mapping, const char *name) {
    const char *names[MOQ_MAX_LAYER_PARAMS];
    char all[400] = "";
    PyObject *key;
    for (int i = 0; i < count; i++) {
        size_t used = strlen(all);
        names[i] = params[i].name;
        snprintf(all + used, sizeof all - used, "%s%s", used ? ", " : "", names[i]);
    }
    int found = moq_mapping_find_stranger(mapping, names, count, &key);
    if (found > 0)
        PyErr_Format(PyExc_ValueError, "%s: %R is no prepared parameter of %s, which has %s%s",
                     name, key, text, all,
                     strcmp(name, "params") == 0 ? "; pass what prepare() returned" : "");
    Py_XDECREF(key);
    return found == 0 ? 0 : -1;
}

int moq_mapping_refuse_strangers(const moq_plan *plan, PyObject *mapping, const char *name) {
    char text[160];
    plan->operation->text(plan->problem, text, sizeof text);
    return moq_mapping_refuse_others(plan->param, plan->param_count, text, mapping, name);
}

/* Reads a taken tensor as the layer does, or releases it with an exception. */
static int fit(moq_device device, moq_dtype dtype, bool host, moq_arg *arg) {
    bool anywhere = host && arg->view.device.kind == MOQ_CPU;
    if ((dtype != MOQ_DT_NONE && moq_arg_reinterpret(arg, dtype) < 0) ||
        (!anywhere && moq_arg_check_device(device, arg) < 0)) {
        moq_arg_release(arg);
        return -1;
    }
    return 0;
}

int moq_arg_take_on(moq_state *state, moq_device device, PyObject *object, const char *name,
                    moq_dtype dtype, bool host, moq_arg *arg) {
    return moq_arg_take(state, object, name, arg) < 0 ? -1 : fit(device, dtype, host, arg);
}

int moq_arg_take_kept_on(moq_state *state, moq_device device, PyObject *object, const char *name,
                         moq_dtype dtype, moq_arg *arg) {
    return moq_arg_take_kept(state, object, name, arg) < 0 ? -1 : fit(device, dtype, false, arg);
}
