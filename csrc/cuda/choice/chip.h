/* The chips that estimates of seconds know, in one table.
 *
 * Estimates are fitted to times of one chip, the first of the table. Whatever of an estimate is a
 * rate of the chip is multiplied by how much more, or less, the target has of it than that chip. A
 * chip that is not in the table counts as the first, with its own number of multiprocessors. */
#ifndef MOQ_CUDA_CHOICE_CHIP_H
#define MOQ_CUDA_CHOICE_CHIP_H

#include "core/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MAX_CLUSTER 8 /* blocks of a cluster that every device of 9.0 takes */

typedef struct {
    const char *name;   /* as callers name it */
    const char *device; /* as the driver names it */
    int32_t capability; /* 90 for 9.0 */
    int32_t sm_count;
    double memory; /* bytes a second that the memory is made for */
    double matrix; /* operations of FP8 products a second that the tensor cores are made for */
    /* Clusters of so many blocks, each with a multiprocessor to itself, that run at once. */
    uint8_t clusters[MAX_CLUSTER + 1];
} moq_chip;

/* The rows of the table, from 1 on, which is moq_target.chip; NULL past the last. */
const moq_chip *moq_chip_at(int32_t index);

/* The row of a chip by its name, or by what the driver says of it; 0 where there is none. */
int32_t moq_find_chip(const char *name);
int32_t moq_find_chip_of(const char *device, int32_t capability, int32_t sm_count);

/* What was fitted to the first chip's memory or tensor cores, for the target's. */
double moq_memory_rate(const moq_target *target, double fitted);
double moq_matrix_rate(const moq_target *target, double fitted);

/* Clusters of so many blocks, each with a multiprocessor to itself, that run at once: as counted on
 * the chip, in proportion where it has other multiprocessors than its row says. At least one. */
int64_t moq_clusters_that_fit(const moq_target *target, int cluster);

#ifdef __cplusplus
}
#endif
#endif
