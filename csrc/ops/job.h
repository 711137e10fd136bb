/* The path of a call below Python, which is the same for every operation: memory to work in, inputs
 * and outputs as the matrices that kernels read and write, the device current, two streams in
 * order.
 *
 * An operation embeds a job in a record of its own, opens it when the call is checked and a kernel
 * is chosen, and hands it to the binding. The binding asks for the bytes, brings the memory and the
 * stream and runs it:
 *
 *     moq_job_open(&job, device, run);
 *     moq_matrix_open_input(&job.x, x, smoothing);      x as it is, or to be copied
 *     moq_matrix_open_output(&job.y, y);
 *     moq_job_reserve(&job, bytes of the kernel);      the kernel's part is at the beginning
 *     moq_matrix_reserve(&job, &job.x);                 then what is copied
 *     moq_matrix_reserve(&job, &job.y);
 *
 * and in its run, with the device current:
 *
 *     moq_matrix_place(&job, &job.y);                   where copies lie
 *     moq_matrix_fill(&job, &job.x, err);               copies, or does nothing
 *     launch(..., moq_matrix_tensor(&job.x), moq_matrix_tensor(&job.y), ...)
 *     moq_matrix_hand_back(&job, &job.y, err); */
#ifndef MOQ_OPS_JOB_H
#define MOQ_OPS_JOB_H

#include "core/tensor.h"

/* On CUDA matrices and weights begin at multiples of so many bytes, which kernels read at a time.
 */
#define MOQ_ROW_ALIGNMENT 16

typedef struct moq_job {
    moq_device device;
    /* Launches, or computes, with the device current. The job is the first member of what the
     * operation opened. NULL where there is nothing to do. */
    moq_status (*run)(struct moq_job *job, moq_err *err);
    int64_t bytes; /* of memory on the device that the job works in; 0 for none */
    /* The binding sets these before it runs the job. */
    void *workspace;
    void *stream; /* CUDA */
    /* True where the workspace, or a new output, is memory in the order of another stream than the
     * call's: the two wait for each other. */
    bool orders;
    void *memory_stream;
} moq_job;

void moq_job_open(moq_job *job, moq_device device, moq_status (*run)(moq_job *job, moq_err *err));

/* Reserves so many bytes of the workspace; returns where they begin. */
int64_t moq_job_reserve(moq_job *job, int64_t bytes);

/* Runs an open job. On CUDA the work is queued on its stream. */
moq_status moq_job_run(moq_job *job, moq_err *err);

/* A tensor of a call as a matrix: on CUDA of contiguous rows, of the caller's memory or of the
 * workspace. On the CPU kernels take tensors with any strides. Points into itself: not to be
 * copied. */
typedef struct {
    const moq_tensor *given;
    moq_tensor tensor;
    bool on_cuda;
    bool copied;
    const float *smoothing; /* one factor a column, by which the copy is multiplied; or NULL */
    int64_t at;             /* of the copy in the workspace */
} moq_matrix;

void moq_matrix_open_input(moq_matrix *matrix, const moq_tensor *given, const float *smoothing);
/* Opens an output, a tensor with contiguous rows. */
void moq_matrix_open_output(moq_matrix *matrix, const moq_tensor *given);
/* The tensor that the kernel is given. */
static inline const moq_tensor *moq_matrix_tensor(const moq_matrix *matrix) {
    return matrix->copied || matrix->on_cuda ? &matrix->tensor : matrix->given;
}
/* Reserves room for the copy, if there is one. */
void moq_matrix_reserve(moq_job *job, moq_matrix *matrix);
/* Finds the address of the copy in the workspace, known once the binding brought the memory. */
void moq_matrix_place(const moq_job *job, moq_matrix *matrix);
/* Finds the address of an input's copy and fills it. */
moq_status moq_matrix_fill(const moq_job *job, moq_matrix *matrix, moq_err *err);
/* Writes the values of an output that was copied to where the caller wants them. */
moq_status moq_matrix_hand_back(const moq_job *job, const moq_matrix *matrix, moq_err *err);

/* Refuses a prepared tensor, which is never copied, at an address that is no multiple of
 * MOQ_ROW_ALIGNMENT; `name` is of the parameter. */
moq_status moq_check_address(const void *address, const char *name, moq_err *err);

#endif
