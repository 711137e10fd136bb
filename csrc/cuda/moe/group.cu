/* Sorts slots by expert: see group.h. A counting sort whose order is the same in every run.
 *
 * A block has a range of slots, each of its warps a part of that. A warp goes through its part 32
 * slots at a time; slots of one expert among these 32 find each other by a match, so that a slot's
 * rank is that of its lane, and counts of the warp so far come from shared memory, [warp][expert].
 * Up to ONCE slots are a single block's; with more, a first kernel counts the slots of each expert
 * in every range, a second adds these up over ranges and experts, and the third ranks.
 *
 * Bound by latency: that of ids, which are asked for several at a time, and of the code, which is
 * met for the first time in every call, so that loops are not unrolled. */
#include "cuda/cuda.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/group.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define WARPS   16
#define THREADS (32 * WARPS)
#define ONCE    8192 /* slots of one block */
#define ASKED   4    /* ids that a lane asks for at a time */
#define RANGES  64   /* of slots, where ONCE allows */
#define RANGE   2048 /* slots of one, at least */
#define EVEN    8    /* rows of tiles are multiples of */
#define OWN     ((MOQ_CUDA_MOE_EXPERTS + THREADS - 1) / THREADS) /* experts of a thread */

typedef struct {
    slot_tensor ids;
    const int32_t *expert_map;
    int64_t first; /* token */
    int32_t slots, top_k, experts, global_experts;
    int32_t range; /* slots of a block */
    int32_t ranges, tile_rows, tiles, align;
    bool pairs;
    int32_t *before; /* [ranges, E]: slots of an expert in the ranges before, once they are added */
    slot_groups out;
} group_args;

/* ---- slots ---- */

/* The local expert of a slot, or -1 where it does not count. */
static __device__ __forceinline__ int expert_of(const group_args *a, int slot) {
    int token = slot / a->top_k;
    int64_t at = slot_offset(&a->ids, a->first + token, slot - token * a->top_k);
    int64_t id = a->ids.dtype == MOQ_DT_I64 ? ((const int64_t *)a->ids.data)[at]
                                            : ((const int32_t *)a->ids.data)[at];
    if (id < 0 || id >= a->global_experts)
        return -1;
    int local = a->expert_map ? a->expert_map[id] : (int)id;
    return local >= 0 && local < a->experts ? local : -1;
}

/* The slots of a warp. */
typedef struct {
    int begin, end;
} slot_part;

static __device__ __forceinline__ slot_part part_of_warp(const group_args *a) {
    int begin = (int)blockIdx.x * a->range, end = min(begin + a->range, a->slots);
    int each = (end - begin + WARPS - 1) / WARPS;
    int first = min(begin + (int)threadIdx.x / 32 * each, end);
    return {first, min(first + each, end)};
}

/* What a block has in shared memory. */
typedef struct {
    int *count; /* [WARPS, E]: slots of a warp, then of those before it, then of those so far */
    int *begin; /* [E]: the row of the block's first */
    int *first_tile; /* [E + 1] */
    int *end;        /* [E]: behind its last row */
    uint16_t *held;  /* [range]: the expert of each slot of the block, or NOBODY */
} block_memory;

#define NOBODY 0xffff

static __host__ __device__ __forceinline__ int64_t memory_bytes(int64_t experts, int64_t range) {
    return ((WARPS + 3) * experts + 1) * (int64_t)sizeof(int) + range * (int64_t)sizeof(uint16_t);
}

static __device__ __forceinline__ block_memory memory_at(const group_args *a, int *shared) {
    block_memory m = {shared};
    m.begin = m.count + WARPS * a->experts;
    m.end = m.begin + a->experts;
    m.first_tile = m.end + a->experts;
    m.held = (uint16_t *)(m.first_tile + a->experts + 1);
    return m;
}

