/* Chips, by what the driver tells of them.
 *
 * Rates of configs (search.h) are of one chip, an H200. On another one bytes come as much faster as
 * its memory is, and multiprocessors work as much faster as their clock is and as those of its
 * capability multiply in a clock. A name says only what attributes cannot. */
#ifndef MOQ_CUDA_CHOICE_CHIP_H
#define MOQ_CUDA_CHOICE_CHIP_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Attributes of a device; 0 where the driver tells none. */
typedef struct {
    const char *name; /* as the driver has it, or as callers name a chip that need not be here */
    int32_t capability, sm_count, sm_mhz, memory_mhz, bus_bits;
} moq_chip;

/* Chips that callers may name, from 0 on; NULL past the last. */
const moq_chip *moq_chip_at(int32_t index);

/* A chip that stands for those of a capability: one of the table with the same, else with the same
 * major version, else an H200, called as it is. */
moq_chip moq_chip_of(int32_t capability);

/* Writes the part of a layer's target that a chip decides. Attributes that are 0 are taken from
 * moq_chip_of. */
void moq_describe_chip(const moq_chip *chip, moq_target *target);

/* Clusters of so many blocks, each with a multiprocessor to itself, that run at once: as counted on
 * an H200, in proportion to multiprocessors elsewhere. At least one. */
int64_t moq_clusters_that_fit(const moq_target *target, int cluster);

#ifdef __cplusplus
}
#endif
#endif
