/* PTX that CUDA C has no words for, one function an instruction: barriers in shared memory, the
 * bulk tensor copy engine, warpgroup products, programmatic dependent launch. Names follow the PTX
 * manual. */
#ifndef MOQ_CUDA_DEVICE_PTX_H
#define MOQ_CUDA_DEVICE_PTX_H

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace moq {

static __device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Returns a shared address that the compiler keeps in a register, rather than computing it again at
 * every use. */
static __device__ __forceinline__ uint32_t fixed_shared_address(const void *pointer) {
    uint32_t address;
    asm volatile("{\n"
                 ".reg .u64 wide;\n"
                 "cvta.to.shared.u64 wide, %1;\n"
                 "cvt.u32.u64 %0, wide;\n"
                 "}"
                 : "=r"(address)
                 : "l"(pointer));
    return address;
}

/* Makes the compiler compute a number here, not where it is used. */
template <class T> static __device__ __forceinline__ void find_now(T &number) {
    if constexpr (sizeof number == 8)
        asm volatile("" : "+l"(number));
    else
        asm volatile("" : "+r"(number));
}

/* Returns true in one lane of a converged warp. */
static __device__ __forceinline__ bool is_elected(void) {
    uint32_t elected;
    asm volatile("{\n"
                 ".reg .pred one;\n"
                 "elect.sync _|one, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, one;\n"
                 "}"
                 : "=r"(elected));
    return elected != 0;
}

/* ---- programmatic dependent launch ---- */

/* Allows the next kernel of the stream to start, as far as this block is concerned. */
static __device__ __forceinline__ void launch_dependents(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until every earlier kernel has ended and its writes are visible. */
static __device__ __forceinline__ void wait_for_predecessor(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Reads a parameter of the kernel ahead of its use, line by line of the constant cache: in a kernel
 * that starts early, the misses overlap the wait. The words read are stored, or the compiler would
 * drop the loads. */
template <class T> static __device__ __forceinline__ void touch_parameter(const T &parameter) {
    __shared__ uint32_t nowhere;
    if constexpr (sizeof parameter < 4) /* it has no fields */
        return;
    const uint32_t *word = (const uint32_t *)&parameter;
    uint32_t all = word[sizeof parameter / 4 - 1];
#pragma unroll
    for (unsigned i = 0; 64 * i < sizeof parameter; i++)
        all |= word[16 * i];
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(shared_address(&nowhere)), "r"(all)
                 : "memory");
}

/* ---- barriers ---- */

static __device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

/* Makes initialised barriers visible to the copy engine. */
static __device__ __forceinline__ void mbarrier_init_fence(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives once, and announces `bytes` of copies to wait for. */
static __device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Waits for the end of the phase of a parity. A fresh barrier is in phase 0, so that waiting for
 * parity 1 returns at once. A thread that skips a phase may be let through one that has not ended.
 */
static __device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "AGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra END;\n"
                 "bra AGAIN;\n"
                 "END:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Pipeline state: the index of the next stage, and the parity of its phase. */
typedef struct {
    int index, parity;
} pipeline_state;

static __device__ __forceinline__ void advance(pipeline_state *place, int stages) {
    if (++place->index == stages) {
        place->index = 0;
        place->parity ^= 1;
    }
}

/* Synchronises `threads` threads of the block at barrier `id`. */
static __device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives at a barrier without waiting. */
static __device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Makes this thread's stores to shared memory visible to wgmma and the copy engine, after the next
 * barrier. */
static __device__ __forceinline__ void fence_async_proxy(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Returns 1 / value but for the last bit or two; 0 for infinity. */
static __device__ __forceinline__ float reciprocal_approx(float value) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(value));
    return r;
}

/* ---- the copy engine ---- */

/* Returns the L2 policy for bytes that are read once. */
static __device__ __forceinline__ uint64_t policy_evict_first(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Prefetches the line of an address into the L2. */
static __device__ __forceinline__ void prefetch_l2(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* Loads 16 bytes that are read once; an earlier kernel may have written them. */
static __device__ __forceinline__ uint4 load_once(const void *address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

/* Prefetches a tensor map that is a parameter of the kernel. */
static __device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Returns the L2 policy of ordinary accesses. */
static __device__ __forceinline__ uint64_t policy_evict_normal(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Copies the box of `map` at (c0, c1, c2) to shared memory and counts its bytes at `barrier`. */
static __device__ __forceinline__ void copy_box_3d(uint32_t to, const CUtensorMap *map, int c0,
                                                   int c1, int c2, uint32_t barrier,
                                                   uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
                 : "memory");
}

/* ---- registers of a whole warpgroup; the kernel needs launch bounds ---- */

template <int count> static __device__ __forceinline__ void more_registers(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count> static __device__ __forceinline__ void fewer_registers(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/* Copies the box of `map` at (c0, c1) to shared memory and counts its bytes at `barrier`. */
static __device__ __forceinline__ void copy_box_2d(uint32_t to, const CUtensorMap *map, int c0,
                                                   int c1, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(barrier), "l"(policy)
                 : "memory");
}

/* Copies a box to the same address in each block of the cluster that `mask` has a bit for, and
 * counts its bytes at the same barrier of each. */
static __device__ __forceinline__ void copy_box_2d_to(uint32_t to, const CUtensorMap *map, int c0,
                                                      int c1, uint32_t barrier, uint64_t policy,
                                                      uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %6, %5;" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(barrier), "l"(policy), "h"(mask)
                 : "memory");
}

/* Copies the box of a map of moq_tensor_map_pairs from `row` on, a multiple of 16. */
static __device__ __forceinline__ void copy_pairs(uint32_t to, const CUtensorMap *map, int column,
                                                  int row, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(column), "r"(0), "r"(row / 16), "r"(barrier), "l"(policy)
                 : "memory");
}

/* Copies the box of copy_pairs to both blocks of a cluster. */
static __device__ __forceinline__ void copy_pairs_to_both(uint32_t to, const CUtensorMap *map,
                                                          int column, int row, uint32_t barrier,
                                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %7, %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(row / 16), "r"(barrier), "l"(policy), "h"((uint16_t)3)
        : "memory");
}

/* Stores the box of `map` at (c0, c1) from shared memory that was written before a
 * fence_async_proxy and a barrier. */
static __device__ __forceinline__ void store_box_2d(const CUtensorMap *map, int c0, int c1,
                                                    uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(c0), "r"(c1), "r"(from)
                 : "memory");
}

/* Waits until this thread's bulk tensor stores have read their shared memory. */
static __device__ __forceinline__ void store_boxes_wait(void) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Stores a box as one of a group of stores; store_commit ends the group. */
static __device__ __forceinline__ void store_box_of_group(const CUtensorMap *map, int c0, int c1,
                                                          uint32_t from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(from)
        : "memory");
}

static __device__ __forceinline__ void store_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of this thread's groups of stores are still reading shared memory.
 */
template <int pending> static __device__ __forceinline__ void store_wait(void) {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/* Copies `bytes`, a multiple of 16, from an address that is a multiple of 16. */
static __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, uint32_t bytes,
                                                  uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Copies bytes that are read once, under an L2 policy. */
static __device__ __forceinline__ void
copy_bytes_once(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

/* Copies bytes to the same address in each block of the cluster that `mask` has a bit for, and
 * counts them at the same barrier of each. */
static __device__ __forceinline__ void copy_bytes_to(uint32_t to, const void *from, uint32_t bytes,
                                                     uint32_t barrier, uint16_t mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
                 : "memory");
}

/* ---- clusters ---- */

static __device__ __forceinline__ uint32_t rank_in_cluster(void) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ uint32_t blocks_in_cluster(void) {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

/* Synchronises all threads of the cluster. */
static __device__ __forceinline__ void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* Arrives at the cluster's barrier, or waits there: a thread that has waited knows that all blocks
 * run and have initialised their barriers, and no more. */
static __device__ __forceinline__ void cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Waits for the cluster under racecheck alone (MOQEXT_RACECHECK=1), in a warp that needs nothing of
 * other blocks: racecheck lets no thread through cluster_wait() before every warp of the cluster
 * has come to one or has ended. */
static __device__ __forceinline__ void cluster_wait_for_racecheck(void) {
#ifdef MOQ_RACECHECK
    cluster_wait();
#endif
}

/* Returns the address in block `rank` of the cluster that corresponds to a shared address of this
 * one. */
static __device__ __forceinline__ uint32_t address_in(uint32_t rank, uint32_t address) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

/* Stores a value in the shared memory of a block of the cluster, and counts its bytes at a barrier
 * there; threads that have waited for it may read them. */
static __device__ __forceinline__ void send_word(uint32_t to, uint32_t value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
        "r"(value), "r"(barrier)
        : "memory");
}

static __device__ __forceinline__ void send_pair(uint32_t to, float2 value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
                 "[%3];" ::"r"(to),
                 "f"(value.x), "f"(value.y), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void send_four(uint32_t to, float4 value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, "
                 "%4}, [%5];" ::"r"(to),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void send_words(uint32_t to, uint4 value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, "
                 "%4}, [%5];" ::"r"(to),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
                 : "memory");
}

/* Stores at an address of address_in; it is visible after cluster_sync. */
static __device__ __forceinline__ void store_remote(uint32_t to, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

/* Arrives at the barrier of block `rank` of the cluster that lies at the same address. */
static __device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* Orders what a warp's lanes have read before the first lane arrives at a barrier or starts a copy
 * into the same place. The compiler drops __syncwarp where the warp is converged, and racecheck
 * then sees an order for the first lane alone. Under racecheck (MOQEXT_RACECHECK=1) lanes meet by a
 * mask that the compiler does not know, and all of them arrive. */
#ifdef MOQ_RACECHECK
#define WARP_ARRIVALS 32
static __device__ __forceinline__ void warp_meets(void) {
    uint32_t after, before;
    asm volatile("mov.u32 %0, %%lanemask_ge;" : "=r"(after));
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
    asm volatile("bar.warp.sync %0;" ::"r"(after | before) : "memory");
}
#else
#define WARP_ARRIVALS 1
static __device__ __forceinline__ void warp_meets(void) {
    __syncwarp();
}
#endif

/* Synchronises threads after they initialise barriers, under racecheck alone; otherwise warps that
 * fill stages of their own need not wait for others. Racecheck forgets copies under way when
 * another warp initialises a barrier, and reports reads of them ("invalid async operation
 * synchronization"). */
static __device__ __forceinline__ void barriers_are_ready(int id, int threads) {
#ifdef MOQ_RACECHECK
    barrier_sync(id, threads);
#else
    __syncwarp();
#endif
}

/* Releases what `barrier` guards, for a whole warp: in this block, or in both blocks of the
 * cluster, which share it. */
template <bool PAIR> static __device__ __forceinline__ void warp_releases(uint32_t barrier) {
    uint32_t lane = threadIdx.x % 32;
    warp_meets();
    if (WARP_ARRIVALS > 1 && PAIR) {
        mbarrier_arrive_at(barrier, 0);
        mbarrier_arrive_at(barrier, 1);
    } else if (WARP_ARRIVALS > 1) {
        mbarrier_arrive(barrier);
    } else if (lane < (PAIR ? 2 : 1)) {
        if (PAIR)
            mbarrier_arrive_at(barrier, lane);
        else
            mbarrier_arrive(barrier);
    }
}

/* Releases what `barrier` guards in the first `blocks` blocks of the cluster. */
static __device__ __forceinline__ void warp_releases_all(uint32_t barrier, uint32_t blocks) {
    uint32_t lane = threadIdx.x % 32;
    warp_meets();
    for (uint32_t i = 0; WARP_ARRIVALS > 1 && i < blocks; i++)
        mbarrier_arrive_at(barrier, i);
    if (WARP_ARRIVALS == 1 && lane < blocks)
        mbarrier_arrive_at(barrier, lane);
}

/* ---- shared memory ---- */

/* Returns an address that the compiler keeps in its register, rather than computing it again at
 * every use. */
static __device__ __forceinline__ uint32_t kept(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

static __device__ __forceinline__ uint4 load_shared(uint32_t from) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

static __device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}

static __device__ __forceinline__ uint32_t load_shared_half(uint32_t from) {
    uint16_t value;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
    return value;
}

static __device__ __forceinline__ void store_shared_word(uint32_t to, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

static __device__ __forceinline__ void store_shared_pair(uint32_t to, uint2 value) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(value.x), "r"(value.y)
                 : "memory");
}

/* Loads four 8 x 8 matrices of 16 bits, or of 8 rows of 16 bytes. Lane i names row i % 8 of matrix
 * i / 8, and gets 4 bytes of row i / 4 of each, from 4 * (i % 4) on. */
static __device__ __forceinline__ void load_matrices(uint32_t (&matrix)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(row)
                 : "memory");
}

static __device__ __forceinline__ uint2 load_shared_pair(uint32_t from) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "r"(from)
                 : "memory");
    return value;
}

