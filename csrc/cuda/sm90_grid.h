/* What launchers of Hopper's kernels count with: how work divides, how many blocks there are room
 * for at once, and what a block has. */
#ifndef MOQ_CUDA_SM90_GRID_H
#define MOQ_CUDA_SM90_GRID_H

#include <stdint.h>

#define MAX_CLUSTER  8      /* that every device of 9.0 takes */
#define BLOCK_SHARED 232448 /* bytes of shared memory that a block may have */

static inline int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Clusters of a block a multiprocessor that run at once: of 132 multiprocessors in groups of 16 and
 * 18 (H200), others in proportion. */
static inline int64_t clusters_that_fit(int64_t sm_count, int cluster) {
    static const uint8_t FIT[MAX_CLUSTER + 1] = {0, 132, 66, 39, 30, 22, 17, 15, 15};
    int64_t fit = sm_count * FIT[cluster] / 132;
    return fit > 1 ? fit : 1;
}

/* Tiles whose steps all workers share evenly (sm90_nvfp4_shares.h): those of the last two rounds,
 * and who has a step of them. Where that idles a sixteenth of them at most, a tile has workers of
 * its own: none has steps of two tiles, whose sums it would hand over and take (docs/lab.md). */
typedef struct {
    int64_t tiles, workers;
} even_shares;

static inline even_shares share_evenly(int64_t tiles, int64_t steps, int64_t most) {
    int64_t shared = tiles < 2 * most ? tiles : tiles % most + most;
    int64_t workers = shared * steps < most ? shared * steps : most;
    if (shared < most && most % shared <= most / 16)
        workers -= workers % shared;
    return {shared, workers};
}

/* How many steps of those tiles a worker has: `least`, and one more the first `more` of each
 * `group` workers, which have a tile of their own or are all. */
typedef struct {
    int least, more, group;
    int inverse; /* 65536 / group, so that 255 workers divide by a product */
} step_shares;

static inline step_shares shares_of(int64_t tiles, int64_t steps, int64_t workers) {
    bool own = tiles > 0 && workers % tiles == 0;
    int64_t group = own ? workers / tiles : workers, all = own ? steps : tiles * steps;
    return {(int)(all / group), (int)(all % group), (int)group, (int)divide_up(65536, group)};
}

#endif
