/* Experts: any names, sizes, routing and tensors are refused or computed, by every kernel or that
 * of MOQEXT_KERNEL, into the rows of the output and nowhere else.
 *
 * What weights are prepared to is target linear's business: parameters here are drawn in prepared
 * form. Where activations are neither quantized nor rounded (NVFP4 with float32) the result is
 * compared with a sum in float64; of other layers nothing is known but that a refusal comes before
 * anything is written, and that the sanitizers find nothing.
 *
 * Case: names and sizes, then what departs from what is asked for, then bytes. */
#include "fuzz.h"

#include "core/formats.h"
#include "ops/moe_call.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WEIGHTS_MAX 12000 /* elements of all weights that are really made */
#define TOKENS_MAX  40

typedef struct {
    moq_moe_spec spec;
    moq_param_spec want[MOQ_MAX_LAYER_PARAMS];
    fuzz_tensor tensor[MOQ_MAX_LAYER_PARAMS];
    int count;
    moq_params params;
} layer;

static moq_status resolve(fuzz_input *in, moq_moe_spec *spec, moq_err *err) {
    static const char *const ALGOS[] = {"NVFP4",          "FP8",       "W4A16_NVFP4",
                                        "FP8_PB_WO",      "NVFP4_AWQ", "FP8_PER_CHANNEL_PER_TOKEN",
                                        "W4A8_NVFP4_FP8", "MXFP4"};
    static const char *const COMPUTES[] = {"exact", "exact", "exact", "fp8",
                                           "fp4",   "auto",  "exact", ""};
    static const char *const DTYPES[] = {"float32", "bfloat16", "float32", "float16",
                                         "float32", "e4m3",     "float32", "float32"};
    static const char *const ACTIVATIONS[] = {"silu",      "gelu", "gelu_tanh", "relu2",
                                              "swigluoai", "silu", "silu",      "x"};
    moq_moe_names names = {.device = {MOQ_CPU, 0}};
    names.algo = ALGOS[fuzz_range(in, 0, 7)];
    names.compute = COMPUTES[fuzz_range(in, 0, 7)];
    names.dtype = DTYPES[fuzz_range(in, 0, 7)];
    names.activation = ACTIVATIONS[fuzz_range(in, 0, 7)];
    names.gated = fuzz_range(in, 0, 3) > 0;
    names.experts = fuzz_range(in, 0, 9);
    names.top_k = fuzz_range(in, 0, 5);
    names.hidden = 16 * fuzz_range(in, 0, 9) + (fuzz_range(in, 0, 15) == 0);
    names.intermediate = 16 * fuzz_range(in, 0, 9) + (fuzz_range(in, 0, 15) == 0);
    names.global_experts = fuzz_flag(in) ? names.experts + fuzz_range(in, -1, 6) : 0;
    bool numbers = fuzz_range(in, 0, 7) == 0;
    names.alpha = numbers && fuzz_flag(in) ? (double)fuzz_scale(in) : (double)NAN;
    names.beta = numbers && fuzz_flag(in) ? (double)fuzz_scale(in) : (double)NAN;
    names.limit = numbers && fuzz_flag(in) ? (double)fuzz_scale(in) : (double)NAN;
    names.quantized_input = fuzz_range(in, 0, 3) == 3;
    return moq_moe_resolve(&names, spec, err);
}

/* ---- parameters ---- */

/* An element to one of modest size that no damaged file has. */
static void tame(moq_tensor *t, int64_t i, const moq_param_spec *want) {
    uint8_t *byte = (uint8_t *)t->data + (size_t)i * moq_dtype_size(t->dtype);
    float scale = (float)(*byte + 1) / 128;
    if (t->dtype == MOQ_DT_F32) {
        memcpy(byte, &scale, sizeof scale);
    } else if (t->dtype == MOQ_DT_E4M3) {
        *byte &= want->role[0] == 's' ? 0x7f : 0xff;
        *byte ^= (*byte & 0x7f) == 0x7f;
    }
}

