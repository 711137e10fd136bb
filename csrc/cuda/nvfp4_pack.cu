/* NVFP4 weights to the packed layout and back: see nvfp4_pack.h.
 *
 * A warp has RUN units of a slab, one after the other in memory: of each row 128 bytes of codes and
 * 16 of scales. Lane 16p + 4u + s takes group s of unit u, 8 bytes and a scale, of rows 2i + p and
 * 2i + p + 8 for i = 0..3, so that 16 lanes read a row's line. It makes the group's words in shared
 * memory, where units are a vector further apart than they are in the result: no bank is met twice.
 * From there they go out 16 bytes a lane. Unpacking goes the same way back.
 *
 * Bound by memory: 9/16 byte of a weight in and out, beside about 2.5 operations. What is not
 * aligned to 8 bytes goes byte by byte.
 *
 * The largest value of a row, for folding, is found on the way: magnitudes of codes are in the
 * order of the codes, and those of floats in that of their bits, so the order of the atomic maxima
 * does not matter. */
#include "cuda/nvfp4_pack.h"

#include "core/nvfp4_pack.h"
#include "cuda/launch.h"

#include <cuda_fp16.h>

#define WARPS   8
#define THREADS (32 * WARPS)
#define RUN     4
#define PAIRS   4 /* of rows g and g + 8, of a lane */
#define VECTORS (MOQ_PACK_BYTES / 16)
#define APART   (VECTORS + 1) /* vectors from unit to unit in shared memory */

/* A group of rows g and g + 8. */
typedef struct {
    uint2 codes[2]; /* the first in the lowest nibble */
    uint32_t scale[2];
} groups;

/* The rows of a slab that are of one source, from row 0 of the slab as if it had them all. */
typedef struct {
    const uint8_t *codes, *scales; /* of the lane's group */
    int64_t code_stride, scale_stride;
    int rows; /* of the slab, up to the source's last */
    float factor;
} cursor;

static __device__ __forceinline__ cursor find_source(const moq_nvfp4_pack &p, int64_t row,
                                                     int64_t group, int64_t scale) {
    int64_t slab = row / MOQ_PACK_ROWS * MOQ_PACK_ROWS, begin = 0;
    int i = 0;
    while (row - begin >= p.source[i].rows && i + 1 < p.source_count)
        begin += p.source[i++].rows;
    const moq_pack_source &of = p.source[i];
    return {of.codes + (slab - begin) * of.code_stride + group * 8,
            of.scales + (slab - begin) * of.scale_stride + scale,
            of.code_stride,
            of.scale_stride,
            (int)min(begin + of.rows - slab, (int64_t)MOQ_PACK_ROWS),
            p.factors ? p.factors[i] : of.factor};
}

template <bool ALIGNED> static __device__ __forceinline__ uint2 load_codes(const uint8_t *from) {
    if (ALIGNED)
        return __ldcs((const uint2 *)from);
    uint2 codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes.x |= (uint32_t)from[i] << 8 * i;
        codes.y |= (uint32_t)from[4 + i] << 8 * i;
    }
    return codes;
}

template <bool ALIGNED>
static __device__ __forceinline__ void store_codes(uint8_t *to, const uint2 &codes) {
    if (ALIGNED)
        *(uint2 *)to = codes;
#pragma unroll
    for (int i = 0; i < 4 && !ALIGNED; i++) {
        to[i] = (uint8_t)(codes.x >> 8 * i);
        to[4 + i] = (uint8_t)(codes.y >> 8 * i);
    }
}

/* ---- words ---- */

/* Bits of b where the mask has ones, else of a. */
static __device__ __forceinline__ uint32_t select(uint32_t a, uint32_t b, uint32_t mask) {
    return (a & ~mask) | (b & mask);
}

/* The words of all four vectors from a group of two rows, as moq_pack_pair has them; four codes of
 * a row, in every other nibble, at a time. Where x are the codes of pairs 0 and 1, y those of 2 and
 * 3: the signs of the four pairs are made neighbours, then magnitudes two by two (six bits in each
 * byte: one of even, one of odd columns), then both bytes of each half, which are dealt out last.
 */
