/* Slots of a call of experts, sorted by expert on the device: for launchers and kernels of this
 * room.
 *
 * Slots are numbered within a chunk of tokens, token * top_k + j. Those that count (core/moe.h) get
 * rows: expert after expert, and within an expert in their own order. The rows of an expert may
 * begin at multiples of a number, with rows of no slot before. They go in as few tiles as there are
 * of as many rows as a kernel asks for, which share the rows evenly, in multiples of 8 but for the
 * last one of an expert. */
#ifndef MOQ_CUDA_MOE_GROUP_H
#define MOQ_CUDA_MOE_GROUP_H

#include "core/moe.h"
#include "core/status.h"

#include <stdint.h>

namespace moq::moe {

/* A tensor [..., top_k], by slot. */
typedef struct {
    const void *data;
    moq_dtype dtype;
    int leading; /* dimensions before top_k */
    int64_t step, shape[MOQ_MAX_NDIM], stride[MOQ_MAX_NDIM];
} slot_tensor;

static inline slot_tensor slot_tensor_of(const moq_tensor *t) {
    slot_tensor s = {.data = t->data, .dtype = t->dtype};
    moq_tensor rows;
    s.step = t->stride[t->ndim - 1];
    if (moq_tensor_as_rows(t, &rows)) { /* one division less */
        s.leading = 1;
        s.shape[0] = rows.shape[0];
        s.stride[0] = rows.stride[0];
        return s;
    }
    for (; s.leading < t->ndim - 1; s.leading++) {
        s.shape[s.leading] = t->shape[s.leading];
        s.stride[s.leading] = t->stride[s.leading];
    }
    return s;
}

/* Where slot j of a token lies, in elements. */
static __device__ __forceinline__ int64_t slot_offset(const slot_tensor *t, int64_t token, int j) {
    int64_t offset = j * t->step;
    for (int i = t->leading - 1; i > 0; i--) {
        offset += token % t->shape[i] * t->stride[i];
        token /= t->shape[i];
    }
    return t->leading ? offset + token * t->stride[0] : offset;
}

/* Bytes of a workspace that the next part takes, from a multiple of 256 on; where it begins. */
static inline int64_t take_bytes(int64_t *end, int64_t bytes) {
    int64_t at = *end;
    *end += (bytes + 255) / 256 * 256;
    return at;
}

/* One tile of rows. */
typedef struct {
    int32_t expert, first, rows; /* rows [first, first + rows) */
} row_tile;

/* The result, all on the device. */
typedef struct {
    int32_t *count; /* how many rows there are, and how many tiles; two zeros, for kernels to count
                       what they take of them */
    int32_t *begin; /* [E]: the first row of each expert */
    int32_t *row;   /* [slots]: the row of each slot, or -1 */
    int32_t *slot;  /* [most_rows]: the slot of each row, or -1 */
    int32_t *owner; /* [most_rows]: the expert of each row */
    row_tile *tile; /* [most_tiles]: in the order of rows, behind them tiles without rows */
} slot_groups;

/* What is to be sorted: tokens [first, first + tokens) of a call, at most 2^31 - 1 slots. */
typedef struct {
    const moq_moe_call *call;
    int64_t first, tokens;
    int tile_rows;
    int align;  /* the rows of an expert begin at multiples of this */
    bool pairs; /* whether an expert has an even number of tiles, of which the last may be empty */
} slot_chunk;

/* Rows and tiles that the slots can make at most, however they are routed. */
int64_t most_rows(const slot_chunk *chunk);
int64_t most_tiles(const slot_chunk *chunk);

/* Bytes of a workspace for the groups of a chunk, and their places in it. */
int64_t groups_bytes(const slot_chunk *chunk);
slot_groups groups_at(const slot_chunk *chunk, void *memory);

/* Sorts, in one launch or in three. `memory` is of groups_bytes, the groups those of groups_at. */
moq_status group_slots(const slot_chunk *chunk, void *memory, moq_err *err);

} // namespace moq::moe

#endif
