/* Slots sorted by expert (group.h): a counting sort whose order is the same in every run.
 *
 * A block has a range of slots, each of its warps a part of that. A warp goes through its part 32
 * slots at a time. Slots of one expert among these find each other by votes on the bits of the
 * expert; a match instruction would take a multiprocessor 70 cycles. So a slot's place is that of
 * its lane behind the warp's earlier ones, whose counts are in shared memory, [warp][expert].
 *
 * The blocks are one cluster. Each sends the others how many slots of each expert it has, and finds
 * by itself where experts, and its own slots in them, begin. With more slots than a cluster has
 * room for, or than a block has without clusters, there are three kernels: the first counts the
 * slots of each expert in every range, the second adds these over ranges and experts, and the third
 * places the slots.
 *
 * Bound: latency, above all of ids, several of which are loaded at a time. A block sorts in shared
 * memory: rows stored in the order of slots, each in a line of its own, take a multiprocessor as
 * long as all else together. Up to 512 slots go to one block, as an exchange between blocks takes a
 * microsecond. */
#include "cuda/choice/grid.h"
#include "cuda/cuda.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/group.h"
#include "cuda/runtime/launch.h"

namespace moq::moe {

#define WARPS   16
#define THREADS (32 * WARPS)
#define ROOM    (96 * 1024) /* bytes of shared memory that every chip has */
#define ONCE    8192        /* slots of a block, at most */
#define ALONE   4096 /* slots of a block alone, at most: with more, three kernels are faster */
#define CLUSTER 8    /* blocks of a cluster, at most */
#define SHARE   2048 /* slots of a block of a cluster, at most, as ALONE */
#define LOADED  8    /* ids that a lane loads at a time */
#define RANGES  64   /* ranges of slots, if ONCE allows */
#define RANGE   512  /* slots of a range, at least */
#define EVEN    8    /* rows of tiles are multiples of this */
#define LISTERS 4    /* threads of a block that list tiles of an expert */
#define FILLERS 8    /* threads that mark an expert's rows without a slot */
#define ALL     0xffffffffu

typedef struct {
    slot_tensor ids;
    const int32_t *flat; /* contiguous ids, from the first slot on, or NULL */
    int32_t words;       /* words of an id */
    const int32_t *expert_map;
    int64_t first; /* first token */
    int32_t slots, top_k, experts, global_experts;
    int32_t range; /* slots of a block */
    int32_t ranges, tile_rows, tiles, align;
    bool pairs;
    int32_t *before; /* [ranges, E]: slots of an expert in earlier ranges, once they are added */
    slot_groups out;
} group_args;

#define NOBODY 0xffffu

/* ---- slots ---- */

/* Returns the local expert of an id, or NOBODY if its slot does not count. */
static __device__ __forceinline__ int expert_of_id(const group_args *a, int id) {
    if ((uint32_t)id >= (uint32_t)a->global_experts)
        return NOBODY;
    int local = a->expert_map ? a->expert_map[id] : id;
    return (uint32_t)local < (uint32_t)a->experts ? local : NOBODY;
}

/* Loads an id; -1 if it has an upper word other than 0. */
static __device__ __forceinline__ int id_at(const int32_t *word, int words) {
    int low = word[0], high = words == 2 ? word[1] : 0;
    return high == 0 ? low : -1;
}

/* Finds the id of a slot in any layout of ids. */
static __device__ __forceinline__ int find_id(const group_args *a, int slot) {
    int token = slot / a->top_k;
    int64_t at = slot_offset(&a->ids, a->first + token, slot - token * a->top_k);
    return id_at((const int32_t *)a->ids.data + at * a->words, a->words);
}

/* Returns the first slot of the block. */
static __device__ __forceinline__ int first_slot(const group_args *a) {
    return (int)blockIdx.x * a->range;
}

/* The slots of a warp, counted from the block's first one on. */
typedef struct {
    int begin, end;
} slot_range;

static __device__ __forceinline__ slot_range range_of_warp(const group_args *a) {
    int slots = max(min(a->slots - first_slot(a), a->range), 0);
    int each = (slots + WARPS - 1) / WARPS;
    int first = min((int)threadIdx.x / 32 * each, slots);
    return {first, min(first + each, slots)};
}

/* Returns the words of counts: two neighbouring experts share one. */
static __host__ __device__ __forceinline__ int words_of(int experts) {
    return (experts + 1) / 2;
}

/* The smem layout of a block. */
typedef struct {
    int *begin;       /* [E + 1]: the first row of an expert */
    int *end;         /* [E]: the row after the last one with a slot */
    int *first_tile;  /* [E + 1] */
    int *local;       /* [E + 1]: first of an expert's slots among the block's sorted ones */
    int *base;        /* [E]: offset from a place among these to a row */
    uint32_t *others; /* [CLUSTER, words_of(E)]: slots of every block of the cluster */
    uint32_t *count;  /* [WARPS, words_of(E)]: slots of a warp, then of earlier warps */
    uint32_t *held;   /* [range]: expert of a slot, or NOBODY; above, its place in the warp */
    uint32_t *sorted; /* [range]: a slot; above, its expert */
} block_memory;

static int64_t memory_bytes(int64_t experts, int64_t range) {
    return (5 * experts + 3 + (CLUSTER + WARPS) * words_of((int)experts) + 2 * range) * 4;
}

static __device__ __forceinline__ block_memory memory_at(const group_args *a, int *shared) {
    block_memory m = {shared};
    m.end = m.begin + a->experts + 1;
    m.first_tile = m.end + a->experts;
    m.local = m.first_tile + a->experts + 1;
    m.base = m.local + a->experts + 1;
    m.others = (uint32_t *)(m.base + a->experts);
    m.count = m.others + CLUSTER * words_of(a->experts);
    m.held = m.count + WARPS * words_of(a->experts);
    m.sorted = m.held + a->range;
    return m;
}

/* Returns the counts of the calling warp, by expert. */
static __device__ __forceinline__ uint16_t *counts_of_warp(const group_args *a,
                                                           const block_memory *m) {
    return (uint16_t *)(m->count + threadIdx.x / 32 * words_of(a->experts));
}

/* Clears the counts, before any wait for another kernel. */
static __device__ __forceinline__ void clear_counts(const group_args *a, const block_memory *m) {
    for (int i = threadIdx.x; i < WARPS * words_of(a->experts); i += THREADS)
        m->count[i] = 0;
    __syncthreads();
}

/* Returns the lanes of `same` with the same bits of `expert` as this one. */
template <uint32_t FROM, uint32_t TO>
static __device__ __forceinline__ uint32_t lanes_alike(uint32_t expert, uint32_t same) {
#pragma unroll
    for (uint32_t bit = FROM; bit < TO; bit *= 2) {
        uint32_t set = __ballot_sync(ALL, expert & bit);
        same &= expert & bit ? set : ~set;
    }
    return same;
}

/* Returns the lanes with the same expert as this one, none for NOBODY. Votes on unused bits cost
 * less than a loop whose votes wait for each other. */
static __device__ __forceinline__ uint32_t lanes_of_expert(const group_args *a, uint32_t expert) {
    constexpr uint32_t FEW = 128;
    uint32_t same = lanes_alike<1, FEW>(expert, __ballot_sync(ALL, expert != NOBODY));
    return a->experts > FEW ? lanes_alike<FEW, MOQ_CUDA_MOE_EXPERTS>(expert, same) : same;
}

/* Finds the expert of each of the warp's slots. */
static __device__ __forceinline__ void find_experts(const group_args *a, const block_memory *m) {
    slot_range range = range_of_warp(a);
    int lane = threadIdx.x % 32, first = first_slot(a);
    const int32_t *flat = a->flat + (int64_t)first * a->words;
#pragma unroll 1
    for (int base = range.begin + lane; a->flat && base < range.end; base += 32 * LOADED) {
        int id[LOADED];
#pragma unroll
        for (int i = 0; i < LOADED; i++)
            id[i] = base + 32 * i < range.end
                        ? id_at(flat + (base + 32 * i) * (int64_t)a->words, a->words)
                        : -1;
#pragma unroll
        for (int i = 0; i < LOADED; i++)
            if (base + 32 * i < range.end)
                m->held[base + 32 * i] = (uint32_t)expert_of_id(a, id[i]);
    }
#pragma unroll 1
    for (int slot = range.begin + lane; !a->flat && slot < range.end; slot += 32)
        m->held[slot] = (uint32_t)expert_of_id(a, find_id(a, first + slot));
}

/* Finds the expert of each of the block's slots and its place among those of the warp. */
static __device__ __forceinline__ void count_slots(const group_args *a, const block_memory *m) {
    slot_range range = range_of_warp(a);
    int lane = threadIdx.x % 32;
    uint16_t *own = counts_of_warp(a, m);
    find_experts(a, m); /* a lane reads only what it has written */
#pragma unroll 2
    for (int slot = range.begin + lane; slot - lane < range.end; slot += 32) {
        uint32_t expert = slot < range.end ? m->held[slot] : NOBODY, before = 0;
        uint32_t same = lanes_of_expert(a, expert), rank = __popc(same & ((1u << lane) - 1));
        if (expert != NOBODY) {
            before = own[expert];
            m->held[slot] = expert | (before + rank) << 16;
        }
        __syncwarp();
        if (expert != NOBODY && rank == 0)
            own[expert] = (uint16_t)(before + __popc(same));
        __syncwarp();
    }
    __syncthreads();
}

/* Returns the block's slots of the thread's two experts, the second in the upper half of the word;
 * count[warp][expert] become counts of earlier warps. */
static __device__ __forceinline__ uint32_t add_warps(const group_args *a, const block_memory *m) {
    int words = words_of(a->experts);
    uint32_t own[WARPS], sum = 0;
    static_assert(ONCE < 1 << 16, "a sum does not reach into the other half");
    static_assert(MOQ_CUDA_MOE_EXPERTS <= 2 * THREADS, "a thread has two experts");
    if ((int)threadIdx.x >= words)
        return 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        own[warp] = m->count[warp * words + threadIdx.x];
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        m->count[warp * words + threadIdx.x] = sum;
        sum += own[warp];
    }
    return sum;
}

