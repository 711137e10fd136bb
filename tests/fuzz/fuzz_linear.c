/* Linear layers: any names, sizes and tensors are refused or prepared, and what was prepared runs
 * and gives what codes and scales mean, with every kernel or that of MOQEXT_KERNEL.
 *
 * Case: algorithm, compute mode, dtype and sizes, then how each tensor departs from what is asked
 * for, then bytes. */
#include "fuzz.h"

#include "core/formats.h"
#include "ops/linear_call.h"
#include "ops/weight_prepare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WEIGHT_MAX  4000   /* elements of a weight that is really made */
#define PRODUCT_MAX 160000 /* of them with rows of x */
#define ROWS_MAX    300    /* more than a panel of the CPU kernels, of 256 */
#define PART_MAX    8

typedef struct {
    fuzz_tensor part[PART_MAX];
    moq_tensor view[PART_MAX];
    moq_source source;
} source_set;

typedef struct {
    moq_linear_spec spec;
    int64_t partition[MOQ_MAX_PARTITIONS + 1]; /* what the spec points to */
    source_set weight, weight_scale, weight_scale_2, input_scale, pre_quant_scale, lora_a, lora_b;
    bool spoiled; /* a tensor is not what the layer asks for */
} layer;

static int64_t draw_size(fuzz_input *in, int64_t usual) {
    const int kind = (int)fuzz_range(in, 0, 255);
    if (kind < 4)
        return (int64_t)fuzz_bits(in, 8);
    return kind < 128 ? fuzz_range(in, 1, usual) / 16 * 16 : fuzz_range(in, 1, usual);
}

static moq_status resolve(fuzz_input *in, layer *l, moq_err *err) {
    static const char *const ALGOS[] = {"FP8",
                                        "NVFP4",
                                        "W4A16_NVFP4",
                                        "FP8_PB_WO",
                                        "fp8_pb_real",
                                        "nvfp4",
                                        "FP8_PER_CHANNEL_PER_TOKEN",
                                        "MXFP4",
                                        "",
                                        "MIXED_PRECISION",
                                        "W4A8_NVFP4_FP8",
                                        "NVFP4_AWQ",
                                        "MXFP8",
                                        "W8A8_SQ_PER_CHANNEL",
                                        "W4A16_AWQ",
                                        "NVFP4_SVD"};
    static const char *const COMPUTES[] = {"exact", "exact", "exact", "fp8",
                                           "fp4",   "fp8",   "fp4",   ""};
    static const char *const DTYPES[] = {"float32", "bfloat16", "float16", "float32",
                                         "bf16",    "e4m3",     "float32", "x"};
    static const int64_t GROUPS[] = {0, 0, 0, 16, 32, 128, -1, 64};
    const char *algo = ALGOS[fuzz_range(in, 0, 15)];
    const char *compute = COMPUTES[fuzz_range(in, 0, 7)], *dtype = DTYPES[fuzz_range(in, 0, 7)];
    const int64_t k = draw_size(in, 300), group = GROUPS[fuzz_range(in, 0, 7)];
    const int shape = (int)fuzz_range(in, 0, 255);
    const int32_t count = shape < 4 ? (int32_t)(65 * (shape & 1)) : shape % PART_MAX + 1;
    for (int32_t i = 0; i < count; i++)
        l->partition[i] = count > PART_MAX ? 1 : draw_size(in, 140);
    const bool low_rank = strcmp(algo, "NVFP4_SVD") == 0;
    const moq_weight_names names = {.algo = algo,
                                    .compute = compute,
                                    .in_features = k,
                                    .partitions = l->partition,
                                    .partition_count = count,
                                    .group_size = group,
                                    .rank = low_rank ? fuzz_range(in, -1, 9) : 0};
    return moq_linear_resolve(&names, dtype, &l->spec, err);
}

/* Element i, in row-major memory, to one a checkpoint may hold: a scale of at most 2, which for a
 * weight may be 0, no code that is NaN, no block scale that is negative. */
