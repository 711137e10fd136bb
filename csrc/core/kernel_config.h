/* A way to do a call, among several that a kernel has.
 *
 * Choosing one compares many; it is done once for a number of tokens. The plan keeps the way that
 * was found and every call carries it to the kernel, which lays the call out by arithmetic. What is
 * not in the way follows from the way, the layer and the number of tokens. */
#ifndef MOQ_CORE_KERNEL_CONFIG_H
#define MOQ_CORE_KERNEL_CONFIG_H

#include <stdint.h>

/* The sharing out of work: the row of the kernel's table of shapes, or of ways, in five bits, and
 * how many blocks of a cluster share a tile, from 1 to 8, in three. */
#define MOQ_TILING_ROWS         32
#define MOQ_TILING(row, blocks) ((uint8_t)((row) << 3 | ((blocks) - 1)))

static inline int moq_tiling_row(uint8_t tiling) {
    return tiling >> 3;
}

static inline int moq_tiling_blocks(uint8_t tiling) {
    return (tiling & 7) + 1;
}

/* A way, in 24 bits. Kernels that look at one scale of x by themselves have a form for calls that
 * bring the scale and one for calls that do not, which only the call knows; others have one twice.
 * CPU kernels, and those of other chips, leave forms 0. */
typedef struct {
    uint8_t variant; /* by which measuring and keeping name the way; 0: the kernel tells none */
    uint8_t tiling;  /* x comes as it is, or with the scale to quantize it by */
    uint8_t dynamic_tiling; /* the scale of x is found in the call */
} moq_kernel_config;

/* A way whose form does not depend on whether the call brings the scale of x. */
static inline moq_kernel_config moq_kernel_config_of(int32_t variant, int row, int blocks) {
    moq_kernel_config config = {(uint8_t)variant, MOQ_TILING(row, blocks), MOQ_TILING(row, blocks)};
    return config;
}

#endif
