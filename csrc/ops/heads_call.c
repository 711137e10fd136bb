/* Operation qk_norm_rope: see heads_call.h. */
#include "ops/heads_call.h"

#include "cuda/cuda.h"
#include "cuda/tensor/cuda_heads.h"
#include "ops/check.h"

#include <math.h>

static const char *const WEIGHT_NAMES[MOQ_HEADS_KINDS] = {"q_weight", "k_weight"};

/* A tensor without gaps, of a dtype, a rank and a last extent, on the device of x, that begins at a
 * multiple of what is loaded at once: 16 bytes of 16-bit floats, or one position. */
static moq_status check_input(const moq_tensor *t, const char *name, const moq_tensor *x,
                              moq_dtype dtype, int32_t ndim, int64_t last, moq_err *err) {
    const uintptr_t piece = dtype == MOQ_DT_I64 ? 8 : 16;
    char got[128];
    if (t->dtype != dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s, got %s", moq_dtype_name(dtype),
                           moq_dtype_name(t->dtype));
    if (t->ndim != ndim || t->shape[ndim - 1] != last || !moq_tensor_is_contiguous(t))
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected %d dimension%s without gaps, the last of %lld, got %s",
                           (int)ndim, ndim > 1 ? "s" : "", (long long)last,
                           moq_shape_text(t, got, sizeof got));
    if ((uintptr_t)t->data % piece != 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, name, "expected memory at a multiple of %d bytes",
                           (int)piece);
    return moq_check_device(t, name, x->device, err);
}

static moq_status check_rows(const moq_tensor *x, int64_t least, moq_err *err) {
    char got[128];
    if (x->device.kind != MOQ_CUDA)
        return moq_fail_of(err, MOQ_ERR_VALUE, "x", "heads are turned on CUDA devices only");
    MOQ_TRY(moq_check_usable(x, "x", err));
    if (x->dtype != MOQ_DT_BF16 && x->dtype != MOQ_DT_F16)
        return moq_fail_of(err, MOQ_ERR_TYPE, "x", "expected bfloat16 or float16, got %s",
                           moq_dtype_name(x->dtype));
    if (x->ndim != 2 || x->shape[1] < least || (x->shape[0] > 0 && x->stride[1] != 1))
        return moq_fail_of(err, MOQ_ERR_VALUE, "x",
                           "expected rows without gaps of at least %lld values, got %s",
                           (long long)least, moq_shape_text(x, got, sizeof got));
    if ((uintptr_t)x->data % 16 != 0 || (x->shape[0] > 1 && x->stride[0] % 8 != 0))
        return moq_fail_of(err, MOQ_ERR_VALUE, "x", "expected rows at multiples of 16 bytes");
    return MOQ_OK;
}

/* One half of the cache: every head of it begins at a multiple of 16 bytes. */
static moq_status check_cache(const moq_tensor *t, const char *name, const moq_tensor *x,
                              int64_t heads, int64_t columns, moq_err *err) {
    char got[128];
    if (t->dtype != x->dtype)
        return moq_fail_of(err, MOQ_ERR_TYPE, name, "expected %s, got %s", moq_dtype_name(x->dtype),
                           moq_dtype_name(t->dtype));
    if (t->ndim != 4 || t->shape[2] != heads || t->shape[3] != columns)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected shape [blocks, slots, %lld, %lld], got %s", (long long)heads,
                           (long long)columns, moq_shape_text(t, got, sizeof got));
    bool aligned = t->stride[3] == 1 && (uintptr_t)t->data % 16 == 0;
    for (int i = 0; i < 3; i++)
        aligned = aligned && (t->shape[i] == 1 || t->stride[i] % 8 == 0);
    if (!aligned)
        return moq_fail_of(err, MOQ_ERR_VALUE, name,
                           "expected heads without gaps at multiples of 16 bytes");
    return moq_check_device(t, name, x->device, err);
}

