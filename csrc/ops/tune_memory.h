/* The memory that tuning measures on: tensors of random values and copies of weights, on the device
 * of a layer, all freed together. */
#ifndef MOQ_OPS_TUNE_MEMORY_H
#define MOQ_OPS_TUNE_MEMORY_H

#include "core/tensor.h"

typedef struct moq_piece moq_piece;

typedef struct {
    moq_device device;
    void *stream;     /* CUDA: on which everything is done */
    moq_piece *first; /* what was allocated */
} moq_tune_memory;

/* Begins on the current device. Whatever it answers, moq_tune_memory_end may be called. */
moq_status moq_tune_memory_begin(moq_device device, moq_tune_memory *memory, moq_err *err);
void moq_tune_memory_end(moq_tune_memory *memory);

moq_status moq_tune_allocate(moq_tune_memory *memory, int64_t bytes, void **out, moq_err *err);

/* A contiguous matrix without values: inputs still to be filled, outputs. */
moq_status moq_tune_make_matrix(moq_tune_memory *memory, moq_dtype dtype, int64_t m,
                                int64_t columns, moq_tensor *out, moq_err *err);
/* Copies bytes of the host to memory of the device. */
moq_status moq_tune_write(const moq_tune_memory *memory, void *to, const void *from, size_t bytes,
                          moq_err *err);
/* Values about as normal activations are, from -2 to 2 with a variance of 1/3, equal in every run.
 */
moq_status moq_tune_fill(const moq_tune_memory *memory, const moq_tensor *matrix, moq_err *err);

/* The number of copies of weights of so many bytes that keep calls that take turns from finding
 * theirs in a cache; 1 on the CPU, where no kernel is chosen for how it reads memory. At most
 * MOQ_MAX_WEIGHT_COPIES. */
#define MOQ_MAX_WEIGHT_COPIES 32
moq_status moq_tune_count_copies(const moq_tune_memory *memory, int64_t bytes, int *count,
                                 moq_err *err);
/* The tensor and copies of it: `count` addresses, the first of which is the tensor's own. */
moq_status moq_tune_copy(moq_tune_memory *memory, const moq_tensor *tensor, int count,
                         const void **copies, moq_err *err);

#endif
