/* Routing and scheduling inside the decode kernels of experts on Hopper: the expert of each slot,
 * chunks of slots, and the share of each warp.
 *
 * A chunk is up to 8 slots of one expert, the columns of an mma. An item is a chunk by some rows of
 * its expert's weight. The blocks of K of all items of a block form one sequence that warps share
 * evenly, so that an item may be split over consecutive warps. The warp with its first blocks of K
 * adds the partial sums that the others stage in shared memory. */
#ifndef MOQ_CUDA_MOE_SM90_DECODE_SCHEDULER_H
#define MOQ_CUDA_MOE_SM90_DECODE_SCHEDULER_H

#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/moe/group.h"
#include "cuda/moe/sm90/decode/decode.h"

namespace moq::moe_decode {

#define WARPS      MOQ_MOE_DECODE_WARPS
#define THREADS    (32 * WARPS)
#define CHUNK      MOQ_MOE_DECODE_CHUNK
#define MAX_STAGES MOQ_MOE_DECODE_STAGES
#define ALL_LANES  0xffffffffu

/* ---- slots ---- */

/* The router's tensors, and offsets of the tables in shared memory. */
typedef struct {
    moe::slot_tensor ids, weights; /* int32 or int64, and float32 */
    const int32_t *map;            /* [global_experts], or NULL */
    int global_experts, experts, top_k, slots;
    moq_moe_decode_tables at;
} routing;

/* Tables in shared memory: the expert of each slot, or -1 if it does not count; slots by expert;
 * chunks; the number of slots of each expert, later where they begin. */
typedef struct {
    int32_t *expert;
    uint16_t *sorted;
    uint32_t *chunk;
    uint32_t *count;
    uint16_t *within; /* [groups of 32 slots][experts]: slots of an expert in a group */
    int32_t *chunks;  /* number of chunks */
} tables;

/* Returns the tables of a warp: with at most 32 slots a warp may have its own. */
static __device__ __forceinline__ tables tables_of(const routing *r, uint8_t *shared, int warp) {
    tables t;
    shared += r->slots <= 32 ? warp * r->at.pitch : 0;
    t.expert = (int32_t *)(shared + r->at.expert);
    t.sorted = (uint16_t *)(shared + r->at.sorted);
    t.chunk = (uint32_t *)(shared + r->at.chunk);
    t.count = (uint32_t *)(shared + r->at.count);
    t.within = (uint16_t *)(t.count + r->experts);
    t.chunks = (int32_t *)(shared + r->at.chunks);
    return t;
}

/* Packs a chunk into a word. */
static __device__ __forceinline__ uint32_t chunk_word(int expert, int first, int slots) {
    return (uint32_t)expert << 16 | (uint32_t)first << 4 | (uint32_t)slots;
}
static __device__ __forceinline__ int expert_of_chunk(uint32_t word) {
    return (int)(word >> 16);
}
static __device__ __forceinline__ int first_of_chunk(uint32_t word) {
    return (int)(word >> 4 & 0xfff);
}
static __device__ __forceinline__ int slots_of_chunk(uint32_t word) {
    return (int)(word & 15);
}
static_assert(MOQ_MOE_DECODE_SLOTS <= 0x1000 && CHUNK <= 15 && MOQ_MOE_DECODE_EXPERTS <= 0x10000,
              "a chunk fits a word");

/* Returns the offset of a slot's id, in elements. */
static __device__ __noinline__ int64_t place_of_id(const routing *r, int slot) {
    int token = slot / r->top_k;
    return moe::slot_offset(&r->ids, token, slot - token * r->top_k);
}

/* Loads an id past L1, which may hold an older state: a block may start before the router has
 * written. */
static __device__ __forceinline__ int64_t id_at(const routing *r, int64_t place) {
    return r->ids.dtype == MOQ_DT_I64 ? (int64_t)__ldcg((const long long *)r->ids.data + place)
                                      : (int64_t)__ldcg((const int *)r->ids.data + place);
}

/* Returns the local expert of an id, or -1 if the slot does not count. */
static __device__ __forceinline__ int expert_of_id(const routing *r, int64_t id) {
    if (id < 0 || id >= r->global_experts)
        return -1;
    int local = r->map ? __ldcg(r->map + id) : (int)id;
    return local >= 0 && local < r->experts ? local : -1;
}

static __device__ __forceinline__ int expert_at(const routing *r, int64_t place) {
    return expert_of_id(r, id_at(r, place));
}

static __device__ __noinline__ int expert_of_slot(const routing *r, int slot) {
    return expert_at(r, place_of_id(r, slot));
}

static __device__ __noinline__ float weight_of_slot(const routing *r, int slot) {
    int token = slot / r->top_k;
    return __ldcg((const float *)r->weights.data +
                  moe::slot_offset(&r->weights, token, slot - token * r->top_k));
}

/* Returns the sum of the lanes up to this one. */
static __device__ __forceinline__ uint32_t sum_up_to(uint32_t value, int lane) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        uint32_t other = __shfl_up_sync(ALL_LANES, value, i);
        value += lane >= i ? other : 0;
    }
    return value;
}

