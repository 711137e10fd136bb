/* Rearranging of codes and scales on the device (cuda_layout.h). Bound: memory.
 *
 * Bytes mapped to bytes (fp4 packing, translation): a thread has 16 or 32 bytes of a row in
 * registers; rows without gaps form one long row. Rows that are not aligned to 16 bytes, or whose
 * columns lie apart, are read and written byte by byte.
 *
 * Swizzle: a tile of 128 rows x 4 columns is 512 bytes. A thread has the 16 of them that belong to
 * the rows m, m + 32, m + 64 and m + 96. Eight lanes have neighbouring tiles, so that both sides
 * move whole sectors of 32 bytes. */
#include "cuda/tensor/cuda_layout.h"

#include "core/swizzle.h"
#include "cuda/runtime/launch.h"

namespace moq::layouts {

#define THREADS 256
#define TILES   8 /* tiles of a block, neighbours in a row */

/* ---- bytes to bytes ---- */

typedef struct {
    moq_tensor from; /* a tensor of bytes with at least one axis */
    uint8_t *out;
    int64_t columns; /* bytes of a row of `from` */
    unsigned chunks; /* blocks of a row */
    bool wide;       /* rows can be moved 16 bytes at a time */
} map_args;

struct pack_codes {
    static const int IN = 32, OUT = 16;
    typedef char table; /* none */

    /* Packs four codes of two words each into four bytes. */
    static __device__ __forceinline__ void apply(const uint32_t *in, uint32_t *out,
                                                 const uint8_t *) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t a = in[2 * i] & 0x0f0f0f0fu, b = in[2 * i + 1] & 0x0f0f0f0fu;
            out[i] = __byte_perm(a | a >> 4, b | b >> 4, 0x6420);
        }
    }
};

struct unpack_codes {
    static const int IN = 16, OUT = 32;
    typedef char table;

    static __device__ __forceinline__ void apply(const uint32_t *in, uint32_t *out,
                                                 const uint8_t *) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t low = __byte_perm(in[i], 0, 0x4140), high = __byte_perm(in[i], 0, 0x4342);
            out[2 * i] = (low | low << 4) & 0x0f0f0f0fu;
            out[2 * i + 1] = (high | high << 4) & 0x0f0f0f0fu;
        }
    }
};

struct translate_codes {
    static const int IN = 16, OUT = 16;
    typedef moq_code_table table;

    static __device__ __forceinline__ void apply(const uint32_t *in, uint32_t *out,
                                                 const uint8_t *to) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = to[in[i] & 0xff] | to[in[i] >> 8 & 0xff] << 8 | to[in[i] >> 16 & 0xff] << 16 |
                     (uint32_t)to[in[i] >> 24] << 24;
    }
};

/* Returns the first byte of a row; rows of all leading axes are counted in row-major order. */
static __device__ __forceinline__ const uint8_t *row_of(const moq_tensor *t, int64_t row) {
    int64_t at = 0;
    for (int i = t->ndim - 2; i >= 0; i--) {
        at += row % t->shape[i] * t->stride[i];
        row /= t->shape[i];
    }
    return (const uint8_t *)t->data + at;
}

template <int N>
static __device__ __forceinline__ void load(uint32_t (&word)[N / 4], const uint8_t *from,
                                            int64_t step, int count, bool wide) {
    if (wide && count == N) {
#pragma unroll
        for (int i = 0; i < N / 16; i++)
            *(uint4 *)&word[4 * i] = __ldcs((const uint4 *)from + i);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t byte = i < count ? from[i * step] : 0;
        word[i / 4] = i % 4 ? word[i / 4] | byte << 8 * (i % 4) : byte;
    }
}

