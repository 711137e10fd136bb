/* Chips, by what the driver tells of them: see chip.h. */
#include "cuda/choice/chip.h"

#include "cuda/choice/search.h"

#include <string.h>

/* The first is the one that rates are of. Of chips of one capability the first stands for those
 * that are not here. Blackwell's figures are those of NVIDIA's papers, read in pages that quote
 * them: "Blackwell Architecture Technical Brief" (B200: 7.7 TB/s, B300: 8 TB/s), "RTX PRO Blackwell
 * GPU Architecture" (1792 GB/s), "RTX Blackwell GPU Architecture" (RTX 5090) and the hardware
 * overview of "DGX Spark" (GB10: 273 GB/s). */
static const moq_chip CHIPS[] = {
    {"H200 SXM", 90, 132, 1980, 3201, 6016},  {"H100 SXM", 90, 132, 1980, 2619, 5120},
    {"H100 PCIe", 90, 114, 1755, 1593, 5120}, {"GH200", 90, 132, 1980, 2619, 6144},
    {"H20", 90, 78, 1980, 2619, 6144},        {"A100 SXM", 80, 108, 1410, 1593, 5120},
    {"L40S", 89, 142, 2520, 9001, 384},       {"B200", 100, 148, 1965, 3760, 8192},
    {"B300", 103, 148, 1920, 3906, 8192},     {"RTX PRO 6000", 120, 188, 2600, 14001, 512},
    {"RTX 5090", 120, 170, 2407, 14001, 512}, {"GB10", 121, 48, 2520, 4266, 256},
};

enum { CHIP_COUNT = sizeof CHIPS / sizeof *CHIPS };

/* Products of a multiprocessor in a clock, beside an H200's: in kernels of warps (mma.sync) with
 * float32 sums, and in those of cuBLASLt. By the products in a second that NVIDIA states of the
 * chips above. Warps of an H200 are taken to reach 0.62 of its rate (arXiv 2402.13499), those
 * of 10.0 to 11.0, which nobody measured, as much as an H200's. A chip is of the last row that is
 * not above its capability.
 */
static const struct {
    int32_t capability;
    float warps, library;
} RATES[] = {
    {80, 0.8f, 0.5f}, {86, 0.4f, 0.25f}, {90, 1, 1}, {100, 1, 2}, {110, 1, 1}, {120, 0.4f, 0.25f},
};

enum { RATE_COUNT = sizeof RATES / sizeof *RATES };

const moq_chip *moq_chip_at(int32_t index) {
    return index >= 0 && index < CHIP_COUNT ? &CHIPS[index] : NULL;
}

/* Whether the tensor cores have a quarter of what their clock and number say. */
static bool has_cut_cores(const char *name) {
    const char *h20 = strstr(name, "H20");
    return h20 && h20[3] != '0';
}

/* Whether the tensor cores add 16-bit products to float32 at half of their rate. */
static bool has_slow_sums(const char *name) {
    return strstr(name, "GeForce") || strstr(name, "RTX 50");
}

moq_chip moq_chip_of(int32_t capability) {
    const moq_chip *like = &CHIPS[0];
    for (int i = CHIP_COUNT - 1; i >= 0; i--)
        if (CHIPS[i].capability / 10 == capability / 10 &&
            (like->capability != capability || CHIPS[i].capability == capability))
            like = &CHIPS[i];
    moq_chip chip = *like;
    chip.capability = capability;
    return chip;
}

/* Attributes that the driver does not tell are those of a chip of the capability, memory as fast as
 * the chip is large. */
static moq_chip complete(const moq_chip *told) {
    moq_chip chip = *told, like = moq_chip_of(told->capability);
    if (chip.sm_count <= 0)
        chip.sm_count = like.sm_count;
    if (chip.sm_mhz <= 0)
        chip.sm_mhz = like.sm_mhz;
    if (chip.memory_mhz <= 0 || chip.bus_bits <= 0) {
        chip.memory_mhz = like.memory_mhz;
        chip.bus_bits = like.bus_bits * chip.sm_count / like.sm_count;
    }
    return chip;
}

void moq_describe_chip(const moq_chip *told, moq_target *target) {
    const moq_chip chip = complete(told), *usual = &CHIPS[0];
    int row = RATE_COUNT - 1;
    while (row > 0 && RATES[row].capability > chip.capability)
        row--;
    float clock = (float)chip.sm_mhz / (float)usual->sm_mhz;
    if (has_cut_cores(chip.name))
        clock /= 4;
    target->capability = chip.capability;
    target->sm_count = chip.sm_count;
    target->memory = (float)((double)chip.memory_mhz * chip.bus_bits /
                             ((double)usual->memory_mhz * usual->bus_bits));
    target->cores = clock * RATES[row].warps / (has_slow_sums(chip.name) ? 2 : 1);
    target->library = clock * RATES[row].library;
}

/* Multiprocessors are in groups of 16 and 18, which is what decides. */
int64_t moq_clusters_that_fit(const moq_target *target, int cluster) {
    static const uint8_t COUNTED[MAX_CLUSTER + 1] = {0, 132, 66, 39, 30, 22, 17, 15, 15};
    int64_t fit = (int64_t)target->sm_count * COUNTED[cluster] / COUNTED[1];
    return fit > 1 ? fit : 1;
}
