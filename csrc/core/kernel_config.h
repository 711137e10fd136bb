/* The config in which a kernel does a call, among several that it has.
 *
 * Choosing one compares many; it is done once for a number of tokens. The plan keeps the config
 * that was found and every call carries it to the kernel, which lays the call out by arithmetic.
 * The rest follows from the config, the layer and the number of tokens. */
#ifndef MOQ_CORE_KERNEL_CONFIG_H
#define MOQ_CORE_KERNEL_CONFIG_H

#include <stdint.h>

/* A tiling: the row of the kernel's table of shapes in five bits, and how many blocks of a cluster
 * share a tile, from 1 to 8, in three. */
#define MOQ_TILING_ROWS         32
#define MOQ_TILING(row, blocks) ((uint8_t)((row) << 3 | ((blocks) - 1)))

static inline int moq_tiling_row(uint8_t tiling) {
    return tiling >> 3;
}

static inline int moq_tiling_blocks(uint8_t tiling) {
    return (tiling & 7) + 1;
}

/* A config, in 24 bits. Kernels that find the scale of x themselves have a tiling for calls that
 * bring the scale and one for calls that do not, which only the call knows; others have one twice.
 * CPU kernels, and those of other chips, leave tilings 0. */
typedef struct {
    uint8_t variant; /* by which measuring and keeping name the config; 0: the kernel has one */
    uint8_t tiling;  /* x comes as it is, or with the scale to quantize it by */
    uint8_t dynamic_tiling; /* the scale of x is found in the call */
} moq_kernel_config;

/* A config with one tiling, whether or not the call brings the scale of x. */
static inline moq_kernel_config moq_kernel_config_of(int32_t variant, int row, int blocks) {
    moq_kernel_config config = {(uint8_t)variant, MOQ_TILING(row, blocks), MOQ_TILING(row, blocks)};
    return config;
}

#endif
