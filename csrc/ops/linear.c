/* The call of a linear: shapes and layouts checked, a kernel picked, launched. See ops/linear.h. */
#include "ops/linear.h"

#include "cpu/smooth.h"
#include "cuda/cuda.h"
#include "cuda/rows.h"
#include "cuda/smooth.h"
#include "ops/target.h"

#include <math.h>
#include <string.h>

static moq_status check_x(const moq_linear_spec *spec, const moq_tensor *x, moq_err *err) {
    char shape[128];
    if (x->dtype != spec->dtype)
        return moq_fail(err, MOQ_ERR_TYPE, "x: expected %s, got %s", moq_dtype_name(spec->dtype),
                        moq_dtype_name(x->dtype));
    if (x->ndim < 1 || x->shape[x->ndim - 1] != spec->in_features)
        return moq_fail(err, MOQ_ERR_VALUE, "x: expected shape [..., %lld], got %s",
                        (long long)spec->in_features, moq_shape_text(x, shape, sizeof shape));
    return MOQ_OK;
}

moq_status moq_linear_output_shape(const moq_linear_spec *spec, const moq_tensor *x, int64_t *shape,
                                   moq_err *err) {
    MOQ_TRY(check_x(spec, x, err));
    memcpy(shape, x->shape, (size_t)x->ndim * sizeof *shape);
    shape[x->ndim - 1] = spec->out_features;
    return MOQ_OK;
}

static moq_status check_y(const moq_linear_spec *spec, const moq_tensor *x, const moq_tensor *y,
                          moq_err *err) {
    char got[128], expected[128];
    moq_tensor wanted = *x;
    wanted.shape[wanted.ndim - 1] = spec->out_features;
    if (y->dtype != spec->dtype)
        return moq_fail(err, MOQ_ERR_TYPE, "out: expected %s, got %s", moq_dtype_name(spec->dtype),
                        moq_dtype_name(y->dtype));
    if (y->ndim != x->ndim ||
        memcmp(y->shape, wanted.shape, (size_t)y->ndim * sizeof *y->shape) != 0)
        return moq_fail(err, MOQ_ERR_VALUE, "out: expected shape %s, got %s",
                        moq_shape_text(&wanted, expected, sizeof expected),
                        moq_shape_text(y, got, sizeof got));
    if (moq_tensor_numel(y) > 0 && spec->out_features > 1 && y->stride[y->ndim - 1] != 1)
        return moq_fail(err, MOQ_ERR_BUFFER, "out: expected contiguous rows, got a stride of %lld",
                        (long long)y->stride[y->ndim - 1]);
    return MOQ_OK;
}

static moq_status check_bias(const moq_linear_spec *spec, const moq_tensor *bias, moq_err *err) {
    char shape[128];
    if (!bias)
        return MOQ_OK;
    if (bias->dtype != spec->dtype && bias->dtype != MOQ_DT_F32)
        return moq_fail(err, MOQ_ERR_TYPE, "bias: expected %s or float32, got %s",
                        moq_dtype_name(spec->dtype), moq_dtype_name(bias->dtype));
    if (bias->ndim != 1 || bias->shape[0] != spec->out_features)
        return moq_fail(err, MOQ_ERR_VALUE, "bias: expected shape [%lld], got %s",
                        (long long)spec->out_features, moq_shape_text(bias, shape, sizeof shape));
    if (!moq_tensor_is_contiguous(bias))
        return moq_fail(err, MOQ_ERR_BUFFER, "bias: expected a contiguous tensor");
    return MOQ_OK;
}

static moq_status refuse_param(const moq_param_spec *wanted, const char *mapping,
                               const moq_tensor *t, moq_err *err) {
    char expected[128], got[128];
    moq_tensor shape = {.ndim = wanted->ndim};
    memcpy(shape.shape, wanted->shape, sizeof wanted->shape);
    return moq_fail(err, MOQ_ERR_VALUE, "%s[\"%s\"]: expected %s of shape %s, got %s of shape %s",
                    mapping, wanted->name, moq_dtype_name(wanted->dtype),
                    moq_shape_text(&shape, expected, sizeof expected), moq_dtype_name(t->dtype),
                    moq_shape_text(t, got, sizeof got));
}

static moq_status check_param(const moq_param_spec *wanted, const char *mapping,
                              const moq_tensor *t, moq_err *err) {
    if (t->dtype == MOQ_DT_NONE) {
        if (wanted->required)
            return moq_fail(err, MOQ_ERR_VALUE, "%s[\"%s\"]: missing", mapping, wanted->name);
        return MOQ_OK;
    }
    if (t->dtype != wanted->dtype || t->ndim != wanted->ndim ||
        memcmp(t->shape, wanted->shape, (size_t)t->ndim * sizeof *t->shape) != 0)
        return refuse_param(wanted, mapping, t, err);
    if (!moq_tensor_is_contiguous(t))
        return moq_fail(err, MOQ_ERR_BUFFER, "%s[\"%s\"]: expected a contiguous tensor", mapping,
                        wanted->name);
    return MOQ_OK;
}

