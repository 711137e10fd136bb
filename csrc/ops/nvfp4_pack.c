/* Packing of NVFP4 weights: see nvfp4_pack.h. */
#include "ops/nvfp4_pack.h"

#include "core/formats.h"
#include "core/nvfp4_packed.h"
#include "core/weight.h"
#include "cpu/cpu_nvfp4_pack.h"
#include "cuda/cuda.h"
#include "cuda/tensor/cuda_nvfp4_pack.h"
#include "ops/check.h"

#include <string.h>

#define UNIT_ALIGNMENT 16 /* on devices */

static moq_status check_matrix(const moq_tensor *t, const char *name, moq_dtype dtype,
                               moq_err *err) {
    char shape[128];
    MOQ_TRY(moq_check_holds(t, name, dtype, err));
    MOQ_TRY(moq_check_usable(t, name, err));
    int last = t->ndim - 1;
    if ((t->ndim != 2 && t->ndim != 3) || moq_tensor_numel(t) < 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected rows and columns, got shape %s",
                           moq_shape_text(t, shape, sizeof shape));
    if (t->ndim == 3 && t->shape[0] > MOQ_MAX_EXPERTS)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected at most %d experts, got shape %s",
                           MOQ_MAX_EXPERTS, moq_shape_text(t, shape, sizeof shape));
    if (t->shape[last] > 1 && t->stride[last] != 1)
        return moq_fail_of(err, MOQ_ERR_BUFFER, name, "expected contiguous rows, got stride %lld",
                           (long long)t->stride[last]);
    return MOQ_OK;
}

/* Matrices of the stack, or 1. */
static int64_t experts_of(const moq_tensor *t) {
    return t->ndim == 3 ? t->shape[0] : 1;
}

/* A stack's first dimension before two others, where there is one. */
static moq_tensor describe_like(const moq_tensor *stack, moq_dtype dtype, int64_t rows,
                                int64_t columns) {
    int64_t shape[] = {stack->shape[0], rows, columns};
    bool whole = stack->ndim == 3;
    return moq_describe(dtype, whole ? 3 : 2, whole ? shape : shape + 1);
}

/* `experts` 0 for a matrix. */
static moq_tensor units_of(int64_t experts, int64_t rows, int64_t columns) {
    int64_t shape[] = {experts, moq_pack_slabs(rows), moq_pack_blocks(columns), MOQ_PACK_BYTES};
    return moq_describe(MOQ_DT_U8, experts ? 4 : 3, experts ? shape : shape + 1);
}

static moq_status check_alignment(const moq_tensor *units, const char *name, moq_err *err) {
    if (units->device.kind == MOQ_CPU || (uintptr_t)units->data % UNIT_ALIGNMENT == 0)
        return MOQ_OK;
    return moq_fail_of(err, MOQ_ERR_BUFFER, name,
                       "expected an address that is a multiple of %d, got %p", UNIT_ALIGNMENT,
                       units->data);
}

moq_status moq_describe_pack_nvfp4(const moq_tensor *weight, const moq_tensor *scale,
                                   moq_tensor *expected, moq_err *err) {
    char shape[128];
    MOQ_TRY(check_matrix(weight, "weight", MOQ_DT_E2M1X2, err));
    MOQ_TRY(check_matrix(scale, "weight_scale", MOQ_DT_E4M3, err));
    MOQ_TRY(moq_check_device(scale, "weight_scale", weight->device, err));
    int last = weight->ndim - 1;
    int64_t rows = weight->shape[last - 1], columns = 2 * weight->shape[last];
    if (columns % MOQ_NVFP4_GROUP != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight",
                           "expected codes for a multiple of 16 columns, got shape %s",
                           moq_shape_text(weight, shape, sizeof shape));
    if (scale->ndim != weight->ndim || experts_of(scale) != experts_of(weight) ||
        scale->shape[last - 1] != rows ||
        (scale->shape[last] * MOQ_NVFP4_GROUP != columns &&
         scale->shape[last] * MOQ_MX_GROUP != columns))
        return moq_fail_of(err, MOQ_ERR_VALUE, "weight_scale",
                           "expected one scale per row and 16 or 32 of %lld columns, "
                           "got shape %s",
                           (long long)columns, moq_shape_text(scale, shape, sizeof shape));
    *expected = units_of(weight->ndim == 3 ? weight->shape[0] : 0, rows, columns);
    return MOQ_OK;
}

static moq_status pack_on_device(const moq_nvfp4_rows *p, void *stream, moq_err *err) {
    moq_pack_source source = {
        .codes = p->codes,
        .code_stride = p->code_stride,
        .code_step = p->code_step,
        .scales = p->scales,
        .scale_stride = p->scale_stride,
        .scale_step = p->scale_step,
        .rows = p->rows,
        .factor = 1.0f,
    };
    moq_nvfp4_pack pack = {
        .experts = p->experts,
        .rows = p->rows,
        .columns = p->columns,
        .group = p->group,
        .source_count = 1,
        .source = &source,
        .out = p->packed,
    };
    return moq_cuda_pack_nvfp4(&pack, stream, err);
}

static moq_status unpack_on_device(const moq_nvfp4_rows *p, void *stream, moq_err *err) {
    moq_nvfp4_unpack unpack = {p->packed, p->experts, p->rows,  p->columns,
                               p->group,  p->codes,   p->scales};
    return moq_cuda_unpack_nvfp4(&unpack, stream, err);
}

