/* Product of NVFP4 codes of both operands by the block-scaled mma.sync of compute capability 12.x:
 * see nvfp4_block_tile.h for what a warp does.
 *
 * A block has 64 rows of W and 64 tokens, operands come from memory and L2 straight to registers,
 * each word of W once for 64 tokens. What bounds it, and how fast it is, nobody knows: it has never
 * run on its chip. The layouts are tested by an emulation of the instruction. */
#include "cuda/device/load.h"
#include "cuda/linear/sm120/nvfp4_block.h"
#include "cuda/linear/sm120/nvfp4_block_tile.h"
#include "cuda/runtime/launch.h"

namespace moq::block_scaled {

static __device__ __forceinline__ void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2], uint32_t a_scales,
                                                 uint32_t b_scales) {
    asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
                 ".f32.e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales),
                   "r"(b_scales));
}

/* Rounds sums times alpha to y. */
static __global__ void __launch_bounds__(32 * WARPS)
    multiply(const __grid_constant__ product p, const float *alpha, moq_output out) {
    int64_t row = (int64_t)blockIdx.x * TILE_ROWS + threadIdx.x / 32 * WARP_ROWS;
    int64_t token = (int64_t)blockIdx.y * TILE_TOKENS;
    const float factor = *alpha;
    auto mma = [](float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scales,
                  uint32_t b_scales) { mma_nvfp4(d, a, b, a_scales, b_scales); };
    multiply_tile(p, threadIdx.x % 32, row, token, mma, [&](int64_t m, int64_t n, float sum) {
        if (m < p.x.rows && n < p.w.rows)
            moq_store_output(&out, m, (int)n, __fmul_rn(sum, factor), 0.0f);
    });
}

extern "C" moq_status moq_block_scaled_product(const moq_matmul *m, moq_err *err) {
    product p = {
        {m->w, (const uint8_t *)m->w_scale, m->n}, {m->x, (const uint8_t *)m->x_scale, m->m}, m->k};
    moq_output out = {};
    out.data = m->y;
    out.stride = m->y_stride;
    out.dtype = m->dtype;
    const float *alpha = m->alpha;
    moq_launch launch = {};
    launch.what = "linear by block-scaled mma.sync";
    launch.kernel = (const void *)multiply;
    launch.grid = dim3((unsigned)((m->n + TILE_ROWS - 1) / TILE_ROWS),
                       (unsigned)((m->m + TILE_TOKENS - 1) / TILE_TOKENS));
    launch.block = dim3(32 * WARPS);
    launch.stream = (cudaStream_t)m->stream;
    void *args[] = {&p, &alpha, &out};
    return moq_cuda_launch(&launch, args, err);
}

} // namespace moq::block_scaled
