/* How work divides into tiles and steps, for the choice of a config, for launchers and for kernels.
 */
#ifndef MOQ_CUDA_CHOICE_GRID_H
#define MOQ_CUDA_CHOICE_GRID_H

#include "core/invariant.h"
#include "core/linear.h"
#include "core/sizes.h"

#include <stdbool.h>
#include <stdint.h>

#define MOQ_NVFP4_BYTES 0.5625 /* of a packed weight with its share of a block scale */

/* Experts of a layer at most, whose slots are sorted by counts in the shared memory of a block. */
#define MOQ_CUDA_MOE_EXPERTS 1024

#define BLOCK_SHARED                                                                               \
    232448 /* bytes of shared memory that a block of compute capability 9.0 may have */

/* Tiles of so many rows of W: each partition begins a new one. */
static inline int64_t moq_tile_count(const moq_linear_spec *spec, int rows) {
    int64_t tiles = 0;
    for (int i = 0; i < spec->partition_count; i++)
        tiles += divide_up(spec->partition[i], rows);
    return tiles;
}

/* Operand or tile that the blocks of a cluster share. In pairs each copies half of the operand to
 * both; with MOQ_SPLIT_K each has some of K, with MOQ_SPLIT_K_WARPGROUPS each warpgroup every other
 * step of that. */
typedef enum {
    MOQ_ALONE,
    MOQ_SHARE_WEIGHTS,
    MOQ_SHARE_TOKENS,
    MOQ_SPLIT_K,
    MOQ_SPLIT_K_WARPGROUPS
} moq_sharing;

/* Tiles whose steps all workers share evenly (gemm_scheduler.h): those of the last two rounds,
 * and who has a step of them. Where that idles a sixteenth of them at most, a tile has workers of
 * its own: none has steps of two tiles, whose sums it would hand over and take
 * (docs/lab/nvfp4-medium.md). */
typedef struct {
    int64_t tiles, workers;
} stream_k_split;

static inline stream_k_split stream_k_split_of(int64_t tiles, int64_t steps, int64_t most) {
    int64_t shared = tiles < 2 * most ? tiles : tiles % most + most;
    int64_t workers = shared * steps < most ? shared * steps : most;
    if (shared < most && most % shared <= most / 16)
        workers -= workers % shared;
    stream_k_split tail = {shared, workers};
    return tail;
}

/* How many steps of those tiles a worker has: `least`, and one more the first `more` of each
 * `group` workers, which have a tile of their own or are all. */
typedef struct {
    int least, more, group;
    int inverse; /* 65536 / group, so that 255 workers divide by a product */
} stream_k_tail;

static inline stream_k_tail stream_k_tail_of(int64_t tiles, int64_t steps, int64_t workers) {
    bool own = tiles > 0 && workers % tiles == 0;
    int64_t group = own ? workers / tiles : workers, all = own ? steps : tiles * steps;
    stream_k_tail tail = {(int)(all / group), (int)(all % group), (int)group,
                          (int)divide_up(65536, group)};
    MOQ_ASSERT(tiles * steps <= INT32_MAX); /* kernels count shared steps in 32 bits */
    MOQ_ASSERT(tiles == 0 || (workers < 256 && tail.more < tail.group));
    return tail;
}

/* Tokens of a tile that are transposed at a time on their way to memory, and bytes of a warpgroup's
 * outputs of eight tokens. */
#define TURNED_AT_ONCE(tokens) ((tokens) < 64 ? (tokens) : 64)
#define EIGHT_BYTES            (8 * 128)
#define COLUMN_TERMS_BYTES     2304 /* factors and biases of all warpgroups of a block, at most */

/* Shared memory of split-K: float4 of a warpgroup's share of sums, bytes of all shares of a block,
 * bytes of the outputs of a warpgroup. */
typedef struct {
    int side, sums, turn_step;
} split_k_room;

static inline split_k_room split_k_room_of(int columns, int splits, int warpgroups) {
    int eights_of_part = (columns / 8 + splits - 1) / splits, side = eights_of_part * splits * 128;
    split_k_room room = {side, warpgroups * side * 16, eights_of_part * EIGHT_BYTES};
    return room;
}

#endif
