/* Block scales of MX as those of NVFP4 (cuda_mx_scales.h).
 *
 * For each row: scales[i] = e4m3(2^(exponents[i] - most + 8)), factor = 2^(most - 8 - 127), `most`
 * being the row's largest exponent. A warp has a row, a lane every 32nd group of it. The second
 * dimension of the grid goes over the experts of a stack.
 *
 * Bound: memory, a byte a group in and out. The codes are read, too, in rows where groups of zeros
 * may have no say. */
#include "cuda/tensor/cuda_mx_scales.h"

#include "cuda/runtime/launch.h"

#include <cuda_runtime.h>

namespace moq::mx_scales {

#define WARPS 4 /* of a block */

/* Returns true if all codes of a group are zeros, of either sign. Rows may begin at any byte. */
static __device__ __forceinline__ bool is_zero(const uint8_t *codes, int64_t group) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < MOQ_MX_GROUP / 2; i++)
        any |= codes[group * (MOQ_MX_GROUP / 2) + i];
    return (any & 0x77u) == 0;
}

typedef struct {
    int least, most;
} range;

/* Returns the exponents of a row that have a say: of all groups, or of those that are not zeros. */
static __device__ __forceinline__ range find_range(const uint8_t *exponents, const uint8_t *codes,
                                                   int64_t groups, bool all) {
    int least = MOQ_MX_NAN, most = -1;
    for (int64_t i = threadIdx.x % 32; i < groups; i += 32) {
        if (all || !is_zero(codes, i)) {
            least = min(least, (int)exponents[i]);
            most = max(most, (int)exponents[i]);
        }
    }
    return {__reduce_min_sync(0xffffffffu, least), __reduce_max_sync(0xffffffffu, most)};
}

static __global__ void __launch_bounds__(32 * WARPS)
    convert(const __grid_constant__ moq_mx_rows p, moq_findings *found) {
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, expert = blockIdx.y;
    if (row >= p.rows)
        return;
    const uint8_t *exponents = p.exponents + expert * p.exponent_step + row * p.exponent_stride;
    const uint8_t *codes = p.codes + expert * p.code_step + row * p.code_stride;
    int64_t at = expert * p.span + row;
    range of = find_range(exponents, codes, p.groups, true);
    bool bad = of.most == MOQ_MX_NAN, all = moq_mx_holds_all(of.least, of.most);
    if (!all && !bad) {
        of = find_range(exponents, codes, p.groups, false);
        if (of.most < 0)
            of = {MOQ_MX_ONE, MOQ_MX_ONE};
        bad = of.most - of.least > MOQ_MX_SPAN;
    }
    if (threadIdx.x % 32 == 0)
        p.factors[at] = __uint_as_float(bad ? 0x7fc00000u : moq_mx_factor_bits(of.most));
    if (bad && found)
        found->bad_code = 1;
    for (int64_t i = threadIdx.x % 32; i < p.groups && !bad; i += 32) {
        bool counts = all || !is_zero(codes, i);
        p.scales[at * p.groups + i] = counts ? moq_mx_scale(exponents[i], of.most) : 0;
    }
}

extern "C" moq_status moq_cuda_convert_mx_scales(const moq_mx_rows *rows, moq_findings *found,
                                                 void *stream, moq_err *err) {
    moq_mx_rows p = *rows;
    moq_launch launch = {.what = "prepare: scales of MX",
                         .kernel = (const void *)convert,
                         .grid =
                             dim3((unsigned)((p.rows + WARPS - 1) / WARPS), (unsigned)p.experts),
                         .block = dim3(32 * WARPS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&p, &found};
    return moq_cuda_launch(&launch, args, err);
}

} // namespace moq::mx_scales
