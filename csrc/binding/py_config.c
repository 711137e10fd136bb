/* `_C.config_parse`, `_C.config_detect`, `_C.glob_match` and the type `_C.Config`: a configuration
 * that was read, and its answers about modules. `moqext.QuantConfig` is its public face. */
#include "binding/args.h"
#include "binding/py_value.h"
#include "binding/state.h"
#include "core/exclude_vllm.h"
#include "core/resolve.h"

#include <string.h>

/* The memory that a document may take: a list of a million names fits, a bomb does not. */
#define ARENA_LIMIT ((size_t)1 << 30)

typedef struct {
    PyObject_HEAD
    moq_arena arena;
    moq_config config;
    moq_resolver *resolver;
    moq_vllm_exclusion *vllm; /* compiled when first asked for */
} config_object;

/* Texts borrowed from a sequence of str, for the length of a call. */
typedef struct {
    PyObject *owner;
    moq_text *text;
    size_t count;
} text_list;

static int borrow_text(PyObject *object, const char *name, moq_text *out) {
    Py_ssize_t size;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a str, got %R", name, Py_TYPE(object));
        return -1;
    }
    out->data = PyUnicode_AsUTF8AndSize(object, &size);
    out->size = (size_t)size;
    return out->data ? 0 : -1;
}

static void release_texts(text_list *list) {
    Py_CLEAR(list->owner);
    PyMem_Free(list->text);
    list->text = NULL;
}

static int borrow_texts(PyObject *object, const char *name, text_list *out) {
    *out = (text_list){NULL, NULL, 0};
    if (moq_arg_absent(object))
        return 0;
    if (PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a sequence of str, got a str", name);
        return -1;
    }
    out->owner = PySequence_Tuple(object);
    if (!out->owner)
        return -1;
    const Py_ssize_t count = PyTuple_Size(out->owner);
    out->text = PyMem_Calloc((size_t)count + 1, sizeof *out->text);
    if (!out->text)
        PyErr_NoMemory();
    for (; out->text && out->count < (size_t)count; out->count++) {
        PyObject *item = PyTuple_GetItem(out->owner, (Py_ssize_t)out->count);
        if (borrow_text(item, name, &out->text[out->count]) < 0) {
            release_texts(out);
            return -1;
        }
    }
    return out->text ? 0 : -1;
}

/* ------------------------------------------------------------------------------------ reading */

typedef struct {
    moq_state *state;
    config_object *object;
    moq_document *documents;
} reader;

/* One (file, root, mapping) triple. */
static int read_document(reader *r, PyObject *triple, moq_document *out) {
    moq_text file, root;
    if (!PyTuple_Check(triple) || PyTuple_Size(triple) != 3) {
        PyErr_SetString(PyExc_TypeError, "documents: expected tuples (file, root, mapping)");
        return -1;
    }
    if (moq_text_from_python(r->state, &r->object->arena, PyTuple_GetItem(triple, 0), "file",
                             &file) < 0 ||
        moq_text_from_python(r->state, &r->object->arena, PyTuple_GetItem(triple, 1), "root",
                             &root) < 0)
        return -1;
    /* Text in an arena is followed by a zero byte, as memory from there is zeroed. */
    *out = (moq_document){.file = file.data, .root = root.data};
    const moq_path path = {.key = root, .file = file.data};
    return moq_value_from_python(r->state, &r->object->arena, PyTuple_GetItem(triple, 2), &path,
                                 &out->value);
}

static int read_documents(reader *r, PyObject *tuple) {
    const Py_ssize_t count = PyTuple_Size(tuple);
    moq_err err;
    void *memory;
    if (moq_arena_take(&r->object->arena, (size_t)count, sizeof(moq_document), &memory, &err)) {
        moq_raise(r->state, &err);
        return -1;
    }
    moq_document *documents = memory;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_document(r, PyTuple_GetItem(tuple, i), &documents[i]) < 0)
            return -1;
    }
    config_object *self = r->object;
    moq_status status;
    Py_BEGIN_ALLOW_THREADS
    status = moq_config_read(&self->arena, documents, (size_t)count, &self->config, &err);
    if (status == MOQ_OK)
        status = moq_resolver_build(&self->arena, &self->config, &self->resolver, &err);
    Py_END_ALLOW_THREADS
    if (status == MOQ_OK)
        return 0;
    moq_raise(r->state, &err);
    return -1;
}