/* Finds the experts of the block's slots and counts them for each warp. */
static __device__ __forceinline__ void count_slots(const group_args *a, const block_memory *m) {
    slot_part part = part_of_warp(a);
    uint16_t *held = m->held - (int)blockIdx.x * a->range;
    int *own = m->count + threadIdx.x / 32 * a->experts;
    for (int i = threadIdx.x; i < WARPS * a->experts; i += THREADS)
        m->count[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int base = part.begin + (int)threadIdx.x % 32; base < part.end; base += 32 * ASKED) {
        int expert[ASKED];
#pragma unroll
        for (int i = 0; i < ASKED; i++)
            expert[i] = base + 32 * i < part.end ? expert_of(a, base + 32 * i) : -1;
#pragma unroll
        for (int i = 0; i < ASKED; i++) {
            if (base + 32 * i < part.end)
                held[base + 32 * i] = (uint16_t)expert[i];
            if (expert[i] >= 0)
                atomicAdd(own + expert[i], 1); /* whole numbers: their order does not matter */
        }
    }
    __syncthreads();
}

/* The slots of an expert in this block; count[warp][expert] become those of the warps before. */
static __device__ __forceinline__ int add_warps(const group_args *a, int *count, int expert) {
    int own[WARPS], sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        own[warp] = count[warp * a->experts + expert];
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        count[warp * a->experts + expert] = sum;
        sum += own[warp];
    }
    return sum;
}

/* Rows of the slots of each warp. */
static __device__ __forceinline__ void place_slots(const group_args *a, const block_memory *m) {
    slot_part part = part_of_warp(a);
    const uint16_t *held = m->held - (int)blockIdx.x * a->range;
    int lane = threadIdx.x % 32, *own = m->count + threadIdx.x / 32 * a->experts;
#pragma unroll 1
    for (int base = part.begin; base < part.end; base += 32) {
        int slot = base + lane, expert = slot < part.end ? held[slot] : NOBODY;
        uint32_t same = __match_any_sync(0xffffffffu, expert);
        int rank = __popc(same & ((1u << lane) - 1));
        int row = expert != NOBODY ? m->begin[expert] + own[expert] + rank : -1;
        __syncwarp();
        if (expert != NOBODY && rank == 0)
            own[expert] += __popc(same);
        __syncwarp();
        if (slot < part.end)
            a->out.row[slot] = row;
        if (row >= 0) {
            a->out.slot[row] = slot;
            a->out.owner[row] = expert;
        }
    }
}

/* ---- experts ---- */

typedef struct {
    int rows, tiles;
} extent;

/* What the threads before this one have; *all becomes what all have. */
static __device__ __forceinline__ extent scan_block(extent own, extent *shared, extent *all) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    extent sum = own;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        int rows = __shfl_up_sync(0xffffffffu, sum.rows, i);
        int tiles = __shfl_up_sync(0xffffffffu, sum.tiles, i);
        sum.rows += lane >= i ? rows : 0;
        sum.tiles += lane >= i ? tiles : 0;
    }
    if (lane == 31)
        shared[warp] = sum;
    __syncthreads();
    extent before = {sum.rows - own.rows, sum.tiles - own.tiles};
    *all = {0, 0};
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        before.rows += i < warp ? shared[i].rows : 0;
        before.tiles += i < warp ? shared[i].tiles : 0;
        all->rows += shared[i].rows;
        all->tiles += shared[i].tiles;
    }
    return before;
}

/* Where each expert's rows and tiles begin. Thread t has experts t * OWN on; total[i] are the slots
 * of its i-th, and become its first row. */
static __device__ __forceinline__ void place_experts(const group_args *a, int (&total)[OWN],
                                                     const block_memory *m) {
    __shared__ extent shared[WARPS];
    int first = (int)threadIdx.x * OWN, step = a->tile_rows * (a->pairs ? 2 : 1);
    extent own = {0, 0}, all, next[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        next[i].rows = (total[i] + a->align - 1) / a->align * a->align;
        next[i].tiles = (total[i] + step - 1) / step * (a->pairs ? 2 : 1);
        own.rows += next[i].rows;
        own.tiles += next[i].tiles;
    }
    extent at = scan_block(own, shared, &all);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = first + i, end = at.rows + total[i];
        total[i] = at.rows;
        if (expert < a->experts) {
            a->out.begin[expert] = at.rows;
            m->begin[expert] = at.rows;
            m->first_tile[expert] = at.tiles;
            m->end[expert] = end;
        }
        at.rows += next[i].rows;
        at.tiles += next[i].tiles;
        for (int row = end; row < at.rows; row++) {
            a->out.slot[row] = -1;
            a->out.owner[row] = expert;
        }
    }
    if (threadIdx.x == 0) {
        a->out.count[0] = all.rows;
        a->out.count[1] = m->first_tile[a->experts] = all.tiles;
    }
    __syncthreads();
}

