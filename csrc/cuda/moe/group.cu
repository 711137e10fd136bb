/* Sorts slots by expert: see group.h. A counting sort whose order is the same in every run.
 *
 * A block has a range of slots, each of its warps a part of that. A warp goes through its part 32
 * slots at a time; slots of one expert among these 32 find each other by a match, so that a slot's
 * rank is that of its lane, and counts of the warp so far come from shared memory, [warp][expert].
 * Up to ONCE slots are a single block's; with more, a first kernel counts the slots of each expert
 * in every range, a second adds these up over ranges and experts, and the third ranks.
 *
 * Bound by latency: a block's 16 warps take 16 steps for 8192 slots, some microseconds. */
#include "cuda/cuda.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/group.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define WARPS   16
#define THREADS (32 * WARPS)
#define ONCE    8192                                             /* slots of one block */
#define OWN     ((MOQ_CUDA_MOE_EXPERTS + THREADS - 1) / THREADS) /* experts of a thread */

typedef struct {
    slot_tensor ids;
    const int32_t *expert_map;
    int64_t first; /* token */
    int32_t slots, top_k, experts, global_experts;
    int32_t range; /* slots of a block */
    int32_t ranges, tile_rows, tiles;
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

/* count[warp][expert] of this block; keeps the expert of each slot in out.row. */
static __device__ __forceinline__ void count_slots(const group_args *a, int *count) {
    slot_part part = part_of_warp(a);
    int *own = count + threadIdx.x / 32 * a->experts;
    for (int i = threadIdx.x; i < WARPS * a->experts; i += THREADS)
        count[i] = 0;
    __syncthreads();
    for (int slot = part.begin + (int)threadIdx.x % 32; slot < part.end; slot += 32) {
        int expert = expert_of(a, slot);
        a->out.row[slot] = expert;
        if (expert >= 0)
            atomicAdd(own + expert, 1); /* whole numbers: their order does not matter */
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
static __device__ __forceinline__ void place_slots(const group_args *a, int *count) {
    slot_part part = part_of_warp(a);
    int lane = threadIdx.x % 32, *own = count + threadIdx.x / 32 * a->experts;
    for (int base = part.begin; base < part.end; base += 32) {
        int slot = base + lane, expert = slot < part.end ? a->out.row[slot] : -1;
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

/* Where each expert's rows and tiles begin. Thread t has experts t * OWN on; total[i] are the slots
 * of its i-th, and become its first row. */
static __device__ __forceinline__ void place_experts(const group_args *a, int (&total)[OWN],
                                                     int *first_tile) {
    __shared__ extent shared[WARPS];
    int first = (int)threadIdx.x * OWN;
    extent own = {0, 0}, all;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        own.rows += total[i];
        own.tiles += (total[i] + a->tile_rows - 1) / a->tile_rows;
    }
    extent at = scan_block(own, shared, &all);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int rows = total[i];
        total[i] = at.rows;
        if (first + i < a->experts) {
            a->out.begin[first + i] = at.rows;
            first_tile[first + i] = at.tiles;
        }
        at.rows += rows;
        at.tiles += (rows + a->tile_rows - 1) / a->tile_rows;
    }
    if (threadIdx.x == 0) {
        a->out.begin[a->experts] = all.rows;
        first_tile[a->experts] = all.tiles;
    }
    __syncthreads();
}

/* The list of tiles; out.begin was written by this block. */
static __device__ __forceinline__ void list_tiles(const group_args *a, const int *first_tile) {
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
            tile.expert = low;
            tile.first = a->out.begin[low] + (i - first_tile[low]) * a->tile_rows;
            tile.rows = min(a->out.begin[low + 1] - tile.first, a->tile_rows);
        }
        a->out.tile[i] = tile;
    }
}

/* ---- kernels ---- */

/* Shared: count [WARPS, E], first_tile [E + 1]. */
static __global__ void __launch_bounds__(THREADS)
    group_at_once(const __grid_constant__ group_args a) {
    extern __shared__ int count[];
    int *first_tile = count + WARPS * a.experts, total[OWN] = {};
    wait_for_predecessor();
    count_slots(&a, count);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
        if (expert < a.experts)
            total[i] = add_warps(&a, count, expert);
    }
    place_experts(&a, total, first_tile);
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
    place_slots(&a, count);
    list_tiles(&a, first_tile);
    launch_dependents();
}

