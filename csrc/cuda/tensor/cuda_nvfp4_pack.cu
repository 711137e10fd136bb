/* NVFP4 weights to the packed layout and back (cuda_nvfp4_pack.h).
 *
 * A warp has RUN units of a slab, consecutive in memory: 128 bytes of codes and 16 of scales of
 * each row. Packing, lane 16p + 4u + s loads group s of unit u, 8 bytes, of rows 2i + p and 2i + p
 * + 8 for i = 0..3, so that 16 lanes read a row's line. The four lanes of a unit then exchange
 * bytes. Lane s gets the codes of its four groups that belong to vector t = s, makes the whole
 * vector of them, and stores it.
 *
 * Lane 2r + h loads the 8 scales of row r and units 2h and 2h + 1. It gives one unit to the lane
 * with row r + 8 or r - 8, and stores the scales of both rows. Only scales for the largest values
 * go through shared memory. Unpacking goes through shared memory, where units are a vector further
 * apart than in the result, so that no bank is met twice.
 *
 * Bound: memory, 9/16 byte of a weight in and out, beside about 2.5 operations. Rows that are not
 * aligned to 8 bytes go byte by byte. To fold, a block has a whole slab and finds the largest value
 * of each row on the way: magnitudes of codes have the order of the codes. */
#include "cuda/tensor/cuda_nvfp4_pack.h"

#include "core/formats.h"
#include "core/nvfp4_packed.h"
#include "core/swizzle.h"
#include "cuda/device/load.h"
#include "cuda/runtime/launch.h"

#include <cuda_fp16.h>

