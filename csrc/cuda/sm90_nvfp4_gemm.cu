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
    constexpr bool SHARED = !PARTS && !PAIR && T <= 64;
    return {T,
            ROW_GROUPS,
            K_GROUPS,
            PARTS,
            PAIR,
            bf16::threads,
            bf16::stage,
            step,
            {{(const void *)nvfp4_gemm<bf16, exact_products, false>,
              SHARED ? (const void *)nvfp4_gemm<bf16, exact_products, SHARED> : NULL},
             {(const void *)nvfp4_gemm<f16, exact_products, false>,
              SHARED ? (const void *)nvfp4_gemm<f16, exact_products, SHARED> : NULL}}};
}

static const variant VARIANTS[] = {
    variant_of<16, 2, 1, false>(0.381),        variant_of<16, 3, 1, false>(0.451),
    variant_of<16, 4, 1, false>(0.533),        variant_of<16, 2, 1, true>(0.399),
    variant_of<16, 3, 1, true>(0.448),         variant_of<16, 2, 2, true>(0.585),
    variant_of<16, 1, 2, true>(0.431),         variant_of<32, 2, 1, false>(0.399),
    variant_of<32, 4, 1, false>(0.576),        variant_of<32, 3, 1, false>(0.496),
    variant_of<32, 2, 1, true>(0.396),         variant_of<32, 3, 1, true>(0.483),
    variant_of<32, 4, 1, true>(0.572),         variant_of<32, 2, 2, true>(0.626),
    variant_of<32, 1, 2, true>(0.385),         variant_of<64, 2, 1, false>(0.486),
    variant_of<64, 4, 1, false>(0.903),        variant_of<64, 3, 1, false>(0.665),
    variant_of<64, 2, 1, true>(0.452),         variant_of<64, 3, 1, true>(0.595),
    variant_of<64, 4, 1, true>(0.763),         variant_of<64, 2, 2, true>(0.767),
    variant_of<64, 1, 2, true>(0.496),         variant_of<128, 2, 1, false>(0.726),
    variant_of<128, 4, 1, false>(1.353),       variant_of<128, 3, 1, false>(1.036),
    variant_of<128, 2, 1, true>(0.583),        variant_of<128, 3, 1, true>(0.997),
    variant_of<128, 4, 1, true>(1.353),        variant_of<128, 2, 2, true>(1.272),
    variant_of<128, 2, 1, false, true>(0.788),
};

enum { VARIANT_COUNT = sizeof VARIANTS / sizeof *VARIANTS };
static_assert(2 * VARIANT_COUNT < 64,
              "tune() measures 64 variants of a kernel, the first is the choice");

/* Seconds of a call: the products, W from memory and all tiles from the second-level cache at the
 * same time, then sums and outputs; of x more than 1.5 MB comes slower. Fitted to 718 times of 16
 * layers with 16 to 256 tokens on an H200, so that the choice, which costs 0.6 %, rather than each
 * time is near (docs/lab.md). */
static double estimate(const moq_linear_spec *spec, const method *way, int64_t m) {
    const variant *v = way->shape;
    double n = (double)spec->out_features, k = (double)spec->in_features;
    double steps = (double)divide_up(spec->in_features, STEP),
           tokens = fmax(16, (double)tokens_of(m, way));
    double tiles = (double)(way->row_tiles * way->columns) * (v->pair ? 2 : 1);
    double turns = (double)(way->row_tiles * way->columns) / (double)way->workers;
    double blocks = (double)way->workers * way->cluster * (v->pair ? 2 : 1);
    double share = v->row_groups * 64 * 72 + tokens * (STEP * 2) * (v->pair ? 0.5 : 1.0);
    double exchange = 0;
    if (way->rest)
        exchange =
            2.7e-6 + 1.02e-8 * tokens * (1 + 0.82 * (double)way->workers / (double)way->rest);
    else
        turns = ceil(turns);
    double products = turns * steps / way->cluster / v->k_groups * v->step * 1e-6;
    double far = 1 + 3.6e-8 * fmax(0, (double)m * k * 2 - 1.5e6);
    double copies = tiles * steps * share * far / 11.5e12;
    double memory = n * k * 0.5625 / 5.06e12 / fmin(1, blocks / 80);
    double outputs = v->parts ? 4.5e-7 * v->row_groups + 3.33e-8 * fmin(tokens, 64) +
                                    2.7e-8 * fmax(0, tokens - 64)
                              : 3.4e-7 * v->row_groups + 6.9e-9 * tokens;
    return 0.79e-6 + ceil(turns) * outputs + exchange +
           cbrt(products * products * products + memory * memory * memory +
                copies * copies * copies);
}

static const family EXACT = {VARIANTS, VARIANT_COUNT, 16, 128, estimate};

extern "C" double moq_cuda_nvfp4_gemm_seconds(const moq_linear_spec *spec, int64_t m) {
    return method_for(&EXACT, spec, m, 0).seconds;
}

extern "C" int32_t moq_cuda_nvfp4_gemm_choose(const moq_linear_spec *spec, int64_t m) {
    return choice_of(&EXACT, spec, m);
}

extern "C" uint64_t moq_cuda_nvfp4_gemm_variants(const moq_linear_call *call) {
    return variants_of(&EXACT, call);
}

/* Bytes of the flags of a call, which are first in its workspace. */
static int64_t flag_bytes(const method *way) {
    return divide_up(way->workers * way->shape->row_groups * 4 * 8, 256) * 256;
}

extern "C" int64_t moq_cuda_nvfp4_gemm_workspace(const moq_linear_call *call) {
    method way = method_for(&EXACT, call->spec, call->m, call->variant);
    if (!way.shape || !way.rest)
        return 0;
    return flag_bytes(&way) + way.workers * way.shape->row_groups * 64 * way.shape->tokens * 4;
}

extern "C" moq_status moq_cuda_nvfp4_gemm(const moq_linear_call *call, moq_err *err) {
    const moq_linear_spec *spec = call->spec;
    method way = method_for(&EXACT, spec, call->m, call->variant);
    if (!way.shape || way.seconds == INFINITY)
        return refuse(call, err);
    layout l = lay_out(way.shape, way.cluster);
    gemm_args a = begin_args(call, &way, l);
    if (way.rest) {
        a.ready = (uint64_t *)call->workspace;
        a.handed = (float4 *)((uint8_t *)call->workspace + flag_bytes(&way));
    }
    const void *kernel = way.shape->kernel[spec->dtype == MOQ_DT_F16][way.rest > 0];
    return launch_tiles(call, &way, l, &a, kernel, call->x->data, spec->in_features * 2,
                        call->x->stride[0] * 2, err);
}