static __global__ void __launch_bounds__(THREADS)
    count_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int count[];
    launch_dependents();
    wait_for_predecessor();
    count_slots(&a, count);
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS)
        a.before[(int64_t)blockIdx.x * a.experts + expert] = add_warps(&a, count, expert);
}

static __global__ void __launch_bounds__(THREADS) add_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int first_tile[];
    int total[OWN] = {};
    launch_dependents();
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int expert = (int)threadIdx.x * OWN + i;
        for (int range = 0; range < a.ranges && expert < a.experts; range++) {
            int *before = a.before + (int64_t)range * a.experts + expert, own = *before;
            *before = total[i];
            total[i] += own;
        }
    }
    place_experts(&a, total, first_tile);
    list_tiles(&a, first_tile);
}

static __global__ void __launch_bounds__(THREADS)
    place_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int count[];
    slot_part part = part_of_warp(&a);
    int *own = count + threadIdx.x / 32 * a.experts;
    launch_dependents();
    for (int i = threadIdx.x; i < WARPS * a.experts; i += THREADS)
        count[i] = 0;
    wait_for_predecessor();
    __syncthreads();
    for (int slot = part.begin + (int)threadIdx.x % 32; slot < part.end; slot += 32) {
        if (a.out.row[slot] >= 0)
            atomicAdd(own + a.out.row[slot], 1);
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS) {
        int first = a.out.begin[expert] + a.before[(int64_t)blockIdx.x * a.experts + expert];
        add_warps(&a, count, expert);
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            count[warp * a.experts + expert] += first;
    }
    __syncthreads();
    place_slots(&a, count);
}

/* ---- launch ---- */

int64_t most_tiles(const moq_moe_spec *spec, int64_t slots, int tile_rows) {
    int64_t experts = slots < spec->experts ? slots : spec->experts; /* with a short tile each */
    return (slots + experts * (tile_rows - 1)) / tile_rows;
}

static int64_t slots_of(const slot_chunk *chunk) {
    return chunk->tokens * chunk->call->spec->top_k;
}

static int64_t range_count(const slot_chunk *chunk) {
    return (slots_of(chunk) + ONCE - 1) / ONCE;
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
    int64_t tiles = most_tiles(spec, slots, chunk->tile_rows);
    slot_groups g;
    *bytes = 0;
    g.begin = take(bytes, memory, spec->experts + 1);
    g.row = take(bytes, memory, slots);
    g.slot = take(bytes, memory, slots);
    g.owner = take(bytes, memory, slots);
    g.tile = (row_tile *)take(bytes, memory, tiles * (int64_t)(sizeof(row_tile) / 4));
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
    a.range = a.ranges > 1 ? ONCE : a.slots;
    a.tile_rows = chunk->tile_rows;
    a.tiles = (int32_t)most_tiles(spec, a.slots, chunk->tile_rows);
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
    int counts = WARPS * args.experts, tiles = args.experts + 1;
    if (args.ranges == 1)
        return launch(chunk, (const void *)group_at_once, 1, counts + tiles, &args, err);
    MOQ_TRY(launch(chunk, (const void *)count_ranges, args.ranges, counts, &args, err));
    MOQ_TRY(launch(chunk, (const void *)add_ranges, 1, tiles, &args, err));
    return launch(chunk, (const void *)place_ranges, args.ranges, counts, &args, err);
}

} // namespace moq::moe
