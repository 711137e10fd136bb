/* Module `moqext._C`: creation, state and slots. Functions live in one file per family. */
#include "binding/state.h"

#include "binding/tensor_setup.h"

/* Slot ids newer than the 3.11 headers this is built for; an interpreter that does not know one
 * refuses the module, so the array is chosen at run time by Py_Version. */
#define SLOT_MULTIPLE_INTERPRETERS 3 /* Py_mod_multiple_interpreters, 3.12 */
#define SLOT_GIL                   4 /* Py_mod_gil, 3.13 */

static const char *const KEYWORD_NAMES[KW_COUNT] = {
#define MOQ_KW_NAME(name) #name,
    MOQ_KEYWORDS(MOQ_KW_NAME)
#undef MOQ_KW_NAME
};

/* One entry for each family of functions, which adds its own to the module; types come after the
 * types that they derive from. */
static int (*const FAMILIES[])(PyObject *, moq_state *) = {
    moq_add_config,   moq_add_dequantize,      moq_add_describe, moq_add_formats,
    moq_add_gate,     moq_add_heads,           moq_add_info,     moq_add_layout,
    moq_add_plan,     moq_add_linear,          moq_add_moe,      moq_add_weight,
    moq_add_quantize, moq_add_quantize_weight, moq_add_rotary,   moq_add_route,
    moq_add_tables,   moq_add_tensor_header,   moq_add_transfer, moq_add_pinned,
};

static int add_exceptions(PyObject *module, moq_state *state) {
    state->config_error = PyErr_NewExceptionWithDoc(
        "moqext.ConfigError",
        "A quantization config that cannot be understood; `path` is the JSON path of the field.",
        PyExc_ValueError, NULL);
    if (!state->config_error ||
        PyModule_AddObjectRef(module, "ConfigError", state->config_error) < 0)
        return -1;
    state->unsupported_error = PyErr_NewExceptionWithDoc(
        "moqext.UnsupportedQuantization",
        "A recognised quantization that cannot run here; the message says what can.",
        PyExc_ValueError, NULL);
    if (!state->unsupported_error)
        return -1;
    return PyModule_AddObjectRef(module, "UnsupportedQuantization", state->unsupported_error);
}

/* The slot below is enough for isolated interpreters of 3.12 and later. Others would get as far as
 * NumPy's tables, which are one for the process. */
static int refuse_subinterpreter(void) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0)
        return 0;
    PyErr_SetString(
        PyExc_ImportError,
        "moqext does not support sub-interpreters, because NumPy does not: import it in "
        "the main interpreter");
    return -1;
}

static int execute(PyObject *module) {
    if (refuse_subinterpreter() < 0)
        return -1;
    moq_state *state = moq_module_state(module);
    for (int i = 0; i < KW_COUNT; i++) {
        state->keyword[i] = PyUnicode_InternFromString(KEYWORD_NAMES[i]);
        if (!state->keyword[i])
            return -1;
    }
    if (moq_tensor_setup(module, state) < 0 || add_exceptions(module, state) < 0)
        return -1;
    for (size_t i = 0; i < sizeof FAMILIES / sizeof *FAMILIES; i++) {
        if (FAMILIES[i](module, state) < 0)
            return -1;
    }
    return 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    moq_state *state = moq_module_state(module);
    Py_VISIT(state->config_error);
    Py_VISIT(state->unsupported_error);
    Py_VISIT(state->config_type);
    Py_VISIT(state->plan_type);
    Py_VISIT(state->linear_plan_type);
    Py_VISIT(state->moe_plan_type);
    Py_VISIT(state->weight_plan_type);
    return moq_tensor_traverse(state, visit, arg);
}

static int clear(PyObject *module) {
    moq_state *state = moq_module_state(module);
    Py_CLEAR(state->config_error);
    Py_CLEAR(state->unsupported_error);
    Py_CLEAR(state->config_type);
    Py_CLEAR(state->plan_type);
    Py_CLEAR(state->linear_plan_type);
    Py_CLEAR(state->moe_plan_type);
    Py_CLEAR(state->weight_plan_type);
    for (int i = 0; i < KW_COUNT; i++)
        Py_CLEAR(state->keyword[i]);
    moq_tensor_clear(state);
    return 0;
}

static void destroy(void *module) {
    clear((PyObject *)module);
}

static PyModuleDef_Slot slots[4];

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "moqext._C",
    .m_doc = "Native part of moqext; use the names of package moqext.",
    .m_size = sizeof(moq_state),
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = destroy,
};

PyMODINIT_FUNC PyInit__C(void) {
    int n = 0;
    slots[n++] = (PyModuleDef_Slot){Py_mod_exec, (void *)execute};
    if (Py_Version >= 0x030c0000) /* not supported: NumPy's own core is not, either */
        slots[n++] = (PyModuleDef_Slot){SLOT_MULTIPLE_INTERPRETERS, (void *)0};
    if (Py_Version >= 0x030d0000) /* the GIL is used */
        slots[n++] = (PyModuleDef_Slot){SLOT_GIL, (void *)0};
    slots[n] = (PyModuleDef_Slot){0, NULL};
    return PyModuleDef_Init(&definition);
}
