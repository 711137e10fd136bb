/* Rotary embedding, y = rounded(rounded(x * cos) + rounded(other * sin)), `other` from the other
 * half of a head: core/rotary.h has it operation by operation.
 *
 * A thread has 8 neighbours of a head's first half and those of its second half, which need each
 * other. A block has pieces of the heads of one token, so that they share its angles. Pieces of
 * 16-bit values at multiples of 16 bytes are read and written whole, others value by value. Bound:
 * memory, 4 bytes a value; for one token the start of a kernel. */
#include "cuda/tensor/cuda_rotary.h"

#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_quantize_chunk.h"

namespace moq::rotation {

using quantization::chunk;
using quantization::narrow;
using quantization::widen;

#define THREADS 128
#define PIECE   8 /* values of each half */
#define BLOCKS  0x7fffffff

typedef struct {
    const void *data;
    int64_t batch, token, head, value; /* steps in elements */
} strided;

typedef struct {
    strided x, cos, sin;
    void *out;
    int64_t count, tokens, heads; /* tokens in all, and tokens of a sequence */
    int half, pieces;             /* values and pieces of half a head */
} rotary_args;

/* Loads values of each half of a head, from `at` on, `left` of them at most. */
template <int DT, bool WHOLE>
static __device__ __forceinline__ chunk<DT, PIECE> load_piece(const strided &from, int64_t at,
                                                              int left) {
    constexpr int size = DT == MOQ_DT_F32 ? 4 : 2;
    chunk<DT, PIECE> c = {};
    const uint8_t *place = (const uint8_t *)from.data + at * size;
    if constexpr (WHOLE) {
        uint4 four = *(const uint4 *)place;
        c.word[0] = four.x, c.word[1] = four.y, c.word[2] = four.z, c.word[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            if (i >= left)
                continue;
            if (DT == MOQ_DT_F32)
                c.word[i % c.words] = ((const uint32_t *)place)[i * from.value];
            else
                c.word[i / 2] |= (uint32_t)((const uint16_t *)place)[i * from.value]
                                 << (i % 2 * 16);
        }
    }
    return c;
}

template <int DT, bool WHOLE>
static __device__ __forceinline__ void store_piece(void *out, int64_t at, const chunk<DT, PIECE> &c,
                                                   int left) {
    constexpr int size = DT == MOQ_DT_F32 ? 4 : 2;
    uint8_t *place = (uint8_t *)out + at * size;
    if constexpr (WHOLE) {
        *(uint4 *)place = make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]);
    } else {
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            if (i >= left)
                continue;
            if (DT == MOQ_DT_F32)
                ((uint32_t *)place)[i] = c.word[i % c.words];
            else
                ((uint16_t *)place)[i] = (uint16_t)(c.word[i / 2] >> (i % 2 * 16));
        }
    }
}

/* Returns rounded(rounded(a * cos) + rounded(b * sin)). */
template <int DT>
static __device__ __forceinline__ chunk<DT, PIECE>
turned(const float (&a)[PIECE], const chunk<DT, PIECE> &cos, const float (&b)[PIECE],
       const chunk<DT, PIECE> &sin) {
    float angle[PIECE], own[PIECE], other[PIECE];
    widen(cos, angle);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        own[i] = __fmul_rn(a[i], angle[i]);
    widen(narrow<DT>(own), own);
    widen(sin, angle);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        other[i] = __fmul_rn(b[i], angle[i]);
    widen(narrow<DT>(other), other);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        own[i] = __fadd_rn(own[i], other[i]);
    return narrow<DT>(own);
}