static __device__ __forceinline__ uint4 make_words(const groups &in) {
    uint32_t x0 = in.codes[0].x, x1 = in.codes[1].x, y0 = in.codes[0].y, y1 = in.codes[1].y;
    uint32_t signs = select(select(x0, y0 >> 1, 0x44444444u), select(y1 >> 2, x1 >> 3, 0x11111111u),
                            0x33333333u);
    uint32_t low_even = (y0 & 0x07070707u) | (x1 << 3 & 0x38383838u);
    uint32_t low_odd = (y0 >> 4 & 0x07070707u) | (x1 >> 1 & 0x38383838u);
    uint32_t high_even = (x0 & 0x07070707u) | (y1 << 3 & 0x38383838u);
    uint32_t high_odd = (x0 >> 4 & 0x07070707u) | (y1 >> 1 & 0x38383838u);
    uint32_t a = select(low_even, high_even << 6, 0xc0c0c0c0u);
    uint32_t b = select(high_even >> 2, signs << 4, 0xf0f0f0f0u);
    uint32_t c = select(low_odd, high_odd << 6, 0xc0c0c0c0u);
    uint32_t d = select(high_odd >> 2, signs, 0xf0f0f0f0u);
    uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
    return make_uint4(__byte_perm(ab, cd, 0x5410), __byte_perm(ab, cd, 0x7632),
                      __byte_perm(ab2, cd2, 0x5410), __byte_perm(ab2, cd2, 0x7632));
}

static __device__ __forceinline__ void stage(uint8_t *unit, int g, int s, const groups &in) {
    uint4 words = make_words(in);
#pragma unroll
    for (int t = 0; t < 4; t++)
        *(uint32_t *)(unit + moq_pack_word_at(g, t, s)) = (&words.x)[t];
    *(uint16_t *)(unit + moq_pack_scale_at(g, s)) = (uint16_t)(in.scale[0] | in.scale[1] << 8);
}

static __device__ __forceinline__ groups unstage(const uint8_t *unit, int g, int s) {
    groups out = {};
#pragma unroll
    for (int t = 0; t < 4; t++) {
        uint32_t word = *(const uint32_t *)(unit + moq_pack_word_at(g, t, s));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            out.codes[h].x |= moq_unpack_pair(word, h) << 8 * t;
            out.codes[h].y |= moq_unpack_pair(word, 2 + h) << 8 * t;
        }
    }
    out.scale[0] = unit[moq_pack_scale_at(g, s)];
    out.scale[1] = unit[moq_pack_scale_at(g + 8, s)];
    return out;
}

/* ---- the largest value ---- */

/* The largest of 16 magnitudes: their codes are in their order. Of each 16 bits the highest nibble
 * decides, and every nibble is that once. */
static __device__ __forceinline__ uint32_t largest_code(uint2 codes) {
    uint32_t x = codes.x & 0x77777777u, y = codes.y & 0x77777777u;
    uint32_t most = __vmaxu2(x, y);
#pragma unroll
    for (int i = 4; i < 16; i += 4)
        most = __vmaxu2(most, __vmaxu2(x << i, y << i));
    return max(most, most << 16) >> 28;
}

static __device__ __forceinline__ float half_of_bits(uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
}

/* Both formats are the upper part of a half with another bias. */
static __device__ __forceinline__ float largest_value(uint2 codes, uint32_t scale) {
    return half_of_bits(largest_code(codes) << 9) * 0x1p14f * half_of_bits((scale & 0x7f) << 7) *
           0x1p8f;
}

/* The largest value of each of the lane's rows, over the 16 lanes of p: lanes part with half of
 * their rows each time, and end with one. */
static __device__ __forceinline__ void keep_largest(const moq_nvfp4_pack &p, int64_t slab,
                                                    const groups (&in)[PAIRS]) {
    int lane = threadIdx.x % 32, index = 0;
    float most[2 * PAIRS];
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++)
        most[i] = largest_value(in[i / 2].codes[i % 2], in[i / 2].scale[i % 2]);