/* Packs an expert's number of chunks, in the upper half, and of slots. */
static __device__ __forceinline__ uint32_t tally_of(int slots) {
    return (uint32_t)((slots + CHUNK - 1) / CHUNK) << 16 | (uint32_t)slots;
}

/* Makes the tables of at most 32 slots, a lane each, whose ids are at `at`: experts in the order of
 * their first slots. */
static __device__ __forceinline__ void group_lanes(const routing *r, const tables *t, int64_t at,
                                                   int lane) {
    int expert = lane < r->slots ? expert_at(r, at) : -1;
    uint32_t same = __match_any_sync(ALL_LANES, expert);
    int slots = __popc(same), rank = __popc(same & ((1u << lane) - 1));
    uint32_t own = expert >= 0 && rank == 0 ? tally_of(slots) : 0, all = sum_up_to(own, lane);
    uint32_t before = __shfl_sync(ALL_LANES, all - own, __ffs(same) - 1);
    int place = (int)(before & 0xffff) + rank;
    if (expert >= 0) {
        t->sorted[place] = (uint16_t)lane;
        if (rank % CHUNK == 0)
            t->chunk[(before >> 16) + rank / CHUNK] =
                chunk_word(expert, place, min(CHUNK, slots - rank));
    }
    if (lane < r->slots)
        t->expert[lane] = expert;
    if (lane == 31)
        *t->chunks = (int)(all >> 16);
}

/* Counts the slots of each expert among 32 consecutive ones, a warp's lanes, and keeps of a slot
 * its expert and rank there. */
static __device__ __forceinline__ void count_lanes(const routing *r, const tables *t, int group,
                                                   int lane) {
    int slot = 32 * group + lane, expert = slot < r->slots ? expert_of_slot(r, slot) : -1;
    uint32_t same = __match_any_sync(ALL_LANES, expert);
    int rank = __popc(same & ((1u << lane) - 1));
    if (slot < r->slots)
        t->expert[slot] = expert < 0 ? -1 : expert | rank << 16;
    if (expert >= 0 && rank == 0)
        t->within[group * r->experts + expert] = (uint16_t)__popc(same);
}

/* Replaces an expert's counts in groups of 32 slots by the counts of earlier groups; returns the
 * sum. */
static __device__ __forceinline__ int sum_groups(const routing *r, const tables *t, int groups,
                                                 int expert) {
    int sum = 0;
#pragma unroll 4
    for (int i = 0; i < groups; i++) {
        uint16_t *at = t->within + i * r->experts + expert;
        int own = *at;
        *at = (uint16_t)sum;
        sum += own;
    }
    return sum;
}

/* Makes the chunks of all experts in their order; counts become the first slot of an expert. */
static __device__ __forceinline__ void chunk_experts(const routing *r, const tables *t, int lane) {
    uint32_t total = 0;
    for (int first = 0; first < r->experts; first += 32) {
        int expert = first + lane, slots = expert < r->experts ? (int)t->count[expert] : 0;
        uint32_t own = tally_of(slots), all = total + sum_up_to(own, lane), before = all - own;
        for (int i = 0; i < slots; i += CHUNK)
            t->chunk[(before >> 16) + i / CHUNK] =
                chunk_word(expert, (int)(before & 0xffff) + i, min(CHUNK, slots - i));
        if (expert < r->experts)
            t->count[expert] = before & 0xffff;
        total = __shfl_sync(ALL_LANES, all, 31);
    }
    if (lane == 0)
        *t->chunks = (int)(total >> 16);
}

/* Prepares the tables before the ids are there: clears counts. Returns the offset of the id of the
 * lane's slot, if there are at most 32. All threads call. */
