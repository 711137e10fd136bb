/* Module state and the translation of error records: what every file of the binding shares.
 *
 * Convention of this floor: a function returning PyObject* returns a new reference or NULL with an
 * exception set; one returning int returns 0, or -1 with an exception set. */
#ifndef MOQ_BINDING_STATE_H
#define MOQ_BINDING_STATE_H

#include <Python.h>

#include "binding/keywords.h"
#include "core/status.h"

typedef struct moq_boundary moq_boundary;

typedef struct {
    PyObject *config_error;         /* moqext.ConfigError */
    PyObject *unsupported_error;    /* moqext.UnsupportedQuantization */
    PyObject *config_type;          /* moqext._C.Config */
    PyTypeObject *plan_type;        /* moqext._C.Plan */
    PyTypeObject *linear_plan_type; /* moqext._C.LinearPlan */
    PyTypeObject *moe_plan_type;    /* moqext._C.MoEPlan */
    PyTypeObject *weight_plan_type; /* moqext._C.WeightPlan */
    PyObject *keyword[KW_COUNT];    /* interned names */
    moq_boundary *boundary;         /* what the tensor boundary remembers: binding/boundary.h */
} moq_state;

/* The state of the module a METH_FASTCALL module function is bound to. */
static inline moq_state *moq_module_state(PyObject *module) {
    return (moq_state *)PyModule_GetState(module);
}

/* Sets the exception a failed call of a lower floor describes; always returns NULL. */
PyObject *moq_raise(moq_state *state, const moq_err *err);

/* The methods of each family, gathered into the module by module.c. */
int moq_add_config(PyObject *module, moq_state *state);
int moq_add_dequantize(PyObject *module, moq_state *state);
int moq_add_describe(PyObject *module, moq_state *state);
int moq_add_formats(PyObject *module, moq_state *state);
int moq_add_gate(PyObject *module, moq_state *state);
int moq_add_heads(PyObject *module, moq_state *state);
int moq_add_info(PyObject *module, moq_state *state);
int moq_add_linear(PyObject *module, moq_state *state);
int moq_add_layout(PyObject *module, moq_state *state);
int moq_add_moe(PyObject *module, moq_state *state);
int moq_add_pinned(PyObject *module, moq_state *state);
int moq_add_plan(PyObject *module, moq_state *state);
int moq_add_quantize(PyObject *module, moq_state *state);
int moq_add_quantize_weight(PyObject *module, moq_state *state);
int moq_add_rotary(PyObject *module, moq_state *state);
int moq_add_route(PyObject *module, moq_state *state);
int moq_add_tables(PyObject *module, moq_state *state);
int moq_add_tensor_header(PyObject *module, moq_state *state);
int moq_add_transfer(PyObject *module, moq_state *state);
int moq_add_weight(PyObject *module, moq_state *state);

#endif
