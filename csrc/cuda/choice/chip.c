/* Chips, by what the driver tells of them: see chip.h. */
#include "cuda/choice/chip.h"

#include "cuda/choice/search.h"

#include <string.h>

/* The first is the one that rates are of. */
static const moq_chip CHIPS[] = {
    {"H200 SXM", 90, 132, 1980, 3201, 6016},  {"H100 SXM", 90, 132, 1980, 2619, 5120},
    {"H100 PCIe", 90, 114, 1755, 1593, 5120}, {"GH200", 90, 132, 1980, 2619, 6144},
    {"H20", 90, 78, 1980, 2619, 6144},        {"A100 SXM", 80, 108, 1410, 1593, 5120},
    {"L40S", 89, 142, 2520, 9001, 384},       {"RTX 5090", 120, 170, 2407, 14001, 512},
};

enum { CHIP_COUNT = sizeof CHIPS / sizeof *CHIPS };

const moq_chip *moq_chip_at(int32_t index) {
    return index >= 0 && index < CHIP_COUNT ? &CHIPS[index] : NULL;
}

/* Whether the tensor cores have a quarter of what their clock and number say. */
static bool has_cut_cores(const char *name) {
    const char *h20 = strstr(name, "H20");
    return h20 && h20[3] != '0';
}

static float ratio(int64_t value, int64_t usual) {
    return value > 0 ? (float)value / (float)usual : 1;
}

void moq_describe_chip(const moq_chip *chip, moq_target *target) {
    const moq_chip *usual = &CHIPS[0];
    target->capability = chip->capability;
    target->sm_count = chip->sm_count;
    target->memory = ratio((int64_t)chip->memory_mhz * chip->bus_bits,
                           (int64_t)usual->memory_mhz * usual->bus_bits);
    target->cores = ratio(chip->sm_mhz, usual->sm_mhz) / (has_cut_cores(chip->name) ? 4 : 1);
}

/* Multiprocessors are in groups of 16 and 18, which is what decides. */
int64_t moq_clusters_that_fit(const moq_target *target, int cluster) {
    static const uint8_t COUNTED[MAX_CLUSTER + 1] = {0, 132, 66, 39, 30, 22, 17, 15, 15};
    int64_t fit = (int64_t)target->sm_count * COUNTED[cluster] / COUNTED[1];
    return fit > 1 ? fit : 1;
}