template <int DT, bool WHOLE>
static __device__ __forceinline__ void rotate_piece(const rotary_args &a, int64_t row,
                                                    int64_t piece) {
    int64_t batch = row / a.tokens, token = row % a.tokens;
    int64_t head = piece / a.pieces, d = piece % a.pieces * PIECE;
    int left = (int)min((int64_t)PIECE, a.half - d);
    int64_t x = batch * a.x.batch + token * a.x.token + head * a.x.head + d * a.x.value;
    int64_t cos = batch * a.cos.batch + token * a.cos.token + d * a.cos.value;
    int64_t sin = batch * a.sin.batch + token * a.sin.token + d * a.sin.value;
    float low[PIECE], high[PIECE], minus[PIECE];
    widen(load_piece<DT, WHOLE>(a.x, x, left), low);
    widen(load_piece<DT, WHOLE>(a.x, x + a.half * a.x.value, left), high);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        minus[i] = -high[i];
    int64_t to = (row * a.heads + head) * 2 * a.half + d;
    store_piece<DT, WHOLE>(a.out, to,
                           turned<DT>(low, load_piece<DT, WHOLE>(a.cos, cos, left), minus,
                                      load_piece<DT, WHOLE>(a.sin, sin, left)),
                           left);
    cos += a.half * a.cos.value;
    sin += a.half * a.sin.value;
    store_piece<DT, WHOLE>(a.out, to + a.half,
                           turned<DT>(high, load_piece<DT, WHOLE>(a.cos, cos, left), low,
                                      load_piece<DT, WHOLE>(a.sin, sin, left)),
                           left);
}

template <int DT, bool WHOLE>
static __global__ void __launch_bounds__(THREADS)
    rotate_heads(const __grid_constant__ rotary_args a) {
    wait_for_predecessor();
    launch_dependents();
    int64_t pieces = a.heads * a.pieces;
    for (int64_t row = blockIdx.x; row < a.count; row += gridDim.x) {
        int64_t piece = (int64_t)blockIdx.y * THREADS + threadIdx.x;
        for (; piece < pieces; piece += (int64_t)gridDim.y * THREADS)
            rotate_piece<DT, WHOLE>(a, row, piece);
    }
}

static strided strided_of(const moq_tensor *t) {
    return {t->data, t->stride[0], t->stride[1], t->stride[2], t->stride[3]};
}

/* Returns true if pieces of 16-bit values lie at multiples of 16 bytes; the stride of an axis of
 * length 1 does not matter. */
static bool is_aligned(const strided &s, const moq_tensor *t) {
    const int64_t steps[] = {s.batch, s.token, s.head};
    for (int i = 0; i < 3; i++) {
        if (t->shape[i] > 1 && steps[i] % PIECE != 0)
            return false;
    }
    return s.value == 1 && (uintptr_t)s.data % 16 == 0;
}

template <int DT> static const void *kernel_of(bool whole) {
    if constexpr (DT == MOQ_DT_F32)
        return (const void *)rotate_heads<DT, false>;
    else
        return whole ? (const void *)rotate_heads<DT, true> : (const void *)rotate_heads<DT, false>;
}

extern "C" moq_status moq_cuda_rotate(const moq_rotary *rotary, void *out, void *stream,
                                      moq_err *err) {
    const moq_tensor *x = &rotary->x;
    rotary_args a = {.x = strided_of(x),
                     .cos = strided_of(&rotary->cos),
                     .sin = strided_of(&rotary->sin),
                     .out = out,
                     .count = x->shape[0] * x->shape[1],
                     .tokens = x->shape[1],
                     .heads = x->shape[2],
                     .half = (int)(x->shape[3] / 2)};
    a.pieces = (a.half + PIECE - 1) / PIECE;
    bool whole = a.half % PIECE == 0 && is_aligned(a.x, x) && is_aligned(a.cos, &rotary->cos) &&
                 is_aligned(a.sin, &rotary->sin) && (uintptr_t)out % 16 == 0;
    int64_t blocks = (a.heads * a.pieces + THREADS - 1) / THREADS;
    moq_launch launch = {.what = "rotary_embedding",
                         .kernel = x->dtype == MOQ_DT_F32    ? kernel_of<MOQ_DT_F32>(whole)
                                   : x->dtype == MOQ_DT_BF16 ? kernel_of<MOQ_DT_BF16>(whole)
                                                             : kernel_of<MOQ_DT_F16>(whole),
                         .grid = dim3((unsigned)(a.count < BLOCKS ? a.count : BLOCKS),
                                      (unsigned)(blocks < 65535 ? blocks : 65535)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream,
                         .pdl = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::rotation