moq_tensor *moq_linear_param(moq_linear_params *params, moq_param id) {
    switch (id) {
    case MOQ_PARAM_WEIGHT:
        return &params->weight;
    case MOQ_PARAM_WEIGHT_SCALE:
        return &params->weight_scale;
    case MOQ_PARAM_OUTPUT_SCALE:
        return &params->output_scale;
    case MOQ_PARAM_FOLD_SCALE:
        return &params->fold_scale;
    case MOQ_PARAM_PRE_QUANT_SCALE:
        return &params->pre_quant_scale;
    default:
        return &params->input_scale;
    }
}

static moq_status check_params(const moq_param_spec *wanted, int count,
                               const moq_linear_params *params, const char *mapping, moq_err *err) {
    for (int i = 0; i < count; i++)
        MOQ_TRY(check_param(&wanted[i], mapping,
                            moq_linear_param((moq_linear_params *)params, wanted[i].id), err));
    return MOQ_OK;
}

moq_status moq_linear_check_params(const moq_linear_spec *spec, const moq_linear_params *params,
                                   const char *mapping, moq_err *err) {
    moq_param_spec wanted[MOQ_MAX_PARAMS];
    int count = moq_linear_prepared_params(spec, wanted);
    return check_params(wanted, count, params, mapping, err);
}

/* ---- x and y as kernels want them ---- */

/* Kernels read rows of x 16 bytes at a time. */
#define ROW_ALIGNMENT 16
/* Parts of the workspace begin at multiples of this. */
#define PART_ALIGNMENT 256

static int64_t round_up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
}

/* One row after the other, each contiguous and at an aligned address. */
static bool kernels_read(const moq_tensor *rows) {
    int64_t size = (int64_t)moq_dtype_size(rows->dtype);
    bool contiguous = rows->shape[1] == 1 || rows->stride[1] == 1;
    bool apart = rows->shape[0] == 1 ||
                 (rows->stride[0] >= rows->shape[1] && rows->stride[0] * size % ROW_ALIGNMENT == 0);
    return contiguous && apart && (uintptr_t)rows->data % ROW_ALIGNMENT == 0;
}

/* A matrix [m, columns] to be in the workspace. */
static moq_tensor make_rows(const moq_tensor *like, int64_t m) {
    int64_t columns = like->shape[like->ndim - 1], size = (int64_t)moq_dtype_size(like->dtype);
    int64_t stride = round_up(columns * size, ROW_ALIGNMENT) / size;
    return (moq_tensor){.dtype = like->dtype,
                        .device = like->device,
                        .ndim = 2,
                        .shape = {m, columns},
                        .stride = {stride, 1}};
}

static int64_t reserve(moq_linear_job *job, int64_t bytes) {
    int64_t at = job->workspace;
    job->workspace += round_up(bytes, PART_ALIGNMENT);
    return at;
}

static int64_t reserve_rows(moq_linear_job *job, const moq_tensor *rows) {
    return reserve(job, rows->shape[0] * rows->stride[0] * (int64_t)moq_dtype_size(rows->dtype));
}

/* What the kernel leaves to others. */
static void place_smoothing(moq_linear_job *job) {
    job->smoothing = job->kernel->smooths ? NULL : job->call.pre_quant_scale;
    if (job->smoothing)
        job->call.pre_quant_scale = NULL;
}

/* On the CPU kernels take x as it is. */
static void place_on_cpu(moq_linear_job *job) {
    job->x = job->call.x;
    if (!job->smoothing)
        return;
    job->x_rows = make_rows(job->x, job->call.m);
    job->x_at = reserve_rows(job, &job->x_rows);
    job->call.x = &job->x_rows;
}

/* Finds the matrices and what the job works in: first the kernel's part, then copies. */
static void place_on_cuda(moq_linear_job *job) {
    int64_t m = job->call.m;
    job->x = job->call.x;
    job->y = job->call.y;
    job->copies_x =
        !moq_tensor_as_rows(job->x, &job->x_rows) || !kernels_read(&job->x_rows) || job->smoothing;
    job->copies_y = !moq_tensor_as_rows(job->y, &job->y_rows); /* contiguous rows were demanded */
    if (job->copies_x)
        job->x_rows = make_rows(job->x, m);
    if (job->copies_y)
        job->y_rows = make_rows(job->y, m);
    job->call.x = &job->x_rows;
    job->call.y = &job->y_rows;
    if (job->kernel->workspace)
        reserve(job, job->kernel->workspace(&job->call));
    if (job->copies_x)
        job->x_at = reserve_rows(job, &job->x_rows);
    if (job->copies_y)
        job->y_at = reserve_rows(job, &job->y_rows);
}

static moq_status check_weight_address(const moq_linear_call *call, moq_err *err) {
    if ((uintptr_t)call->weight % ROW_ALIGNMENT == 0)
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_BUFFER,
                    "params[\"weight\"]: expected an address that is a multiple of %d, got %p",
                    ROW_ALIGNMENT, (const void *)call->weight);
}