static void tame(moq_tensor *t, int64_t i, const moq_param_spec *want) {
    const bool is_scale = want->role[0] == 's', is_input = want->name[0] == 'i';
    uint8_t *byte = (uint8_t *)t->data + (size_t)i * moq_dtype_size(t->dtype);
    const float scale = *byte == 9 && !is_input ? 0 : (float)(*byte + 1) / 128;
    if (t->dtype == MOQ_DT_F32 || t->dtype == MOQ_DT_BF16) {
        moq_encode_row(t->dtype, &scale, 1, byte);
    } else if (t->dtype == MOQ_DT_E4M3) {
        *byte &= is_scale ? 0x7f : 0xff;
        *byte ^= (*byte & 0x7f) == 0x7f;
    } else if (t->dtype == MOQ_DT_E8M0) {
        *byte = 120 + *byte % 9; /* 2^-7 to 2 */
    }
}

/* Makes the tensors of one parameter: one for the layer or one for each partition. */
static void make_source(fuzz_input *in, layer *l, const moq_param_spec *want, source_set *out) {
    const moq_linear_spec *spec = &l->spec;
    const int damage = (int)fuzz_range(in, 0, 255); /* only a few values do any */
    const bool rows =
        want->shape[0] == spec->out_features && (want->ndim == 2 || spec->per_row_scale);
    const bool of_x = want->id == MOQ_PARAM_PRE_QUANT_SCALE; /* of all partitions */
    const bool of_ranks = want->id == MOQ_PARAM_LORA_A;
    const bool split = fuzz_flag(in) && spec->partition_count > 1 && !of_x;
    const bool wild = fuzz_range(in, 0, 31) == 0;
    int32_t count = split ? spec->partition_count : 1;
    l->spoiled = l->spoiled || damage < 5 || wild;
    if (damage == 0)
        count = 0;
    if (damage == 1)
        count = count % PART_MAX + 1;
    for (int32_t p = 0; p < count; p++) {
        moq_dtype dtype =
            damage == 2 ? (moq_dtype)fuzz_range(in, 1, MOQ_DT_COUNT - 1) : want->dtype;
        int64_t shape[2] = {want->shape[0], want->shape[1]};
        const int64_t own = p < spec->partition_count ? spec->partition[p] : 1;
        if (split && of_ranks)
            shape[0] = spec->rank;
        else if (split && want->shape[0] * 2 == spec->out_features)
            shape[0] = own / 2;
        else if (split)
            shape[0] = rows ? own : want->ndim == 2 ? (own + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK : 1;
        if (damage == 3) {
            const int64_t axis = fuzz_range(in, 0, want->ndim - 1);
            shape[axis] += fuzz_range(in, -1, 1);
        }
        shape[0] = shape[0] < 0 ? 0 : shape[0];
        shape[1] = shape[1] < 0 ? 0 : shape[1];
        if (dtype == MOQ_DT_F32 && damage >= 250)
            dtype = MOQ_DT_BF16;
        out->part[p] = fuzz_make(in, dtype, want->ndim, shape, damage == 4);
        moq_tensor *t = &out->part[p].view;
        const int64_t numel = moq_tensor_numel(t);
        for (int64_t i = 0; i < numel && !l->spoiled; i++)
            tame(t, i, want);
        out->view[p] = *t;
    }
    out->source = (moq_source){.count = count, .part = out->view};
}

static void free_source(source_set *s) {
    for (int p = 0; p < PART_MAX; p++)
        fuzz_free(&s->part[p]);
}

static void make_sources(fuzz_input *in, layer *l, moq_weight_sources *sources) {
    moq_param_spec want[MOQ_MAX_PARAMS];
    const int count = moq_linear_checkpoint_params(&l->spec, want);
    for (int i = 0; i < count; i++) {
        source_set *s = want[i].id == MOQ_PARAM_WEIGHT           ? &l->weight
                        : want[i].id == MOQ_PARAM_WEIGHT_SCALE   ? &l->weight_scale
                        : want[i].id == MOQ_PARAM_WEIGHT_SCALE_2 ? &l->weight_scale_2
                        : want[i].id == MOQ_PARAM_INPUT_SCALE    ? &l->input_scale
                        : want[i].id == MOQ_PARAM_LORA_A         ? &l->lora_a
                        : want[i].id == MOQ_PARAM_LORA_B         ? &l->lora_b
                                                                 : &l->pre_quant_scale;
        if (want[i].required || fuzz_flag(in))
            make_source(in, l, &want[i], s);
    }
    *sources = (moq_weight_sources){l->weight.source,          l->weight_scale.source,
                                    l->weight_scale_2.source,  l->input_scale.source,
                                    l->pre_quant_scale.source, l->lora_a.source,
                                    l->lora_b.source};
}

static int32_t partition_of(const moq_linear_spec *spec, int64_t n, int64_t *row) {
    int32_t p = 0;
    while (n >= spec->partition[p])
        n -= spec->partition[p++];
    *row = n;
    return p;
}

/* The scale of partition p, or of row n where rows have their own. */
static double factor_of(const layer *l, const source_set *s, int64_t n) {
    int64_t row;
    const int32_t p = partition_of(&l->spec, n, &row);
    const bool per_row = l->spec.per_row_scale, fused = s->source.count == 1;
    const moq_tensor *t = &s->view[fused ? 0 : p];
    if (per_row)
        return fuzz_element(t, fused ? n : row);
    return fuzz_element(t, fused && moq_tensor_numel(t) > 1 ? p : 0);
}

/* Code (n, k) of a weight, of which int4 has two rows in one. */
static double code_at(const moq_linear_spec *spec, const moq_tensor *weight, int64_t n, int64_t k) {
    if (spec->checkpoint == MOQ_WEIGHT_INT4_GROUP) {
        const uint8_t *bytes = weight->data;
        const int pair = bytes[fuzz_offset(weight, n / 2 * spec->in_features + k)];
        return ((pair >> (n % 2 * 4) & 15) ^ 8) - 8;
    }
    if (spec->checkpoint == MOQ_WEIGHT_INT8_ROW)
        return ((const int8_t *)weight->data)[fuzz_offset(weight, n * spec->in_features + k)];
    return fuzz_element(weight, n * spec->in_features + k);
}

/* Value (n, k) of the product of row n's low-rank pair. */
static double low_rank_at(const layer *l, int64_t n, int64_t k) {
    int64_t row;
    const moq_linear_spec *spec = &l->spec;
    const int32_t p = partition_of(spec, n, &row);
    const bool fused_a = l->lora_a.source.count == 1, fused_b = l->lora_b.source.count == 1;
    const moq_tensor *a = &l->lora_a.view[fused_a ? 0 : p], *b = &l->lora_b.view[fused_b ? 0 : p];
    double sum = 0;
    for (int64_t i = 0; i < spec->rank; i++)
        sum += fuzz_element(b, (fused_b ? n : row) * spec->rank + i) *
               fuzz_element(a, ((fused_a ? p * spec->rank : 0) + i) * spec->in_features + k);
    return sum;
}

/* Weight (n, k) as codes and scales of the checkpoint say. */
static double weight_at(const layer *l, int64_t n, int64_t k) {
    int64_t row;
    const moq_linear_spec *spec = &l->spec;
    const int32_t p = partition_of(spec, n, &row);
    const bool fused = l->weight.source.count == 1, fused_scale = l->weight_scale.source.count == 1;
    const moq_tensor *weight = &l->weight.view[fused ? 0 : p];
    const moq_tensor *scale = &l->weight_scale.view[fused_scale ? 0 : p];
    const int64_t columns = moq_linear_scale_columns(spec);
    const double code = code_at(spec, weight, fused ? n : row, k);
    if (spec->checkpoint == MOQ_WEIGHT_E4M3_ROW || spec->checkpoint == MOQ_WEIGHT_INT8_ROW)
        return code * factor_of(l, &l->weight_scale, n);
    if (spec->checkpoint != MOQ_WEIGHT_E4M3_BLOCK) {
        const double group =
            fuzz_element(scale, (fused_scale ? n : row) * columns + k / spec->group_size);
        const bool second = spec->checkpoint == MOQ_WEIGHT_E2M1 && !spec->mx_scales;
        return code * group * (second ? factor_of(l, &l->weight_scale_2, n) : 1.0);
    }
    int64_t block = row / MOQ_FP8_BLOCK;
    for (int32_t q = 0; q < p && fused_scale; q++)
        block += (spec->partition[q] + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
    return code * fuzz_element(scale, block * columns + k / MOQ_FP8_BLOCK);
}

/* Bounds how far one output may be from the exact sum: `size` is the sum of its terms' magnitudes,
 * and `flat` that of the largest terms there could be, which quantized activations round to a part
 * of.
 */
static double allowed(const moq_linear_spec *spec, double sum, double size, double flat) {
    const double rounding = spec->dtype == MOQ_DT_F32   ? 0x1p-24
                            : spec->dtype == MOQ_DT_F16 ? 0x1p-10
                                                        : 0x1p-7;
    double slack = 0.07; /* e4m3: half a step of an eighth */
    if (spec->input == MOQ_INPUT_AS_IS)
        return size * 1e-5 + fabs(sum) * rounding + 1e-6;
    if (spec->input == MOQ_INPUT_NVFP4)
        slack = 0.3; /* e2m1: half of the step from 4 to 6, of 4; and the block scale's own */
    if (spec->weight != spec->checkpoint)
        slack = 0.14; /* e4m3 twice */
    return (size + flat / 8) * slack + fabs(sum) * rounding + 1e-6;
}

/* Element i of x, by its pre_quant_scale where there is one. */
static double smoothed(const layer *l, const moq_tensor *x, int64_t i) {
    const double value = fuzz_element(x, i);
    if (l->pre_quant_scale.source.count == 0)
        return value;
    const moq_tensor *scale = &l->pre_quant_scale.view[0];
    float product = (float)value * (float)fuzz_element(scale, i % l->spec.in_features);
    uint8_t rounded[4];
    moq_encode_row(x->dtype, &product, 1, rounded);
    moq_decode_row(x->dtype, rounded, 1, &product);
    return product;
}

typedef struct {
    double sum, near;
} expectation;

/* y[r, n] as codes and scales of the checkpoint say, for m rows of x. */
static expectation *expect(const layer *l, const moq_tensor *x, int64_t m, const moq_tensor *bias) {
    const moq_linear_spec *spec = &l->spec;
    const int64_t k = spec->in_features, count = spec->out_features;
    expectation *all = malloc((size_t)(m * count) * sizeof *all);
    double *values = malloc((size_t)(m * k) * sizeof *values),
           *row = malloc((size_t)k * sizeof *row);
    for (int64_t i = 0; i < m * k; i++)
        values[i] = smoothed(l, x, i);
    for (int64_t n = 0; n < count; n++) {
        double largest = 0;
        for (int64_t i = 0; i < k; i++) {
            row[i] = weight_at(l, n, i) + (spec->rank ? low_rank_at(l, n, i) : 0);
            largest = fmax(largest, fabs(row[i]));
        }
        for (int64_t r = 0; r < m; r++) {
            double sum = bias ? fuzz_element(bias, n) : 0, size = fabs(sum), amax = 0;
            for (int64_t i = 0; i < k; i++) {
                const double value = values[r * k + i];
                sum += value * row[i];
                size += fabs(value * row[i]);
                amax = fmax(amax, fabs(value));
            }
            const double flat = amax * largest * (double)k;
            all[r * count + n] = (expectation){sum, allowed(spec, sum, size, flat)};
        }
    }
    free(values);
    free(row);
    return all;
}

static void check_output(const moq_linear_spec *spec, const char *kernel, const expectation *all,
                         const moq_tensor *y) {
    for (int64_t i = 0; i < moq_tensor_numel(y); i++) {
        const double got = fuzz_element(y, i);
        const bool may_overflow =
            y->dtype == MOQ_DT_F16 && fabs(all[i].sum) + all[i].near > 65504; /* its largest */
        FUZZ_CHECK(may_overflow || fabs(got - all[i].sum) <= all[i].near,
                   "%s, %s, element %lld: %g, expected %g within %g", spec->algo, kernel,
                   (long long)i, got, all[i].sum, all[i].near);
    }
}

/* Calls of each kernel, printed at the end: a case may be refused before it reaches one. */
static struct {
    const char *name;
    long long calls;
} tally[MOQ_MAX_KERNELS];

static void print_tally(void) {
    for (int i = 0; i < MOQ_MAX_KERNELS; i++) {
        if (tally[i].name)
            fprintf(stderr, "calls of %s: %lld\n", tally[i].name, tally[i].calls);
    }
}

static void count_call(int kernel, const char *name) {
    static bool registered;
    if (!registered)
        atexit(print_tally);
    registered = true;
    tally[kernel].name = name;
    tally[kernel].calls++;
}

/* Mostly up to 2, else as many as the model can do in a millisecond: kernels treat few rows, more
 * than a tile and more than a panel each in their own way. */
static int64_t draw_rows(fuzz_input *in, const moq_linear_spec *spec) {
    const int64_t kind = fuzz_range(in, 0, 255);
    const int64_t most = PRODUCT_MAX / (spec->in_features * spec->out_features);
    return kind < 224 ? kind % 3 : fuzz_range(in, 0, most < ROWS_MAX ? most : ROWS_MAX);
}

/* Activations of modest size, so that every sum is finite. */
static fuzz_tensor make_x(fuzz_input *in, moq_dtype dtype, int32_t ndim, const int64_t *shape) {
    fuzz_tensor x = fuzz_make(in, dtype, ndim, shape, fuzz_flag(in));
    const int64_t count = moq_tensor_numel(&x.view);
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = fuzz_offset(&x.view, i);
        char *element = (char *)x.view.data + at * (int64_t)moq_dtype_size(dtype);
        const float value = (float)((int)(uint8_t)*element - 128) / 32;
        moq_encode_row(dtype, &value, 1, element);
    }
    return x;
}

static void run(fuzz_input *in, const layer *l, const moq_params *params) {
    const moq_linear_spec *spec = &l->spec;
    moq_err err;
    const int64_t rows = draw_rows(in, spec);
    const int64_t shape[3] = {fuzz_range(in, 0, 2), rows, spec->in_features};
    const int32_t ndim = (int32_t)fuzz_range(in, 1, 3);
    fuzz_tensor x = make_x(in, spec->dtype, ndim, shape + 3 - ndim);
    const moq_dtype bias_dtype = fuzz_flag(in) ? MOQ_DT_F32 : spec->dtype;
    fuzz_tensor bias = make_x(in, bias_dtype, 1, &spec->out_features);
    const moq_tensor *used =
        moq_tensor_is_contiguous(&bias.view) && fuzz_flag(in) ? &bias.view : NULL;
    moq_tensor wanted = {.dtype = spec->dtype, .ndim = ndim};
    FUZZ_CHECK(moq_linear_output_shape(spec, &x.view, wanted.shape, &err) == MOQ_OK, "%s",
               err.text);
    const bool judged = !l->spoiled && l->input_scale.source.count == 0;
    const int64_t m = moq_tensor_numel(&x.view) / spec->in_features;
    expectation *expected = judged ? expect(l, &x.view, m, used) : NULL;
    const char *only = getenv("MOQEXT_KERNEL");
    for (int i = 0; i < MOQ_LINEAR.kernel_count; i++) {
        char name[64], reason[MOQ_REASON_SIZE];
        const moq_kernel *kernel = MOQ_LINEAR.kernels[i];
        moq_plan plan;
        if ((spec->quantized_input && !kernel->takes_codes) ||
            !MOQ_LINEAR.can_run(spec, kernel, m, reason, sizeof reason))
            continue;
        snprintf(name, sizeof name, "%s:%s", kernel->family, kernel->name);
        if (only && strcmp(only, name) != 0)
            continue;
        FUZZ_CHECK(moq_plan_make(&MOQ_LINEAR, spec, name, &plan, &err) == MOQ_OK, "%s", err.text);
        fuzz_tensor y = fuzz_result(&wanted, 0xff);
        count_call(i, kernel->name);
        moq_linear_job job;
        moq_status status = moq_linear_open(&plan, params, &x.view, used, &y.view, &job, &err);
        void *workspace = NULL;
        if (status == MOQ_OK && job.job.bytes > 0)
            job.job.workspace = workspace = malloc((size_t)job.job.bytes);
        if (status == MOQ_OK)
            status = moq_job_run(&job.job, &err);
        free(workspace);
        FUZZ_CHECK(status == MOQ_OK, "%s: %s", name, err.text);
        if (judged)
            check_output(spec, name, expected, &y.view);
        fuzz_free(&y);
    }
    free(expected);
    fuzz_free(&x);
    fuzz_free(&bias);
}

static void prepare_and_run(fuzz_input *in, layer *l) {
    moq_param_spec want[MOQ_MAX_PARAMS];
    moq_weight_sources sources;
    moq_params params;
    fuzz_tensor prepared[MOQ_MAX_PARAMS] = {{.memory = NULL}};
    moq_err err;
    moq_params_clear(&params, 0, MOQ_PARAM_COUNT);
    make_sources(in, l, &sources);
    const int count = moq_linear_prepared_params(&l->spec, want);
    for (int i = 0; i < count; i++) {
        moq_tensor shape = {.dtype = want[i].dtype, .ndim = want[i].ndim};
        const bool of_x = want[i].id == MOQ_PARAM_PRE_QUANT_SCALE;
        if (!want[i].required && (of_x ? sources.pre_quant_scale : sources.input_scale).count == 0)
            continue;
        memcpy(shape.shape, want[i].shape, sizeof want[i].shape);
        prepared[i] = fuzz_result(&shape, 0xff);
        params.of[want[i].id] = prepared[i].view;
    }
    const moq_prepare_mode way = {.fresh = false};
    const moq_status status = moq_weight_prepare(&l->spec.matrix, &sources, way, &params, &err);
    if (status == MOQ_OK) {
        run(in, l, &params);
    } else {
        fuzz_check_error(status, &err);
        FUZZ_CHECK(l->spoiled, "%s", err.text);
        for (int i = 0; i < count; i++) {
            const uint8_t *memory = prepared[i].memory;
            FUZZ_CHECK(!memory || moq_tensor_numel(&prepared[i].view) == 0 || memory[0] == 0xff,
                       "%s was written before %s", want[i].name, err.text);
        }
    }
    for (int i = 0; i < count; i++)
        fuzz_free(&prepared[i]);
}

static void check_spec(const moq_linear_spec *spec) {
    moq_param_spec param[MOQ_MAX_PARAMS];
    char text[160];
    FUZZ_CHECK(strlen(moq_linear_text(spec, text, sizeof text)) < sizeof text, "%s", text);
    for (int pass = 0; pass < 2; pass++) {
        const int count = pass ? moq_linear_prepared_params(spec, param)
                               : moq_linear_checkpoint_params(spec, param);
        FUZZ_CHECK(count >= 1 && count <= MOQ_MAX_PARAMS, "%d", count);
        for (int i = 0; i < count; i++) {
            const int64_t columns = param[i].ndim == 2 ? param[i].shape[1] : 1;
            FUZZ_CHECK(param[i].shape[0] > 0 && columns > 0, "%s of %s", param[i].name, text);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    layer *l = calloc(1, sizeof *l);
    moq_err err;
    const moq_status status = resolve(&in, l, &err);
    if (status != MOQ_OK) {
        fuzz_check_error(status, &err);
    } else {
        check_spec(&l->spec);
        if (l->spec.partition_count <= PART_MAX &&
            l->spec.in_features <= WEIGHT_MAX / l->spec.out_features)
            prepare_and_run(&in, l);
    }
    free_source(&l->weight);
    free_source(&l->weight_scale);
    free_source(&l->weight_scale_2);
    free_source(&l->input_scale);
    free_source(&l->pre_quant_scale);
    free_source(&l->lora_a);
    free_source(&l->lora_b);
    free(l);
    return 0;
}