static PyObject *config_parse(PyObject *module, PyObject *documents) {
    moq_state *state = moq_module_state(module);
    PyTypeObject *type = (PyTypeObject *)state->config_type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *tuple = PySequence_Tuple(documents);
    config_object *self = tuple ? (config_object *)allocate(type, 0) : NULL;
    if (self) {
        moq_arena_setup(&self->arena, ARENA_LIMIT);
        reader r = {.state = state, .object = self};
        if (read_documents(&r, tuple) < 0)
            Py_CLEAR(self);
    }
    Py_XDECREF(tuple);
    return (PyObject *)self;
}

static void destroy(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    moq_arena_release(&((config_object *)self)->arena);
    release(self);
    Py_DECREF(type);
}

static PyObject *config_detect(PyObject *module, PyObject *mapping) {
    moq_state *state = moq_module_state(module);
    const moq_path path = {.key = MOQ_TEXT("$"), .file = ""};
    moq_arena arena;
    moq_value value;
    PyObject *result = NULL;
    moq_arena_setup(&arena, ARENA_LIMIT);
    if (moq_value_from_python(state, &arena, mapping, &path, &value) == 0)
        result = Py_BuildValue("z", moq_family_name(moq_config_detect(&value)));
    moq_arena_release(&arena);
    return result;
}

/* ------------------------------------------------------------------------------------- fields */

static int set_item(PyObject *dict, const char *key, PyObject *value) {
    int done = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return done;
}

