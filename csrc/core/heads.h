/* The heads of a fused projection made ready for attention, in their place: normed, and turned by
 * the angles of their tokens' positions.
 *
 *   v = x, or where the heads have a weight rounded(rounded(x * r) * weight), r as of rms_norm in
 *       core/activation.h, over the values of one head;
 *   y[d] = rounded(rounded(v[d] * cos[d % (D / 2)]) + rounded(other[d] * sin[d % (D / 2)])), other
 *       as in core/rotary.h.
 *
 * Arithmetic is float32, each operation rounded once, and "rounded" is to the dtype of x: the bits
 * are those of rms_norm and rotary_embedding, one after the other.
 *
 * With a cache, rows have as many heads of v behind those of k, and token t's k and v are written
 * there too, at slots[t] = block * slots of a block + slot; a slot that the cache does not have, as
 * those of padding, which are negative, is not written. */
#ifndef MOQ_CORE_HEADS_H
#define MOQ_CORE_HEADS_H

#include "core/tensor.h"

enum { MOQ_HEADS_Q, MOQ_HEADS_K, MOQ_HEADS_KINDS };
enum { MOQ_CACHE_K, MOQ_CACHE_V, MOQ_CACHES };

typedef struct {
    moq_tensor x;         /* [T, columns] of 16-bit floats; a row is without gaps */
    moq_tensor positions; /* [T] int64 without gaps; beyond the table the last of it holds */
    moq_tensor table;     /* [P, D] of the dtype of x without gaps: cosines, then sines */
    moq_tensor weight[MOQ_HEADS_KINDS]; /* [D] of the dtype of x; ndim -1: no norm */
    int64_t heads[MOQ_HEADS_KINDS];     /* in a row: those of q, then those of k */
    moq_tensor cache[MOQ_CACHES]; /* [blocks, slots of a block, heads of k, D], of the dtype of x, D
                                   * without gaps; ndim -1: none */
    moq_tensor slots;             /* [tokens that are stored, the first of x] int64 without gaps */
    float eps;
} moq_heads;

#endif
