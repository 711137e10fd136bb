/* Kernels of the NVFP4 linear of some tokens on Hopper with exact products (sm90_nvfp4_some.cu):
 * what a file that compiles them for one type of activations includes. Compiling them for both
 * types takes half a minute. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_SOME_EXACT_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_SOME_EXACT_H

#include "cuda/linear/sm90/sm90_nvfp4_some_frame.h"

namespace moq::nvfp4_some {

/* The shapes in their order, for float16 (sm90_nvfp4_some_f16.cu). */
const variant *float16_variants(void);

/* Products of the weights as they are: nothing of a row is needed before its outputs. */
struct exact_products {
    typedef struct {
    } rows;
    static __device__ __forceinline__ rows fetch(const gemm_args *, int) {
        return {};
    }
    template <class S>
    static __device__ __forceinline__ void complete(const gemm_args *, const tile_place *, int,
                                                    tile_terms<S> *) {
    }
    template <class S>
    static __device__ __forceinline__ void multiply(const consumer_ring *t, rows, int steps,
                                                    stage_place *s, float (&sum)[S::T / 2]) {
        nvfp4_some::multiply<S>(t, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <moq_nvfp4_type TYPE, int T, int ROW_GROUPS, int K_GROUPS, bool PARTS, bool SHARED>
static variant variant_of(void) {
    typedef tile<TYPE, T, ROW_GROUPS, K_GROUPS, PARTS> shape;
    static_assert(shape::stage == MOQ_NVFP4_SOME_STAGE(T, ROW_GROUPS, 2),
                  "as the choice counts it");
    return {shape::threads,
            {(const void *)nvfp4_some<shape, exact_products, false>,
             SHARED ? (const void *)nvfp4_some<shape, exact_products, SHARED> : NULL}};
}

} // namespace moq::nvfp4_some

#endif