/* Places the block's slots: writes the row of each slot and the slot of each row, those of an
 * expert by neighbouring threads. m->local and m->base are complete. */
#define SLOT_BITS 13
static_assert(ONCE <= 1 << SLOT_BITS && MOQ_CUDA_MOE_EXPERTS <= 1 << (32 - SLOT_BITS),
              "slot and expert share 32 bits");
static __device__ __forceinline__ void place_slots(const group_args *a, const block_memory *m) {
    slot_range range = range_of_warp(a);
    int first = first_slot(a);
    const uint16_t *count = counts_of_warp(a, m);
#pragma unroll 4
    for (int slot = range.begin + (int)threadIdx.x % 32; slot < range.end; slot += 32) {
        uint32_t expert = m->held[slot] & 0xffff, place = m->held[slot] >> 16;
        int row = -1;
        if (expert != NOBODY) {
            place += m->local[expert] + count[expert];
            m->sorted[place] = (uint32_t)slot | expert << SLOT_BITS;
            row = m->base[expert] + (int)place;
        }
        a->out.row[first + slot] = row;
    }
    __syncthreads();
    int all = m->local[a->experts];
#pragma unroll 4
    for (int place = threadIdx.x; place < all; place += THREADS) {
        uint32_t own = m->sorted[place], expert = own >> SLOT_BITS;
        int row = m->base[expert] + place;
        a->out.slot[row] = first + (int)(own & ((1u << SLOT_BITS) - 1));
        a->out.owner[row] = (int)expert;
    }
}

