/* The path of a call: see job.h. */
#include "ops/job.h"

#include "core/sizes.h"
#include "cpu/cpu_smooth.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_rows.h"
#include "cuda/tensor/cuda_smooth.h"

/* ---- matrices ---- */

/* One row after the other, each contiguous and at an aligned address; codes without gaps. */
static bool kernels_read(const moq_tensor *rows) {
    int64_t size = (int64_t)moq_dtype_size(rows->dtype);
    if (rows->dtype == MOQ_DT_E4M3 && rows->shape[0] > 1 && rows->stride[0] != rows->shape[1])
        return false;
    bool contiguous = rows->shape[1] == 1 || rows->stride[1] == 1;
    bool apart = rows->shape[0] == 1 || (rows->stride[0] >= rows->shape[1] &&
                                         rows->stride[0] * size % MOQ_ROW_ALIGNMENT == 0);
    return contiguous && apart && (uintptr_t)rows->data % MOQ_ROW_ALIGNMENT == 0;
}

/* A matrix of the given tensor's rows, to be in the workspace. */
static void make_copy(moq_matrix *matrix) {
    const moq_tensor *given = matrix->given;
    int64_t columns = given->shape[given->ndim - 1], size = (int64_t)moq_dtype_size(given->dtype);
    int64_t stride = round_up(columns * size, MOQ_ROW_ALIGNMENT) / size;
    matrix->copied = true;
    matrix->tensor = (moq_tensor){.dtype = given->dtype,
                                  .device = given->device,
                                  .ndim = 2,
                                  .shape = {moq_tensor_numel(given) / columns, columns},
                                  .stride = {stride, 1}};
}

void moq_matrix_open_input(moq_matrix *matrix, const moq_tensor *given, const float *smoothing) {
    matrix->given = given;
    matrix->on_cuda = given->device.kind == MOQ_CUDA;
    matrix->copied = false;
    matrix->smoothing = smoothing;
    if (smoothing || (matrix->on_cuda && (!moq_tensor_as_rows(given, &matrix->tensor) ||
                                          !kernels_read(&matrix->tensor))))
        make_copy(matrix);
}

void moq_matrix_open_output(moq_matrix *matrix, const moq_tensor *given) {
    matrix->given = given;
    matrix->on_cuda = given->device.kind == MOQ_CUDA;
    matrix->copied = false;
    matrix->smoothing = NULL;
    if (matrix->on_cuda && !moq_tensor_as_rows(given, &matrix->tensor))
        make_copy(matrix);
}

void moq_matrix_reserve(moq_job *job, moq_matrix *matrix) {
    const moq_tensor *t = &matrix->tensor;
    if (matrix->copied)
        matrix->at =
            moq_job_reserve(job, t->shape[0] * t->stride[0] * (int64_t)moq_dtype_size(t->dtype));
}

void moq_matrix_place(const moq_job *job, moq_matrix *matrix) {
    if (matrix->copied)
        matrix->tensor.data = (char *)job->workspace + matrix->at;
}

moq_status moq_matrix_fill(const moq_job *job, moq_matrix *matrix, moq_err *err) {
    if (!matrix->copied)
        return MOQ_OK;
    moq_matrix_place(job, matrix);
    if (!matrix->on_cuda)
        return moq_cpu_smooth_rows(matrix->given, matrix->smoothing, &matrix->tensor, err);
    return matrix->smoothing
               ? moq_cuda_smooth_rows(matrix->given, matrix->smoothing, &matrix->tensor,
                                      job->stream, err)
               : moq_cuda_gather_rows(matrix->given, &matrix->tensor, job->stream, err);
}

moq_status moq_matrix_hand_back(const moq_job *job, const moq_matrix *matrix, moq_err *err) {
    return matrix->copied ? moq_cuda_scatter_rows(&matrix->tensor, matrix->given, job->stream, err)
                          : MOQ_OK;
}

moq_status moq_check_address(const void *address, const char *name, moq_err *err) {
    if ((uintptr_t)address % MOQ_ROW_ALIGNMENT == 0)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_BUFFER,
                    "params[\"%s\"]: expected an address that is a multiple of %d, got %p", name,
                    MOQ_ROW_ALIGNMENT, address);
}

/* ---- the job ---- */

void moq_job_open(moq_job *job, moq_device device, moq_status (*run)(moq_job *job, moq_err *err)) {
    *job = (moq_job){.device = device, .run = run};
}

int64_t moq_job_reserve(moq_job *job, int64_t bytes) {
    return take_part(&job->bytes, bytes);
}

/* Runs a job in memory of the order of another stream than the call's: what used the memory there
 * has to end first, and what will use it has to wait. */
static moq_status run_in_order(moq_job *job, moq_err *err) {
    void *stream = job->stream, *other = job->memory_stream;
    if (!job->orders)
        return job->run(job, err);
    if (moq_cuda_is_capturing(stream) != moq_cuda_is_capturing(other))
        return moq_fail_of(err, MOQ_ERR_INTERNAL, "stream",
                           "the call needs memory in the order of the current stream, and only "
                           "one of the two is being captured; make that one current");
    MOQ_TRY(moq_cuda_order(other, stream, err));
    moq_status status = job->run(job, err);
    moq_err second; /* of two failures the first is told */
    moq_status ordered = moq_cuda_order(stream, other, status == MOQ_OK ? err : &second);
    return status == MOQ_OK ? ordered : status;
}

/* Runs a job with its device current; the caller's is made current again. */
static moq_status run_on_device(moq_job *job, moq_err *err) {
    bool entered;
    MOQ_TRY(moq_cuda_enter(job->device.index, &entered, err));
    moq_status status = run_in_order(job, err);
    moq_cuda_leave(entered);
    return status;
}

moq_status moq_job_run(moq_job *job, moq_err *err) {
    if (!job->run)
        return MOQ_OK;
    return job->device.kind == MOQ_CUDA ? run_on_device(job, err) : job->run(job, err);
}
