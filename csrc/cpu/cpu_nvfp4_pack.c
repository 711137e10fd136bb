/* NVFP4 weights to the packed layout and back: see cpu_nvfp4_pack.h. A unit after the other, each
 * row of it by groups of 16 columns. */
#include "cpu/cpu_nvfp4_pack.h"

#include "core/nvfp4_packed.h"
#include "cpu/interrupt.h"
#include "cpu/threads.h"

#include <stdbool.h>
#include <string.h>

#define GROUP_BYTES  8   /* 16 codes */
#define THREAD_UNITS 64  /* at least so many for a member of a team */
#define NANOSECONDS  1.0 /* of a value, roughly */
#define UNIT_VALUES  (MOQ_PACK_ROWS * MOQ_PACK_K)

static int64_t count_units(const moq_nvfp4_rows *p) { /* of a matrix */
    return moq_pack_slabs(p->rows) * moq_pack_blocks(p->columns);
}

/* A group of 16 columns of a unit: where its codes and its scale are in the layer. */
typedef struct {
    uint8_t *codes, *scale;
    int r, s; /* row of the slab, group of the block */
} group_place;

/* False beyond the last row or column. */
static bool find_group(const moq_nvfp4_rows *p, int64_t unit, int index, group_place *at) {
    int64_t blocks = moq_pack_blocks(p->columns), units = count_units(p);
    int64_t expert = unit / units;
    unit %= units;
    at->r = index / MOQ_PACK_GROUPS;
    at->s = index % MOQ_PACK_GROUPS;
    int64_t row = unit / blocks * MOQ_PACK_ROWS + at->r;
    int64_t column = unit % blocks * MOQ_PACK_K + 16 * at->s;
    at->codes = p->codes + expert * p->code_step + row * p->code_stride + column / 2;
    at->scale = p->scales + expert * p->scale_step + row * p->scale_stride + column / p->group;
    return row < p->rows && column < p->columns;
}

/* Byte b of a group: which pair of which word it is. */
static uint32_t *find_word(uint32_t *words, const group_place *at, int b, int *pair) {
    *pair = b / 4 * 2 + at->r / 8;
    return words + moq_pack_word_at(at->r % 8, b % 4, at->s) / 4;
}

static void pack_units(void *context, int64_t begin, int64_t end) {
    const moq_nvfp4_rows *p = context;
    moq_pace pace = {0};
    for (int64_t unit = begin; unit < end && !moq_stops(&pace, UNIT_VALUES); unit++) {
        uint8_t *to = p->packed + unit * MOQ_PACK_BYTES;
        uint32_t words[MOQ_PACK_SCALES / 4] = {0};
        group_place at;
        memset(to, 0, MOQ_PACK_BYTES);
        for (int i = 0; i < MOQ_PACK_ROWS * MOQ_PACK_GROUPS; i++) {
            if (!find_group(p, unit, i, &at))
                continue;
            for (int b = 0, pair; b < GROUP_BYTES; b++) {
                uint32_t *word = find_word(words, &at, b, &pair);
                *word |= moq_pack_pair(at.codes[b], pair);
            }
            to[moq_pack_scale_at(at.r, at.s)] = moq_pack_scale(*at.scale);
        }
        memcpy(to, words, sizeof words);
    }
}

static void unpack_units(void *context, int64_t begin, int64_t end) {
    const moq_nvfp4_rows *p = context;
    moq_pace pace = {0};
    for (int64_t unit = begin; unit < end && !moq_stops(&pace, UNIT_VALUES); unit++) {
        const uint8_t *from = p->packed + unit * MOQ_PACK_BYTES;
        uint32_t words[MOQ_PACK_SCALES / 4];
        group_place at;
        memcpy(words, from, sizeof words);
        for (int i = 0; i < MOQ_PACK_ROWS * MOQ_PACK_GROUPS; i++) {
            if (!find_group(p, unit, i, &at))
                continue;
            for (int b = 0, pair; b < GROUP_BYTES; b++) {
                const uint32_t *word = find_word(words, &at, b, &pair);
                at.codes[b] = (uint8_t)moq_unpack_pair(*word, pair);
            }
            if (16 * at.s % p->group == 0)
                *at.scale = from[moq_pack_scale_at(at.r, at.s)];
        }
    }
}

static moq_shares share_units(const moq_nvfp4_rows *p) {
    int64_t units = p->experts * count_units(p);
    return (moq_shares){.count = units,
                        .grain = THREAD_UNITS,
                        .nanoseconds = NANOSECONDS * UNIT_VALUES * (double)units};
}

void moq_cpu_pack_nvfp4(const moq_nvfp4_rows *rows) {
    moq_shares shares = share_units(rows);
    moq_parallel_for(&shares, pack_units, (void *)rows);
}

void moq_cpu_unpack_nvfp4(const moq_nvfp4_rows *rows) {
    moq_shares shares = share_units(rows);
    moq_parallel_for(&shares, unpack_units, (void *)rows);
}