#pragma unroll
    for (int half = PAIRS; half > 0; half /= 2) {
        bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float kept = upper ? most[i + half] : most[i], given = upper ? most[i] : most[i + half];
            most[i] = fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, half));
        }
        index += upper ? half : 0;
    }
    most[0] = fmaxf(most[0], __shfl_xor_sync(0xffffffffu, most[0], 8));
    int64_t row = slab * MOQ_PACK_ROWS + index / 2 * 2 + index % 2 * 8 + lane / 16;
    if ((lane & 8) == 0 && row < p.rows)
        atomicMax((unsigned *)p.largest + row, __float_as_uint(most[0]));
}

/* ---- bad scales ---- */

/* What no intact checkpoint holds among the lane's scales, of rows row + 2i + 8h: the first is
 * kept. */
static __device__ __forceinline__ void keep_bad(const moq_nvfp4_pack &p, int64_t row,
                                                int64_t column, const groups (&in)[PAIRS]) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++)
        seen |= in[i % PAIRS].scale[i / PAIRS] | (in[i % PAIRS].scale[i / PAIRS] + 1);
    if (!(seen & 0x80))
        return;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
        uint32_t scale = in[i % PAIRS].scale[i / PAIRS];
        int64_t bad = (row + i % PAIRS * 2 + i / PAIRS * 8) * (p.columns / p.group) + column;
        if (scale >= 0x7f)
            atomicMin((unsigned long long *)p.bad, (unsigned long long)bad);
    }
}

/* ---- the kernels ---- */

/* The warp's units: a slab, its first block, and how many of RUN there are. */
typedef struct {
    int64_t slab, first;
    int count; /* 0: none */
} run;

static __device__ __forceinline__ run find_run(int64_t rows, int64_t columns) {
    uint32_t blocks = (uint32_t)moq_pack_blocks(columns), runs = (blocks + RUN - 1) / RUN;
    uint32_t index = blockIdx.x * WARPS + threadIdx.x / 32; /* no memory holds 2^32 */
    uint32_t slab = index / runs, first = index % runs * RUN;
    return {slab, first, slab < moq_pack_slabs(rows) ? (int)min(blocks - first, (uint32_t)RUN) : 0};
}

/* A lane's part of the run: group s of unit u, of rows g and g + 8 for g = 2i + p. */
typedef struct {
    int lane, p, u, s;
    int64_t group; /* of the layer; beyond its last one there is nothing */
} part;

static __device__ __forceinline__ part find_part(const run &here) {
    int lane = threadIdx.x % 32, u = lane / 4 % RUN, s = lane % 4;
    return {lane, lane / 16, u, s, (here.first + u) * MOQ_PACK_GROUPS + s};
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ moq_nvfp4_pack p) {
    __shared__ uint4 staged[WARPS][RUN * APART];
    uint4 *units = staged[threadIdx.x / 32];
    run here = find_run(p.rows, p.columns);
    if (here.count == 0)
        return;
    part mine = find_part(here);
    int64_t first = here.slab * MOQ_PACK_ROWS;
    int64_t at = p.group == 32 ? mine.group / 2 : mine.group; /* the scale's column */
    int rows = (int)min(p.rows - first, (int64_t)MOQ_PACK_ROWS);
    if (mine.group * 16 >= p.columns)
        rows = 0;
    groups in[PAIRS] = {};
    cursor from = find_source(p, first, mine.group, at);
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
        int r = mine.p + i % PAIRS * 2 + i / PAIRS * 8;
        if (r >= rows)
            continue;
        if (r >= from.rows)
            from = find_source(p, first + r, mine.group, at);
        if (from.factor != 0.0f) {
            in[i % PAIRS].codes[i / PAIRS] = load_codes<ALIGNED>(from.codes + r * from.code_stride);
            in[i % PAIRS].scale[i / PAIRS] = moq_pack_scale(from.scales[r * from.scale_stride]);
        }
        if (p.output_scale && mine.group == 0)
            p.output_scale[first + r] = from.factor;
    }
    if (p.bad)
        keep_bad(p, first + mine.p, at, in);
    if (p.largest)
        keep_largest(p, here.slab, in);
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        stage((uint8_t *)(units + mine.u * APART), 2 * i + mine.p, mine.s, in[i]);
    __syncwarp();
    int64_t unit = here.slab * moq_pack_blocks(p.columns) + here.first;
    uint4 *to = (uint4 *)(p.out + unit * MOQ_PACK_BYTES);
