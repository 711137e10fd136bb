/* NVFP4 weights to the packed layout and back: see nvfp4_pack.h.
 *
 * A warp has RUN units of a slab, one after the other in memory. Lane 4g + s takes group s of rows
 * g and g + 8 of each: 8 bytes of codes a row, 32 from four lanes, and two scales. It makes the
 * group's word of all four vectors of g in shared memory, without bank conflicts; from there units
 * go out 16 bytes a lane. Unpacking goes the same way back.
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
#define VECTORS (MOQ_PACK_BYTES / 16)

/* What a lane has of a unit: a group of rows g and g + 8. */
typedef struct {
    uint2 codes[2]; /* the first in the lowest nibble */
    uint32_t scale[2];
} groups;

/* A row of the layer as it is stored; codes NULL where it is zeros or there is none. */
typedef struct {
    const uint8_t *codes, *scales;
} stored_row;

static __device__ __forceinline__ stored_row find_row(const moq_nvfp4_pack &p, int64_t row) {
    if (row >= p.rows)
        return {NULL, NULL};
    int i = 0;
    while (row >= p.source[i].rows)
        row -= p.source[i++].rows;
    const moq_pack_source &from = p.source[i];
    if (!from.codes)
        return {NULL, NULL};
    return {from.codes + row * from.code_stride, from.scales + row * from.scale_stride};
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
    if (ALIGNED) {
        *(uint2 *)to = codes;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(codes.x >> 8 * i);
        to[4 + i] = (uint8_t)(codes.y >> 8 * i);
    }
}

/* ---- words ---- */

/* Byte t of four: its low nibble at the beginning of the low half, the high one of the high half.
 */
static __device__ __forceinline__ uint32_t take_byte(uint32_t codes, int t) {
    return __byte_perm(codes, codes >> 4, t | t << 4 | (4 + t) << 8 | t << 12);
}

/* The word of vector t from a group of two rows. */
static __device__ __forceinline__ uint32_t make_word(const groups &in, int t) {
    return moq_pack_halves(take_byte(in.codes[0].x, t), 0) |
           moq_pack_halves(take_byte(in.codes[1].x, t), 1) |
           moq_pack_halves(take_byte(in.codes[0].y, t), 2) |
           moq_pack_halves(take_byte(in.codes[1].y, t), 3);
}

static __device__ __forceinline__ void stage(uint8_t *unit, int g, int s, const groups &in) {
#pragma unroll
    for (int t = 0; t < 4; t++)
        *(uint32_t *)(unit + moq_pack_word_at(g, t, s)) = make_word(in, t);
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

/* The largest of 16 magnitudes: their codes are in their order. */
static __device__ __forceinline__ uint32_t largest_code(uint2 codes) {
    uint32_t x = __vmaxu4(codes.x & 0x07070707u, codes.x >> 4 & 0x07070707u);
    uint32_t y = __vmaxu4(codes.y & 0x07070707u, codes.y >> 4 & 0x07070707u);
    uint32_t two = __vmaxu4(x, y);
    two = __vmaxu4(two, two >> 16);
    return max(two & 0xff, two >> 8 & 0xff);
}

static __device__ __forceinline__ float half_of_bits(uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short)bits));
}

/* Both formats are the upper part of a half with another bias. */
static __device__ __forceinline__ float largest_value(uint2 codes, uint32_t scale) {
    return half_of_bits(largest_code(codes) << 9) * 0x1p14f * half_of_bits((scale & 0x7f) << 7) *
           0x1p8f;
}

/* Of rows g and g + 8 of the lane's groups, then of the four lanes of a row. */
static __device__ __forceinline__ void keep_largest(const moq_nvfp4_pack &p, int64_t row, int s,
                                                    const groups (&in)[RUN]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = 0.0f;
#pragma unroll
        for (int u = 0; u < RUN; u++)
            most = fmaxf(most, largest_value(in[u].codes[h], in[u].scale[h]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        if (s == 0 && row + 8 * h < p.rows)
            atomicMax((unsigned *)p.largest + row + 8 * h, __float_as_uint(most));
    }
}

/* ---- the kernels ---- */

/* The warp's units: a slab, its first block, and how many of RUN there are. */
typedef struct {
    int64_t slab, first;
    int count; /* 0: none */
} run;

static __device__ __forceinline__ run find_run(int64_t rows, int64_t columns) {
    int64_t blocks = moq_pack_blocks(columns), runs = (blocks + RUN - 1) / RUN;
    int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, slab = index / runs;
    int64_t first = index % runs * RUN;
    return {slab, first, slab < moq_pack_slabs(rows) ? (int)min(blocks - first, (int64_t)RUN) : 0};
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ moq_nvfp4_pack p) {
    __shared__ uint4 staged[WARPS][RUN * VECTORS];
    uint8_t *units = (uint8_t *)staged[threadIdx.x / 32];
    int lane = threadIdx.x % 32, g = lane / 4, s = lane % 4;
    run here = find_run(p.rows, p.columns);
    if (here.count == 0)
        return;
    int64_t row = here.slab * MOQ_PACK_ROWS + g, group_count = p.columns / 16;
    groups in[RUN] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        stored_row from = find_row(p, row + 8 * h);
#pragma unroll
        for (int u = 0; u < RUN; u++) {
            int64_t group = (here.first + u) * MOQ_PACK_GROUPS + s;
            if (!from.codes || group >= group_count)
                continue;
            in[u].codes[h] = load_codes<ALIGNED>(from.codes + group * 8);
            in[u].scale[h] = from.scales[group * 16 / p.group];
        }
    }
    if (p.largest)
        keep_largest(p, row, s, in);
#pragma unroll
    for (int u = 0; u < RUN; u++)
        stage(units + u * MOQ_PACK_BYTES, g, s, in[u]);
    __syncwarp();
    int64_t unit = here.slab * moq_pack_blocks(p.columns) + here.first;
    uint4 *to = (uint4 *)(p.out + unit * MOQ_PACK_BYTES);
#pragma unroll
    for (int i = 0; i < RUN * VECTORS; i += 32) {
        if (i + lane < here.count * VECTORS)
            to[i + lane] = ((const uint4 *)units)[i + lane];
    }
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS) unpack(moq_nvfp4_unpack p) {
    __shared__ uint4 staged[WARPS][RUN * VECTORS];
    uint8_t *units = (uint8_t *)staged[threadIdx.x / 32];
    int lane = threadIdx.x % 32, g = lane / 4, s = lane % 4;
    run here = find_run(p.rows, p.columns);
    int64_t unit = here.slab * moq_pack_blocks(p.columns) + here.first;
    const uint4 *from = (const uint4 *)(p.packed + unit * MOQ_PACK_BYTES);
    for (int i = lane; i < here.count * VECTORS; i += 32)
        ((uint4 *)units)[i] = from[i];
    __syncwarp();
    for (int u = 0; u < here.count; u++) {
        groups out = unstage(units + u * MOQ_PACK_BYTES, g, s);
        int64_t column = (here.first + u) * MOQ_PACK_K + 16 * s;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int64_t row = here.slab * MOQ_PACK_ROWS + g + 8 * h;
            if (row >= p.rows || column >= p.columns)
                continue;
            store_codes<ALIGNED>(p.codes + (row * p.columns + column) / 2, out.codes[h]);
            if (column % p.group == 0)
                p.scales[(row * p.columns + column) / p.group] = (uint8_t)out.scale[h];
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