static void make_params(fuzz_input *in, layer *l) {
    moq_input_mode mode = l->spec.w13.input;
    bool scaled = mode == MOQ_INPUT_E4M3_TENSOR || mode == MOQ_INPUT_NVFP4;
    l->count = moq_moe_prepared_params(&l->spec, l->want);
    moq_params_clear(&l->params, 0, MOQ_PARAM_PLACES);
    for (int i = 0; i < l->count; i++) {
        const moq_param_spec *want = &l->want[i];
        bool input = strstr(want->name, "input_scale") != NULL;
        if (!want->required && !(input && scaled) && !fuzz_flag(in))
            continue;
        l->tensor[i] = fuzz_make(in, want->dtype, want->ndim, want->shape, false);
        for (int64_t j = 0, n = moq_tensor_numel(&l->tensor[i].view); j < n; j++)
            tame(&l->tensor[i].view, j, want);
        l->params.of[want->id] = l->tensor[i].view;
    }
}

/* ---- the model ---- */

/* Row n of expert e of a weight times a, in float64. */
static double product(const layer *l, bool second, int64_t e, int64_t n, const double *a) {
    const moq_linear_spec *spec = second ? &l->spec.w2 : &l->spec.w13;
    const moq_tensor *of = l->params.of + (second ? MOQ_PARAM_OF_W2 : MOQ_PARAM_OF_W13);
    const int64_t k = spec->in_features, row = e * spec->out_features + n;
    const int64_t groups = moq_linear_scale_columns(spec);
    double sum = 0;
    for (int64_t i = 0; i < k; i++)
        sum +=
            (double)fuzz_element(&of[MOQ_PARAM_WEIGHT], row * k + i) *
            (double)fuzz_element(&of[MOQ_PARAM_WEIGHT_SCALE], row * groups + i / spec->group_size) *
            a[i];
    sum *= (double)fuzz_element(&of[MOQ_PARAM_OUTPUT_SCALE], row);
    return of[MOQ_PARAM_BIAS].data ? sum + (double)fuzz_element(&of[MOQ_PARAM_BIAS], row) : sum;
}

static double sigmoid(double z) {
    return 1 / (1 + exp(-z));
}

static double activate(const moq_moe_spec *s, double g, double v) {
    switch (s->activation) {
    case MOQ_MOE_SILU:
        g = fmin(g, (double)s->limit);
        v = s->gated ? fmin(fmax(v, -(double)s->limit), (double)s->limit) + (double)s->beta : 1;
        return g * sigmoid((double)s->alpha * g) * v;
    case MOQ_MOE_GELU:
        g *= erfc(-g * sqrt(0.5)) / 2;
        break;
    case MOQ_MOE_GELU_TANH:
        g *= sigmoid(2 * sqrt(2 / acos(-1)) * (g + 0.044715 * g * g * g));
        break;
    case MOQ_MOE_RELU2:
        g = fmax(g, 0) * fmax(g, 0);
        break;
    }
    return s->gated ? g * v : g;
}

static void smooth(const layer *l, int place, int64_t e, int64_t n, double *a) {
    const moq_tensor *scale = &l->params.of[place + MOQ_PARAM_PRE_QUANT_SCALE];
    for (int64_t i = 0; i < n && scale->data; i++)
        a[i] = (double)((float)a[i] * fuzz_element(scale, e * n + i));
}

/* Output of expert e for row a, of float32 activations. */
static void model_expert(const layer *l, int64_t e, double *a, double *d) {
    const moq_moe_spec *s = &l->spec;
    const int64_t h = s->w13.in_features, inner = s->w2.in_features;
    double *g = malloc((size_t)inner * sizeof *g);
    smooth(l, MOQ_PARAM_OF_W13, e, h, a);
    for (int64_t i = 0; i < inner; i++)
        g[i] = (double)(float)activate(s, product(l, false, e, i, a),
                                       s->gated ? product(l, false, e, inner + i, a) : 0);
    smooth(l, MOQ_PARAM_OF_W2, e, inner, g);
    for (int64_t i = 0; i < h; i++)
        d[i] = product(l, true, e, i, g);
    free(g);
}

typedef struct {
    fuzz_tensor x, x_scale, weights, ids, map, y;
    moq_moe_inputs inputs;
} call;

static int64_t local_expert(const layer *l, const call *c, int64_t slot) {
    const moq_tensor *ids = &c->ids.view;
    const int64_t at = fuzz_offset(ids, slot);
    int64_t id = ids->dtype == MOQ_DT_I64 ? ((int64_t *)ids->data)[at] : ((int32_t *)ids->data)[at];
    if (id < 0 || id >= l->spec.global_experts)
        return -1;
    return c->inputs.expert_map ? ((const int32_t *)c->map.view.data)[id] : id;
}