namespace moq::packing {

#define WARPS   4 /* warps of a block */
#define THREADS (32 * WARPS)
#define RUN     4
#define PAIRS   4 /* pairs of rows g and g + 8 of a lane */
#define VECTORS (MOQ_PACK_BYTES / 16)
#define APART   (VECTORS + 1) /* vectors from unit to unit in shared memory */

/* Kernels with a slab a block: warps at most, and blocks a multiprocessor whose registers must
 * suffice. */
#define SLAB_WARPS   8
#define BLOCKS_OF_SM 4
/* Kernels with runs a block: blocks a multiprocessor. The aligned kernel has 48 registers a thread,
 * without spills; the bytewise one has two blocks less. */
#define BLOCKS_OF_COPY 10

/* Arguments of a kernel. The sources are among them, so that nothing has to be on the device
 * before. The second dimension of its grid goes over the experts of a stack. */
typedef struct {
    moq_nvfp4_pack of;
    int64_t out_step; /* bytes of units from expert to expert */
    moq_pack_source source[MOQ_MAX_PARTITIONS];
} pack_args;

/* A group of rows g and g + 8. */
typedef struct {
    uint2 codes[2]; /* the first in the lowest nibble */
} groups;

template <bool ALIGNED> static __device__ __forceinline__ uint2 load_codes(const uint8_t *from) {
    if (ALIGNED)
        return *(const uint2 *)from;
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

/* Returns bits of b where the mask has ones, else of a. */
static __device__ __forceinline__ uint32_t select(uint32_t a, uint32_t b, uint32_t mask) {
    return (a & ~mask) | (b & mask);
}

/* Makes the words of all four vectors from a group of two rows, in the order of moq_pack_pair. It
 * takes four codes of a row, in every other nibble, at a time: `x` has the codes of pairs 0 and 1,
 * `y` those of 2 and 3. The signs of the four pairs are made neighbours, then magnitudes two by
 * two: six bits in each byte, one of even, one of odd columns. Both bytes of each half are dealt
 * out last. */
static __device__ __forceinline__ uint4 make_words(const groups &in) {
    uint32_t x0 = in.codes[0].x, x1 = in.codes[1].x, y0 = in.codes[0].y, y1 = in.codes[1].y;
    uint32_t signs = select(select(x0, y0 >> 1, 0x44444444u), select(y1 >> 2, x1 >> 3, 0x11111111u),
                            0x33333333u);
    uint32_t low_even = select(y0, x1 << 3, 0x38383838u);
    uint32_t low_odd = select(y0 >> 4, x1 >> 1, 0x38383838u);
    uint32_t high_even = select(x0, y1 << 3, 0x38383838u);
    uint32_t high_odd = select(x0 >> 4, y1 >> 1, 0x38383838u);
    uint32_t a = select(low_even, high_even << 6, 0xc0c0c0c0u);
    uint32_t b = select(high_even >> 2, signs << 4, 0xf0f0f0f0u);
    uint32_t c = select(low_odd, high_odd << 6, 0xc0c0c0c0u);
    uint32_t d = select(high_odd >> 2, signs, 0xf0f0f0f0u);
    uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);
    return make_uint4(__byte_perm(ab, cd, 0x5410), __byte_perm(ab, cd, 0x7632),
                      __byte_perm(ab2, cd2, 0x5410), __byte_perm(ab2, cd2, 0x7632));
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
    return out;
}

/* ---- a lane's share of a run ---- */

/* The warp's units: a slab, its first block, and how many of RUN there are. No memory holds 2^32
 * units or groups. */
typedef struct {
    uint32_t slab, first;
    int count; /* 0: no unit */
} run;

static __device__ __forceinline__ run find_run(int64_t rows, int64_t columns) {
    uint32_t blocks = (uint32_t)moq_pack_blocks(columns), runs = (blocks + RUN - 1) / RUN;
    uint32_t index = blockIdx.x * WARPS + threadIdx.x / 32;
    uint32_t slab = index / runs, first = index % runs * RUN;
    return {slab, first, slab < moq_pack_slabs(rows) ? (int)min(blocks - first, (uint32_t)RUN) : 0};
}

/* A lane's codes: group s of unit u, of rows g and g + 8 for g = 2i + p. */
typedef struct {
    int lane, p, u, s;
    uint32_t group; /* group of the layer; nothing is beyond the last one */
} part;

static __device__ __forceinline__ uint32_t groups_of(int64_t columns) {
    return (uint32_t)(columns / MOQ_NVFP4_GROUP);
}

static __device__ __forceinline__ part find_part(const run &here) {
    int lane = threadIdx.x % 32, u = lane / 4 % RUN, s = lane % 4;
    return {lane, lane / 16, u, s, (here.first + u) * MOQ_PACK_GROUPS + s};
}

/* Codes and scales that a lane has loaded. */
typedef struct {
    groups codes[PAIRS];
    uint2 scales; /* of row lane / 2, units from lane % 2 * 2 on; lowest byte first */
} share;

/* Finds the source of a row, and that source's first row. */
typedef struct {
    int index;
    int64_t first;
} place;

static __device__ __forceinline__ place find_place(const pack_args &p, int64_t row) {
    place at = {0, 0};
    while (row - at.first >= p.source[at.index].rows && at.index + 1 < p.of.source_count)
        at.first += p.source[at.index++].rows;
    return at;
}

/* Returns weight_scale_2 of a source for the block's expert. */
static __device__ __forceinline__ float factor_of(const pack_args &p,
                                                  const moq_pack_source &source) {
    return source.factor_at
               ? moq_load_one(source.factor_at, (int)(blockIdx.y * (uint32_t)p.of.factor_step),
                              source.factor_dtype)
               : source.factor;
}

/* Loads the scales of a row for groups `group` to group + 7: either all exist, or none. */
static __device__ __forceinline__ uint2 load_eight(const pack_args &p, const uint8_t *row,
                                                   uint32_t group) {
    if (group >= groups_of(p.of.columns))
        return make_uint2(0, 0);
    if (p.of.group == MOQ_NVFP4_GROUP)
        return *(const uint2 *)(row + group);
    uint32_t four = *(const uint32_t *)(row + group / 2);
    return make_uint2(__byte_perm(four, 0, 0x1100), __byte_perm(four, 0, 0x3322));
}

/* Loads a row's codes one by one; some may not exist. */
static __device__ __forceinline__ uint2 load_each(const pack_args &p, const uint8_t *row,
                                                  uint32_t group) {
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++, group++) {
        if (group < groups_of(p.of.columns))
            word[i / 4] |= (uint32_t)row[p.of.group == MOQ_NVFP4_GROUP ? group : group / 2]
                           << i % 4 * 8;
    }
    return make_uint2(word[0], word[1]);
}