/* ---- experts ---- */

/* Adds `value` over earlier threads that have experts, several sums at a time. */
template <int SUMS>
static __device__ __forceinline__ void scan_threads(const group_args *a, int (&value)[SUMS]) {
    __shared__ int of_warp[WARPS][SUMS];
    int lane = threadIdx.x % 32, warp = (int)threadIdx.x / 32, own[SUMS];
    bool counts = 32 * warp < words_of(a->experts);
    if (counts) {
#pragma unroll
        for (int j = 0; j < SUMS; j++)
            own[j] = value[j];
#pragma unroll
        for (int i = 1; i < 32; i *= 2)
#pragma unroll
            for (int j = 0; j < SUMS; j++) {
                int other = __shfl_up_sync(ALL, value[j], i);
                value[j] += lane >= i ? other : 0;
            }
#pragma unroll
        for (int j = 0; j < SUMS; j++) {
            if (lane == 31)
                of_warp[warp][j] = value[j];
            value[j] -= own[j];
        }
    }
    __syncthreads();
    for (int i = 0; counts && i < warp; i++)
#pragma unroll
        for (int j = 0; j < SUMS; j++)
            value[j] += of_warp[i][j];
}

/* A thread's counts of one of its experts: slots of this block, of earlier blocks, of all. */
typedef struct {
    int own, before, total;
} expert_slots;

