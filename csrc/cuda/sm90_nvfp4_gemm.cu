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
 * What bounds it (H200, docs/lab.md): 91 instructions of a warp for 16 rows by 64 columns, of
 * which 60 decode, so 120 to 200 cycles of a scheduler; with 128 tokens the tensor cores, which
 * share the register file with the decoding; what the second-level cache delivers, of x too, which
 * every tile of rows reads again. */
#include "cuda/sm90_nvfp4_method.h"

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

template <int T, int ROW_GROUPS, int K_GROUPS, bool PARTS, bool PAIR = false>
static variant variant_of(double step) {
    typedef tile<MOQ_NVFP4_BF16, T, ROW_GROUPS, K_GROUPS, PARTS, PAIR> bf16;
    typedef tile<MOQ_NVFP4_F16, T, ROW_GROUPS, K_GROUPS, PARTS, PAIR> f16;
    constexpr bool SHARED = !PARTS && !PAIR;
    return {T,
            ROW_GROUPS,
            K_GROUPS,
            PARTS,
            PAIR,
            bf16::threads,
            bf16::stage,
            bf16::token_bytes / T,
            step,
            {{(const void *)nvfp4_gemm<bf16, exact_products, false>,
              SHARED ? (const void *)nvfp4_gemm<bf16, exact_products, SHARED> : NULL},
             {(const void *)nvfp4_gemm<f16, exact_products, false>,
              SHARED ? (const void *)nvfp4_gemm<f16, exact_products, SHARED> : NULL}}};
}

static const variant VARIANTS[] = {
    variant_of<16, 2, 1, false>(0.380),        variant_of<16, 3, 1, false>(0.460),
    variant_of<16, 4, 1, false>(0.532),        variant_of<16, 2, 1, true>(0.399),
    variant_of<16, 3, 1, true>(0.473),         variant_of<16, 2, 2, true>(0.574),
    variant_of<16, 1, 2, true>(0.443),         variant_of<32, 2, 1, false>(0.399),
    variant_of<32, 4, 1, false>(0.559),        variant_of<32, 3, 1, false>(0.497),
    variant_of<32, 2, 1, true>(0.403),         variant_of<32, 3, 1, true>(0.509),
    variant_of<32, 4, 1, true>(0.578),         variant_of<32, 2, 2, true>(0.621),
    variant_of<32, 1, 2, true>(0.405),         variant_of<64, 2, 1, false>(0.497),
    variant_of<64, 4, 1, false>(0.842),        variant_of<64, 3, 1, false>(0.658),
    variant_of<64, 2, 1, true>(0.475),         variant_of<64, 3, 1, true>(0.586),
    variant_of<64, 4, 1, true>(0.751),         variant_of<64, 2, 2, true>(0.780),
    variant_of<64, 1, 2, true>(0.534),         variant_of<128, 2, 1, false>(0.663),
    variant_of<128, 4, 1, false>(1.290),       variant_of<128, 3, 1, false>(1.001),
    variant_of<128, 2, 1, true>(0.605),        variant_of<128, 3, 1, true>(0.980),
    variant_of<128, 4, 1, true>(1.262),        variant_of<128, 2, 2, true>(1.248),
    variant_of<128, 2, 1, false, true>(0.763),
};

enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };
static_assert(2 * VARIANT_COUNT < 64,
              "tune() measures 64 variants of a kernel, the first is the choice");

/* Fitted to 832 times of 16 layers with 16 to 256 tokens on an H200, so that the choice, which
 * costs 0.2 % by them, rather than each time is near (docs/lab.md). */
static const family EXACT = {VARIANTS,
                             VARIANT_COUNT,
                             16,
                             128,
                             {.begin = 0.796,
                              .cache = 12.1,
                              .memory = 5.67,
                              .far = 0.0361,
                              .heat = 0.103,
                              .rows = 0.389,
                              .tokens = 0.00685,
                              .part_rows = 0.35,
                              .part_tokens = 0.0273,
                              .part_more = 0.0202,
                              .received = 0.0353,
                              .hand_over = 3.24,
                              .shared_token = 0.00706,
                              .others = 0.808,
                              .own = 0.541,
                              .own_token = 0.0127}};

extern "C" double moq_cuda_nvfp4_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(&EXACT, spec, m, 0).seconds;
}

extern "C" int32_t moq_cuda_nvfp4_gemm_choose(const moq_linear_spec *spec, int64_t m) {
    return choice_of(&EXACT, spec, m);
}

extern "C" uint64_t moq_cuda_nvfp4_gemm_variants(const moq_linear_call *call) {
    return variants_of(&EXACT, call);
}

extern "C" int64_t moq_cuda_nvfp4_gemm_workspace(const moq_linear_call *call) {
    method way = method_for(&EXACT, call->spec, call->m, call->variant);
    return way.shape ? room_of_sums(&way).bytes : 0;
}

extern "C" moq_status moq_cuda_nvfp4_gemm(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    method way = method_for(&EXACT, spec, call->m, call->variant);
    if (!way.shape || way.seconds == INFINITY)
        return refuse(call, err);
    layout l = lay_out(way.shape, way.cluster);
    gemm_args a = begin_args(call, &way, l, call->workspace);
    return launch_tiles(call, &way, l, &a, call->x->data, spec->in_features * 2,
                        call->x->stride[0] * 2, err);
}
