/* The packed layout of NVFP4 weights: where each code and block scale of a layer lies in the form
 * that CUDA kernels read. It is a permutation of the checkpoint's bits; nothing is rounded, and of
 * what a scale means nothing is lost: minus zero becomes zero, so that no good scale has a sign.
 *
 * K goes in blocks of 64 columns, rows in slabs of 16, as many slabs as make rows a multiple of 64;
 * what is beyond the layer is zero codes under zero scales. A unit is a slab by a block: 576 bytes,
 * that of slab i and block j at (i * blocks + j) * 576. In a unit, g = 0..7 and t = 0..3 number the
 * lanes of a warp (lane 4g + t), s = 0..3 the groups of 16 columns, h = 0..1 rows g and g + 8:
 *
 *   0..511    codes: a vector of 16 bytes for each lane, of a little-endian word for each s. The
 *             word has the lane's weights of an m16k16 operand of mma, in pairs of columns k, k + 1
 *             of group s:
 *               pair 0   row g       k = 2t         sign at bit 15   magnitude at bits  6..8;
 *               pair 1   row g + 8   k = 2t         sign at bit 12   magnitude at bits  3..5;
 *               pair 2   row g       k = 2t + 8     sign at bit 14   magnitude at bits  0..2;
 *               pair 3   row g + 8   k = 2t + 8     sign at bit 13   magnitude at bits  9..11
 *             for the even column, 16 bits higher for the odd one. A pair is one byte of the
 *             checkpoint. The vector of lane (g, t) is at 16 * (4g + (t ^ g / 2)): lanes that read
 *             one word of every fourth vector, or one vector each, meet no bank twice.
 *   512..575  block scales, e4m3 as in the checkpoint (0x80 is 0x00): that of row g + 8h and group
 * s at 512 + 8g + 2s + h. A scale of 32 columns is there twice. */
#ifndef MOQ_CORE_NVFP4_PACKED_H
#define MOQ_CORE_NVFP4_PACKED_H

#include <assert.h>
#include <stdint.h>

#define MOQ_PACK_K      64  /* columns of a block */
#define MOQ_PACK_ROWS   16  /* rows of a slab */
#define MOQ_PACK_SLABS  4   /* the number of slabs is a multiple of this */
#define MOQ_PACK_GROUPS 4   /* groups of 16 columns in a block */
#define MOQ_PACK_SCALES 512 /* where the scales begin in a unit */
#define MOQ_PACK_BYTES  576 /* of a unit */

static_assert(MOQ_PACK_K == 16 * MOQ_PACK_GROUPS && MOQ_PACK_ROWS == 16, "of m16k16 operands");
static_assert(MOQ_PACK_SCALES == MOQ_PACK_ROWS * MOQ_PACK_K / 2, "codes of four bits come first");
static_assert(MOQ_PACK_BYTES == MOQ_PACK_SCALES + MOQ_PACK_ROWS * MOQ_PACK_GROUPS,
              "scales of a byte follow, and nothing else");
static_assert(MOQ_PACK_BYTES % 16 == 0, "units follow each other at multiples of a vector");

#ifdef __CUDACC__
#define MOQ_PACK_INLINE static __host__ __device__ __forceinline__
#else
#define MOQ_PACK_INLINE static inline
#endif

/* Slabs of a layer of `rows` rows, and blocks of one of `columns` columns. */
MOQ_PACK_INLINE int64_t moq_pack_slabs(int64_t rows) {
    return (rows + MOQ_PACK_SLABS * MOQ_PACK_ROWS - 1) / (MOQ_PACK_SLABS * MOQ_PACK_ROWS) *
           MOQ_PACK_SLABS;
}

MOQ_PACK_INLINE int64_t moq_pack_blocks(int64_t columns) {
    return (columns + MOQ_PACK_K - 1) / MOQ_PACK_K;
}

/* Bytes from the beginning of a unit to the word of lane (g, t) for group s. */
MOQ_PACK_INLINE int moq_pack_word_at(int g, int t, int s) {
    return 16 * (4 * g + (t ^ g >> 1)) + 4 * s;
}

/* Bytes from the beginning of a unit to the block scale of row r = 0..15 and group s. */
MOQ_PACK_INLINE int moq_pack_scale_at(int r, int s) {
    return MOQ_PACK_SCALES + 8 * (r & 7) + 2 * s + (r >> 3);
}

/* A block scale of the checkpoint as it is packed. */
MOQ_PACK_INLINE uint8_t moq_pack_scale(uint8_t scale) {
    return scale == 0x80 ? 0 : scale;
}

/* The bit at which the magnitude of a pair begins in each half of its word, and the bit of the
 * sign. */
MOQ_PACK_INLINE int moq_pack_magnitude(int pair) {
    return pair == 0 ? 6 : pair == 1 ? 3 : pair == 2 ? 0 : 9;
}

MOQ_PACK_INLINE int moq_pack_sign(int pair) {
    return pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
}

/* Two codes of a pair, the even column's in the low half and the odd one's in the high half (bits
 * above a code may be anything), as bits of the word. */
MOQ_PACK_INLINE uint32_t moq_pack_halves(uint32_t codes, int pair) {
    uint32_t magnitudes = codes << moq_pack_magnitude(pair),
             signs = codes << (moq_pack_sign(pair) - 3);
    return (magnitudes & 0x00070007u << moq_pack_magnitude(pair)) |
           (signs & 0x00010001u << moq_pack_sign(pair));
}

/* The codes of a byte of the checkpoint, in its low nibble the even column's, as bits of a word. */
MOQ_PACK_INLINE uint32_t moq_pack_pair(uint32_t codes, int pair) {
    return moq_pack_halves(codes | codes << 12, pair);
}

/* The byte of a pair from its word: the inverse of moq_pack_pair. */
MOQ_PACK_INLINE uint32_t moq_unpack_pair(uint32_t word, int pair) {
    uint32_t magnitudes = word >> moq_pack_magnitude(pair), signs = word >> moq_pack_sign(pair);
    return (magnitudes & 0x7u) | (magnitudes >> 12 & 0x70u) | (signs & 0x1u) << 3 |
           (signs >> 9 & 0x80u);
}

#endif