static __device__ __forceinline__ int half_of(uint32_t word, int i) {
    return (int)(word >> 16 * i & 0xffff);
}

/* Finds where each expert's rows and tiles begin, and this block's slots of it. `first`: this block
 * writes the results that all share. */
static __device__ __forceinline__ void place_experts(const group_args *a, const block_memory *m,
                                                     const expert_slots (&slots)[2], bool first) {
    int together = a->pairs ? 2 : 1, step = a->tile_rows * together;
    int rows[2], tiles[2], sum[3];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows[i] = (slots[i].total + a->align - 1) / a->align * a->align;
        tiles[i] = (slots[i].total + step - 1) / step * together;
    }
    sum[0] = rows[0] + rows[1];
    sum[1] = tiles[0] + tiles[1];
    sum[2] = slots[0].own + slots[1].own;
    scan_threads(a, sum);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int expert = 2 * (int)threadIdx.x + i;
        if (expert >= a->experts)
            break;
        m->begin[expert] = sum[0];
        m->end[expert] = sum[0] + slots[i].total;
        m->first_tile[expert] = sum[1];
        m->local[expert] = sum[2];
        m->base[expert] = sum[0] + slots[i].before - sum[2];
        if (first)
            a->out.begin[expert] = sum[0];
        sum[0] += rows[i];
        sum[1] += tiles[i];
        sum[2] += slots[i].own;
        if (expert + 1 < a->experts)
            continue;
        m->begin[a->experts] = sum[0];
        m->first_tile[a->experts] = sum[1];
        m->local[a->experts] = sum[2];
        if (first)
            *(int4 *)a->out.count = make_int4(sum[0], sum[1], 0, 0);
    }
    __syncthreads();
}

/* A block's share of the results by expert. */
typedef struct {
    int rank, blocks;
} share;

/* Marks rows without a slot, behind those of each expert. */
static __device__ __forceinline__ void fill_rows(const group_args *a, const block_memory *m,
                                                 share s) {
    if (a->align == 1)
        return;
#pragma unroll 1
    for (int expert = (int)threadIdx.x / FILLERS * s.blocks + s.rank; expert < a->experts;
         expert += THREADS / FILLERS * s.blocks)
        for (int row = m->end[expert] + (int)threadIdx.x % FILLERS; row < m->begin[expert + 1];
             row += FILLERS) {
            a->out.slot[row] = -1;
            a->out.owner[row] = expert;
        }
}

/* Lists the tiles: LISTERS threads a block have an expert and every so many of its tiles; then
 * tiles without rows follow. */
