/* Packed NVFP4 weights as FP8 ones, for prefill with compute "fp8":
 *
 *     codes[n, k] = e4m3(e2m1 * scale * fold[n])    factor[n] = scale of row n's outputs
 *
 * Layouts: W packed (core/nvfp4_packed.h), codes [N, K] as an FP8 checkpoint has them. A warp has
 * four units, 16 rows of 256 columns; four lanes exchange words, so that each stores 16 codes of
 * a row at once. Bound: memory, which it reads and writes at 3.9 TB/s (H200,
 * docs/lab/nvfp4-fp8.md). */
#include "core/nvfp4_packed.h"
#include "core/sizes.h"
#include "cuda/device/load.h"
#include "cuda/device/nvfp4_fold.h"
#include "cuda/device/ptx.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/nvfp4_unpack.h"

namespace moq::unpacking {

#define WARPS 8
#define UNITS 4 /* units of a warp */

typedef struct {
    const uint8_t *weight;
    const float *fold_scale, *output_scale;
    uint8_t *codes;
    float *factor;
    int rows, columns;
    int blocks, spans; /* blocks of K, in units and in warps' shares */
    int64_t count;     /* shares of all warps */
} fold_args;

/* Stores a row's codes of a unit. A lane has four of each group, and after an exchange 16 of group
 * t. */
static __device__ __forceinline__ void store_row(const fold_args *a, int row, int column,
                                                 uint4 own) {
    uint4 w = moq_exchange_words(own, threadIdx.x % 4);
    uint4 in_order = make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410),
                                __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632));
    column += threadIdx.x % 4 * 16;
    if (row < a->rows && column < a->columns)
        *(uint4 *)(a->codes + (int64_t)row * a->columns + column) = in_order;
}

static __global__ void __launch_bounds__(WARPS * 32) fold_weights(const fold_args a) {
    int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (item >= a.count) {
        wait_for_predecessor();
        return;
    }
    int slab = (int)(item / a.spans), block = (int)(item % a.spans) * UNITS;
    int row = slab * MOQ_PACK_ROWS + lane / 4, last = a.rows - 1;
    const uint8_t *unit = a.weight + ((int64_t)slab * a.blocks + block) * MOQ_PACK_BYTES;
    uint4 codes[UNITS];
    uint2 scales[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const uint8_t *from = unit + (block + i < a.blocks ? i : 0) * MOQ_PACK_BYTES;
        codes[i] = __ldcs((const uint4 *)(from + moq_pack_word_at(lane / 4, lane % 4, 0)));
        scales[i] = __ldcs((const uint2 *)(from + moq_pack_scale_at(lane / 4, 0)));
    }
    float upper = a.fold_scale[min(row, last)], lower = a.fold_scale[min(row + 8, last)];
    uint32_t folds = moq_pack_folds(upper, lower);
    if (block == 0 && lane % 4 < 2) {
        int own = row + lane % 4 * 8;
        float fold = lane % 4 ? lower : upper;
        if (own < a.rows)
            a.factor[own] = a.output_scale[own] * moq_unfold(fold);
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        uint32_t f[2][4];
        if (block + i >= a.blocks)
            break;
        moq_fold_unit(codes[i], scales[i], folds, f);
        int column = (block + i) * MOQ_PACK_K;
        store_row(&a, row, column, make_uint4(f[0][0], f[0][2], f[1][0], f[1][2]));
        store_row(&a, row + 8, column, make_uint4(f[0][1], f[0][3], f[1][1], f[1][3]));
    }
    wait_for_predecessor(); /* a kernel that waits for this one waits for that, too */
}

extern "C" moq_status moq_cuda_nvfp4_unpack(const moq_cuda_unpack *u, moq_err *err) {
    int64_t blocks = moq_pack_blocks(u->columns);
    fold_args a = {.weight = u->weight + u->first / MOQ_PACK_ROWS * blocks * MOQ_PACK_BYTES,
                   .fold_scale = u->fold_scale + u->first,
                   .output_scale = u->output_scale + u->first,
                   .codes = u->codes,
                   .factor = u->factor,
                   .rows = (int)u->rows,
                   .columns = (int)u->columns,
                   .blocks = (int)blocks,
                   .spans = (int)divide_up(blocks, UNITS)};
    a.count = divide_up(u->rows, MOQ_PACK_ROWS) * a.spans;
    moq_launch launch = {.what = "NVFP4 weights to FP8",
                         .kernel = (const void *)fold_weights,
                         .grid = dim3((unsigned)divide_up(a.count, WARPS)),
                         .block = dim3(WARPS * 32),
                         .stream = (cudaStream_t)u->stream,
                         .pdl = u->pdl};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::unpacking
