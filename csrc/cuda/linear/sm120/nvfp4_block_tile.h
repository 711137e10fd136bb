/* Tile of the product of NVFP4 codes of both operands by block-scaled mma.sync, m16n8k64.
 *
 *   y[m, n] = sum_k x[m, k] sx[m, k / 16] w[n, k] sw[n, k / 16]
 *
 * W is the operand A, 16 rows of it a warp, and x the operand B, 8 tokens a product. Both are e2m1
 * [rows, K / 2] with swizzled e4m3 scales (core/swizzle.h), of which the four of a row and 64
 * columns are one word. By the PTX ISA lane 4g + t (g = 0..7, t = 0..3) has
 *
 *   a[0] row g,  a[1] row g + 8: columns 8t to 8t + 7;   a[2], a[3]: the same rows, 32 columns on
 *   b[0] column 8t to 8t + 7 of token g;                 b[1]: 32 columns on
 *   d[0], d[1] row g, tokens 2t and 2t + 1;              d[2], d[3]: row g + 8
 *   scales of A: lanes with t = 0 row g, those with t = 1 row g + 8;   of B: those with t = 0 token
 * g
 *
 * with the first column in the lowest nibble and the first group in the lowest byte. K is a
 * multiple of 32: what is beyond it, beyond the rows and beyond the tokens is zero.
 *
 * This header is plain C++ besides, so that a test runs it on any machine with the instruction
 * emulated (tests/cuda/block_tile.cpp). */
#ifndef MOQ_CUDA_LINEAR_SM120_NVFP4_BLOCK_TILE_H
#define MOQ_CUDA_LINEAR_SM120_NVFP4_BLOCK_TILE_H

#include "core/formats.h"
#include "core/swizzle.h"

#include <string.h>

#ifdef __CUDACC__
#define MOQ_TILE_INLINE static __device__ __forceinline__
#else
#define MOQ_TILE_INLINE static inline
#endif

namespace moq::block_scaled {

#define WARPS       4
#define WARP_ROWS   16
#define TILE_ROWS   (WARPS * WARP_ROWS)
#define TOKENS      8 /* of a product */
#define PRODUCTS    8
#define TILE_TOKENS (PRODUCTS * TOKENS)
#define STEP        64 /* columns of a product */

/* An operand: codes of rows without gaps, and their scales. */
typedef struct {
    const uint8_t *codes, *scales;
    int64_t rows;
} operand;

typedef struct {
    operand w, x;
    int64_t k;
} product;

/* Loads eight codes of a row from byte `at` on; zeros beyond the rows and the columns. */
MOQ_TILE_INLINE uint32_t load_codes(const operand &from, int64_t row, int64_t at, int64_t bytes) {
    uint32_t word = 0;
    if (row < from.rows && at < bytes)
        memcpy(&word, __builtin_assume_aligned(from.codes + row * bytes + at, 4), 4);
    return word;
}

/* Loads the scales of a row and the STEP columns from k on. */
MOQ_TILE_INLINE uint32_t load_scales(const operand &from, int64_t row, int64_t k, int64_t across) {
    uint32_t word = 0;
    if (row < from.rows)
        memcpy(&word,
               __builtin_assume_aligned(
                   from.scales + moq_swizzle_at(row, k / MOQ_NVFP4_GROUP, across), 4),
               4);
    return word;
}

/* Multiplies WARP_ROWS rows of W from `row` on by TILE_TOKENS tokens from `token` on, and hands
 * each result of the lane to store(token, row, sum), those beyond the tokens and the rows, too. */
template <class MMA, class STORE>
MOQ_TILE_INLINE void multiply_tile(const product &p, int lane, int64_t row, int64_t token, MMA mma,
                                   STORE store) {
    const int g = lane / 4, t = lane % 4;
    const int64_t bytes = p.k / 2, across = moq_swizzle_across(p.k / MOQ_NVFP4_GROUP);
    float sums[PRODUCTS][4] = {};
    for (int64_t k = 0; k < p.k; k += STEP) {
        const int64_t at = k / 2 + 4 * t, later = at + 16;
        const uint32_t a[4] = {
            load_codes(p.w, row + g, at, bytes), load_codes(p.w, row + g + 8, at, bytes),
            load_codes(p.w, row + g, later, bytes), load_codes(p.w, row + g + 8, later, bytes)};
        const uint32_t a_scales = load_scales(p.w, row + g + 8 * (t & 1), k, across);
#ifdef __CUDACC__
#pragma unroll
#endif
        for (int i = 0; i < PRODUCTS; i++) {
            const int64_t of = token + TOKENS * i + g;
            const uint32_t b[2] = {load_codes(p.x, of, at, bytes),
                                   load_codes(p.x, of, later, bytes)};
            mma(sums[i], a, b, a_scales, load_scales(p.x, of, k, across));
        }
    }
    for (int i = 0; i < PRODUCTS; i++)
        for (int e = 0; e < 4; e++)
            store(token + TOKENS * i + 2 * t + (e & 1), row + g + 8 * (e >> 1), sums[i][e]);
}

} // namespace moq::block_scaled

#endif