template <bool EVERY_WARP>
static __device__ __forceinline__ int64_t open_tables(const routing *r, const tables *t) {
    int lane = (int)threadIdx.x % 32, groups = (r->slots + 31) / 32;
    int64_t place = 0;
    if (groups > 1) {
        for (int i = (int)threadIdx.x; i < groups * r->experts; i += (int)blockDim.x)
            t->within[i] = 0;
    } else if ((EVERY_WARP || threadIdx.x < 32) && lane < r->slots) {
        place = place_of_id(r, lane);
        find_now(place);
    }
    __syncthreads();
    return place;
}

/* Makes the tables from the result of open_tables; all threads call. With at most 32 slots each
 * warp makes its own, or waits for the first. */
template <bool EVERY_WARP>
static __device__ __forceinline__ void group_slots(const routing *r, const tables *t,
                                                   int64_t place) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, groups = (r->slots + 31) / 32;
    int threads = (int)blockDim.x;
    if (r->slots <= 32) {
        if (EVERY_WARP || warp == 0)
            group_lanes(r, t, place, lane);
        if (EVERY_WARP)
            __syncwarp();
        else
            __syncthreads();
        return;
    }
    for (int group = warp; group < groups; group += threads / 32)
        count_lanes(r, t, group, lane);
    __syncthreads();
    for (int expert = (int)threadIdx.x; expert < r->experts; expert += threads)
        t->count[expert] = (uint32_t)sum_groups(r, t, groups, expert);
    __syncthreads();
    if (warp == 0)
        chunk_experts(r, t, lane);
    __syncthreads();
    for (int slot = (int)threadIdx.x; slot < r->slots; slot += threads) {
        int both = t->expert[slot], expert = both & 0xffff;
        if (both < 0)
            continue;
        t->sorted[t->count[expert] + t->within[slot / 32 * r->experts + expert] + (both >> 16)] =
            (uint16_t)slot;
        t->expert[slot] = expert;
    }
    __syncthreads();
}

/* ---- shares of warps ---- */

/* The items of a block: `per_chunk` consecutive ones in a chunk, each of `blocks` blocks of K. */
typedef struct {
    int begin, steps; /* begin: the first item; steps: blocks of K of all items */
    int per_chunk, blocks;
} work;

/* A warp's position in its share, which consists of pieces of items. */
typedef struct {
    int left;       /* blocks of K of later pieces */
    int piece;      /* blocks of K of this piece, from `block` of the item on; 0 at the end */
    int block, row; /* row: number among the chunk's items */
    int chunk;
} walk;

/* Returns the first block of K of a warp's share. */
static __device__ __forceinline__ int first_step(const work *w, int warp) {
    return (int)((uint32_t)w->steps * (uint32_t)warp / WARPS);
}

static __device__ __forceinline__ walk walk_of(const work *w, int warp) {
    walk a;
    int step = first_step(w, warp), item = step / w->blocks, left = first_step(w, warp + 1) - step;
    a.block = step - item * w->blocks;
    item += w->begin;
    a.chunk = item / w->per_chunk;
    a.row = item - a.chunk * w->per_chunk;
    a.piece = min(left, w->blocks - a.block);
    a.left = left - a.piece;
    return a;
}

/* Advances to the next piece. */
static __device__ __forceinline__ void walk_on(const work *w, walk *a) {
    a->block = 0;
    if (++a->row == w->per_chunk) {
        a->row = 0;
        a->chunk++;
    }
    a->piece = min(a->left, w->blocks);
    a->left -= a->piece;
}

/* ---- partial sums of items that warps split ---- */

/* Stages the partial sums of a warp's first piece, COUNT of each lane, if its item began in another
 * warp. */
template <int COUNT>
static __device__ __forceinline__ void stage_partial_sums(float *staged, const float *sum,
                                                          int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        staged[i * 32 + lane] = sum[i];
}

/* Adds the partial sums of later warps, in their order, for an item of which they have `missing`
 * blocks. */
template <int COUNT>
static __device__ __forceinline__ void add_partial_sums(const work *w, const float *staged,
                                                        uint32_t barriers, int warp, int missing,
                                                        float *sum, int lane) {
#pragma unroll 1
    while (missing > 0) {
        warp++;
        int steps = first_step(w, warp + 1) - first_step(w, warp);
        if (steps == 0)
            continue;
        mbarrier_wait(barriers + 8u * warp, 0);
        const float *from = staged + warp * COUNT * 32 + lane;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            sum[i] = __fadd_rn(sum[i], from[i * 32]);
        missing -= steps;
    }
}

/* ---- early loads ---- */

/* Loads now: the compiler does not move the load to its use. */
static __device__ __forceinline__ float load_early(const float *from) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}

} // namespace moq::moe_decode

#endif