static __device__ __forceinline__ void list_tiles(const group_args *a, const block_memory *m,
                                                  share s) {
    int all = m->first_tile[a->experts], listers = LISTERS * s.blocks;
#pragma unroll 1
    for (int expert = (int)threadIdx.x / listers * s.blocks + s.rank; expert < a->experts;
         expert += THREADS / LISTERS) {
        int first = m->first_tile[expert], tiles = m->first_tile[expert + 1] - first;
        int begin = m->begin[expert], rows = m->end[expert] - begin;
        if (tiles == 0)
            continue;
        int each = ((rows + tiles - 1) / tiles + EVEN - 1) / EVEN * EVEN;
        each = min(each, a->tile_rows);
#pragma unroll 1
        for (int i = (int)threadIdx.x % listers; i < tiles; i += listers) {
            int own = min(rows - i * each, each);
            row_tile tile = {expert, begin + i * each, own};
            if (own <= 0)
                tile = {expert, begin, 0};
            a->out.tile[first + i] = tile;
        }
    }
    for (int i = all + s.rank * THREADS + (int)threadIdx.x; i < a->tiles; i += THREADS * s.blocks)
        a->out.tile[i] = {0, 0, 0};
}

/* ---- kernels ---- */

/* Sends the other blocks of the cluster this one's slots of the thread's experts, `own`, and adds
 * theirs. */
static __device__ __forceinline__ void exchange_counts(const group_args *a, const block_memory *m,
                                                       share s, uint32_t own,
                                                       expert_slots (&slots)[2]) {
    int words = words_of(a->experts);
    slots[0] = {half_of(own, 0), 0, half_of(own, 0)};
    slots[1] = {half_of(own, 1), 0, half_of(own, 1)};
    if (s.blocks == 1)
        return;
#if __CUDA_ARCH__ >= 900
    uint32_t place = shared_address(m->others + s.rank * words + threadIdx.x);
    cluster_wait(); /* until all blocks run */
    for (int i = 0; i < s.blocks && (int)threadIdx.x < words; i++)
        store_remote(address_in((uint32_t)i, place), __uint_as_float(own));
    cluster_sync();
    slots[0].total = slots[1].total = 0;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        uint32_t other =
            i < s.blocks && (int)threadIdx.x < words ? m->others[i * words + threadIdx.x] : 0;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            slots[j].total += half_of(other, j);
            slots[j].before += i < s.rank ? half_of(other, j) : 0;
        }
    }
#endif
}

/* Sorts in one launch, by a cluster or a block. */
static __global__ void __launch_bounds__(THREADS)
    group_in_cluster(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    share s = {(int)blockIdx.x, (int)gridDim.x};
    expert_slots slots[2];
#if __CUDA_ARCH__ >= 900
    if (s.blocks > 1)
        cluster_arrive();
#endif
    clear_counts(&a, &m);
    wait_for_predecessor();
    launch_dependents();
    count_slots(&a, &m);
    exchange_counts(&a, &m, s, add_warps(&a, &m), slots);
    place_experts(&a, &m, slots, s.rank == 0);
    place_slots(&a, &m);
    fill_rows(&a, &m, s);
    list_tiles(&a, &m, s);
}

static __global__ void __launch_bounds__(THREADS)
    count_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    clear_counts(&a, &m);
    wait_for_predecessor();
    launch_dependents(); /* the next kernel may read the ids from here on */
    count_slots(&a, &m);
    uint32_t own = add_warps(&a, &m);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * (int)threadIdx.x + i < a.experts)
            a.before[(int64_t)blockIdx.x * a.experts + 2 * threadIdx.x + i] = half_of(own, i);
}

