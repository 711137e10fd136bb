/* The work of a block of the NVFP4 GEMMs of Hopper: some tiles, and of the last ones an even share
 * of the steps of all, so that no block idles where tiles do not come out even. A block that has
 * the first steps of a tile leaves its sums in memory, and says so by a flag.
 *
 * sm90_nvfp4_many_tile.h and sm90_nvfp4_some_tile.h include it. It takes gemm_args with `steps` of
 * a tile and the `shares` that workers have of those of the shared tiles. */
#ifndef MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_SHARES_H
#define MOQ_CUDA_LINEAR_SM90_SM90_NVFP4_SHARES_H

/* The tiles of a block, one after the other, and which steps of them it has: all of those up to
 * `count`, which go round, then an even share of the steps of the rest, from `low` to `high`. Those
 * are done from the last to the first: a block begins with the first steps of a tile that a later
 * one ends, so that whoever waits for sums waits for an earlier block. */
typedef struct {
    int index, stride, count;
    int first, end, low, high;
} course;

static __device__ __forceinline__ void take_share(const gemm_args *a, course *c) {
    int tile = (c->high - 1) / a->steps;
    if (c->high <= c->low) {
        c->first = c->end = 0;
        return;
    }
    c->index = c->count + tile;
    c->first = max(c->low - tile * a->steps, 0);
    c->end = c->high - tile * a->steps;
    c->high -= c->end - c->first;
}

/* The first of the shared steps that a worker has. */
static __device__ __forceinline__ int share_of(const gemm_args *a, int worker) {
    const step_shares *s = &a->shares;
    int group = worker * s->inverse >> 16;
    return worker * s->least + group * s->more + min(worker - group * s->group, s->more);
}

/* The course of a worker where `whole` tiles are not shared. */
static __device__ __forceinline__ course course_of(const gemm_args *a, int worker, int workers,
                                                   int whole) {
    course c = {worker, workers, whole, 0, a->steps, share_of(a, worker), share_of(a, worker + 1)};
    if (c.index >= c.count)
        take_share(a, &c);
    return c;
}

static __device__ __forceinline__ void next_tile(const gemm_args *a, course *c) {
    c->index += c->stride;
    if (c->index >= c->count)
        take_share(a, c);
}

/* How many blocks before it have steps of a worker's tile. */
static __device__ __forceinline__ int earlier_ones(const gemm_args *a, const course *c,
                                                   int worker) {
    int begin = (c->index - c->count) * a->steps, others = 0;
    for (int low = c->low; low > begin;)
        low = share_of(a, worker - ++others);
    return others;
}

/* Says that a block's sums are there. The memory was anyone's before and is not cleared, since
 * other data are these 64 bits by chance alone. Whoever has seen them takes them away, so that no
 * later call finds them. */
#define READY 0x6d6f7165787473a7ull

static __device__ __forceinline__ void await_sums(uint64_t *flag) {
    while (load_acquire(flag) != READY)
        ;
    *flag = 0;
}

#endif
