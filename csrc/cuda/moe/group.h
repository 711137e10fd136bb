/* Slots of a call of experts, sorted by expert on the device: interface for launchers and kernels.
 *
 * Slots are numbered within a chunk of tokens, token * top_k + j. Slots that count (core/moe.h) get
 * rows: expert after expert, and within an expert in their own order. The rows of an expert may
 * begin at multiples of a number, with rows without a slot before. They form as few tiles as there
 * are of the kernel's tile rows. Tiles share the rows evenly, in multiples of 8 except for the last
 * one of an expert. */
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

/* Returns the offset of slot j of a token, in elements. */
static __device__ __forceinline__ int64_t slot_offset(const slot_tensor *t, int64_t token, int j) {
    int64_t offset = j * t->step;
    for (int i = t->leading - 1; i > 0; i--) {
        offset += token % t->shape[i] * t->stride[i];
        token /= t->shape[i];
    }
    return t->leading ? offset + token * t->stride[0] : offset;
}

/* Takes the next `bytes` of a workspace, from a multiple of 256 on; returns their offset. */
static inline int64_t take_bytes(int64_t *end, int64_t bytes) {
    int64_t at = *end;
    *end += (bytes + 255) / 256 * 256;
    return at;
}

/* A tile of rows of one expert. */
typedef struct {
    int32_t expert, first, rows; /* rows [first, first + rows) */
} row_tile;

/* The result of sorting, all on the device. */
typedef struct {
    int32_t *count; /* number of rows, number of tiles, and two zeros as counters for kernels */
    int32_t *begin; /* [E]: the first row of each expert */
    int32_t *row;   /* [slots]: the row of each slot, or -1 */
    int32_t *slot;  /* [most_rows]: the slot of each row, or -1 */
    int32_t *owner; /* [most_rows]: the expert of each row */
    row_tile *tile; /* [most_tiles]: in the order of rows, then tiles without rows */
} slot_groups;

/* A chunk to sort: tokens [first, first + tokens) of a call, at most 2^31 - 1 slots. */
typedef struct {
    const moq_moe_call *call;
    int64_t first, tokens;
    int tile_rows;
    int align;  /* the rows of an expert begin at multiples of this */
    bool pairs; /* an expert has an even number of tiles, the last of which may be empty */
} slot_chunk;

/* Return the rows and tiles at most, for any routing. */
int64_t most_rows(const slot_chunk *chunk);
int64_t most_tiles(const slot_chunk *chunk);

/* Bytes of a workspace for the groups of a chunk, and the groups in such memory. */
int64_t groups_bytes(const slot_chunk *chunk);
slot_groups groups_at(const slot_chunk *chunk, void *memory);

/* Sorts in one launch or in three. `memory` has groups_bytes, laid out by groups_at. */
moq_status group_slots(const slot_chunk *chunk, void *memory, moq_err *err);

} // namespace moq::moe

#endif