static PyObject *text_list_to_python(const moq_text *texts, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *text = moq_text_to_python(texts[i]);
        if (!text || PyList_SetItem(list, (Py_ssize_t)i, text) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *group_to_python(int64_t size) {
    if (size == 0)
        Py_RETURN_NONE;
    return PyLong_FromLongLong(size);
}

static PyObject *flag_to_python(moq_flag flag) {
    if (flag == MOQ_UNSAID)
        Py_RETURN_NONE;
    return PyBool_FromLong(flag == MOQ_YES);
}

/* {name: (algorithm, group size)} in the order of the file. */
static PyObject *layers_to_python(const moq_config *config) {
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < config->layer_count; i++) {
        const moq_layer_entry *entry = &config->layers[i];
        PyObject *name = moq_text_to_python(entry->name);
        PyObject *pair =
            Py_BuildValue("zN", moq_algo_name(entry->algo), group_to_python(entry->group_size));
        if (!name || !pair || PyDict_SetItem(dict, name, pair) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(name);
        Py_XDECREF(pair);
    }
    return dict;
}

/* [(field, chosen, other, chosen_file, other_file)]. */
static PyObject *conflicts_to_python(const moq_config *config) {
    PyObject *list = PyList_New((Py_ssize_t)config->conflict_count);
    for (size_t i = 0; list && i < config->conflict_count; i++) {
        const moq_conflict *conflict = &config->conflicts[i];
        PyObject *row = Py_BuildValue(
            "NNNss", moq_text_to_python(conflict->field), moq_text_to_python(conflict->chosen),
            moq_text_to_python(conflict->other), conflict->chosen_file, conflict->other_file);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *config_fields(PyObject *object, PyObject *unused) {
    (void)unused;
    const moq_config *config = &((config_object *)object)->config;
    PyObject *dict = PyDict_New();
    if (!dict)
        return NULL;
    if (set_item(dict, "quant_algo", Py_BuildValue("z", moq_algo_name(config->algo))) < 0 ||
        set_item(dict, "kv_cache_quant_algo", Py_BuildValue("z", moq_kv_name(config->kv))) < 0 ||
        set_item(dict, "moe_quant_algo", Py_BuildValue("z", moq_algo_name(config->moe_algo))) < 0 ||
        set_item(dict, "native_algo", Py_BuildValue("z", moq_algo_name(config->native_algo))) < 0 ||
        set_item(dict, "group_size", group_to_python(config->group_size)) < 0 ||
        set_item(dict, "has_zero_point", flag_to_python(config->has_zero_point)) < 0 ||
        set_item(dict, "pre_quant_scale", flag_to_python(config->pre_quant_scale)) < 0 ||
        set_item(dict, "exclude_modules",
                 text_list_to_python(config->exclude, config->exclude_count)) < 0 ||
        set_item(dict, "quantized_layers", layers_to_python(config)) < 0 ||
        set_item(dict, "quant_method", moq_text_to_python(config->quant_method)) < 0 ||
        set_item(dict, "producer_name", moq_text_to_python(config->producer_name)) < 0 ||
        set_item(dict, "producer_version", moq_text_to_python(config->producer_version)) < 0 ||
        set_item(dict, "conflicts", conflicts_to_python(config)) < 0 ||
        set_item(dict, "notes", text_list_to_python(config->notes, config->note_count)) < 0)
        Py_CLEAR(dict);
    return dict;
}

/* ------------------------------------------------------------------------------------ answers */

static moq_state *state_of(PyObject *object) {
    return (moq_state *)PyType_GetModuleState(Py_TYPE(object));
}

static PyObject *rule_to_python(const moq_layer_quant *quant) {
    const char *list = quant->rule == MOQ_RULE_LAYERS ? "quantized_layers" : "exclude_modules";
    switch (quant->rule) {
    case MOQ_RULE_CONFIG:
        return PyUnicode_FromString("quant_algo");
    case MOQ_RULE_UNLISTED:
        return PyUnicode_FromString("quantized_layers: not listed");
    case MOQ_RULE_NATIVE:
        return PyUnicode_FromString("quant_method: fp8");
    case MOQ_RULE_LAYERS:
    case MOQ_RULE_EXCLUDED:
        break;
    }
    PyObject *entry = moq_text_to_python(quant->entry);
    PyObject *text = entry ? PyUnicode_FromFormat("%s: %U", list, entry) : NULL;
    Py_XDECREF(entry);
    return text;
}

static PyObject *config_layer_quant(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames) {
    static const moq_signature SIGNATURE = {"layer_quant", 2, 1, 2, {KW_module, KW_shards}};
    moq_state *state = state_of(object);
    const config_object *self = (const config_object *)object;
    PyObject *values[2];
    moq_text module;
    text_list parts;
    moq_layer_quant quant;
    moq_err err;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        borrow_text(values[0], "module", &module) < 0 ||
        borrow_texts(values[1], "shards", &parts) < 0)
        return NULL;
    moq_status status =
        moq_resolve_layer(self->resolver, module, parts.text, parts.count, &quant, &err);
    release_texts(&parts);
    if (status != MOQ_OK)
        return moq_raise(state, &err);
    return Py_BuildValue("zNN", moq_algo_name(quant.algo), group_to_python(quant.group_size),
                         rule_to_python(&quant));
}

/* The parts a packed_modules_mapping gives for the module's last component; none is fine. */
static int borrow_packed(PyObject *mapping, moq_text module, text_list *out) {
    const moq_text last = moq_text_last_component(module);
    *out = (text_list){NULL, NULL, 0};
    if (moq_arg_absent(mapping))
        return 0;
    PyObject *key = PyUnicode_FromStringAndSize(last.data, (Py_ssize_t)last.size);
    PyObject *parts = key ? PyObject_GetItem(mapping, key) : NULL;
    Py_XDECREF(key);
    if (!parts) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int done = borrow_texts(parts, "packed_modules_mapping", out);
    Py_DECREF(parts);
    return done;
}

static moq_status excluded_by_vllm(config_object *self, moq_text module, const text_list *parts,
                                   bool *out, moq_err *err) {
    const moq_config *config = &self->config;
    if (module.size == 0 || module.size >= MOQ_NAME_MAX)
        return moq_fail_of(err, MOQ_ERR_VALUE, "module",
                           "expected a name of 1 to %d bytes, got one of %zu", MOQ_NAME_MAX - 1,
                           module.size);
    if (!self->vllm)
        MOQ_TRY(moq_vllm_exclusion_compile(&self->arena, config->exclude, config->exclude_count,
                                           &self->vllm, err));
    return moq_vllm_exclusion_find(self->vllm, module, parts->text, parts->count,
                                   config->exclude_path, out, err);
}

static PyObject *config_is_excluded(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames) {
    static const moq_signature SIGNATURE = {
        "is_excluded", 3, 1, 3, {KW_module, KW_packed_modules_mapping, KW_semantics}};
    moq_state *state = state_of(object);
    config_object *self = (config_object *)object;
    PyObject *values[3];
    moq_text module, semantics = MOQ_TEXT("modelopt");
    text_list parts;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        borrow_text(values[0], "module", &module) < 0 ||
        (values[2] && borrow_text(values[2], "semantics", &semantics) < 0))
        return NULL;
    const bool vllm = moq_text_equal(semantics, MOQ_TEXT("vllm"));
    if (!vllm && !moq_text_equal(semantics, MOQ_TEXT("modelopt"))) {
        PyErr_Format(PyExc_ValueError, "semantics: expected 'modelopt' or 'vllm', got %R",
                     values[2]);
        return NULL;
    }
    if (borrow_packed(values[1], module, &parts) < 0)
        return NULL;
    bool excluded = false;
    moq_err err;
    moq_status status = vllm ? excluded_by_vllm(self, module, &parts, &excluded, &err)
                             : moq_resolve_excluded(self->resolver, module, parts.text, parts.count,
                                                    &excluded, &err);
    release_texts(&parts);
    return status == MOQ_OK ? PyBool_FromLong(excluded) : moq_raise(state, &err);
}

static PyObject *glob_match(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames) {
    static const moq_signature SIGNATURE = {
        "glob_match", 3, 2, 3, {KW_pattern, KW_name, KW_fnmatch}};
    moq_state *state = moq_module_state(module);
    PyObject *values[3];
    moq_text pattern, name;
    if (moq_args_parse(state, &SIGNATURE, args, nargs, kwnames, values) < 0 ||
        borrow_text(values[0], "pattern", &pattern) < 0 ||
        borrow_text(values[1], "name", &name) < 0)
        return NULL;
    const int fnmatch = values[2] ? PyObject_IsTrue(values[2]) : 0;
    if (fnmatch < 0)
        return NULL;
    moq_arena arena;
    moq_glob glob;
    moq_err err;
    moq_arena_setup(&arena, ARENA_LIMIT);
    const moq_glob_rules rules = fnmatch ? MOQ_GLOB_FNMATCH : MOQ_GLOB_STAR;
    moq_status status = moq_glob_compile(&arena, pattern, rules, &glob, &err);
    const bool matches = status == MOQ_OK && moq_glob_match(&glob, name);
    moq_arena_release(&arena);
    return status == MOQ_OK ? PyBool_FromLong(matches) : moq_raise(state, &err);
}

/* --------------------------------------------------------------------------------- the module */

static PyMethodDef CONFIG_METHODS[] = {
    {"fields", config_fields, METH_NOARGS, "fields() -> dict: everything that was read"},
    {"layer_quant", (PyCFunction)(void (*)(void))config_layer_quant, METH_FASTCALL | METH_KEYWORDS,
     "layer_quant(module, shards=()) -> (quant_algo, group_size, rule)"},
    {"is_excluded", (PyCFunction)(void (*)(void))config_is_excluded, METH_FASTCALL | METH_KEYWORDS,
     "is_excluded(module, packed_modules_mapping=None, semantics='modelopt') -> bool"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot CONFIG_SLOTS[] = {
    {Py_tp_doc, "A configuration that was read; use moqext.QuantConfig."},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, CONFIG_METHODS},
    {0, NULL},
};

static PyType_Spec CONFIG_SPEC = {
    .name = "moqext._C.Config",
    .basicsize = sizeof(config_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = CONFIG_SLOTS,
};

static PyMethodDef METHODS[] = {
    {"config_parse", config_parse, METH_O,
     "config_parse(documents) -> Config, from (file, root, mapping) in order of precedence"},
    {"config_detect", config_detect, METH_O, "config_detect(mapping) -> str | None"},
    {"glob_match", (PyCFunction)(void (*)(void))glob_match, METH_FASTCALL | METH_KEYWORDS,
     "glob_match(pattern, name, fnmatch=False) -> bool"},
    {NULL, NULL, 0, NULL},
};

int moq_add_config(PyObject *module, moq_state *state) {
    state->config_type = PyType_FromModuleAndSpec(module, &CONFIG_SPEC, NULL);
    if (!state->config_type || PyModule_AddIntConstant(module, "NAME_LIMIT", MOQ_NAME_MAX - 1) < 0)
        return -1;
    return PyModule_AddFunctions(module, METHODS);
}