static void check_sums(const layer *l, const call *c, const moq_tensor *before,
                       const char *kernel) {
    const moq_moe_spec *s = &l->spec;
    const int64_t h = s->w13.in_features, tokens = moq_tensor_numel(&c->x.view) / h;
    double *a = malloc(3 * (size_t)h * sizeof *a), *d = a + h, *sum = d + h;
    for (int64_t t = 0; t < tokens; t++) {
        double size = 1e-3;
        for (int64_t i = 0; i < h; i++)
            sum[i] = c->inputs.accumulate ? (double)fuzz_element(before, t * h + i) : 0;
        for (int32_t j = 0; j < s->top_k; j++) {
            const int64_t e = local_expert(l, c, t * s->top_k + j);
            const float w = fuzz_element(&c->weights.view, t * s->top_k + j);
            for (int64_t i = 0; i < h; i++)
                a[i] = c->inputs.weights_on_input
                           ? (double)(fuzz_element(&c->x.view, t * h + i) * w)
                           : (double)fuzz_element(&c->x.view, t * h + i);
            if (e < 0)
                continue;
            model_expert(l, e, a, d);
            for (int64_t i = 0; i < h; i++) {
                const double term = c->inputs.weights_on_input ? d[i] : (double)w * d[i];
                sum[i] += term;
                size = fmax(size, fabs(term));
            }
        }
        for (int64_t i = 0; i < h; i++) {
            const double got = (double)fuzz_element(&c->y.view, t * h + i);
            FUZZ_CHECK(fabs(got - sum[i]) <= 1e-3 * size || size > 1e30,
                       "%s, token %lld, element %lld: %g, expected %g", kernel, (long long)t,
                       (long long)i, got, sum[i]);
        }
    }
    free(a);
}

/* ---- calls ---- */

static fuzz_tensor make_numbers(fuzz_input *in, moq_dtype dtype, int32_t ndim, const int64_t *shape,
                                bool strided) {
    fuzz_tensor t = fuzz_make(in, dtype, ndim, shape, strided);
    for (int64_t i = 0, n = moq_tensor_numel(&t.view); i < n; i++) {
        char *element =
            (char *)t.view.data + fuzz_offset(&t.view, i) * (int64_t)moq_dtype_size(dtype);
        const float value = (float)((int)(uint8_t)*element - 128) / 32;
        moq_encode_row(dtype, &value, 1, element);
    }
    return t;
}

/* Numbers around those that there are, and now and then any. */
static fuzz_tensor make_ids(fuzz_input *in, moq_dtype dtype, const int64_t *shape, int64_t most) {
    fuzz_tensor t = fuzz_make(in, dtype, 2, shape, fuzz_flag(in));
    const bool wild = fuzz_range(in, 0, 7) == 0;
    for (int64_t i = 0, n = moq_tensor_numel(&t.view); i < n && !wild; i++) {
        const int64_t at = fuzz_offset(&t.view, i);
        if (dtype == MOQ_DT_I64)
            ((int64_t *)t.view.data)[at] = (uint8_t)((int64_t *)t.view.data)[at] % (most + 2) - 1;
        else
            ((int32_t *)t.view.data)[at] =
                (int32_t)((uint8_t)((int32_t *)t.view.data)[at] % (most + 2) - 1);
    }
    return t;
}

static void make_call(fuzz_input *in, const layer *l, call *c) {
    const moq_moe_spec *s = &l->spec;
    const int64_t tokens =
        fuzz_range(in, 0, 3) ? fuzz_range(in, 0, 4) : fuzz_range(in, 0, TOKENS_MAX);
    const int damage = (int)fuzz_range(in, 0, 255);
    const int64_t rows[2] = {tokens, moq_linear_x_columns(&s->w13) + (damage == 1)};
    const int64_t scales[2] = {tokens, moq_moe_x_scales(s) + (damage == 8)};
    const int64_t outputs[2] = {tokens, s->w13.in_features + (damage == 9)};
    const int64_t slots[2] = {tokens + (damage == 2), s->top_k + (damage == 3)};
    const int64_t global = s->global_experts + (damage == 4);
    c->x = s->w13.quantized_input
               ? fuzz_make(in, moq_linear_x_dtype(&s->w13), 2, rows, fuzz_flag(in))
               : make_numbers(in, damage == 5 ? MOQ_DT_F64 : s->w13.dtype, 2, rows, fuzz_flag(in));
    c->x_scale = fuzz_make(in, moq_moe_x_scale_dtype(s), 2, scales, fuzz_flag(in));
    c->weights = make_numbers(in, damage == 6 ? MOQ_DT_F16 : MOQ_DT_F32, 2, slots, fuzz_flag(in));
    c->ids = make_ids(in, fuzz_flag(in) ? MOQ_DT_I32 : MOQ_DT_I64, slots, s->global_experts);
    c->map = fuzz_make(in, MOQ_DT_I32, 1, &global, false);
    for (int64_t i = 0; i < global && damage != 7; i++) {
        int32_t *number = (int32_t *)c->map.view.data + i;
        *number = (int32_t)((uint8_t)*number % (s->experts + 1)) - 1;
    }
    c->y = make_numbers(in, s->w13.dtype, 2, outputs, false);
    c->inputs = (moq_moe_inputs){.x = &c->x.view,
                                 .weights = &c->weights.view,
                                 .ids = &c->ids.view,
                                 .y = &c->y.view,
                                 .weights_on_input =
                                     s->top_k == 1 ? fuzz_flag(in) : fuzz_range(in, 0, 15) == 1,
                                 .accumulate = fuzz_flag(in)};
    if (moq_moe_x_scales(s) > 0 || damage == 10)
        c->inputs.x_scale = &c->x_scale.view;
    if (s->global_experts > s->experts || fuzz_flag(in))
        c->inputs.expert_map = &c->map.view;
}

