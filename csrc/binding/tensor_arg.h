/* A tensor that a call was given or makes: its view, and what keeps the memory for the call. */
#ifndef MOQ_BINDING_TENSOR_ARG_H
#define MOQ_BINDING_TENSOR_ARG_H

#include "binding/state.h"
#include "core/tensor.h"

struct DLPackExchangeAPI;
struct DLManagedTensorVersioned;

typedef struct {
    moq_tensor view;
    const char *name; /* of the argument, for messages */
    PyObject *object; /* strong: what the caller passed */
    PyObject *keeper; /* strong or NULL: a capsule that keeps the memory for the call */
    PyObject *adopt;  /* strong or NULL: makes the caller's kind of tensor of a filled result */
    struct DLManagedTensorVersioned *managed; /* owned or NULL: memory of the exchange API */
    const struct DLPackExchangeAPI *exchange; /* of the producer, NULL where it has none */
    moq_dtype stored; /* dtype as the producer declares it, before a format was applied */
} moq_arg;

/* Calls the deleter of an owned tensor, with any exception in flight kept. */
void moq_managed_release(struct DLManagedTensorVersioned *managed);
/* Releases an argument; an empty (all zero) or released one is left alone. Needs the GIL. */
void moq_arg_release(moq_arg *arg);

/* Reads the argument as `dtype`: it must be declared so, or be a raw carrier of the same width
 * (uint8 for one byte, uint16/int16 for two). TypeError names both dtypes. */
int moq_arg_reinterpret(moq_arg *arg, moq_dtype dtype);
/* Reads the argument as a `format` that the caller named, for which int8 is a carrier, too. */
int moq_arg_apply_format(moq_arg *arg, moq_dtype format);

/* BufferError naming `out` and `in` where they share bytes between their first and last elements.
 * Views that interleave without sharing an element count as overlapping. */
int moq_arg_refuse_overlap(const moq_arg *out, const moq_arg *in);

/* BufferError naming two outputs whose memory overlaps. */
int moq_arg_refuse_both_written(const moq_arg *out, const moq_arg *other);

#endif
