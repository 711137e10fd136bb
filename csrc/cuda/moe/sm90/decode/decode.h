/* How a call of experts with few tokens on Hopper is shared out (moe/sm90/decode): blocks, the
 * slabs of each, clusters, and shared memory. Plain C, which asks nothing but the description. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_DECODE_H
#define MOQ_CUDA_MOE_SM90_DECODE_DECODE_H

#include "core/moe.h"
#include "core/nvfp4_packed.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_MOE_DECODE_CHUNK   8 /* slots of an expert that are multiplied at once */
#define MOQ_MOE_DECODE_STAGES  8 /* of a warp, at most */
#define MOQ_MOE_DECODE_SLOTS   1024
#define MOQ_MOE_DECODE_EXPERTS 1024
#define MOQ_MOE_DECODE_COLUMNS (1 << 16)

/* Warps of a block, and what a stage of a warp has: units of packed NVFP4 weights, a slab by 64
 * columns, or of FP8 as many slabs by 128 columns as there are. */
#define MOQ_MOE_DECODE_WARPS       8
#define MOQ_MOE_NVFP4_DECODE_UNITS 4
#define MOQ_MOE_FP8_DECODE_BLOCKS  1

/* Items whose sums wait in shared memory at once, where warps share K. */
#define MOQ_MOE_DECODE_STAGED 3

/* Blocks of K that a split of a warp may have (moe/sm90/decode/split_k.h): kernels are made for
 * them.
 */
#define MOQ_MOE_NVFP4_DECODE_SPLIT_K(X) X(1) X(2) X(3) X(4) X(6) X(8)
#define MOQ_MOE_FP8_DECODE_SPLIT_K(X)   X(1) X(2) X(3) X(4)

/* Fused up and down (moe/sm90/decode/fused.h), NVFP4. Warps of a block that multiply, warps that
 * share K of the first product, and columns of I. Slabs of H of a warp, and of a warp in a stage.
 * Bytes between tokens of g, stages at most, bytes of a stage, and blocks of K of a warp. */
#define MOQ_MOE_FUSED_WARPS            16
#define MOQ_MOE_FUSED_SPLITS           8
#define MOQ_MOE_FUSED_COLUMNS          64
#define MOQ_MOE_FUSED_DOWN_SLABS       8
#define MOQ_MOE_FUSED_STAGE_SLABS      4
#define MOQ_MOE_FUSED_G_PITCH          (2 * MOQ_MOE_FUSED_COLUMNS + 16)
#define MOQ_MOE_FUSED_STAGES           12
#define MOQ_MOE_NVFP4_FUSED_STAGE      (32 * MOQ_PACK_BYTES)
#define MOQ_MOE_NVFP4_FUSED_SPLIT_K(X) X(2) X(4)

/* FP8, fused (moe/sm90/decode/fp8.cu): slabs of H that a warp has, its stages, and floats from
 * the sums of a part of K to those of the next. */
#define MOQ_MOE_FP8_FUSED_DOWN_SLABS 8
#define MOQ_MOE_FP8_FUSED_STAGES     2
#define MOQ_MOE_FP8_FUSED_PITCH      (2 * MOQ_MOE_FUSED_COLUMNS + 1)

/* Configs: four of two kernels, and behind them fused tiles. */
#define MOQ_MOE_DECODE_FUSED 4

/* Offsets of the tables in shared memory. */
typedef struct {
    int expert, sorted, chunk, count, chunks;
    int pitch; /* from a warp's to the next one's, where each has its own */
} moq_moe_decode_tables;

/* Geometry of the up kernel or of the down kernel. */
typedef struct {
    int grid, cluster; /* blocks, and blocks of a cluster, a power of two */
    int slabs;         /* of a warp's stage, at most; of an item, where warps have splits */
    int stages;        /* of a warp */
    int split;         /* blocks of K of a warp, where warps have splits, or 0; the second kernel
                        * leaves d then, for a third that adds up slots */
    int log_splits;    /* warps that share K so */
    int pieces;        /* stages of an item */
    int flight;        /* stages that a warp asks for at once, at first */
    int staged_at;     /* sums of items that are spread over warps */
    int weights_at;    /* of slots */
    int sums_at;       /* down: [slots][rows of a block] float32 */
    int scales_at;     /* of tokens, by place among the sorted slots */
    int shared;        /* bytes of all that */
    moq_moe_decode_tables tables;
} moq_moe_decode_half;

/* The kernel of fused tiles, and the sum behind it. */
typedef struct {
    int grid;   /* blocks; 0: the call has no fused tiles */
    bool alone; /* one token, whose slots are chunks, with a block for each of their fused tiles */
    int split, stages, shared;
    int flight;       /* stages of a fresh ring that are on their way at once */
    int fused_stages; /* of the block in a fused tile */
    bool by_slots; /* the sum: slots have many parts, as a block has few fused tiles of an expert */
    int staged_at, g_at, weights_at;
    /* FP8: column tiles of a block, which are of one slot, blocks of a slot and of a cluster,
     * stages of a tile behind which W2 is asked for, and where its columns are. */
    int block_tiles, slot_blocks, cluster, ask, down_at;
    moq_moe_decode_tables tables;
    int64_t d_at; /* in the workspace, behind where slots are */
} moq_moe_fused;

typedef struct {
    moq_moe_decode_half up, down;
    moq_moe_fused tiles;
} moq_moe_decode_share;

/* Bytes of g, [slots, I], which is between the kernels; where d is behind it and what belongs to
 * it, float32 [slots, H]; and bytes of all that. */
int64_t moq_moe_decode_inner_bytes(const moq_moe_spec *spec, int64_t tokens);
int64_t moq_moe_decode_sums_at(const moq_moe_spec *spec, int64_t tokens);
int64_t moq_moe_decode_workspace(const moq_moe_spec *spec, int64_t tokens,
                                 moq_kernel_config config);

/* Partitions the call by its config. */
void moq_moe_decode_partition(const moq_moe_spec *spec, int64_t tokens, moq_kernel_config config,
                              moq_moe_decode_share *share);

#ifdef __cplusplus
}
#endif
#endif
