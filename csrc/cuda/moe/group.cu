/* Sorts slots by expert: see group.h. A counting sort whose order is the same in every run.
 *
 * A block has a range of slots, each of its warps a part of that. A warp goes through its part 32
 * slots at a time; slots of one expert among these 32 find each other by votes on the bits of the
 * expert (a match instruction takes a multiprocessor 70 cycles), so that a slot's place is that of
 * its lane behind those of the warp so far, whose counts are in shared memory, [warp][expert]. Up
 * to ONCE slots are a single block's; with more, a first kernel counts the slots of each expert in
 * every range, a second adds these up over ranges and experts, and the third places them.
 *
 * Bound by latency, that of ids above all, which are asked for several at a time. A single block
 * sorts in shared memory: rows that are stored in the order of slots, each in a line of its own,
 * take a multiprocessor as long as all else together. */
#include "cuda/cuda.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/cuda_moe.h"
#include "cuda/moe/group.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define WARPS   16
#define THREADS (32 * WARPS)
#define ONCE    8192 /* slots of one block */
#define ASKED   8    /* ids that a lane asks for at a time */
#define RANGES  64   /* of slots, where ONCE allows */
#define RANGE   512  /* slots of one, at least */
#define EVEN    8    /* rows of tiles are multiples of */
#define LISTERS 4    /* threads that list tiles of an expert */
#define ALL     0xffffffffu

typedef struct {
    slot_tensor ids;
    const int32_t *flat; /* ids that follow each other, from the first slot on, or NULL */
    int32_t words;       /* of one */
    const int32_t *expert_map;
    int64_t first; /* token */
    int32_t slots, top_k, experts, global_experts;
    int32_t range; /* slots of a block */
    int32_t ranges, tile_rows, tiles, align;
    bool pairs;
    int32_t *before; /* [ranges, E]: slots of an expert in the ranges before, once they are added */
    slot_groups out;
} group_args;

#define NOBODY 0xffffu

/* ---- slots ---- */

/* The local expert of an id, or NOBODY where its slot does not count. */
static __device__ __forceinline__ int expert_of_id(const group_args *a, int id) {
    if ((uint32_t)id >= (uint32_t)a->global_experts)
        return NOBODY;
    int local = a->expert_map ? a->expert_map[id] : id;
    return (uint32_t)local < (uint32_t)a->experts ? local : NOBODY;
}

/* An id of which the upper word, if there is one, has to be 0; otherwise it is nobody's. */
static __device__ __forceinline__ int id_at(const int32_t *word, int words) {
    return words == 2 && word[1] != 0 ? -1 : word[0];
}

/* The id of a slot, wherever ids are. */
static __device__ __forceinline__ int find_id(const group_args *a, int slot) {
    int token = slot / a->top_k;
    int64_t at = slot_offset(&a->ids, a->first + token, slot - token * a->top_k);
    return id_at((const int32_t *)a->ids.data + at * a->words, a->words);
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
    int *begin;       /* [E]: the row of the block's first slot */
    int *end;         /* [E]: slots, then behind its last row */
    int *first_tile;  /* [E + 1] */
    int *rows;        /* of all experts */
    uint32_t *held;   /* [range]: a slot's expert, or NOBODY, and above its place in the warp */
    uint16_t *count;  /* [WARPS, E]: slots of a warp, then of those before it */
    uint32_t *sorted; /* [rows], where count was: of each row the slot, and above it the expert */
} block_memory;

/* `rows` of a block that sorts alone, or 0. */
static int64_t memory_bytes(int64_t experts, int64_t range, int64_t rows) {
    int64_t counts = WARPS * experts * (int64_t)sizeof(uint16_t), sorted = rows * 4;
    return (3 * experts + 2 + range) * 4 + (counts > sorted ? counts : sorted);
}

static __device__ __forceinline__ block_memory memory_at(const group_args *a, int *shared) {
    block_memory m = {shared};
    m.end = m.begin + a->experts;
    m.first_tile = m.end + a->experts;
    m.rows = m.first_tile + a->experts + 1;
    m.held = (uint32_t *)(m.rows + 1);
    m.sorted = m.held + a->range;
    m.count = (uint16_t *)m.sorted;
    return m;
}

