/* The kind of tensor that a Python type makes, found out once per type and remembered.
 *
 * Recognition is by protocol, never by name: NumPy's own array head, the DLPack C exchange API
 * (capsule `__dlpack_c_exchange_api__` on the type, DLPack 1.3), the method `__dlpack__`. */
#ifndef MOQ_BINDING_PRODUCER_H
#define MOQ_BINDING_PRODUCER_H

#include "binding/state.h"
#include "third_party/dlpack.h"

#include <stdbool.h>

typedef enum {
    MOQ_FROM_NOTHING = 0, /* not a tensor */
    MOQ_FROM_NUMPY,
    MOQ_FROM_EXCHANGE,
    MOQ_FROM_DLPACK
} moq_protocol;

typedef struct {
    PyObject *type; /* identity in the table; borrowed in a copy */
    moq_protocol protocol;
    /* The type defines __iadd__. A library whose arrays are values (JAX, TensorFlow) leaves
     * in-place arithmetic out, and exports its memory without a read-only mark all the same. */
    bool in_place;
    bool array_library;                /* the type defines __array_namespace__ */
    bool masked;                       /* an array type with `mask`: some elements are no values */
    const DLPackExchangeAPI *exchange; /* MOQ_FROM_EXCHANGE: of a major version we know */
    /* The type's is_neg, or NULL; strong in the table, borrowed in a copy. A library that negates
     * lazily (torch) says by it that the values are the negatives of what is in memory, which
     * DLPack has no flag for. */
    PyObject *is_neg;
} moq_producer;

/* Slots of the table: one compare when a type is in its slot, a fresh look when another type took
 * it, so that programs which make types without end cost time and not memory. */
#define MOQ_PRODUCER_SLOTS 64

/* Copies what is known about the type of `object`; the first of a type looks its attributes up. */
int moq_producer_of(moq_state *state, PyObject *object, moq_producer *out);

#endif
