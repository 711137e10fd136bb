/* Ways to do the NVFP4 linear for a few tokens on Hopper (nvfp4_decode.cu): how rows, K and
 * shared memory are shared out. */
#ifndef MOQ_CUDA_LINEAR_SM90_NVFP4_DECODE_CONFIG_H
#define MOQ_CUDA_LINEAR_SM90_NVFP4_DECODE_CONFIG_H

#include "core/linear.h"
#include "core/nvfp4_packed.h"
#include "cuda/choice/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOQ_NVFP4_DECODE_STAGES      96   /* of a block, at most */
#define MOQ_NVFP4_DECODE_STAGE_UNITS 8    /* of W in a stage */
#define MOQ_NVFP4_DECODE_X_BLOCK     128  /* bytes of a token in a block of K */
#define MOQ_NVFP4_DECODE_DECLARED    1152 /* bytes of shared memory declared in the kernel */

/* Whether a block has a warp that adds up sums while the others multiply: sixteen warps of two
 * slabs do all in one round, so that none has to. */
#define MOQ_NVFP4_DECODE_ADDS(warps, slabs) ((warps) == 8 || (slabs) > 2)

/* The geometry that a config decides: how much the blocks have of rows, of K and of shared memory.
 * The arguments of the kernel begin with the same fields. */
#define MOQ_NVFP4_DECODE_SHARE                                                                     \
    int m, n, k;                                                                                   \
    int log_ranks, log_splits; /* blocks of a cluster, and warps of a block, that share K */       \
    int blocks, more_blocks;   /* of K of a warp, and how many warps have one more */              \
    int clusters;              /* that have rows */                                                \
    int slabs, more_slabs;     /* of a cluster, and how many clusters have one more */             \
    int turn;                  /* blocks of K in a stage */                                        \
    int stages;                /* of a warp */                                                     \
    int x_rows, x_stage;       /* x of a stage: [blocks][x_rows][128], and its bytes, */           \
    bool x_stays;              /* or that is kept behind the rings, for all rounds: */             \
    int x_at, x_pitch;         /* [parts][m][x_pitch] */                                           \
    bool boxes;                /* x of stages that are filled again comes in boxes */              \
    bool share;                /* blocks of other rows read x together, two by two */              \
    int warp_bytes;            /* of its stages */                                                 \
    int staged_at, staged_bytes, staged_turn; /* sums: offset; bytes of a warp, of a round or 0 */ \
    int inbox_at; /* [2][ranks][pairs of tokens][rows of a rank] float2 */                         \
    int shared;   /* bytes of all that */                                                          \
    int64_t slab_bytes;

typedef struct {
    MOQ_NVFP4_DECODE_SHARE
} moq_nvfp4_decode_share;

/* A config of a call; `two`: also by two blocks of a multiprocessor, of eight warps each. */
typedef struct {
    int warps, slabs, log_ranks, log_splits;
    bool share, two;
} moq_nvfp4_decode_config;

/* Expands the call's config and partitions the call. */
const moq_nvfp4_decode_config *moq_nvfp4_decode_expand_config(const moq_linear_call *call,
                                                              moq_nvfp4_decode_share *share);

#ifdef __cplusplus
}
#endif
#endif
