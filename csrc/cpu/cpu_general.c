/* Decoding of the layouts that only general kernels read: see cpu_general.h. Plain loops, of which
 * the compiler makes vectors; a row of int4 has every nibble of one half of its bytes. */
#include "cpu/cpu_general.h"

#include "core/formats.h"

static void decode_int8(const int8_t *codes, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = codes[i];
}

static void decode_int4(const uint8_t *codes, int shift, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)((((codes[i] >> shift) & 15) ^ 8) - 8);
}

/* Multiplies by the scale of each group, from column `first` of the row on. */
static void scale_groups(const moq_linear_call *call, int64_t n, int64_t first, int64_t count,
                         float *out) {
    const moq_linear_spec *spec = call->spec;
    int64_t group = spec->group_size, at = n * moq_linear_scale_columns(spec);
    bool powers = spec->weight == MOQ_WEIGHT_E4M3_GROUP;
    for (int64_t i = 0; i < count;) {
        int64_t g = at + (first + i) / group, end = i + group - (first + i) % group;
        float scale = powers ? moq_e8m0_decode(((const uint8_t *)call->weight_scale)[g])
                             : ((const float *)call->weight_scale)[g];
        for (end = end < count ? end : count; i < end; i++)
            out[i] *= scale;
    }
}

void moq_cpu_decode_general(const moq_linear_call *call, int64_t n, int64_t first, int64_t count,
                            float *out) {
    int64_t k = call->spec->in_features;
    switch (call->spec->weight) {
    case MOQ_WEIGHT_INT8_ROW:
        decode_int8((const int8_t *)call->weight + n * k + first, count, out);
        break;
    case MOQ_WEIGHT_INT4_GROUP:
        decode_int4(call->weight + n / 2 * k + first, n % 2 * 4, count, out);
        scale_groups(call, n, first, count, out);
        break;
    default: /* MOQ_WEIGHT_E4M3_GROUP */
        moq_decode_row(MOQ_DT_E4M3, call->weight + n * k + first, count, out);
        scale_groups(call, n, first, count, out);
    }
}