/* The list of tiles. */
static __device__ __forceinline__ void list_tiles(const group_args *a, const block_memory *m) {
    const int *first_tile = m->first_tile;
    for (int i = threadIdx.x; i < a->tiles; i += THREADS) {
        row_tile tile = {0, 0, 0};
        if (i < first_tile[a->experts]) {
            int low = 0,
                high = a->experts - 1; /* the last expert that begins at tile i or before */
            while (low < high) {
                int middle = (low + high + 1) / 2;
                if (first_tile[middle] <= i)
                    low = middle;
                else
                    high = middle - 1;
            }
            int begin = m->begin[low], tiles = first_tile[low + 1] - first_tile[low];
            int each = (m->end[low] - begin + tiles - 1) / tiles;
            each = min((each + EVEN - 1) / EVEN * EVEN, a->tile_rows);
            tile.expert = low;
            tile.first = begin + (i - first_tile[low]) * each;
            tile.rows = min(m->end[low] - tile.first, each);
            if (tile.rows <= 0)
                tile = {low, begin, 0};
        }
        a->out.tile[i] = tile;
    }
}

/* ---- kernels ---- */

static __global__ void __launch_bounds__(THREADS)
    group_at_once(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    int total[OWN] = {};
    wait_for_predecessor();
    launch_dependents();
    count_slots(&a, &m);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
        if (expert < a.experts)
            total[i] = add_warps(&a, m.count, expert);
    }
    place_experts(&a, total, &m);
    place_slots(&a, &m);
    list_tiles(&a, &m);
}

static __global__ void __launch_bounds__(THREADS)
    count_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    wait_for_predecessor();
    launch_dependents(); /* what follows may read the ids from here on */
    count_slots(&a, &m);
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS)
        a.before[(int64_t)blockIdx.x * a.experts + expert] = add_warps(&a, m.count, expert);
}

static __global__ void __launch_bounds__(THREADS) add_ranges(const __grid_constant__ group_args a) {
    constexpr int AT_ONCE = 16; /* ranges whose counts are asked for */
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    int total[OWN] = {};
    wait_for_predecessor();
    launch_dependents();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
#pragma unroll 1
        for (int range = 0; range < a.ranges && expert < a.experts; range += AT_ONCE) {
            int *before = a.before + (int64_t)range * a.experts + expert, own[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                own[j] = range + j < a.ranges ? before[j * a.experts] : 0;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (range + j < a.ranges)
                    before[j * a.experts] = total[i];
                total[i] += own[j];
            }
        }
    }
    place_experts(&a, total, &m);
    list_tiles(&a, &m);
}

static __global__ void __launch_bounds__(THREADS)
    place_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    launch_dependents();
    count_slots(&a, &m); /* the ids were there before the predecessor began */
    wait_for_predecessor();
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS) {
        m.begin[expert] = a.out.begin[expert] + a.before[(int64_t)blockIdx.x * a.experts + expert];
        add_warps(&a, m.count, expert);
    }
    __syncthreads();
    place_slots(&a, &m);
}

/* ---- launch ---- */

static int64_t slots_of(const slot_chunk *chunk) {
    return chunk->tokens * chunk->call->spec->top_k;
}

/* Experts that have slots, at most. */
static int64_t most_experts(const slot_chunk *chunk) {
    int64_t slots = slots_of(chunk), experts = chunk->call->spec->experts;
    return slots < experts ? slots : experts;
}

int64_t most_rows(const slot_chunk *chunk) {
    return slots_of(chunk) + most_experts(chunk) * (chunk->align - 1);
}

