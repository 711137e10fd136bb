/* Checks of prepared tensors: see params.h. */
#include "ops/params.h"

#include <string.h>

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

moq_status moq_check_params(const moq_param_spec *wanted, int count, const moq_params *params,
                            const char *mapping, moq_err *err) {
    for (int i = 0; i < count; i++)
        MOQ_TRY(check_param(&wanted[i], mapping, &params->of[wanted[i].id], err));
    return MOQ_OK;
}
