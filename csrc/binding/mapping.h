/* Mappings of names to the tensors of a layer, as prepare, run and measure take them. */
#ifndef MOQ_BINDING_MAPPING_H
#define MOQ_BINDING_MAPPING_H

#include "binding/py_tensor.h"
#include "ops/plan.h"

/* The keys under which mappings hold the tensors of a layer. */
extern const moq_keyword MOQ_PARAM_KEYWORD[MOQ_PARAM_PLACES];

/* -1 with an exception that names the argument where the argument is no mapping. */
int moq_check_mapping(PyObject *object, const char *name);
/* mapping[keyword], a new reference, since a mapping may make its values as they are asked for;
 * NULL without an exception when it is not there. */
PyObject *moq_mapping_lookup(PyObject *mapping, PyObject *keyword);
/* The first key of the mapping that is none of the names: 1 and a new reference, 0 where there is
 * none, -1 with an exception. */
int moq_mapping_find_stranger(PyObject *mapping, const char *const *names, int count,
                              PyObject **key);
/* -1 with an exception that names a key which is none of the prepared parameters of what `text`
 * describes. */
int moq_mapping_refuse_others(const moq_param_spec *params, int count, const char *text,
                              PyObject *mapping, const char *name);
/* -1 with an exception that names a key which is none of the prepared parameters of a plan. */
int moq_mapping_refuse_strangers(const moq_plan *plan, PyObject *mapping, const char *name);

/* -1 with an exception where the tensor is not on the device. */
int moq_arg_check_device(moq_device device, const moq_arg *arg);
/* A tensor of a layer on `device`, or of the host where `host` says that it may be there; of any
 * dtype where `dtype` is MOQ_DT_NONE. */
int moq_arg_take_on(moq_state *state, moq_device device, PyObject *object, const char *name,
                    moq_dtype dtype, bool host, moq_arg *arg);
/* A prepared parameter of a layer on `device`, taken by moq_arg_take_kept. */
int moq_arg_take_kept_on(moq_state *state, moq_device device, PyObject *object, const char *name,
                         moq_dtype dtype, moq_arg *arg);

#endif