/* Loads the rows of one source: rows `begin` to end - 1 of the slab, of which row 0 would be the
 * source's row `shift`. */
template <bool ALIGNED>
static __device__ __forceinline__ void load_rows(const pack_args &p, const moq_pack_source &source,
                                                 int64_t shift, int begin, int end, const run &here,
                                                 const part &mine, share &out) {
    const uint8_t *codes = source.codes + blockIdx.y * source.code_step +
                           (shift + mine.p) * source.code_stride + (int64_t)mine.group * 8;
    int row = mine.lane / 2, last = mine.group < groups_of(p.of.columns) ? end : 0;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++, codes += 2 * source.code_stride) {
        int r = mine.p + 2 * i;
        if (r >= begin && r < last)
            out.codes[i % PAIRS].codes[i / PAIRS] = load_codes<ALIGNED>(codes);
    }
    bool own = row >= begin && row < end;
    if (own) {
        const uint8_t *scales =
            source.scales + blockIdx.y * source.scale_step + (shift + row) * source.scale_stride;
        uint32_t group = (here.first + mine.lane % 2 * 2) * MOQ_PACK_GROUPS;
        out.scales = ALIGNED ? load_eight(p, scales, group) : load_each(p, scales, group);
    }
    if (factor_of(p, source) == 0.0f) {
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) {
            if (mine.p + 2 * i >= begin && mine.p + 2 * i < end)
                out.codes[i % PAIRS].codes[i / PAIRS] = make_uint2(0, 0);
        }
        if (own)
            out.scales = make_uint2(0, 0);
    }
}

/* Loads all codes and scales of a lane. */
template <bool ALIGNED>
static __device__ __forceinline__ share load_share(const pack_args &p, place at, const run &here,
                                                   const part &mine) {
    int64_t row = (int64_t)here.slab * MOQ_PACK_ROWS;
    share out = {};
#pragma unroll 1
    for (; at.index < p.of.source_count && at.first < row + MOQ_PACK_ROWS;
         at.first += p.source[at.index++].rows) {
        const moq_pack_source &source = p.source[at.index];
        int begin = (int)max(at.first - row, (int64_t)0);
        int end = (int)min(at.first + source.rows - row, (int64_t)MOQ_PACK_ROWS);
        load_rows<ALIGNED>(p, source, row - at.first, begin, end, here, mine, out);
    }
    return out;
}

/* Turns minus zeros into zeros, and reports scales that no intact checkpoint holds. */
static __device__ __forceinline__ void check_scales(const pack_args &p, share &loaded) {
    loaded.scales.x &= ~__vcmpeq4(loaded.scales.x, 0x80808080u);
    loaded.scales.y &= ~__vcmpeq4(loaded.scales.y, 0x80808080u);
    if (p.of.found &&
        (__vcmpgeu4(loaded.scales.x, 0x7f7f7f7fu) | __vcmpgeu4(loaded.scales.y, 0x7f7f7f7fu)))
        p.of.found->bad_code = 1;
}

/* ---- exchanges ---- */

/* Exchanges bytes 0 to 3 of a and of b among the four lanes of a unit: lane t gets byte t of each,
 * that of lane s into byte s. */