template <int N>
static __device__ __forceinline__ void store(uint8_t *to, const uint32_t (&word)[N / 4], int count,
                                             bool wide) {
    if (wide && count == N) {
#pragma unroll
        for (int i = 0; i < N / 16; i++)
            __stcs((uint4 *)to + i, *(const uint4 *)&word[4 * i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i < count)
            to[i] = (uint8_t)(word[i / 4] >> 8 * (i % 4));
    }
}

template <typename Op>
static __global__ void __launch_bounds__(THREADS) map_bytes(map_args a, typename Op::table table) {
    __shared__ uint8_t shared[sizeof table < 256 ? 1 : 256];
    if (sizeof table == 256) {
        shared[threadIdx.x] = ((const uint8_t *)&table)[threadIdx.x];
        __syncthreads();
    }
    int64_t row = blockIdx.x / a.chunks;
    int64_t at = ((int64_t)(blockIdx.x % a.chunks) * THREADS + threadIdx.x) * Op::IN;
    if (at >= a.columns)
        return;
    int count = (int)min((int64_t)Op::IN, a.columns - at);
    int64_t step = a.from.stride[a.from.ndim - 1];
    alignas(16) uint32_t in[Op::IN / 4], out[Op::OUT / 4];
    load<Op::IN>(in, row_of(&a.from, row) + at * step, step, count, a.wide);
    Op::apply(in, out, shared);
    store<Op::OUT>(a.out + (row * a.columns + at) * Op::OUT / Op::IN, out, count * Op::OUT / Op::IN,
                   a.wide);
}

static bool is_wide(const moq_tensor *t, const uint8_t *out, int64_t out_columns) {
    int last = t->ndim - 1;
    bool wide = (uintptr_t)t->data % 16 == 0 && (uintptr_t)out % 16 == 0 &&
                (t->stride[last] == 1 || t->shape[last] == 1);
    for (int i = 0; i < last; i++)
        wide = wide && (t->shape[i] == 1 || (t->stride[i] % 16 == 0 && out_columns % 16 == 0));
    return wide;
}

template <typename Op>
static moq_status map(const char *what, const moq_tensor *from, typename Op::table table,
                      uint8_t *out, void *stream, moq_err *err) {
    map_args a = {*from, out, from->shape[from->ndim - 1], 1, false};
    int64_t count = moq_tensor_numel(from);
    if (count == 0)
        return MOQ_OK;
    if (moq_tensor_is_contiguous(from)) {
        a.from.ndim = 1;
        a.from.shape[0] = a.columns = count;
        a.from.stride[0] = 1;
    }
    a.wide = is_wide(&a.from, out, a.columns * Op::OUT / Op::IN);
    a.chunks = (unsigned)((a.columns + THREADS * Op::IN - 1) / (THREADS * Op::IN));
    moq_launch launch = {.what = what,
                         .kernel = (const void *)map_bytes<Op>,
                         .grid = dim3((unsigned)(count / a.columns) * a.chunks),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&a, &table};
    return moq_cuda_launch(&launch, args, err);
}

extern "C" moq_status moq_cuda_pack_fp4(const moq_tensor *codes, uint8_t *packed, void *stream,
                                        moq_err *err) {
    return map<pack_codes>("pack_fp4", codes, 0, packed, stream, err);
}

extern "C" moq_status moq_cuda_unpack_fp4(const moq_tensor *packed, uint8_t *codes, void *stream,
                                          moq_err *err) {
    return map<unpack_codes>("unpack_fp4", packed, 0, codes, stream, err);
}

extern "C" moq_status moq_cuda_translate(const moq_tensor *codes, const moq_code_table *table,
                                         uint8_t *out, void *stream, moq_err *err) {
    return map<translate_codes>("translating codes", codes, *table, out, stream, err);
}

/* ---- tiles ---- */

typedef struct {
    const uint8_t *data;
    int64_t rows, columns;               /* sizes of a matrix */
    int64_t matrix_step, row_step, step; /* steps between matrices, rows and columns */
} matrices;

typedef struct {
    matrices plain;
    uint8_t *tiles;
    int64_t tile_rows, tile_columns; /* tiles of a matrix */
    int64_t gap;                     /* bytes between the tiles of two matrices */
    int64_t groups;                  /* groups of TILES tiles in a row of tiles */
    bool aligned;                    /* tiles are aligned to 16 bytes */
    bool whole;                      /* four bytes of a row are a word, and rows consist of words */
} tile_args;

/* A thread's place: 16 bytes of a tile, and the first of their four rows and four columns. */
typedef struct {
    uint8_t *tile;
    int64_t matrix, row, column;
    bool exists;
} tile_part;

static __device__ __forceinline__ tile_part split_of(const tile_args *a) {
    int64_t block = blockIdx.x, m = threadIdx.x / TILES;
    int64_t across = block % a->groups * TILES + threadIdx.x % TILES;
    int64_t down = block / a->groups; /* row of tiles, counted over all matrices */
    int64_t tile = down * a->tile_columns + across;
    tile_part part = {a->tiles + tile * MOQ_SWIZZLE_BYTES + m * 16 + down / a->tile_rows * a->gap,
                      down / a->tile_rows, down % a->tile_rows * MOQ_SWIZZLE_ROWS + m, across * 4,
                      across < a->tile_columns};
    return part;
}

/* Loads four bytes of a row of the matrix; zeros outside of it. */
static __device__ __forceinline__ uint32_t load_four(const tile_args *a, const tile_part *p,
                                                     int64_t row) {
    const matrices *t = &a->plain;
    const uint8_t *from =
        t->data + p->matrix * t->matrix_step + row * t->row_step + p->column * t->step;
    uint32_t four = 0;
    if (row >= t->rows)
        return 0;
    if (a->whole)
        return __ldcs((const uint32_t *)from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (p->column + i < t->columns)
            four |= (uint32_t)from[i * t->step] << 8 * i;
    }
    return four;
}

static __device__ __forceinline__ void store_four(const tile_args *a, const tile_part *p,
                                                  int64_t row, uint32_t four) {
    const matrices *t = &a->plain;
    uint8_t *to = (uint8_t *)t->data + p->matrix * t->matrix_step + row * t->row_step + p->column;
    if (row >= t->rows)
        return;
    if (a->whole) {
        __stcs((uint32_t *)to, four);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (p->column + i < t->columns)
            to[i] = (uint8_t)(four >> 8 * i);
    }
}

static __global__ void __launch_bounds__(THREADS) swizzle(tile_args a) {
    tile_part p = split_of(&a);
    alignas(16) uint32_t word[4];
    if (!p.exists)
        return;
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = load_four(&a, &p, p.row + i * 32);
    store<16>(p.tile, word, 16, a.aligned);
}

static __global__ void __launch_bounds__(THREADS) unswizzle(tile_args a) {
    tile_part p = split_of(&a);
    alignas(16) uint32_t word[4];
    if (!p.exists)
        return;
    load<16>(word, p.tile, 1, 16, a.aligned);
#pragma unroll
    for (int i = 0; i < 4; i++)
        store_four(&a, &p, p.row + i * 32, word[i]);
}

/* Fills the arguments; a span of 0 means matrices of tiles without gaps. */
static moq_status move_tiles(const char *what, const void *kernel, const moq_tensor *plain,
                             uint8_t *tiles, int64_t span, void *stream, moq_err *err) {
    int last = plain->ndim - 1;
    int64_t count = plain->ndim == 3 ? plain->shape[0] : 1;
    tile_args a = {
        .plain = {(const uint8_t *)plain->data, plain->shape[last - 1], plain->shape[last],
                  plain->ndim == 3 ? plain->stride[0] : 0, plain->stride[last - 1],
                  plain->stride[last]},
        .tiles = tiles,
    };
    a.tile_rows = moq_swizzle_down(a.plain.rows);
    a.tile_columns = moq_swizzle_across(a.plain.columns);
    a.groups = (a.tile_columns + TILES - 1) / TILES;
    if (span)
        a.gap = span - a.tile_rows * a.tile_columns * MOQ_SWIZZLE_BYTES;
    a.aligned = (uintptr_t)tiles % 16 == 0; /* a tile has a multiple of 16 bytes */
    a.whole = (uintptr_t)a.plain.data % 4 == 0 && a.plain.columns % 4 == 0 && a.plain.step == 1 &&
              a.plain.row_step % 4 == 0 && a.plain.matrix_step % 4 == 0;
    if (count * a.tile_rows * a.groups == 0)
        return MOQ_OK;
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = dim3((unsigned)(count * a.tile_rows * a.groups)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {&a};
    return moq_cuda_launch(&launch, args, err);
}

extern "C" moq_status moq_cuda_swizzle(const moq_tensor *scale, uint8_t *out, void *stream,
                                       moq_err *err) {
    return moq_cuda_swizzle_apart(scale, out, 0, stream, err);
}

extern "C" moq_status moq_cuda_swizzle_apart(const moq_tensor *scale, uint8_t *out, int64_t span,
                                             void *stream, moq_err *err) {
    return move_tiles("swizzle_block_scales", (const void *)swizzle, scale, out, span, stream, err);
}

extern "C" moq_status moq_cuda_unswizzle(const moq_tensor *out, uint8_t *swizzled, void *stream,
                                         moq_err *err) {
    return move_tiles("unswizzle_block_scales", (const void *)unswizzle, out, swizzled, 0, stream,
                      err);
}

} // namespace moq::layouts