static void free_call(call *c) {
    fuzz_free(&c->x);
    fuzz_free(&c->x_scale);
    fuzz_free(&c->weights);
    fuzz_free(&c->ids);
    fuzz_free(&c->map);
    fuzz_free(&c->y);
}

static void run_kernel(const layer *l, call *c, const char *name, const moq_tensor *before) {
    const moq_moe_spec *s = &l->spec;
    moq_plan plan;
    moq_moe_job job;
    moq_err err;
    FUZZ_CHECK(moq_plan_make(&MOQ_MOE, s, name, &plan, &err) == MOQ_OK, "%s", err.text);
    moq_status status = moq_moe_open(&plan, &l->params, &c->inputs, &job, &err);
    if (status == MOQ_OK)
        status = moq_job_run(&job.job, &err);
    if (status != MOQ_OK) {
        fuzz_check_error(status, &err);
        const size_t bytes = (size_t)moq_tensor_numel(before) * moq_dtype_size(before->dtype);
        FUZZ_CHECK(memcmp(c->y.view.data, before->data, bytes) == 0, "written before %s", err.text);
    } else if (s->w13.input == MOQ_INPUT_AS_IS && s->w13.dtype == MOQ_DT_F32 &&
               s->w13.weight == MOQ_WEIGHT_E2M1) {
        check_sums(l, c, before, name);
    }
}

static void run(fuzz_input *in, const layer *l) {
    const char *only = getenv("MOQEXT_KERNEL");
    call c = {0};
    make_call(in, l, &c);
    fuzz_tensor before = fuzz_result(&c.y.view, 0);
    const size_t bytes = (size_t)moq_tensor_numel(&c.y.view) * moq_dtype_size(c.y.view.dtype);
    memcpy(before.view.data, c.y.view.data, bytes);
    for (int i = 0; i < MOQ_MOE.kernel_count; i++) {
        char name[64], reason[MOQ_REASON_SIZE];
        const moq_kernel *kernel = MOQ_MOE.kernels[i];
        snprintf(name, sizeof name, "%s:%s", kernel->family, kernel->name);
        if (!MOQ_MOE.can_run(&l->spec, kernel, 1, reason, sizeof reason) ||
            (only && strcmp(only, name) != 0))
            continue;
        memcpy(c.y.view.data, before.view.data, bytes);
        run_kernel(l, &c, name, &before.view);
    }
    fuzz_free(&before);
    free_call(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    layer *l = calloc(1, sizeof *l);
    moq_err err;
    char text[160];
    const moq_status status = resolve(&in, &l->spec, &err);
    if (status != MOQ_OK) {
        fuzz_check_error(status, &err);
        free(l);
        return 0;
    }
    const moq_moe_spec *s = &l->spec;
    FUZZ_CHECK(strlen(moq_moe_text(s, text, sizeof text)) < sizeof text, "%s", text);
    if (s->experts * (s->w13.out_features + s->w2.in_features) * s->w13.in_features <=
        WEIGHTS_MAX) {
        make_params(&in, l);
        run(&in, l);
    }
    for (int i = 0; i < l->count; i++)
        fuzz_free(&l->tensor[i]);
    free(l);
    return 0;
}
