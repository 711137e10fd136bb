/* Sorts slots by expert: see group.h. A counting sort whose order is the same in every run.
 *
 * A block has a range of slots, each of its warps a part of that, of which a lane holds up to HELD
 * experts: all ids are asked for at once. A warp goes through its part 32 slots at a time; slots of
 * one expert among these 32 find each other by a match, so that a slot's rank is that of its lane,
 * and counts of the warp so far come from shared memory, [warp][expert]. Up to ONCE slots are a
 * single block's; with more, a first kernel counts the slots of each expert in every range, a
 * second adds these up over ranges and experts, and the third ranks.
 *
 * Bound by latency, some microseconds. */
#include "cuda/cuda.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/group.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define WARPS   16
#define THREADS (32 * WARPS)
#define ONCE    8192             /* slots of one block */
#define HELD    (ONCE / THREADS) /* slots of a lane */
#define RANGES  64               /* of slots, where ONCE allows */
#define RANGE   2048             /* slots of one, at least */
#define EVEN    8                /* rows of tiles are multiples of */
#define OWN     ((MOQ_CUDA_MOE_EXPERTS + THREADS - 1) / THREADS) /* experts of a thread */

typedef struct {
    slot_tensor ids;
    const int32_t *expert_map;
    int64_t first; /* token */
    int32_t slots, top_k, experts, global_experts;
    int32_t range; /* slots of a block */
    int32_t ranges, tile_rows, tiles, align;
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

/* The experts of a lane's slots, every 32nd of its warp's. */
static __device__ __forceinline__ void find_experts(const group_args *a, int (&expert)[HELD]) {
    slot_part part = part_of_warp(a);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int slot = part.begin + 32 * i + (int)threadIdx.x % 32;
        expert[i] = slot < part.end ? expert_of(a, slot) : -1;
    }
}

/* count[warp][expert] of this block. */
static __device__ __forceinline__ void count_slots(const group_args *a, const int (&expert)[HELD],
                                                   int *count) {
    int *own = count + threadIdx.x / 32 * a->experts;
    for (int i = threadIdx.x; i < WARPS * a->experts; i += THREADS)
        count[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (expert[i] >= 0)
            atomicAdd(own + expert[i], 1); /* whole numbers: their order does not matter */
    }
    __syncthreads();
}

/* The slots of an expert in this block; count[warp][expert] become those of the warps before. */
static __device__ __forceinline__ int add_warps(const group_args *a, int *count, int expert) {
    int sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        int own = count[warp * a->experts + expert];
        count[warp * a->experts + expert] = sum;
        sum += own;
    }
    return sum;
}

/* Rows of the slots of each warp, where `count` has the row of the first of each expert. */
static __device__ __forceinline__ void place_slots(const group_args *a, const int (&held)[HELD],
                                                   int *count) {
    slot_part part = part_of_warp(a);
    int lane = threadIdx.x % 32, *own = count + threadIdx.x / 32 * a->experts;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int slot = part.begin + 32 * i + lane, expert = held[i];
        if (slot - lane >= part.end)
            break;
        uint32_t same = __match_any_sync(0xffffffffu, expert);
        int rank = __popc(same & ((1u << lane) - 1));
        int row = expert >= 0 ? own[expert] + rank : -1;
        __syncwarp();
        if (expert >= 0 && rank == 0)
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

/* Where experts' tiles begin, and their rows end: in shared memory, [E + 1] and [E]. */
typedef struct {
    int *first_tile, *end;
} expert_ends;

static __device__ __forceinline__ expert_ends ends_at(const group_args *a, int *shared) {
    return {shared, shared + a->experts + 1};
}

/* Where each expert's rows and tiles begin. Thread t has experts t * OWN on; total[i] are the slots
 * of its i-th, and become its first row. */
static __device__ __forceinline__ void place_experts(const group_args *a, int (&total)[OWN],
                                                     const expert_ends *ends) {
    __shared__ extent shared[WARPS];
    int first = (int)threadIdx.x * OWN;
    extent own = {0, 0}, all, next[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        next[i].rows = (total[i] + a->align - 1) / a->align * a->align;
        next[i].tiles = (total[i] + a->tile_rows - 1) / a->tile_rows;
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
            ends->first_tile[expert] = at.tiles;
            ends->end[expert] = end;
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
        a->out.count[1] = ends->first_tile[a->experts] = all.tiles;
    }
    __syncthreads();
}

/* The list of tiles; out.begin was written by this block. */
static __device__ __forceinline__ void list_tiles(const group_args *a, const expert_ends *ends) {
    const int *first_tile = ends->first_tile;
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
            int begin = a->out.begin[low], tiles = first_tile[low + 1] - first_tile[low];
            int each = (ends->end[low] - begin + tiles - 1) / tiles;
            each = min((each + EVEN - 1) / EVEN * EVEN, a->tile_rows);
            tile.expert = low;
            tile.first = begin + (i - first_tile[low]) * each;
            tile.rows = min(ends->end[low] - tile.first, each);
        }
        a->out.tile[i] = tile;
    }
}