typedef moq_status (*device_work)(const moq_nvfp4_rows *rows, void *stream, moq_err *err);

static moq_status run(const moq_nvfp4_rows *rows, moq_device device, void *stream,
                      device_work on_device, void (*on_host)(const moq_nvfp4_rows *),
                      moq_err *err) {
    bool entered;
    if (device.kind == MOQ_CPU) {
        on_host(rows);
        return MOQ_OK;
    }
    MOQ_TRY(moq_cuda_enter(device.index, &entered, err));
    moq_status status = on_device(rows, stream, err);
    moq_cuda_leave(entered);
    return status;
}

static moq_nvfp4_rows rows_of(const moq_tensor *weight, const moq_tensor *scale,
                              const moq_tensor *packed) {
    int last = weight->ndim - 1;
    int64_t columns = 2 * weight->shape[last];
    return (moq_nvfp4_rows){
        .experts = experts_of(weight),
        .rows = weight->shape[last - 1],
        .columns = columns,
        .group = (int32_t)(columns / scale->shape[last]),
        .codes = weight->data,
        .scales = scale->data,
        .code_stride = weight->stride[last - 1],
        .scale_stride = scale->stride[last - 1],
        .code_step = last == 2 ? weight->stride[0] : 0,
        .scale_step = last == 2 ? scale->stride[0] : 0,
        .packed = packed->data,
    };
}

moq_status moq_run_pack_nvfp4(const moq_tensor *weight, const moq_tensor *scale, void *stream,
                              const moq_tensor *out, moq_err *err) {
    moq_tensor expected;
    const moq_tensor *inputs[] = {weight, scale};
    MOQ_TRY(moq_describe_pack_nvfp4(weight, scale, &expected, err));
    expected.device = weight->device;
    MOQ_TRY(moq_check_output(out, "out", &expected, inputs, 2, err));
    MOQ_TRY(check_alignment(out, "out", err));
    moq_nvfp4_rows rows = rows_of(weight, scale, out);
    return run(&rows, weight->device, stream, pack_on_device, moq_cpu_pack_nvfp4, err);
}

moq_status moq_describe_unpack_nvfp4(const moq_tensor *packed, int32_t ndim, const int64_t *shape,
                                     int64_t group_size, moq_tensor *weight, moq_tensor *scale,
                                     moq_err *err) {
    char want[128], got[128];
    int64_t experts = ndim == 3 ? shape[0] : 0, rows = shape[ndim - 2], columns = shape[ndim - 1];
    MOQ_TRY(moq_check_holds(packed, "packed", MOQ_DT_U8, err));
    MOQ_TRY(moq_check_usable(packed, "packed", err));
    if (group_size != MOQ_NVFP4_GROUP && group_size != MOQ_MX_GROUP)
        return moq_fail_of(err, MOQ_ERR_VALUE, "group_size", "expected 16 or 32, got %lld",
                           (long long)group_size);
    if (rows < 1 || columns < 1 || columns % group_size != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "shape",
                           "expected rows and a multiple of %lld columns, got [%lld, %lld]",
                           (long long)group_size, (long long)rows, (long long)columns);
    if (ndim == 3 && (experts < 1 || experts > MOQ_MAX_EXPERTS))
        return moq_fail_of(err, MOQ_ERR_VALUE, "shape", "expected 1 to %d experts, got %lld",
                           MOQ_MAX_EXPERTS, (long long)experts);
    moq_tensor expected = units_of(experts, rows, columns);
    if (!moq_same_shape(packed, &expected))
        return moq_fail_of(err, MOQ_ERR_VALUE, "packed", "expected shape %s, got %s",
                           moq_shape_text(&expected, want, sizeof want),
                           moq_shape_text(packed, got, sizeof got));
    if (!moq_tensor_is_contiguous(packed))
        return moq_fail_of(err, MOQ_ERR_VALUE, "packed",
                           "expected a row-major tensor without gaps, got other strides");
    moq_tensor logical = {.ndim = ndim, .shape = {experts}};
    *weight = describe_like(&logical, MOQ_DT_E2M1X2, rows, columns / 2);
    *scale = describe_like(&logical, MOQ_DT_E4M3, rows, columns / group_size);
    return check_alignment(packed, "packed", err);
}

moq_status moq_run_unpack_nvfp4(const moq_tensor *packed, int32_t ndim, const int64_t *shape,
                                int64_t group_size, void *stream, const moq_tensor *weight,
                                const moq_tensor *scale, moq_err *err) {
    moq_tensor codes, scales;
    const moq_tensor *inputs[] = {packed, weight};
    MOQ_TRY(moq_describe_unpack_nvfp4(packed, ndim, shape, group_size, &codes, &scales, err));
    codes.device = scales.device = packed->device;
    MOQ_TRY(moq_check_output(weight, "out", &codes, inputs, 1, err));
    MOQ_TRY(moq_check_output(scale, "scale_out", &scales, inputs, 2, err));
    moq_nvfp4_rows rows = rows_of(weight, scale, packed);
    return run(&rows, packed->device, stream, unpack_on_device, moq_cpu_unpack_nvfp4, err);
}
