/* The search for the best config of a kernel, which is the same for all.
 *
 * A family of kernels tells what a call is made of in each of its configs (moq_load), by the
 * geometry of its tiles. Seconds follow from that by one formula and by the rates of the config,
 * which benchmarks.fit makes of measured times:
 *
 *   launch + beside + |bytes / bandwidth, inside|
 *
 * where bytes from memory and what multiprocessors do meanwhile overlap: |a, b| is a norm of them,
 * the closer to the greater one the higher its power is. */
#ifndef MOQ_CUDA_CHOICE_SEARCH_H
#define MOQ_CUDA_CHOICE_SEARCH_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MAX_CLUSTER 8 /* blocks of a cluster that every device of 9.0 takes */

/* Terms of what is hidden by reading, and of what is not. */
#define MOQ_INSIDE 3
#define MOQ_BESIDE 3

/* A call in a config: counts of what takes time. */
typedef struct {
    double bytes;
    double inside[MOQ_INSIDE]; /* of the busiest multiprocessor: steps, tiles, rows of steps */
    double beside[MOQ_BESIDE]; /* values that are quantized or added up, blocks that meet */
    int rates;                 /* row of the family's table */
    int blocks;                /* that share a tile, or what else a config leaves open */
} moq_load;

/* Microseconds, TB a second, the power of the norm, and microseconds of each that is counted. */
typedef struct {
    float launch, bandwidth, power, inside[MOQ_INSIDE], beside[MOQ_BESIDE];
} moq_rates;

/* A layer with a number of tokens. */
typedef struct {
    const void *layer; /* moq_linear_spec, or moq_moe_spec, which begins with one */
    const moq_target *target;
    int64_t tokens;
    bool scaled; /* the call brings the scale of x */
} moq_problem;

struct moq_configs {
    int configs;
    bool by_scale; /* a call that brings no scale of x may need another config */
    bool library;  /* variants are a library's algorithms, each in the config of the bucket */
    bool any_chip; /* kernels for Hopper are preferred there: they win, or lose 4 % at most */
    const moq_rates *rates;
    /* Whether a config sums rows in the order of batch_invariant layers; NULL where all do. */
    bool (*row_order_fixed)(int config);
    /* Counts a call in a config; false where it cannot be done so. */
    bool (*work)(const moq_problem *p, int config, moq_load *work);
};

typedef struct {
    int config, blocks;
    double seconds; /* INFINITY where no config can do the call */
} moq_found;

/* A config for a call; INFINITY seconds where it cannot be done so, or the layer is batch_invariant
 * and the config is not. */
moq_found moq_try_config(const moq_configs *f, const moq_problem *p, int config);

/* The best config. */
moq_found moq_find_config(const moq_configs *f, const moq_problem *p);

/* The config of a variant, which is its number and one more; the best for 0, and where the variant
 * cannot do the call. */
moq_kernel_config moq_choose_config(const moq_configs *f, const moq_problem *p, int32_t variant);

/* The config of a call. */
int moq_config_of(const moq_configs *f, moq_kernel_config chosen, bool scaled);

/* Bit i is set where variant i is worth measuring: bit 0, the choice, always, and configs that are
 * not expected to take half as long again. */
uint64_t moq_configs_near(const moq_configs *f, const moq_problem *p);

#ifdef __cplusplus
}
#endif
#endif
