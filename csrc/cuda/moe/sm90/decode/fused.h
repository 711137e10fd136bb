/* Decode kernels of experts on Hopper with fused up and down: arguments and launch of the kernel
 * that goes from x to W2 (fp8_fused.cu, nvfp4_fused.cu), and of the one behind it that adds partial
 * sums and slots (slot_sum.cu). up_down.h has the formulas. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_FUSED_H
#define MOQ_CUDA_MOE_SM90_DECODE_FUSED_H

#include "cuda/moe/sm90/decode/up_down.h"

namespace moq::moe_decode {

#define FUSED_WARPS   MOQ_MOE_FUSED_WARPS
#define FUSED_THREADS (32 * FUSED_WARPS)
#define FUSED_COLUMNS MOQ_MOE_FUSED_COLUMNS
#define FUSED_SLABS   (FUSED_COLUMNS / SLAB) /* slabs of gate, and as many of up */

typedef struct {
    common_args common; /* arguments of the first product */
    moe::activation activation;
    CUtensorMap down_map;
    stack down;
    int g_at, up_slabs; /* up_slabs: slabs of a warp in the first product */
    bool alone;         /* one token, whose slots are chunks: the grid has a block for each tile */
    divisor by_fused_tiles; /* tiles of I; common: stages of a tile, blocks of the grid */
    float *d;               /* [blocks + chunks][columns of a chunk][H] */
    uint32_t *places;       /* [slots]: chunk and column in it; then how many chunks there are */
} fused_args;

/* Arguments of the kernel that adds partial sums and slots. */
typedef struct {
    routing route;
    stack down;
    const float *d;
    const uint32_t *places;
    void *y;
    int64_t y_stride;
    bool alone, weighted, accumulate;
    float factor; /* factor of all sums */
    divisor by_blocks;
    int tiles;
} fused_sum_args;

/* Returns the tiles of a block; the last ones have fewer, or none. If a chunk has as many, each
 * block has one chunk: x is loaded once, and d of a slot has one partial sum. */
static __device__ __forceinline__ int fused_tiles_each(int tiles, const divisor *blocks) {
    return divide(tiles + blocks->by - 1, blocks);
}

/* ---- launch ---- */

/* Fills the arguments, except blocks, bytes and maps of both stacks, which depend on the format. */
fused_args fused_tiles_of(const moq_moe_call *call, const moq_moe_fused *share);

/* Fills the arguments of the adding kernel from those of the first, but for `factor`. */
fused_sum_args sum_of(const moq_moe_call *call, const fused_args *a);

/* Launches the kernel of fused tiles with its arguments, and the one that adds (slot_sum.cu). */
moq_status launch_fused(const moq_moe_call *call, const moq_moe_fused *share, const char *what,
                        const void *kernel, void *args, const fused_sum_args *sum, moq_err *err);
moq_status launch_fused_sum(const moq_moe_call *call, const moq_moe_fused *share,
                            const fused_sum_args *args, moq_err *err);

/* Launch all kernels of a call with fused up and down (fp8_fused.cu, nvfp4_fused.cu). */
moq_status launch_fused_fp8(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err);
moq_status launch_fused_nvfp4(const moq_moe_call *call, const moq_moe_fused *share, moq_err *err);

} // namespace moq::moe_decode

#endif
