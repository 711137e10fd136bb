/* Weight processing: see weight_prepare.h. What all devices have in common is checked here; the
 * rest is in weight_prepare_cpu.c and weight_prepare_cuda.c. */
#include "ops/weight_prepare.h"

#include "cpu/float_mode.h"
#include "cuda/cuda.h"
#include "ops/low_rank_prepare.h"
#include "ops/weight_mx.h"

#include <stdlib.h>

int64_t moq_prepare_workspace(const moq_weight *w, bool fresh) {
    bool on_host = w->device.kind == MOQ_CPU || moq_layout_is_general(w->checkpoint);
    return on_host ? 0 : moq_prepare_mx_workspace(w) + moq_prepare_workspace_on_cuda(w, fresh);
}

/* Chooses where to work on codes and scales. */
static moq_status prepare_codes(const moq_weight *w, const moq_weight_sources *sources,
                                moq_prepare_mode mode, moq_params *params, moq_err *err) {
    bool on_cpu = w->device.kind == MOQ_CPU;
    if (w->mx_scales)
        return moq_prepare_mx(w, sources, mode, params, err);
    return on_cpu ? moq_prepare_on_cpu(w, sources, mode, params, err)
           : moq_layout_is_general(w->checkpoint)
               ? moq_prepare_general_on_cuda(w, sources, mode, params, err)
               : moq_prepare_on_cuda(w, sources, mode, params, err);
}

/* Processes all tensors, with the weight's device current. */
static moq_status prepare(const moq_weight *w, const moq_weight_sources *sources,
                          moq_prepare_mode mode, moq_params *params, moq_err *err) {
    if (w->device.kind == MOQ_CUDA && moq_cuda_is_capturing(mode.stream))
        return moq_fail_of(err, MOQ_ERR_INTERNAL, "prepare",
                           "its stream is being captured into a CUDA graph, but has to be "
                           "waited for; prepare weights before the capture");
    MOQ_TRY(moq_check_sources(w, sources, err));
    moq_low_rank_values pairs;
    moq_status status = moq_low_rank_read(w, sources, mode.stream, &pairs, err);
    if (status == MOQ_OK)
        status = prepare_codes(w, sources, mode, params, err);
    if (status == MOQ_OK && !mode.only_checks)
        status = moq_low_rank_write(w, &pairs, mode.stream, params, err);
    free(pairs.memory);
    return status;
}

static moq_status prepare_anywhere(const moq_weight *w, const moq_weight_sources *sources,
                                   moq_prepare_mode mode, moq_params *params, moq_err *err) {
    moq_param_spec wanted[MOQ_MAX_PARAMS];
    int count = moq_weight_prepared_params(w, wanted);
    bool entered;
    MOQ_TRY(moq_check_params(wanted, count, params, "out", err));
    if (w->device.kind == MOQ_CPU)
        return prepare(w, sources, mode, params, err);
    MOQ_TRY(moq_cuda_enter(w->device.index, &entered, err));
    moq_status status = prepare(w, sources, mode, params, err);
    moq_cuda_leave(entered);
    return status;
}

/* A subnormal scale is no zero, which would make zeros of its weights. */
moq_status moq_weight_prepare(const moq_weight *w, const moq_weight_sources *sources,
                              moq_prepare_mode mode, moq_params *params, moq_err *err) {
    unsigned flushes = moq_enter_float_mode();
    moq_status status = prepare_anywhere(w, sources, mode, params, err);
    moq_leave_float_mode(flushes);
    return status;
}
