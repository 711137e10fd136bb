/* Native work that Ctrl-C can end: see long_call.h. */
#define _GNU_SOURCE /* syscall */
#include "binding/long_call.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Handlers run here; one that raises ends the call. The thread that a process begins with is
 * Python's main thread, but for programs that embed Python in another. */
static bool ask_python(void *context) {
    moq_long_call *call = context;
    if (syscall(SYS_gettid) != getpid())
        return false;
    PyEval_RestoreThread(call->thread);
    bool raised = PyErr_CheckSignals() < 0;
    call->thread = PyEval_SaveThread();
    return raised;
}

void moq_long_call_begin(moq_long_call *call) {
    moq_watch_open(&call->watch, ask_python, call);
    call->thread = PyEval_SaveThread();
}

moq_status moq_long_call_end(moq_long_call *call, moq_status status, moq_err *err) {
    PyEval_RestoreThread(call->thread);
    if (!moq_watch_close(&call->watch))
        return status;
    return moq_fail(err, MOQ_ERR_INTERRUPTED, "interrupted");
}