/* Returns an expert's slots in all ranges; counts of each range become those of earlier ranges. */
static __device__ __forceinline__ int add_range_counts(const group_args *a, int expert) {
    constexpr int AT_ONCE = 16; /* ranges whose counts are loaded at a time */
    int total = 0;
#pragma unroll 1
    for (int range = 0; range < a->ranges; range += AT_ONCE) {
        int *before = a->before + (int64_t)range * a->experts + expert, own[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            own[j] = range + j < a->ranges ? before[j * a->experts] : 0;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (range + j < a->ranges)
                before[j * a->experts] = total;
            total += own[j];
        }
    }
    return total;
}

static __global__ void __launch_bounds__(THREADS) add_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    expert_slots slots[2] = {};
    wait_for_predecessor();
    launch_dependents();
#pragma unroll 1
    for (int i = 0; i < 2; i++) /* neighbouring threads have neighbouring experts here */
        if ((int)threadIdx.x + i * THREADS < a.experts)
            m.end[threadIdx.x + i * THREADS] = add_range_counts(&a, (int)threadIdx.x + i * THREADS);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * (int)threadIdx.x + i < a.experts)
            slots[i].total = m.end[2 * threadIdx.x + i];
    __syncthreads();
    place_experts(&a, &m, slots, true);
    fill_rows(&a, &m, {0, 1});
    list_tiles(&a, &m, {0, 1});
}

static __global__ void __launch_bounds__(THREADS)
    place_ranges(const __grid_constant__ group_args a) {
    extern __shared__ int shared[];
    block_memory m = memory_at(&a, shared);
    launch_dependents();
    clear_counts(&a, &m);
    count_slots(&a, &m); /* the ids were complete before the predecessor started */
    uint32_t own = add_warps(&a, &m);
    int local[1] = {half_of(own, 0) + half_of(own, 1)};
    scan_threads(&a, local);
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int expert = 2 * (int)threadIdx.x + i;
        if (expert >= a.experts)
            break;
        m.local[expert] = local[0];
        m.base[expert] =
            a.out.begin[expert] - local[0] + a.before[(int64_t)blockIdx.x * a.experts + expert];
        local[0] += half_of(own, i);
        if (expert + 1 == a.experts)
            m.local[a.experts] = local[0];
    }
    __syncthreads();
    place_slots(&a, &m);
}

/* ---- launch ---- */

static int64_t slots_of(const slot_chunk *chunk) {
    return chunk->tokens * chunk->call->spec->top_k;
}

/* Returns the experts that have slots, at most. */
static int64_t most_experts(const slot_chunk *chunk) {
    int64_t slots = slots_of(chunk), experts = chunk->call->spec->experts;
    return slots < experts ? slots : experts;
}

int64_t most_rows(const slot_chunk *chunk) {
    return slots_of(chunk) + most_experts(chunk) * (chunk->align - 1);
}

int64_t most_tiles(const slot_chunk *chunk) { /* with a short tile of each expert */
    int64_t step = chunk->tile_rows * (chunk->pairs ? 2 : 1);
    return (slots_of(chunk) + most_experts(chunk) * (step - 1)) / step * (chunk->pairs ? 2 : 1);
}

/* Returns the slots that a block has memory for. */
static int64_t room_of_block(const slot_chunk *chunk) {
    int64_t experts = chunk->call->spec->experts;
    int64_t room = (ROOM - memory_bytes(experts, 0)) / (memory_bytes(0, 1) - memory_bytes(0, 0));
    return room < ONCE ? room : ONCE;
}

/* Returns the slots that one block sorts without a cluster, at most. */
static int64_t most_alone(const slot_chunk *chunk) {
    int64_t room = room_of_block(chunk);
    return room < ALONE ? room : ALONE;
}

/* Returns the slots of a range of the three kernels. */
static int64_t range_of(const slot_chunk *chunk) {
    int64_t each = (slots_of(chunk) + RANGES - 1) / RANGES, room = room_of_block(chunk);
    each = (each + THREADS - 1) / THREADS * THREADS;
    return each < RANGE ? RANGE : each < room ? each : room;
}

static int64_t range_count(const slot_chunk *chunk) {
    int64_t each = range_of(chunk);
    return (slots_of(chunk) + each - 1) / each;
}

