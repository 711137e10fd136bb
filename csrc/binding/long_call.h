/* Native work without the GIL that Ctrl-C can end.
 *
 *     moq_long_call call;
 *     moq_long_call_begin(&call);
 *     status = ...;
 *     status = moq_long_call_end(&call, status, &err);
 *
 * The GIL is held again only to let Python look at its signals, some twenty times a second after
 * the first twentieth, and only by the main thread, to which Python gives them. Where a handler
 * raises, the kernels return and the status is MOQ_ERR_INTERRUPTED with that exception set. */
#ifndef MOQ_BINDING_LONG_CALL_H
#define MOQ_BINDING_LONG_CALL_H

#include <Python.h>

#include "core/status.h"
#include "cpu/interrupt.h"

typedef struct {
    PyThreadState *thread;
    moq_watch watch;
} moq_long_call;

/* `call` must stay where it is in memory until the end. */
void moq_long_call_begin(moq_long_call *call);
/* Ends the call: the status of the work, or that it was stopped. */
moq_status moq_long_call_end(moq_long_call *call, moq_status status, moq_err *err);

#endif
