/* One path of a call, for every operation: arguments taken, the output opened, the stream found,
 * memory brought and the job run.
 *
 *     moq_call_open(&call, state, plan, out, stream);
 *     if (moq_call_take_x(&call, x) == 0 && moq_call_take_params(&call, mapping, &params) == 0 &&
 *         moq_call_find_stream(&call) == 0) {
 *         result = moq_call_open_output(&call, ndim, shape);
 *         if (result) {
 *             status = open(..., &job);               the operation's: checks and chooses
 *             status = moq_call_run(&call, &job);
 *             result = moq_arg_finish(state, result, &call.y, status);
 *         }
 *     }
 *     moq_call_release(&call);
 *
 * In this order every refusal comes before anything is written. An operation takes its further
 * inputs between the parameters and the stream. */
#ifndef MOQ_BINDING_CALL_H
#define MOQ_BINDING_CALL_H

#include "binding/py_tensor.h"
#include "ops/job.h"
#include "ops/plan.h"

/* Tensors that a call reads: x, the prepared parameters, and up to so many others. */
#define MOQ_MAX_OTHERS 4

typedef struct {
    moq_state *state;
    const moq_plan *plan;
    PyObject *out, *given_stream; /* borrowed: the arguments out= and stream= */
    moq_arg in[1 + MOQ_MAX_LAYER_PARAMS + MOQ_MAX_OTHERS]; /* x first */
    int count;
    moq_arg y;
    void *stream;
} moq_call;

void moq_call_open(moq_call *call, moq_state *state, const moq_plan *plan, PyObject *out,
                   PyObject *stream);
/* Releases the tensors that were taken to be read. */
void moq_call_release(moq_call *call);

/* Results carry no history, so a tensor that wants one must not be taken without notice. */
int moq_refuse_gradient(moq_state *state, PyObject *object, const char *name);
/* Takes x, of the layer's dtype, on its device, that needs no gradient. */
int moq_call_take_x(moq_call *call, PyObject *object);
/* Takes the prepared parameters of a mapping; None is as good as no entry, and an entry that the
 * layer does not know is refused, since results without it would be others. */
int moq_call_take_params(moq_call *call, PyObject *mapping, moq_params *params);
/* Takes another tensor on the layer's device, of the dtype it declares, or *view = NULL where it is
 * absent. */
int moq_call_take_other(moq_call *call, PyObject *object, const char *name,
                        const moq_tensor **view);
/* Finds the stream that was given, or the current one of x's framework. */
int moq_call_find_stream(moq_call *call);
/* Opens y: out=, apart from everything that is read, or a new tensor of x's kind. A new reference
 * for moq_arg_finish. */
PyObject *moq_call_open_output(moq_call *call, int32_t ndim, const int64_t *shape);
/* Runs a job that was opened on the views of the call, in memory of the framework of y. */
int moq_call_run(moq_call *call, moq_job *job);

#endif