/* Returns the blocks of the cluster that sorts, 1 without a cluster; 0 for three kernels. */
static int64_t cluster_of(const slot_chunk *chunk) {
    int64_t slots = slots_of(chunk), blocks = 1;
    if (!moq_cuda_is_recent((const void *)group_in_cluster))
        return slots <= most_alone(chunk) ? 1 : 0;
    while (blocks < CLUSTER && slots > blocks * THREADS)
        blocks *= 2;
    return slots <= blocks * SHARE ? blocks : 0;
}

/* Takes the next part of the memory, of `values` words. */
static int32_t *take(int64_t *used, void *memory, int64_t values) {
    int64_t at = take_bytes(used, values * (int64_t)sizeof(int32_t));
    return memory ? (int32_t *)((uint8_t *)memory + at) : NULL;
}

static slot_groups workspace_layout(const slot_chunk *chunk, void *memory, int32_t **before,
                                    int64_t *bytes) {
    const moq_moe_spec *spec = chunk->call->spec;
    int64_t slots = slots_of(chunk), ranges = slots > most_alone(chunk) ? range_count(chunk) : 0;
    slot_groups g;
    *bytes = 0;
    g.count = take(bytes, memory, 4);
    g.begin = take(bytes, memory, spec->experts);
    g.row = take(bytes, memory, slots);
    g.slot = take(bytes, memory, most_rows(chunk));
    g.owner = take(bytes, memory, most_rows(chunk));
    g.tile = (row_tile *)take(bytes, memory, most_tiles(chunk) * (int64_t)(sizeof(row_tile) / 4));
    *before = take(bytes, memory, ranges * spec->experts);
    return g;
}

int64_t groups_bytes(const slot_chunk *chunk) {
    int32_t *before;
    int64_t bytes;
    workspace_layout(chunk, NULL, &before, &bytes);
    return bytes;
}

slot_groups groups_at(const slot_chunk *chunk, void *memory) {
    int32_t *before;
    int64_t bytes;
    return workspace_layout(chunk, memory, &before, &bytes);
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
    a.tile_rows = chunk->tile_rows;
    a.tiles = (int32_t)most_tiles(chunk);
    a.align = chunk->align;
    a.pairs = chunk->pairs;
    a.out = workspace_layout(chunk, memory, &a.before, &bytes);
    return a;
}

/* Launches a kernel, in a cluster of `cluster` blocks if more than 1. */
static moq_status launch(const slot_chunk *chunk, const void *kernel, int64_t blocks,
                         int64_t cluster, group_args *args, moq_err *err) {
    moq_launch launch = {.what = "grouping the slots of experts",
                         .kernel = kernel,
                         .grid = dim3((unsigned)blocks),
                         .block = dim3(THREADS),
                         .cluster = cluster > 1 ? (unsigned)cluster : 0u,
                         .shared = (size_t)memory_bytes(args->experts, args->range),
                         .stream = (cudaStream_t)chunk->call->stream,
                         .pdl = true};
    void *parameters[] = {args};
    return moq_cuda_launch(&launch, parameters, err);
}

moq_status group_slots(const slot_chunk *chunk, void *memory, moq_err *err) {
    int64_t blocks = cluster_of(chunk);
    group_args args = args_of(chunk, memory);
    if (blocks > 0) {
        args.range = (int32_t)((slots_of(chunk) + blocks - 1) / blocks);
        return launch(chunk, (const void *)group_in_cluster, blocks, blocks, &args, err);
    }
    args.ranges = (int32_t)range_count(chunk);
    args.range = (int32_t)range_of(chunk);
    MOQ_TRY(launch(chunk, (const void *)count_ranges, args.ranges, 0, &args, err));
    MOQ_TRY(launch(chunk, (const void *)add_ranges, 1, 0, &args, err));
    return launch(chunk, (const void *)place_ranges, args.ranges, 0, &args, err);
}

} // namespace moq::moe