static __device__ __forceinline__ void transpose(uint32_t &a, uint32_t &b, int s) {
    bool odd = s & 1, upper = s & 2;
    uint32_t given = __byte_perm(a, b, odd ? 0x6420 : 0x7531);
    uint32_t got = __shfl_xor_sync(0xffffffffu, given, 1);
    uint32_t a2 = __byte_perm(a, got, odd ? 0x3514 : 0x5240); /* of two lanes: t % 2, then + 2 */
    uint32_t b2 = __byte_perm(b, got, odd ? 0x3716 : 0x7260);
    given = __byte_perm(a2, b2, upper ? 0x5410 : 0x7632);
    got = __shfl_xor_sync(0xffffffffu, given, 2);
    a = __byte_perm(a2, got, upper ? 0x3254 : 0x5410);
    b = __byte_perm(b2, got, upper ? 0x3276 : 0x7610);
}

/* Orders the scales of rows g and g + 8 for one unit as the packed layout has them. */
typedef struct {
    int unit, g;
    uint2 scales;
} scale_pair;

/* Exchanges a unit each between lanes of rows r and r + 8. */
static __device__ __forceinline__ scale_pair exchange_scales(const part &mine, uint2 scales) {
    bool lower = mine.p == 0; /* rows 0 to 7 */
    uint32_t kept = lower ? scales.x : scales.y;
    uint32_t got = __shfl_xor_sync(0xffffffffu, lower ? scales.y : scales.x, 16);
    uint32_t low = lower ? kept : got, high = lower ? got : kept;
    return {mine.lane % 2 * 2 + mine.p, mine.lane / 2 % 8,
            make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362))};
}

static __device__ __forceinline__ void store_share(const pack_args &p, const run &here,
                                                   const part &mine, share &in,
                                                   const scale_pair &scales) {
    uint8_t *to = p.of.out + blockIdx.y * p.out_step +
                  (here.slab * moq_pack_blocks(p.of.columns) + here.first) * MOQ_PACK_BYTES;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        groups &pair = in.codes[i];
        transpose(pair.codes[0].x, pair.codes[0].y, mine.s);
        transpose(pair.codes[1].x, pair.codes[1].y, mine.s);
        uint4 vector = make_words(pair);
        int at = moq_pack_word_at(2 * i + mine.p, mine.s, 0);
        if (mine.u < here.count)
            *(uint4 *)(to + mine.u * MOQ_PACK_BYTES + at) = vector;
    }
    if (scales.unit < here.count)
        *(uint2 *)(to + scales.unit * MOQ_PACK_BYTES + moq_pack_scale_at(scales.g, 0)) =
            scales.scales;
}

/* ---- factors ---- */

/* Returns true if a warp must write nothing, since it or an earlier kernel has found bad values.
 * Bad factors of all sources, and a zero that the host does not know of, are reported if nobody
 * looked before, also to later kernels. */
static __device__ __forceinline__ bool is_refused(const pack_args &p) {
    bool bad = false, zero = false;
    if (!p.of.found)
        return false;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.of.source_count && !p.of.checked; i += 32) {
        float factor = factor_of(p, p.source[i]);
        bad = bad || !(factor >= 0) || __float_as_uint(factor) == 0x7f800000u;
        bad = bad || (p.of.fold_scale && factor > MOQ_FOLDED_MOST); /* the rule MOQ_SCALE_FOLDED */
        zero = zero || (p.source[i].factor_at && factor == 0.0f);
    }
    if (bad)
        p.of.found->bad_scale = 1;
    if (bad && p.of.unless)
        p.of.unless->bad_scale = 1;
    if (zero)
        p.of.found->zero_scale = 1;
    if (zero && p.of.unless)
        p.of.unless->zero_scale = 1;
    bool met = moq_has_met(p.of.unless, p.of.found); /* called always: it reports */
    return __any_sync(0xffffffffu, bad || zero) || met;
}

