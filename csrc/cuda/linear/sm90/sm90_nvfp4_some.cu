/* NVFP4 linear for some dozens of tokens on Hopper: y[m, n] = round(sum_k x[m, k] W[n, k] +
 * bias[n]) of 16-bit activations and exact weights.
 *
 * W gives the 64 rows of a warpgroup's products, from registers, where a warp decodes its packed
 * codes while the products before are under way; the tokens come in as they are. A block has two to
 * four warpgroups that multiply and a warp each that copies weights and tokens, which go round in a
 * ring of steps of 128 columns. W is constant, so the ring is filled with it before x is complete
 * (dependent launch). Where a layer has fewer tiles than the chip multiprocessors, K is divided
 * among the blocks of a cluster and the warpgroups with the same rows; sums come together as
 * sm90_gemm_outputs.h has it. Where rounds of tiles do not come out even, blocks share the steps of
 * the last ones (sm90_nvfp4_shares.h). Sums are added in the same order always.
 *
 * What bounds it (H200, docs/lab/nvfp4-some.md): 91 instructions of a warp for 16 rows by 64
 * columns, of which 60 decode, so 120 to 200 cycles of a scheduler; with 128 tokens the tensor
 * cores, which share the register file with the decoding; what the second-level cache delivers, of
 * x too, which every tile of rows reads again. */
#include "cuda/linear/sm90/sm90_nvfp4_some_launch.h"

struct exact_products {
    typedef struct {
    } rows;
    static __device__ __forceinline__ rows fetch(const gemm_args *, int) {
        return {};
    }
    template <class S>
    static __device__ __forceinline__ void complete(const gemm_args *, const place *, int,
                                                    edges<S> *) {
    }
    template <class S>
    static __device__ __forceinline__ void multiply(const taps *t, rows, int steps, spot *s,
                                                    float (&sum)[S::T / 2]) {
        ::multiply<S>(t, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <int T, int ROW_GROUPS, int K_GROUPS, bool PARTS, bool PAIR>
static variant variant_of(void) {
    typedef tile<MOQ_NVFP4_BF16, T, ROW_GROUPS, K_GROUPS, PARTS, PAIR> bf16;
    typedef tile<MOQ_NVFP4_F16, T, ROW_GROUPS, K_GROUPS, PARTS, PAIR> f16;
    constexpr bool SHARED = !PARTS && !PAIR;
    static_assert(bf16::stage == MOQ_NVFP4_SOME_STAGE(T, ROW_GROUPS, 2), "as the choice counts it");
    return {bf16::threads,
            {{(const void *)nvfp4_some<bf16, exact_products, false>,
              SHARED ? (const void *)nvfp4_some<bf16, exact_products, SHARED> : NULL},
             {(const void *)nvfp4_some<f16, exact_products, false>,
              SHARED ? (const void *)nvfp4_some<f16, exact_products, SHARED> : NULL}}};
}

#define VARIANT(tokens, row_groups, k_groups, parts, pair, step)                                   \
    variant_of<tokens, row_groups, k_groups, parts, pair>(),

static const variant VARIANTS[] = {MOQ_NVFP4_SOME_SHAPES(VARIANT)};

extern "C" int64_t moq_cuda_nvfp4_some_workspace(const moq_linear_call *call) {
    method way = moq_nvfp4_some_expand_way(call);
    return way.shape ? room_of_sums(&way).bytes : 0;
}

extern "C" moq_status moq_cuda_nvfp4_some(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    method way = moq_nvfp4_some_expand_way(call);
    if (!way.shape)
        return refuse(call, err);
    layout l = moq_nvfp4_some_lay_out(way.shape, way.cluster);
    gemm_args a = begin_args(call, &way, l, call->workspace);
    return launch_tiles(call, &way, l, VARIANTS, &a, call->x->data, spec->in_features * 2,
                        call->x->stride[0] * 2, err);
}