/* Before slots are counted: no thread waits for this but at a barrier of its own. */
static __device__ __forceinline__ void clear_counts(const group_args *a, const block_memory *m) {
    uint32_t *two = (uint32_t *)m->count;
    for (int i = threadIdx.x; i < WARPS / 2 * a->experts; i += THREADS)
        two[i] = 0;
    __syncthreads();
}

/* The lanes that have the same expert as this one; of nobody's slots none. Votes on bits that no
 * expert has cost less than a loop whose votes wait for each other. */
static __device__ __forceinline__ uint32_t lanes_alike(uint32_t expert) {
    uint32_t same = __ballot_sync(ALL, expert != NOBODY);
#pragma unroll
    for (uint32_t bit = 1; bit < MOQ_CUDA_MOE_EXPERTS; bit *= 2) {
        uint32_t set = __ballot_sync(ALL, expert & bit);
        same &= expert & bit ? set : ~set;
    }
    return same;
}

/* Finds the expert of each of the block's slots and its place among those of the warp. */
static __device__ __forceinline__ void count_slots(const group_args *a, const block_memory *m) {
    slot_part part = part_of_warp(a);
    int lane = threadIdx.x % 32;
    uint32_t *held = m->held - (int)blockIdx.x * a->range;
    uint16_t *own = m->count + threadIdx.x / 32 * a->experts;
#pragma unroll 1
    for (int base = part.begin + lane; a->flat && base < part.end; base += 32 * ASKED) {
        int id[ASKED];
#pragma unroll
        for (int i = 0; i < ASKED; i++)
            id[i] = id_at(a->flat + min(base + 32 * i, part.end - 1) * (int64_t)a->words, a->words);
#pragma unroll
        for (int i = 0; i < ASKED; i++)
            if (base + 32 * i < part.end)
                held[base + 32 * i] = (uint32_t)expert_of_id(a, id[i]);
    }
#pragma unroll 1
    for (int slot = part.begin + lane; !a->flat && slot < part.end; slot += 32)
        held[slot] = (uint32_t)expert_of_id(a, find_id(a, slot));
#pragma unroll 2
    for (int slot = part.begin + lane; slot - lane < part.end; slot += 32) {
        uint32_t expert = slot < part.end ? held[slot] : NOBODY, before = 0;
        uint32_t same = lanes_alike(expert), rank = __popc(same & ((1u << lane) - 1));
        if (expert != NOBODY) {
            before = own[expert];
            held[slot] = expert | (before + rank) << 16;
        }
        __syncwarp();
        if (expert != NOBODY && rank == 0)
            own[expert] = (uint16_t)(before + __popc(same));
        __syncwarp();
    }
    __syncthreads();
}

/* The slots of each expert in this block, m->end; count[warp][expert] become those of the warps
 * before. */
static __device__ __forceinline__ void add_warps(const group_args *a, const block_memory *m) {
#pragma unroll 1
    for (int expert = threadIdx.x; expert < a->experts; expert += THREADS) {
        int own[WARPS], sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            own[warp] = m->count[warp * a->experts + expert];
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            m->count[warp * a->experts + expert] = (uint16_t)sum;
            sum += own[warp];
        }
        m->end[expert] = sum;
    }
    __syncthreads();
}

/* The row of a slot of the calling warp, or -1. */
static __device__ __forceinline__ int row_of(const group_args *a, const block_memory *m,
                                             uint32_t held) {
    int expert = held & 0xffff;
    if (expert == NOBODY)
        return -1;
    return m->begin[expert] + m->count[threadIdx.x / 32 * a->experts + expert] + (int)(held >> 16);
}

/* Rows of the slots of each warp. */
static __device__ __forceinline__ void place_slots(const group_args *a, const block_memory *m) {
    slot_part part = part_of_warp(a);
    const uint32_t *held = m->held - (int)blockIdx.x * a->range;
#pragma unroll 2
    for (int slot = part.begin + (int)threadIdx.x % 32; slot < part.end; slot += 32) {
        int row = row_of(a, m, held[slot]);
        a->out.row[slot] = row;
        if (row >= 0) {
            a->out.slot[row] = slot;
            a->out.owner[row] = held[slot] & 0xffff;
        }
    }
}

