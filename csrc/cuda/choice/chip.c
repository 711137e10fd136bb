/* The table of chips: see chip.h. */
#include "cuda/choice/chip.h"

#include <string.h>

/* Memory and tensor cores as NVIDIA's data sheets have them (FP8 without sparsity). Both chips have
 * their multiprocessors in groups of 16 and 18, which is what decides about clusters; counted on an
 * H200. */
static const moq_chip CHIPS[] = {
    {"H200 SXM", "NVIDIA H200", 90, 132, 4.8e12, 1.979e15, {0, 132, 66, 39, 30, 22, 17, 15, 15}},
    {"H100 SXM",
     "NVIDIA H100 80GB HBM3",
     90,
     132,
     3.35e12,
     1.979e15,
     {0, 132, 66, 39, 30, 22, 17, 15, 15}},
};

enum { CHIP_COUNT = sizeof CHIPS / sizeof *CHIPS };

const moq_chip *moq_chip_at(int32_t index) {
    return index >= 1 && index <= CHIP_COUNT ? &CHIPS[index - 1] : NULL;
}

int32_t moq_find_chip(const char *name) {
    for (int i = 0; i < CHIP_COUNT; i++)
        if (strcmp(CHIPS[i].name, name) == 0)
            return i + 1;
    return 0;
}

int32_t moq_find_chip_of(const char *device, int32_t capability, int32_t sm_count) {
    for (int i = 0; i < CHIP_COUNT; i++)
        if (strcmp(CHIPS[i].device, device) == 0 && CHIPS[i].capability == capability &&
            CHIPS[i].sm_count == sm_count)
            return i + 1;
    return 0;
}

static const moq_chip *chip_of(const moq_target *target) {
    const moq_chip *chip = moq_chip_at(target->chip);
    return chip ? chip : &CHIPS[0];
}

double moq_memory_rate(const moq_target *target, double fitted) {
    return fitted * (chip_of(target)->memory / CHIPS[0].memory);
}

double moq_matrix_rate(const moq_target *target, double fitted) {
    return fitted * (chip_of(target)->matrix / CHIPS[0].matrix);
}

int64_t moq_clusters_that_fit(const moq_target *target, int cluster) {
    const moq_chip *chip = chip_of(target);
    int64_t fit = (int64_t)target->sm_count * chip->clusters[cluster] / chip->sm_count;
    return fit > 1 ? fit : 1;
}
