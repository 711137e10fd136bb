/* Kernels of the NVFP4 linear of some tokens on Hopper with exact products (sm90_nvfp4_medium.cu):
 * what a file that compiles them for one type of activations includes. Compiling them for both
 * types takes half a minute. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_EXACT_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_MEDIUM_EXACT_H

#include "cuda/linear/sm90/sm90_nvfp4_medium_frame.h"

namespace moq::nvfp4_medium {

/* The shapes in their order, for float16 (sm90_nvfp4_medium_f16.cu). */
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
    static __device__ __forceinline__ void multiply(const consumer_pipeline *t, rows, int steps,
                                                    stage_place *s, float (&sum)[S::T / 2]) {
        nvfp4_medium::multiply<S>(t, steps, s, sum);
    }
};

/* ---- shapes ---- */

template <moq_nvfp4_type TYPE, int T, int ROW_GROUPS, int K_GROUPS, bool SPLIT_K, bool SHARED>
static variant variant_of(void) {
    typedef tile<TYPE, T, ROW_GROUPS, K_GROUPS, SPLIT_K> shape;
    static_assert(shape::stage == MOQ_NVFP4_MEDIUM_STAGE(T, ROW_GROUPS, 2),
                  "as the choice counts it");
    return {shape::threads,
            {(const void *)nvfp4_medium<shape, exact_products, false>,
             SHARED ? (const void *)nvfp4_medium<shape, exact_products, SHARED> : NULL}};
}

} // namespace moq::nvfp4_medium

#endif