/* place_slots of a single block, by way of shared memory, so that what follows each other there
 * does so in memory. */
#define SLOT_BITS 13
#define NO_SLOT   0xffffffffu
static_assert(ONCE <= 1 << SLOT_BITS && MOQ_CUDA_MOE_EXPERTS <= 1 << (31 - SLOT_BITS),
              "slot and expert share 32 bits");
static __device__ __forceinline__ void sort_slots(const group_args *a, const block_memory *m,
                                                  int rows) {
    slot_part part = part_of_warp(a);
#pragma unroll 4
    for (int slot = part.begin + (int)threadIdx.x % 32; slot < part.end; slot += 32) {
        uint32_t held = m->held[slot];
        int row = row_of(a, m, held);
        a->out.row[slot] = row;
        m->held[slot] = row < 0 ? NO_SLOT : (uint32_t)row | (held & 0xffff) << 16;
    }
    __syncthreads(); /* counts are needed no more */
#pragma unroll 4
    for (int row = threadIdx.x; row < rows; row += THREADS)
        m->sorted[row] = NO_SLOT; /* some rows are nobody's */
    __syncthreads();
#pragma unroll 4
    for (int slot = threadIdx.x; slot < a->slots; slot += THREADS) {
        uint32_t held = m->held[slot];
        if (held != NO_SLOT)
            m->sorted[held & 0xffff] = (uint32_t)slot | held >> 16 << SLOT_BITS;
    }
    __syncthreads();
#pragma unroll 4
    for (int row = threadIdx.x; row < rows; row += THREADS) {
        uint32_t slot = m->sorted[row];
        if (slot != NO_SLOT) {
            a->out.slot[row] = slot & ((1u << SLOT_BITS) - 1);
            a->out.owner[row] = slot >> SLOT_BITS;
        }
    }
}

/* ---- experts ---- */

/* What the lanes before this one have, and *all what all have. */
static __device__ __forceinline__ int scan_lanes(int own, int *all) {
    int sum = own, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        int other = __shfl_up_sync(ALL, sum, i);
        sum += lane >= i ? other : 0;
    }
    *all = __shfl_sync(ALL, sum, 31);
    return sum - own;
}

/* Where each expert's rows and tiles begin, from the slots of each, m->end; how many rows there are
 * is returned. One warp adds up: lane after lane has a share of the experts. */
static __device__ __forceinline__ int place_experts(const group_args *a, const block_memory *m) {
    int together = a->pairs ? 2 : 1, step = a->tile_rows * together;
    int each = (a->experts + 31) / 32, first = min((int)threadIdx.x % 32 * each, a->experts);
    int last = min(first + each, a->experts), rows = 0, tiles = 0, all;
#pragma unroll 1
    for (int expert = threadIdx.x; expert < a->experts; expert += THREADS) {
        int own = m->end[expert];
        m->begin[expert] = (own + a->align - 1) / a->align * a->align;
        m->first_tile[expert] = (own + step - 1) / step * together;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
#pragma unroll 1
        for (int expert = first; expert < last; expert++) {
            rows += m->begin[expert];
            tiles += m->first_tile[expert];
        }
        rows = scan_lanes(rows, &all);
        if (threadIdx.x == 0)
            a->out.count[0] = m->rows[0] = all;
        tiles = scan_lanes(tiles, &all);
        if (threadIdx.x == 0)
            a->out.count[1] = m->first_tile[a->experts] = all;
        a->out.count[2] = a->out.count[3] = 0;
#pragma unroll 1
        for (int expert = first; expert < last; expert++) {
            int own_rows = m->begin[expert], own_tiles = m->first_tile[expert];
            m->begin[expert] = rows;
            m->first_tile[expert] = tiles;
            m->end[expert] += rows;
            rows += own_rows;
            tiles += own_tiles;
        }
    }
    __syncthreads();
    all = m->rows[0];
#pragma unroll 1
    for (int expert = threadIdx.x; expert < a->experts; expert += THREADS) {
        int next = expert + 1 < a->experts ? m->begin[expert + 1] : all;
        a->out.begin[expert] = m->begin[expert];
        for (int row = m->end[expert]; row < next; row++) {
            a->out.slot[row] = -1;
            a->out.owner[row] = expert;
        }
    }
    return all;
}

