/* Python mappings into document trees, with limits on depth, number of values and text. */
#ifndef MOQ_BINDING_PY_VALUE_H
#define MOQ_BINDING_PY_VALUE_H

#include "binding/state.h"
#include "core/value.h"

/* Copies str, int, float, bool, None, lists, tuples and mappings. Anything else, and whatever goes
 * beyond the limits, raises ConfigError with the place below `path`. */
int moq_value_from_python(moq_state *state, moq_arena *arena, PyObject *object,
                          const moq_path *path, moq_value *out);
/* A str as text copied into the arena; TypeError names the argument. */
int moq_text_from_python(moq_state *state, moq_arena *arena, PyObject *object, const char *name,
                         moq_text *out);
PyObject *moq_text_to_python(moq_text text);

#endif
