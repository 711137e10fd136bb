/* The portable linear kernel: every weight layout and input mode in plain C.
 *
 *   y[m, n] = round(f_x[m] * f_w[n] * sum_k X[m, k] * W[n, k] + bias[n])
 *
 * X is a panel of up to MOQ_CPU_PANEL_ROWS rows of x as float32: the values as they are, or their
 * codes decoded again. W is one row of codes as float32. Scales that vary along K are multiplied
 * into X and W (e2m1 times e4m3 is exact, a 128-group scale rounds once); those that do not are the
 * factors f_x and f_w. Sums run in float32 over 16 lanes in a fixed order, so a result does not
 * depend on anything but its operands.
 *
 * Bound by decoding for small m (about 1 ns a weight) and by the dot products beyond. */
#include "cpu/linear.h"

#include "core/formats.h"
#include "cpu/quantize.h"
#include "cpu/rows.h"

#include <stdlib.h>
#include <string.h>

enum { LANES = 16 };

typedef struct {
    const moq_linear_call *call;
    int64_t k;
    float *panel;    /* [MOQ_CPU_PANEL_ROWS, k] */
    float *weight;   /* [k] */
    float *scales;   /* [ceil(k / 128)] */
    uint8_t *codes;  /* [k] */
    uint8_t *groups; /* [ceil(k / 16)] */
    float factor[MOQ_CPU_PANEL_ROWS];
} workspace;

static float dot(const float *a, const float *b, int64_t n) {
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int j = 0; j < LANES; j++)
            lane[j] += a[i + j] * b[i + j];
    }
    for (int j = 0; i < n; i++, j++)
        lane[j] += a[i] * b[i];
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; j++)
            lane[j] += lane[j + width];
    }
    return lane[0];
}

static void scale_groups(float *row, int64_t k, int64_t group, const float *scales) {
    for (int64_t at = 0; at < k; at += group) {
        float scale = *scales++;
        int64_t end = at + group < k ? at + group : k;
        for (int64_t i = at; i < end; i++)
            row[i] *= scale;
    }
}

/* values[i] = e2m1[i] * e4m3[i / group], exactly. */
static void decode_e2m1(const uint8_t *codes, const uint8_t *scales, int64_t k, int64_t group,
                        float *values) {
    moq_decode_row(MOQ_DT_E2M1X2, codes, k, values);
    for (int64_t at = 0; at < k; at += group) {
        float scale = moq_e4m3_decode(*scales++);
        for (int64_t i = at; i < at + group; i++)
            values[i] *= scale;
    }
}

/* Replaces a row of x by what its codes mean, up to the returned factor. */
static float quantize_row(workspace *w, float *row, float input_scale) {
    float factor = input_scale;
    switch (w->call->spec->input) {
    case MOQ_INPUT_AS_IS:
        return 1.0f;
    case MOQ_INPUT_NVFP4:
        moq_quantize_row_nvfp4(row, w->k, input_scale, w->codes, w->groups);
        decode_e2m1(w->codes, w->groups, w->k, MOQ_NVFP4_GROUP, row);
        return factor;
    case MOQ_INPUT_E4M3_TENSOR:
        moq_quantize_row_fp8_static(row, w->k, 1.0f / input_scale, w->codes);
        break;
    case MOQ_INPUT_E4M3_TOKEN:
        factor = moq_quantize_row_fp8_token(row, w->k, w->codes);
        break;
    case MOQ_INPUT_E4M3_GROUP:
        moq_quantize_row_fp8_group(row, w->k, MOQ_FP8_BLOCK, w->codes, w->scales);
        moq_decode_row(MOQ_DT_E4M3, w->codes, w->k, row);
        scale_groups(row, w->k, MOQ_FP8_BLOCK, w->scales);
        return 1.0f;
    }
    moq_decode_row(MOQ_DT_E4M3, w->codes, w->k, row);
    return factor;
}

static void load_panel(workspace *w, int64_t first, int64_t rows, float input_scale) {
    for (int64_t r = 0; r < rows; r++) {
        float *row = w->panel + r * w->k;
        moq_load_row(w->call->x, first + r, row);
        w->factor[r] = quantize_row(w, row, input_scale);
    }
}

