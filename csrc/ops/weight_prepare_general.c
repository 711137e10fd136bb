/* Weight processing on a CUDA device of layouts that only general kernels read: on the host, by the
 * functions of the CPU. The link to the device bounds it, about 20 GB/s. */
#include "ops/weight_mode.h"

#include "cuda/cuda.h"

#include <stdlib.h>

static moq_status no_memory(moq_err *err) {
    return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the codes of a linear layer");
}

/* Bytes from the first element to the end of the last; -1 where a stride is negative. */
static int64_t span_of(const moq_tensor *t) {
    int64_t elements = 1;
    for (int d = 0; d < t->ndim; d++) {
        if (t->stride[d] < 0 && t->shape[d] > 1)
            return -1;
        elements += t->shape[d] > 0 ? (t->shape[d] - 1) * t->stride[d] : 0;
    }
    return elements * (int64_t)moq_dtype_size(t->dtype);
}

/* ---- tensors of the checkpoint ---- */

enum { SOURCES = sizeof(moq_weight_sources) / sizeof(moq_source) };
_Static_assert(SOURCES * sizeof(moq_source) == sizeof(moq_weight_sources), "sources and no more");

/* Copies one tensor of a source to the host, with what lies between its rows and its experts. */
static moq_status download_part(const moq_weight *w, int64_t step, void *stream, moq_tensor *t,
                                moq_err *err) {
    int64_t span = span_of(t), bytes = span + (moq_weight_matrices(w) - 1) * step;
    void *memory = t->data;
    if (t->device.kind == MOQ_CPU)
        return MOQ_OK;
    if (span < 0 || step < 0)
        return moq_fail(err, MOQ_ERR_BUFFER, "params: expected strides that are not negative");
    t->device = (moq_device){MOQ_CPU, 0};
    t->data = malloc((size_t)bytes + 1);
    return t->data ? moq_cuda_download(t->data, memory, (size_t)bytes, stream, err)
                   : no_memory(err);
}

static moq_status download_source(const moq_weight *w, const moq_source *from, void *stream,
                                  moq_source *to, moq_err *err) {
    *to = *from;
    to->part = NULL;
    if (from->count == 0)
        return MOQ_OK;
    moq_tensor *part = calloc((size_t)from->count, sizeof *part);
    if (!part)
        return no_memory(err);
    to->part = part;
    for (int32_t p = 0; p < from->count; p++) {
        part[p] = from->part[p];
        moq_status status = download_part(w, moq_source_step(from, p), stream, &part[p], err);
        if (status != MOQ_OK) {
            to->count = p + 1;
            return status;
        }
    }
    return MOQ_OK;
}

static void free_source(const moq_source *from, moq_source *copy) {
    for (int32_t p = 0; copy->part && p < copy->count; p++)
        if (copy->part[p].data != from->part[p].data)
            free(copy->part[p].data);
    free((moq_tensor *)(uintptr_t)copy->part);
}

/* ---- tensors of the prepared form ---- */

/* True for a tensor that processing writes: input and smoothing factors only where they are given.
 */
static bool is_written(const moq_weight_sources *sources, const moq_param_spec *param) {
    return param->id == MOQ_PARAM_INPUT_SCALE       ? sources->input_scale.count > 0
           : param->id == MOQ_PARAM_PRE_QUANT_SCALE ? sources->pre_quant_scale.count > 0
                                                    : true;
}

static int64_t bytes_of(const moq_param_spec *param) {
    int64_t bytes = (int64_t)moq_dtype_size(param->dtype);
    for (int d = 0; d < param->ndim; d++)
        bytes *= param->shape[d];
    return bytes;
}

static moq_status upload_all(const moq_weight_sources *sources, const moq_param_spec *wanted,
                             int count, const moq_params *host, const moq_params *params,
                             void *stream, moq_err *err) {
    for (int i = 0; i < count; i++)
        if (is_written(sources, &wanted[i]))
            MOQ_TRY(moq_cuda_upload(params->of[wanted[i].id].data, host->of[wanted[i].id].data,
                                    (size_t)bytes_of(&wanted[i]), stream, err));
    return moq_cuda_wait(stream, err);
}

/* Processes weights that are on the host, and brings what comes of it to the device. */
static moq_status prepare_copies(const moq_weight *w, const moq_weight_sources *sources,
                                 moq_prepare_mode mode, moq_params *params, moq_err *err) {
    moq_param_spec wanted[MOQ_MAX_PARAMS];
    int count = moq_weight_prepared_params(w, wanted);
    moq_params host = *params;
    bool enough = true;
    for (int i = 0; i < count; i++) {
        host.of[wanted[i].id].data = malloc((size_t)bytes_of(&wanted[i]) + 1);
        enough = enough && host.of[wanted[i].id].data;
    }
    moq_status status = enough ? moq_prepare_on_cpu(w, sources, mode, &host, err) : no_memory(err);
    if (status == MOQ_OK && !mode.only_checks)
        status = upload_all(sources, wanted, count, &host, params, mode.stream, err);
    for (int i = 0; i < count; i++)
        free(host.of[wanted[i].id].data);
    return status;
}

moq_status moq_prepare_general_on_cuda(const moq_weight *w, const moq_weight_sources *sources,
                                       moq_prepare_mode mode, moq_params *params, moq_err *err) {
    const moq_source *from = (const moq_source *)sources;
    moq_weight_sources home = {0};
    moq_source *to = (moq_source *)&home;
    moq_status status = MOQ_OK;
    for (int s = 0; s < SOURCES && status == MOQ_OK; s++)
        status = download_source(w, &from[s], mode.stream, &to[s], err);
    if (status == MOQ_OK)
        status = prepare_copies(w, &home, mode, params, err);
    for (int s = 0; s < SOURCES; s++)
        free_source(&from[s], &to[s]);
    return status;
}