int64_t most_tiles(const slot_chunk *chunk) { /* with a short one of each expert */
    int64_t step = chunk->tile_rows * (chunk->pairs ? 2 : 1);
    return (slots_of(chunk) + most_experts(chunk) * (step - 1)) / step * (chunk->pairs ? 2 : 1);
}

/* Slots of a range. */
static int64_t range_of(const slot_chunk *chunk) {
    int64_t slots = slots_of(chunk), each = (slots + RANGES - 1) / RANGES;
    if (slots <= ONCE)
        return slots;
    each = (each + THREADS - 1) / THREADS * THREADS;
    return each < RANGE ? RANGE : each < ONCE ? each : ONCE;
}

static int64_t range_count(const slot_chunk *chunk) {
    int64_t each = range_of(chunk);
    return (slots_of(chunk) + each - 1) / each;
}

/* The next part of the memory, of so many values. */
static int32_t *take(int64_t *used, void *memory, int64_t values) {
    int64_t at = *used;
    *used += (values * (int64_t)sizeof(int32_t) + 255) / 256 * 256;
    return memory ? (int32_t *)((uint8_t *)memory + at) : NULL;
}

static slot_groups lay_out(const slot_chunk *chunk, void *memory, int32_t **before,
                           int64_t *bytes) {
    const moq_moe_spec *spec = chunk->call->spec;
    int64_t slots = slots_of(chunk), ranges = range_count(chunk);
    slot_groups g;
    *bytes = 0;
    g.count = take(bytes, memory, 2);
    g.begin = take(bytes, memory, spec->experts);
    g.row = take(bytes, memory, slots);
    g.slot = take(bytes, memory, most_rows(chunk));
    g.owner = take(bytes, memory, most_rows(chunk));
    g.tile = (row_tile *)take(bytes, memory, most_tiles(chunk) * (int64_t)(sizeof(row_tile) / 4));
    *before = take(bytes, memory, ranges > 1 ? ranges * spec->experts : 0);
    return g;
}

int64_t groups_bytes(const slot_chunk *chunk) {
    int32_t *before;
    int64_t bytes;
    lay_out(chunk, NULL, &before, &bytes);
    return bytes;
}

slot_groups groups_at(const slot_chunk *chunk, void *memory) {
    int32_t *before;
    int64_t bytes;
    return lay_out(chunk, memory, &before, &bytes);
}

static group_args args_of(const slot_chunk *chunk, void *memory) {
    const moq_moe_call *call = chunk->call;
    const moq_moe_spec *spec = call->spec;
    group_args a = {};
    int64_t bytes;
    a.ids = slot_tensor_of(call->ids);
    a.expert_map = call->expert_map;
    a.first = chunk->first;
    a.slots = (int32_t)slots_of(chunk);
    a.top_k = spec->top_k;
    a.experts = spec->experts;
    a.global_experts = spec->global_experts;
    a.ranges = (int32_t)range_count(chunk);
    a.range = (int32_t)range_of(chunk);
    a.tile_rows = chunk->tile_rows;
    a.tiles = (int32_t)most_tiles(chunk);
    a.align = chunk->align;
    a.pairs = chunk->pairs;
    a.out = lay_out(chunk, memory, &a.before, &bytes);
    return a;
}

static moq_status launch(const slot_chunk *chunk, const void *kernel, int blocks, group_args *args,
                         moq_err *err) {
    moq_launch launch = {.what = "grouping the slots of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .shared = (size_t)memory_bytes(args->experts, args->range),
                         .stream = (cudaStream_t)chunk->call->stream,
                         .overlap = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

moq_status group_slots(const slot_chunk *chunk, void *memory, moq_err *err) {
    group_args args = args_of(chunk, memory);
    if (args.ranges == 1)
        return launch(chunk, (const void *)group_at_once, 1, &args, err);
    MOQ_TRY(launch(chunk, (const void *)count_ranges, args.ranges, &args, err));
    MOQ_TRY(launch(chunk, (const void *)add_ranges, 1, &args, err));
    return launch(chunk, (const void *)place_ranges, args.ranges, &args, err);
}

} // namespace moq::moe