static moq_status take_cache(const moq_heads_given *given, int64_t columns, moq_heads *plan,
                             moq_err *err) {
    static const char *const names[MOQ_CACHES] = {"k_cache", "v_cache"};
    plan->slots.ndim = -1;
    if (!given->slots && !given->cache[MOQ_CACHE_K] && !given->cache[MOQ_CACHE_V])
        return MOQ_OK;
    if (!given->slots || !given->cache[MOQ_CACHE_K] || !given->cache[MOQ_CACHE_V])
        return moq_fail_of(err, MOQ_ERR_VALUE, "k_cache, v_cache, slots", "expected all or none");
    const moq_tensor *slots = given->slots;
    for (int i = 0; i < MOQ_CACHES; i++) {
        MOQ_TRY(check_cache(given->cache[i], names[i], given->x, given->heads[MOQ_HEADS_K], columns,
                            err));
        plan->cache[i] = *given->cache[i];
    }
    if (!moq_same_shape(given->cache[MOQ_CACHE_K], given->cache[MOQ_CACHE_V]))
        return moq_fail_of(err, MOQ_ERR_VALUE, "v_cache", "expected the shape of k_cache");
    MOQ_TRY(check_input(slots, "slots", given->x, MOQ_DT_I64, 1,
                        slots->ndim == 1 ? slots->shape[0] : 0, err));
    if (slots->shape[0] > given->x->shape[0])
        return moq_fail_of(err, MOQ_ERR_VALUE, "slots", "expected at most %lld, one for a row of x",
                           (long long)given->x->shape[0]);
    plan->slots = *slots;
    return MOQ_OK;
}

moq_status moq_plan_heads(const moq_heads_given *given, moq_heads *plan, moq_err *err) {
    const moq_tensor *x = given->x, *table = given->table;
    const int64_t columns = table->ndim == 2 ? table->shape[1] : 0;
    const int64_t keys = given->heads[MOQ_HEADS_K];
    const int64_t count = given->heads[MOQ_HEADS_Q] + keys + (given->slots ? keys : 0);
    if ((columns != 32 && columns != 64 && columns != 128 && columns != 256) || table->shape[0] < 1)
        return moq_fail_of(err, MOQ_ERR_VALUE, "table",
                           "expected rows for positions of 32, 64, 128 or 256 values");
    if (count < 1 || count > INT32_MAX / columns)
        return moq_fail_of(err, MOQ_ERR_VALUE, "q_heads, k_heads", "expected at least one head");
    if (!(given->eps >= 0) || !isfinite(given->eps))
        return moq_fail_of(err, MOQ_ERR_VALUE, "eps",
                           "expected a finite number that is not negative");
    MOQ_TRY(check_rows(x, count * columns, err));
    MOQ_TRY(check_input(table, "table", x, x->dtype, 2, columns, err));
    MOQ_TRY(check_input(given->positions, "positions", x, MOQ_DT_I64, 1, x->shape[0], err));
    for (int i = 0; i < MOQ_HEADS_KINDS; i++) {
        const moq_tensor *weight = given->weight[i];
        plan->weight[i].ndim = -1;
        if (!weight)
            continue;
        MOQ_TRY(check_input(weight, WEIGHT_NAMES[i], x, x->dtype, 1, columns, err));
        plan->weight[i] = *weight;
    }
    MOQ_TRY(take_cache(given, columns, plan, err));
    plan->x = *x;
    plan->positions = *given->positions;
    plan->table = *table;
    plan->heads[MOQ_HEADS_Q] = given->heads[MOQ_HEADS_Q];
    plan->heads[MOQ_HEADS_K] = keys;
    plan->eps = (float)given->eps;
    return MOQ_OK;
}

moq_status moq_run_heads(const moq_heads *plan, void *stream, moq_err *err) {
    bool entered;
    if (plan->x.shape[0] == 0)
        return MOQ_OK;
    MOQ_TRY(moq_cuda_enter(plan->x.device.index, &entered, err));
    const moq_status status = moq_cuda_qk_norm_rope(plan, stream, err);
    moq_cuda_leave(entered);
    return status;
}