/* Writes output_scale of a row, and fold_scale if there is one, from its largest value. */
static __device__ __forceinline__ void write_factor(const pack_args &p, int64_t row,
                                                    float largest) {
    if (row >= p.of.rows || !p.of.output_scale)
        return;
    int64_t at = blockIdx.y * p.of.rows + row;
    float factor = factor_of(p, p.source[find_place(p, row).index]);
    p.of.output_scale[at] = p.of.row_factor ? factor * p.of.row_factor[at] : factor;
    if (!p.of.fold_scale)
        return;
    uint32_t bits = __float_as_uint(__fdiv_rn(largest, 448.0f));
    uint32_t up = bits & 0x7fffffu ? 1 : 0; /* unless it is a power of two, the next one */
    float r = largest > 0.0f ? __uint_as_float(((bits >> 23) + up) << 23) : 1.0f;
    p.of.fold_scale[at] = 1.0f / r; /* exact: r is from 2^-18 to 8 */
}

/* ---- the largest values ---- */

/* Returns the largest of 16 magnitudes in the upper bits of one of two halves: of each 16 bits the
 * highest nibble decides, and every nibble is that once. */
static __device__ __forceinline__ uint32_t largest_codes(uint2 codes) {
    uint32_t x = codes.x & 0x77777777u, y = codes.y & 0x77777777u;
    uint32_t most = __vmaxu2(x, y);
#pragma unroll
    for (int i = 4; i < 16; i += 4)
        most = __vimax3_u16x2(most, x << i, y << i);
    return most;
}

static __device__ __forceinline__ __half2 halves(uint32_t bits) {
    __half2 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Returns the largest values of rows g and g + 8, times 2^-7. code * scale has 6 bits and is at
 * least 2^-10, so nothing is rounded. Both formats are the upper part of a half with another
 * bias. */
static __device__ __forceinline__ __half2 largest_values(const groups &in, uint32_t scales) {
    uint32_t low = largest_codes(in.codes[0]), high = largest_codes(in.codes[1]);
    uint32_t codes = __vmaxu2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    __half2 code = __hmul2(halves(codes >> 3 & 0x0e000e00u), __float2half2_rn(0x1p14f));
    __half2 scale = __hmul2(halves(__byte_perm(scales, 0, 0x4140) << 7), __float2half2_rn(0x1p1f));
    return __hmul2(code, scale);
}

/* Keeps the largest value of each row of the lane. */
static __device__ __forceinline__ void keep_largest(const share &in, const part &mine,
                                                    const uint2 (&scales)[RUN][MOQ_PACK_ROWS / 2],
                                                    __half2 (&most)[PAIRS]) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint16_t *both = (const uint16_t *)&scales[mine.u][2 * i + mine.p];
        most[i] = __hmax2(most[i], largest_values(in.codes[i], both[mine.s]));
    }
}

/* Reduces over the 16 lanes of p: lanes exchange half of their rows, then half of the rest, and end
 * with rows g and g + 8 for the returned g. */
static __device__ __forceinline__ int reduce_largest(__half2 (&most)[PAIRS]) {
    int lane = threadIdx.x % 32, index = 0;
#pragma unroll
    for (int half = PAIRS / 2; half > 0; half /= 2) {
        bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            __half2 kept = upper ? most[i + half] : most[i];
            __half2 given = upper ? most[i] : most[i + half];
            most[i] = __hmax2(kept, __shfl_xor_sync(0xffffffffu, given, half));
        }
        index += upper ? half : 0;
    }
#pragma unroll
    for (int i = PAIRS; i < 16; i *= 2)
        most[0] = __hmax2(most[0], __shfl_xor_sync(0xffffffffu, most[0], i));
    return 2 * index + lane / 16;
}