/* Stores four 8 x 8 matrices of 16 bits. Lane i names the address of row i % 8 of matrix i / 8, and
 * has columns 2 * (i % 4) and the next of row i / 4 of each. */
static __device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&matrix)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
                 : "memory");
}

/* Stores four 8 x 8 matrices of 16 bits transposed. Lane i names the address of column i % 8 of
 * matrix i / 8, and has columns 2 * (i % 4) and the next of row i / 4 of each. */
static __device__ __forceinline__ void store_matrices_turned(uint32_t column,
                                                             const uint32_t (&matrix)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column),
        "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
        : "memory");
}

/* Stores two matrices as store_matrices_turned stores four. */
static __device__ __forceinline__ void store_two_matrices_turned(uint32_t column, uint32_t first,
                                                                 uint32_t second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(column),
                 "r"(first), "r"(second)
                 : "memory");
}

/* Transposes an 8 x 8 matrix of 16-bit values, held by all threads of a warp: two neighbours of a
 * column become two of a row. */
static __device__ __forceinline__ uint32_t turn_matrix(uint32_t word) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
    return turned;
}

/* ---- flags in memory: writes before a release are visible after the acquire ---- */

static __device__ __forceinline__ void store_release(uint64_t *to, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

static __device__ __forceinline__ uint64_t load_acquire(const uint64_t *from) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

static __device__ __forceinline__ int32_t load_acquire(const int32_t *from) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

static __device__ __forceinline__ void add_release(int32_t *to, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/* Makes writes of others that this thread has acquired visible to the copy engine. */
static __device__ __forceinline__ void fence_async_proxy_of_memory(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* ---- copies of a thread ---- */

/* Copies 16 bytes to shared memory; bytes from `bytes` on, 0 or 16, are zeros. */
static __device__ __forceinline__ void copy_async_16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

/* Copies 4 bytes to shared memory; zeros if `bytes` is 0. */
static __device__ __forceinline__ void copy_async_4(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

/* Arrives at the barrier once all copies of this thread so far have completed; the barrier was
 * initialised to count it. */
static __device__ __forceinline__ void copy_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void copy_async_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` groups of this thread are unfinished. */
template <int pending> static __device__ __forceinline__ void copy_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- matrix products of a warp: sum += a b^T of 16 and 8 rows ---- */

/* Multiplies 16 columns of fp16. */
static __device__ __forceinline__ void mma_f16(float (&sum)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Multiplies 16 columns of bf16. */
static __device__ __forceinline__ void mma_bf16(float (&sum)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Multiplies 32 columns of e4m3, on sm_89 and later. */
static __device__ __forceinline__ void mma_e4m3(float (&sum)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---- warpgroup matrix products ---- */

/* Returns a K-major operand of 128-byte rows in the 128-byte swizzle, with contiguous groups of 8
 * rows; the address is a multiple of 1024. Advancing K by 32 bytes adds 2. */
static __device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Orders earlier accesses to registers before wgmma uses them. */
static __device__ __forceinline__ void wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Stops the compiler from moving accesses to these registers across this point, as it does not know
 * of products under way. */
template <int count> static __device__ __forceinline__ void stay_here(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

template <int count> static __device__ __forceinline__ void stay_here(int (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("" : "+r"(d[i])::"memory");
}

/* Waits until at most `pending` groups of this warp are unfinished. */
template <int pending> static __device__ __forceinline__ void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

} // namespace moq

#endif
