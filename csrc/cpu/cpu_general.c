/* Decoding of the layouts that only general kernels read: see cpu_general.h. A row of int4 has
 * every nibble of one half of its bytes. */
#include "cpu/cpu_general.h"

#include "core/formats.h"
#include "cpu/cpu_convert.h"

/* Scales that pass through the stack at once. */
#define PIECE 64

static void multiply_by(const moq_linear_call *call, int64_t at, int64_t count, int64_t group,
                        float *values) {
    const moq_row_kernels *rows = moq_cpu_row_kernels();
    int64_t factors = (count + group - 1) / group;
    float powers[PIECE];
    if (call->spec->weight != MOQ_WEIGHT_E4M3_GROUP) {
        rows->multiply_groups(values, count, group, (const float *)call->weight_scale + at);
        return;
    }
    rows->decode(MOQ_DT_E8M0, (const uint8_t *)call->weight_scale + at, factors, powers);
    rows->multiply_groups(values, count, group, powers);
}

/* Multiplies by the scale of each group, from column `first` of the row on, where a group may have
 * begun before. */
static void scale_groups(const moq_linear_call *call, int64_t n, int64_t first, int64_t count,
                         float *values) {
    int64_t group = call->spec->group_size, at = n * moq_linear_scale_columns(call->spec);
    for (int64_t i = 0, next; i < count; i = next) {
        int64_t begun = (first + i) % group;
        next = begun ? i + group - begun : i + PIECE * group;
        next = next < count ? next : count;
        multiply_by(call, at + (first + i) / group, next - i, group, values + i);
    }
}

void moq_cpu_decode_general(const moq_linear_call *call, int64_t n, int64_t first, int64_t count,
                            float *out) {
    const moq_row_kernels *rows = moq_cpu_row_kernels();
    int64_t k = call->spec->in_features;
    switch (call->spec->weight) {
    case MOQ_WEIGHT_INT8_ROW:
        rows->decode_int8((const int8_t *)call->weight + n * k + first, count, out);
        break;
    case MOQ_WEIGHT_INT4_GROUP:
        rows->decode_int4(call->weight + n / 2 * k + first, n % 2 * 4, count, out);
        scale_groups(call, n, first, count, out);
        break;
    default: /* MOQ_WEIGHT_E4M3_GROUP */
        rows->decode(MOQ_DT_E4M3, call->weight + n * k + first, count, out);
        scale_groups(call, n, first, count, out);
    }
}