#pragma unroll
    for (int i = 0; i < RUN * VECTORS; i += 32) {
        int v = i + mine.lane;
        if (v < here.count * VECTORS)
            to[v] = units[v + v / VECTORS];
    }
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS) unpack(moq_nvfp4_unpack p) {
    __shared__ uint4 staged[WARPS][RUN * APART];
    uint4 *units = staged[threadIdx.x / 32];
    run here = find_run(p.rows, p.columns);
    if (here.count == 0)
        return;
    part mine = find_part(here);
    int64_t unit = here.slab * moq_pack_blocks(p.columns) + here.first;
    const uint4 *from = (const uint4 *)(p.packed + unit * MOQ_PACK_BYTES);
    for (int v = mine.lane; v < here.count * VECTORS; v += 32)
        units[v + v / VECTORS] = from[v];
    __syncwarp();
    if (mine.group * 16 >= p.columns)
        return;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        groups out = unstage((const uint8_t *)(units + mine.u * APART), 2 * i + mine.p, mine.s);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int64_t row = here.slab * MOQ_PACK_ROWS + 2 * i + mine.p + 8 * h;
            if (row >= p.rows)
                continue;
            store_codes<ALIGNED>(p.codes + row * (p.columns / 2) + mine.group * 8, out.codes[h]);
            if (p.group == 16)
                p.scales[row * (p.columns / 16) + mine.group] = (uint8_t)out.scale[h];
            else if (mine.group % 2 == 0)
                p.scales[row * (p.columns / 32) + mine.group / 2] = (uint8_t)out.scale[h];
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    find_fold_scales(float *fold_scale, float *output_scale, int64_t rows) {
    int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows)
        return;
    float largest = fold_scale[row];
    uint32_t bits = __float_as_uint(__fdiv_rn(largest, 448.0f));
    uint32_t up = bits & 0x7fffffu ? 1 : 0; /* no power of two itself: the next one */
    float r = largest > 0.0f ? __uint_as_float(((bits >> 23) + up) << 23) : 1.0f;
    fold_scale[row] = 1.0f / r; /* exact: r is from 2^-18 to 8 */
    output_scale[row] *= r;
}

/* ---- launch ---- */

static moq_status launch(const void *kernel, const char *what, int64_t blocks, void *parameter,
                         void *stream, moq_err *err) {
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    void *args[] = {parameter};
    return moq_cuda_launch(&launch, args, err);
}

static int64_t blocks_for(int64_t rows, int64_t columns) {
    int64_t runs = (moq_pack_blocks(columns) + RUN - 1) / RUN * moq_pack_slabs(rows);
    return (runs + WARPS - 1) / WARPS;
}

static bool by_eights(const void *pointer, int64_t stride) {
    return (uintptr_t)pointer % 8 == 0 && stride % 8 == 0;
}

extern "C" moq_status moq_cuda_pack_nvfp4(const moq_nvfp4_pack *p, void *stream, moq_err *err) {
    moq_nvfp4_pack parameter = *p;
    bool aligned = true;
    for (int i = 0; i < p->source_count; i++)
        aligned = aligned && by_eights(p->source[i].codes, p->source[i].code_stride);
    return launch(aligned ? (const void *)pack<true> : (const void *)pack<false>,
                  "prepare: packing NVFP4", blocks_for(p->rows, p->columns), &parameter, stream,
                  err);
}

extern "C" moq_status moq_cuda_unpack_nvfp4(const moq_nvfp4_unpack *p, void *stream, moq_err *err) {
    moq_nvfp4_unpack parameter = *p;
    bool aligned = by_eights(p->codes, p->columns / 2);
    return launch(aligned ? (const void *)unpack<true> : (const void *)unpack<false>,
                  "unpacking NVFP4", blocks_for(p->rows, p->columns), &parameter, stream, err);
}

extern "C" moq_status moq_cuda_find_fold_scales(float *fold_scale, float *output_scale,
                                                int64_t rows, void *stream, moq_err *err) {
    void *args[] = {&fold_scale, &output_scale, &rows};
    moq_launch launch = {.what = "prepare: powers of two of rows",
                         .kernel = (const void *)find_fold_scales,
                         .grid = dim3((unsigned)((rows + THREADS - 1) / THREADS)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream};
    return moq_cuda_launch(&launch, args, err);
}