/* The list of tiles: some threads have an expert and every so many of its tiles; then those without
 * rows. */
static __device__ __forceinline__ void list_tiles(const group_args *a, const block_memory *m) {
    int all = m->first_tile[a->experts];
#pragma unroll 1
    for (int expert = threadIdx.x / LISTERS; expert < a->experts; expert += THREADS / LISTERS) {
        int first = m->first_tile[expert], tiles = m->first_tile[expert + 1] - first;
        int begin = m->begin[expert], rows = m->end[expert] - begin;
        if (tiles == 0)
            continue;
        int each = ((rows + tiles - 1) / tiles + EVEN - 1) / EVEN * EVEN;
        each = min(each, a->tile_rows);
#pragma unroll 1
        for (int i = threadIdx.x % LISTERS; i < tiles; i += LISTERS) {
            int own = min(rows - i * each, each);
            row_tile tile = {expert, begin + i * each, own};
            if (own <= 0)
                tile = {expert, begin, 0};
            a->out.tile[first + i] = tile;
        }
    }
    for (int i = all + threadIdx.x; i < a->tiles; i += THREADS)
        a->out.tile[i] = {0, 0, 0};
}

/* ---- kernels ---- */

static __global__ void __launch_bounds__(THREADS)
    group_at_once(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    clear_counts(&a, &m);
    wait_for_predecessor();
    launch_dependents();
    count_slots(&a, &m);
    add_warps(&a, &m);
    sort_slots(&a, &m, place_experts(&a, &m));
    list_tiles(&a, &m);
}

static __global__ void __launch_bounds__(THREADS)
    count_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    clear_counts(&a, &m);
    wait_for_predecessor();
    launch_dependents(); /* what follows may read the ids from here on */
    count_slots(&a, &m);
    add_warps(&a, &m);
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS)
        a.before[(int64_t)blockIdx.x * a.experts + expert] = m.end[expert];
}

static __global__ void __launch_bounds__(THREADS) add_ranges(const __grid_constant__ group_args a) {
    constexpr int AT_ONCE = 16; /* ranges whose counts are asked for */
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    wait_for_predecessor();
    launch_dependents();
#pragma unroll 1
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS) {
        int total = 0;
#pragma unroll 1
        for (int range = 0; range < a.ranges; range += AT_ONCE) {
            int *before = a.before + (int64_t)range * a.experts + expert, own[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                own[j] = range + j < a.ranges ? before[j * a.experts] : 0;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (range + j < a.ranges)
                    before[j * a.experts] = total;
                total += own[j];
            }
        }
        m.end[expert] = total;
    }
    __syncthreads();
    place_experts(&a, &m);
    list_tiles(&a, &m);
}

static __global__ void __launch_bounds__(THREADS)
    place_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    launch_dependents();
    clear_counts(&a, &m);
    count_slots(&a, &m); /* the ids were there before the predecessor began */
    add_warps(&a, &m);
    wait_for_predecessor();
    for (int expert = threadIdx.x; expert < a.experts; expert += THREADS)
        m.begin[expert] = a.out.begin[expert] + a.before[(int64_t)blockIdx.x * a.experts + expert];
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
    g.count = take(bytes, memory, 4);
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
    a.words = a.ids.dtype == MOQ_DT_I64 ? 2 : 1;
    if (a.ids.step == 1 && a.ids.leading == 1 && a.ids.stride[0] == spec->top_k)
        a.flat = (const int32_t *)a.ids.data + chunk->first * spec->top_k * a.words;
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
                         .shared = (size_t)memory_bytes(args->experts, args->range,
                                                        args->ranges > 1 ? 0 : most_rows(chunk)),
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