/* On the current device. */
static moq_status run_on_rows(moq_linear_job *job, moq_err *err) {
    char *workspace = job->call.workspace;
    void *stream = job->call.stream;
    if (job->copies_y)
        job->y_rows.data = workspace + job->y_at;
    if (job->copies_x) {
        job->x_rows.data = workspace + job->x_at;
        MOQ_TRY(job->smoothing
                    ? moq_cuda_smooth_rows(job->x, job->smoothing, &job->x_rows, stream, err)
                    : moq_cuda_gather_rows(job->x, &job->x_rows, stream, err));
    }
    MOQ_TRY(job->kernel->run(&job->call, err));
    return job->copies_y ? moq_cuda_scatter_rows(&job->y_rows, job->y, stream, err) : MOQ_OK;
}

/* The same in memory that belongs to the order of another stream: what used it there before has to
 * end first, and what will use it has to wait. */
static moq_status run_in_order(moq_linear_job *job, moq_err *err) {
    void *stream = job->call.stream, *other = job->memory_stream;
    if (!job->orders)
        return run_on_rows(job, err);
    if (moq_cuda_is_capturing(stream) != moq_cuda_is_capturing(other))
        return moq_fail(
            err, MOQ_ERR_INTERNAL,
            "stream: the call needs memory in the order of the current stream, and only "
            "one of the two is being captured; make that one current");
    MOQ_TRY(moq_cuda_order(other, stream, err));
    moq_status status = run_on_rows(job, err);
    moq_err second; /* of two failures the first is told */
    moq_status ordered = moq_cuda_order(stream, other, status == MOQ_OK ? err : &second);
    return status == MOQ_OK ? ordered : status;
}

/* Runs with the layer's device current, and gives the caller's back. */
static moq_status run_on_device(moq_linear_job *job, moq_err *err) {
    bool entered;
    MOQ_TRY(moq_cuda_enter(job->call.spec->device.index, &entered, err));
    moq_status status = run_in_order(job, err);
    moq_cuda_leave(entered);
    return status;
}

/* ---- the call ---- */

/* A plan of one kernel, asked for by name, may be left without one for this many rows. */
static moq_status check_kernel(const moq_linear_job *job, moq_err *err) {
    const moq_linear_kernel *kernel = job->kernel;
    if (isfinite(kernel->cost(job->call.spec, job->call.m)))
        return MOQ_OK;
    return moq_fail(err, MOQ_ERR_UNSUPPORTED,
                    "%s:%s does not run %lld rows of x; unset "
                    "MOQEXT_KERNEL when the layer is made",
                    kernel->family, kernel->name, (long long)job->call.m);
}

moq_status moq_linear_open(const moq_linear_spec *spec, moq_linear_plan *plan,
                           const moq_linear_params *params, const moq_tensor *x,
                           const moq_tensor *bias, const moq_tensor *y, moq_linear_job *job,
                           moq_err *err) {
    MOQ_TRY(check_x(spec, x, err));
    MOQ_TRY(check_y(spec, x, y, err));
    MOQ_TRY(check_bias(spec, bias, err));
    MOQ_TRY(check_params(plan->param, plan->param_count, params, "params", err));
    job->call = (moq_linear_call){
        .spec = spec,
        .m = moq_tensor_numel(x) / spec->in_features,
        .x = x,
        .y = y,
        .weight = params->weight.data,
        .weight_scale = params->weight_scale.data,
        .output_scale = params->output_scale.data,
        .fold_scale = params->fold_scale.data,
        .input_scale = params->input_scale.data,
        .pre_quant_scale = params->pre_quant_scale.data,
        .bias = bias ? bias->data : NULL,
        .bias_dtype = bias ? bias->dtype : MOQ_DT_NONE,
    };
    job->workspace = 0;
    job->orders = false;
    if (job->call.m == 0)
        return MOQ_OK;
    moq_linear_choice choice = moq_linear_pick(plan, spec, job->call.m);
    job->kernel = choice.kernel;
    job->call.variant = choice.variant;
    MOQ_TRY(check_kernel(job, err));
    place_smoothing(job);
    if (spec->device.kind != MOQ_CUDA) {
        place_on_cpu(job);
        return MOQ_OK;
    }
    MOQ_TRY(moq_check_target(spec->device, &spec->target, err));
    MOQ_TRY(check_weight_address(&job->call, err));
    place_on_cuda(job);
    return MOQ_OK;
}

int64_t moq_linear_workspace(const moq_linear_job *job) {
    return job->workspace;
}

static moq_status run_on_cpu(moq_linear_job *job, moq_err *err) {
    if (job->smoothing) {
        job->x_rows.data = (char *)job->call.workspace + job->x_at;
        MOQ_TRY(moq_cpu_smooth_rows(job->x, job->smoothing, &job->x_rows, err));
    }
    return job->kernel->run(&job->call, err);
}

moq_status moq_linear_run(moq_linear_job *job, moq_err *err) {
    if (job->call.m == 0)
        return MOQ_OK;
    return job->call.spec->device.kind == MOQ_CUDA ? run_on_device(job, err) : run_on_cpu(job, err);
}