/* ---- the kernels ---- */

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS, ALIGNED ? BLOCKS_OF_COPY : BLOCKS_OF_COPY - 2)
    pack(const __grid_constant__ pack_args p) {
    run here = find_run(p.of.rows, p.of.columns);
    if (here.count == 0)
        return;
    part mine = find_part(here);
    int64_t row = (int64_t)here.slab * MOQ_PACK_ROWS;
    share loaded = load_share<ALIGNED>(p, find_place(p, row), here, mine);
    check_scales(p, loaded);
    if (is_refused(p))
        return;
    store_share(p, here, mine, loaded, exchange_scales(mine, loaded.scales));
    if (here.first == 0 && mine.lane < MOQ_PACK_ROWS)
        write_factor(p, row + mine.lane, 0.0f);
}

/* Packs and folds, a slab a block. */
template <bool ALIGNED>
static __global__ void __launch_bounds__(32 * SLAB_WARPS, BLOCKS_OF_SM)
    pack_and_fold(const __grid_constant__ pack_args p) {
    __shared__ uint2 staged[SLAB_WARPS][RUN][MOQ_PACK_ROWS / 2];
    __shared__ float largest[SLAB_WARPS][MOQ_PACK_ROWS];
    uint32_t blocks = (uint32_t)moq_pack_blocks(p.of.columns), warp = threadIdx.x / 32;
    uint32_t warps = blockDim.x / 32;
    int64_t row = (int64_t)blockIdx.x * MOQ_PACK_ROWS;
    place at = find_place(p, row);
    __half2 most[PAIRS] = {};
    if (is_refused(p)) /* all warps, or none */
        return;
#pragma unroll 1
    for (uint32_t first = warp * RUN; first < blocks; first += warps * RUN) {
        run here = {blockIdx.x, first, (int)min(blocks - first, (uint32_t)RUN)};
        part mine = find_part(here);
        share loaded = load_share<ALIGNED>(p, at, here, mine);
        check_scales(p, loaded);
        scale_pair scales = exchange_scales(mine, loaded.scales);
        staged[warp][scales.unit][scales.g] = scales.scales;
        __syncwarp();
        keep_largest(loaded, mine, staged[warp], most);
        __syncwarp();
        store_share(p, here, mine, loaded, scales);
    }
    int g = reduce_largest(most);
    largest[warp][g] = __low2float(most[0]) * 0x1p7f;
    largest[warp][g + 8] = __high2float(most[0]) * 0x1p7f;
    __syncthreads();
    if (threadIdx.x >= MOQ_PACK_ROWS)
        return;
    float all = 0;
    for (uint32_t w = 0; w < warps; w++)
        all = fmaxf(all, largest[w][threadIdx.x]);
    write_factor(p, row + threadIdx.x, all);
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS) unpack(moq_nvfp4_unpack p) {
    __shared__ uint4 staged[WARPS][RUN * APART];
    uint4 *units = staged[threadIdx.x / 32];
    run here = find_run(p.rows, p.columns);
    if (here.count == 0)
        return;
    part mine = find_part(here);
    int64_t slab = blockIdx.y * moq_pack_slabs(p.rows) + here.slab;
    int64_t unit = slab * moq_pack_blocks(p.columns) + here.first;
    const uint4 *from = (const uint4 *)(p.packed + unit * MOQ_PACK_BYTES);
    for (int v = mine.lane; v < here.count * VECTORS; v += 32)
        units[v + v / VECTORS] = from[v];
    __syncwarp();
    if (mine.group >= groups_of(p.columns))
        return;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const uint8_t *from_unit = (const uint8_t *)(units + mine.u * APART);
        groups out = unstage(from_unit, 2 * i + mine.p, mine.s);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int64_t row = (int64_t)here.slab * MOQ_PACK_ROWS + 2 * i + mine.p + 8 * h;
            if (row >= p.rows)
                continue;
            uint8_t scale = from_unit[moq_pack_scale_at(2 * i + mine.p + 8 * h, mine.s)];
            row += blockIdx.y * p.rows;
            store_codes<ALIGNED>(p.codes + row * (p.columns / 2) + (int64_t)mine.group * 8,
                                 out.codes[h]);
            if (p.swizzled)
                p.scales[moq_swizzle_at(row, mine.group,
                                        moq_swizzle_across(p.columns / MOQ_NVFP4_GROUP))] = scale;
            else if (p.group == 16)
                p.scales[row * (p.columns / 16) + mine.group] = scale;
            else if (mine.group % 2 == 0)
                p.scales[row * (p.columns / 32) + mine.group / 2] = scale;
        }
    }
}