/* Row n of the weight; `block` is its row of 128 x 128 blocks. */
static void load_weight(workspace *w, int64_t n, int64_t block) {
    const moq_linear_call *call = w->call;
    int64_t k = w->k, columns = moq_linear_scale_columns(call->spec);
    if (call->spec->weight == MOQ_WEIGHT_E2M1) {
        const uint8_t *scales = (const uint8_t *)call->weight_scale + n * columns;
        decode_e2m1(call->weight + n * (k / 2), scales, k, call->spec->group_size, w->weight);
        return;
    }
    moq_decode_row(MOQ_DT_E4M3, call->weight + n * k, k, w->weight);
    if (call->spec->weight == MOQ_WEIGHT_E4M3_BLOCK)
        scale_groups(w->weight, k, MOQ_FP8_BLOCK,
                     (const float *)call->weight_scale + block * columns);
}

static void store(const moq_linear_call *call, int64_t row, int64_t n, float value) {
    size_t size = moq_dtype_size(call->y->dtype);
    int64_t offset = moq_row_offset(call->y, row) + n;
    moq_encode_row(call->y->dtype, &value, 1, (char *)call->y->data + (size_t)offset * size);
}

/* Rows [first, first + rows) of y for the output columns [start, start + count) of a partition
 * whose blocks begin at row `block`. */
static void multiply_panel(workspace *w, int64_t first, int64_t rows, int64_t start, int64_t count,
                           int64_t block) {
    const moq_linear_call *call = w->call;
    size_t bias_size = moq_dtype_size(call->bias_dtype);
    for (int64_t i = 0; i < count; i++) {
        int64_t n = start + i;
        float bias = 0, factor = call->output_scale ? call->output_scale[n] : 1.0f;
        if (call->bias)
            moq_decode_row(call->bias_dtype, (const char *)call->bias + (size_t)n * bias_size, 1,
                           &bias);
        load_weight(w, n, block + i / MOQ_FP8_BLOCK);
        for (int64_t r = 0; r < rows; r++) {
            float sum = dot(w->panel + r * w->k, w->weight, w->k);
            store(call, first + r, n, sum * (w->factor[r] * factor) + bias);
        }
    }
}

/* The second-level activation scale of partition p: the checkpoint's, else from the whole of x. */
static float input_scale_of(const moq_linear_call *call, int32_t p, float dynamic) {
    return call->input_scale ? call->input_scale[p] : dynamic;
}

static float dynamic_scale(workspace *w) {
    moq_input_mode mode = w->call->spec->input;
    if (w->call->input_scale || (mode != MOQ_INPUT_E4M3_TENSOR && mode != MOQ_INPUT_NVFP4))
        return 1.0f;
    float amax = moq_tensor_amax(w->call->x, w->panel);
    return mode == MOQ_INPUT_NVFP4 ? moq_nvfp4_dynamic_scale(amax) : moq_fp8_dynamic_scale(amax);
}

static void run_panel(workspace *w, int64_t first, int64_t rows, float dynamic) {
    const moq_linear_spec *spec = w->call->spec;
    int64_t start = 0, block = 0;
    for (int32_t p = 0; p < spec->partition_count; p++) {
        float scale = input_scale_of(w->call, p, dynamic);
        if (p == 0 || scale != input_scale_of(w->call, p - 1, dynamic))
            load_panel(w, first, rows, scale);
        multiply_panel(w, first, rows, start, spec->partition[p], block);
        start += spec->partition[p];
        block += (spec->partition[p] + MOQ_FP8_BLOCK - 1) / MOQ_FP8_BLOCK;
    }
}

static moq_status allocate(workspace *w, char **memory, moq_err *err) {
    size_t k = (size_t)w->k, groups = k / MOQ_NVFP4_GROUP + 1;
    size_t floats = (MOQ_CPU_PANEL_ROWS + 1) * k + k / MOQ_FP8_BLOCK + 1;
    *memory = malloc(floats * sizeof(float) + k + groups);
    if (!*memory)
        return moq_fail(err, MOQ_ERR_MEMORY, "no memory for the workspace of a linear layer");
    w->panel = (float *)*memory;
    w->weight = w->panel + MOQ_CPU_PANEL_ROWS * k;
    w->scales = w->weight + k;
    w->codes = (uint8_t *)(w->panel + floats);
    w->groups = w->codes + k;
    return MOQ_OK;
}

moq_status moq_cpu_linear_portable(const moq_linear_call *call, moq_err *err) {
    workspace w = {.call = call, .k = call->spec->in_features};
    char *memory;
    MOQ_TRY(allocate(&w, &memory, err));
    float dynamic = dynamic_scale(&w);
    for (int64_t first = 0; first < call->m; first += MOQ_CPU_PANEL_ROWS) {
        int64_t left = call->m - first;
        run_panel(&w, first, left < MOQ_CPU_PANEL_ROWS ? left : MOQ_CPU_PANEL_ROWS, dynamic);
    }
    free(memory);
    return MOQ_OK;
}