/* ---- kernels ---- */

/* Shared: count [WARPS, E], expert_ends. */
static __global__ void __launch_bounds__(THREADS)
    group_at_once(const __grid_constant__ group_args a) {
    extern __shared__ int count[];
    expert_ends ends = ends_at(&a, count + WARPS * a.experts);
    int total[OWN] = {}, held[HELD];
    wait_for_predecessor();
    find_experts(&a, held);
    count_slots(&a, held, count);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
        if (expert < a.experts)
            total[i] = add_warps(&a, count, expert);
    }
    place_experts(&a, total, &ends);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            if (expert < a.experts)
                count[warp * a.experts + expert] += total[i];
        }
    }
    __syncthreads();
    launch_dependents();
    place_slots(&a, held, count);
    list_tiles(&a, &ends);
}

static __global__ void __launch_bounds__(THREADS)
    count_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int count[];
    int held[HELD];
    wait_for_predecessor();
    launch_dependents(); /* what follows may read the ids from here on */
    find_experts(&a, held);
    count_slots(&a, held, count);
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS)
        a.before[(int64_t)blockIdx.x * a.experts + expert] = add_warps(&a, count, expert);
}

static __global__ void __launch_bounds__(THREADS) add_ranges(const __grid_constant__ group_args a) {
    constexpr int AT_ONCE = 16; /* ranges whose counts are asked for */
    extern __shared__ int shared_ends[];
    expert_ends ends = ends_at(&a, shared_ends);
    int total[OWN] = {};
    wait_for_predecessor();
    launch_dependents();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
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
    place_experts(&a, total, &ends);
    list_tiles(&a, &ends);
}

static __global__ void __launch_bounds__(THREADS)
    place_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int count[];
    int held[HELD];
    launch_dependents();
    find_experts(&a, held); /* they were there before the predecessor began */
    count_slots(&a, held, count);
    wait_for_predecessor();
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS) {
        int first = a.out.begin[expert] + a.before[(int64_t)blockIdx.x * a.experts + expert];
        add_warps(&a, count, expert);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            count[warp * a.experts + expert] += first;
    }
    __syncthreads();
    place_slots(&a, held, count);
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
    return (slots_of(chunk) + most_experts(chunk) * (chunk->tile_rows - 1)) / chunk->tile_rows;
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
    a.out = lay_out(chunk, memory, &a.before, &bytes);
    return a;
}

static moq_status launch(const slot_chunk *chunk, const void *kernel, int blocks, int shared,
                         group_args *args, moq_err *err) {
    moq_launch launch = {.what = "grouping the slots of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .shared = (size_t)shared * sizeof(int),
                         .stream = (cudaStream_t)chunk->call->stream,
                         .overlap = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

moq_status group_slots(const slot_chunk *chunk, void *memory, moq_err *err) {
    group_args args = args_of(chunk, memory);
    int counts = WARPS * args.experts, ends = 2 * args.experts + 1;
    if (args.ranges == 1)
        return launch(chunk, (const void *)group_at_once, 1, counts + ends, &args, err);
    MOQ_TRY(launch(chunk, (const void *)count_ranges, args.ranges, counts, &args, err));
    MOQ_TRY(launch(chunk, (const void *)add_ranges, 1, ends, &args, err));
    return launch(chunk, (const void *)place_ranges, args.ranges, counts, &args, err);
}

} // namespace moq::moe