/* ---- launch ---- */

static moq_status launch(const void *kernel, const char *what, int64_t blocks, int64_t experts,
                         int warps, void *parameter, void *stream, moq_err *err) {
    moq_launch launch = {.what = what,
                         .kernel = kernel,
                         .grid = dim3((unsigned)blocks, (unsigned)experts),
                         .block = dim3(32 * (unsigned)warps),
                         .stream = (cudaStream_t)stream};
    void *args[] = {parameter};
    return moq_cuda_launch(&launch, args, err);
}

static int64_t blocks_for(int64_t rows, int64_t columns) {
    int64_t runs = (moq_pack_blocks(columns) + RUN - 1) / RUN * moq_pack_slabs(rows);
    return (runs + WARPS - 1) / WARPS;
}

/* Returns the warps of a slab: as many as have equal shares of its runs, at most SLAB_WARPS. Rows
 * of experts are short. */
static int slab_warps(int64_t columns) {
    int64_t runs = (moq_pack_blocks(columns) + RUN - 1) / RUN;
    int64_t turns = (runs + SLAB_WARPS - 1) / SLAB_WARPS;
    return (int)((runs + turns - 1) / turns);
}

static bool by(int64_t bytes, const void *pointer, int64_t stride) {
    return (int64_t)((uintptr_t)pointer % (uintptr_t)bytes) == 0 && stride % bytes == 0;
}

extern "C" moq_status moq_cuda_pack_nvfp4(const moq_nvfp4_pack *p, void *stream, moq_err *err) {
    pack_args parameter;
    bool aligned = p->columns % (2 * MOQ_PACK_K) == 0;
    parameter.of = *p;
    parameter.out_step = moq_pack_slabs(p->rows) * moq_pack_blocks(p->columns) * MOQ_PACK_BYTES;
    memcpy(parameter.source, p->source, (size_t)p->source_count * sizeof *p->source);
    for (int i = 0; i < p->source_count; i++) {
        const moq_pack_source *of = &p->source[i];
        int64_t word = p->group == MOQ_NVFP4_GROUP ? 8 : 4;
        aligned = aligned && by(8, of->codes, of->code_stride) &&
                  by(word, of->scales, of->scale_stride) && of->code_step % 8 == 0 &&
                  of->scale_step % word == 0;
    }
    if (p->fold_scale)
        return launch(aligned ? (const void *)pack_and_fold<true>
                              : (const void *)pack_and_fold<false>,
                      "prepare: packing NVFP4", moq_pack_slabs(p->rows), p->experts,
                      slab_warps(p->columns), &parameter, stream, err);
    return launch(aligned ? (const void *)pack<true> : (const void *)pack<false>,
                  "prepare: packing NVFP4", blocks_for(p->rows, p->columns), p->experts, WARPS,
                  &parameter, stream, err);
}

extern "C" moq_status moq_cuda_unpack_nvfp4(const moq_nvfp4_unpack *p, void *stream, moq_err *err) {
    moq_nvfp4_unpack parameter = *p;
    bool aligned = by(8, p->codes, p->columns / 2);
    return launch(aligned ? (const void *)unpack<true> : (const void *)unpack<false>,
                  "unpacking NVFP4", blocks_for(p->rows, p->columns), p->experts, WARPS, &parameter,
                  stream, err);
}

} // namespace moq::packing
