/* Tensors to measure on: see tune_memory.h. */
#include "ops/tune_memory.h"

#include "core/formats.h"
#include "cuda/cuda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Copies of the weights hold this many times the second-level cache. */
#define CACHE_FACTOR 5
#define TILE         65521 /* random values, repeated along x; a prime, so that rows differ */

struct moq_piece {
    moq_piece *next;
    void *memory;
};

static bool on_cuda(const moq_tune_memory *memory) {
    return memory->device.kind == MOQ_CUDA;
}

moq_status moq_tune_memory_begin(moq_device device, moq_tune_memory *memory, moq_err *err) {
    *memory = (moq_tune_memory){.device = device};
    return on_cuda(memory) ? moq_cuda_make_stream(&memory->stream, err) : MOQ_OK;
}

static void release(const moq_tune_memory *memory, void *piece) {
    if (on_cuda(memory))
        moq_cuda_release(piece, memory->stream);
    else
        free(piece);
}

void moq_tune_memory_end(moq_tune_memory *memory) {
    while (memory->first) {
        moq_piece *piece = memory->first;
        memory->first = piece->next;
        release(memory, piece->memory);
        free(piece);
    }
    if (on_cuda(memory))
        moq_cuda_end_stream(memory->stream);
}

static moq_status allocate(const moq_tune_memory *memory, int64_t bytes, void **out, moq_err *err) {
    if (on_cuda(memory))
        return moq_cuda_allocate((size_t)bytes, memory->stream, out, err);
    *out = malloc((size_t)bytes);
    return *out ? MOQ_OK : moq_fail_of(err, MOQ_ERR_MEMORY, "tune", "out of memory");
}

moq_status moq_tune_allocate(moq_tune_memory *memory, int64_t bytes, void **out, moq_err *err) {
    moq_piece *piece = calloc(1, sizeof *piece);
    if (!piece)
        return moq_fail_of(err, MOQ_ERR_MEMORY, "tune", "out of memory");
    piece->next = memory->first;
    memory->first = piece;
    MOQ_TRY(allocate(memory, bytes, &piece->memory, err));
    *out = piece->memory;
    return MOQ_OK;
}

moq_status moq_tune_make_matrix(moq_tune_memory *memory, moq_dtype dtype, int64_t m,
                                int64_t columns, moq_tensor *out, moq_err *err) {
    *out = (moq_tensor){.dtype = dtype, .device = memory->device, .ndim = 2, .shape = {m, columns}};
    moq_tensor_set_contiguous(out);
    int64_t values = moq_tensor_numel(out);
    if (values < 0)
        return moq_fail_of(err, MOQ_ERR_VALUE, "tokens", "expected fewer, got %lld", (long long)m);
    return moq_tune_allocate(memory, values * (int64_t)moq_dtype_size(dtype), &out->data, err);
}

static void fill_tile(float *values) {
    uint64_t state = 1;
    for (int i = 0; i < TILE; i++) {
        float sum = -2;
        for (int j = 0; j < 4; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX */
            sum += (float)(state >> 40) * 0x1p-24f;
        }
        values[i] = sum;
    }
}

moq_status moq_tune_write(const moq_tune_memory *memory, void *to, const void *from, size_t bytes,
                          moq_err *err) {
    if (on_cuda(memory))
        return moq_cuda_upload(to, from, bytes, memory->stream, err);
    memcpy(to, from, bytes);
    return MOQ_OK;
}

moq_status moq_tune_fill(const moq_tune_memory *memory, const moq_tensor *matrix, moq_err *err) {
    size_t size = moq_dtype_size(matrix->dtype);
    size_t bytes = (size_t)moq_tensor_numel(matrix) * size, step = TILE * size;
    float *values = malloc(TILE * sizeof *values);
    char *tile = malloc(step), *to = matrix->data;
    moq_status status = MOQ_OK;
    if (!values || !tile) {
        status = moq_fail_of(err, MOQ_ERR_MEMORY, "tune", "out of memory");
    } else {
        fill_tile(values);
        moq_encode_row(matrix->dtype, values, TILE, tile);
    }
    for (size_t at = 0; at < bytes && status == MOQ_OK; at += step) {
        size_t part = bytes - at < step ? bytes - at : step;
        status = moq_tune_write(memory, to + at, tile, part, err);
    }
    free(values);
    free(tile);
    return status;
}

moq_status moq_tune_count_copies(const moq_tune_memory *memory, int64_t bytes, int *count,
                                 moq_err *err) {
    moq_cuda_device device;
    *count = 1;
    if (!on_cuda(memory))
        return MOQ_OK;
    MOQ_TRY(moq_cuda_query_device(memory->device.index, &device, err));
    double wanted = fmin(MOQ_MAX_WEIGHT_COPIES, CACHE_FACTOR * device.l2_bytes / (double)bytes);
    while (*count < wanted)
        ++*count;
    return MOQ_OK;
}

moq_status moq_tune_copy(moq_tune_memory *memory, const moq_tensor *tensor, int count,
                         const void **copies, moq_err *err) {
    int64_t bytes = moq_tensor_numel(tensor) * (int64_t)moq_dtype_size(tensor->dtype);
    copies[0] = tensor->data;
    for (int i = 1; i < count; i++) {
        void *copy = NULL;
        MOQ_TRY(moq_tune_allocate(memory, bytes, &copy, err));
        MOQ_TRY(moq_cuda_copy(copy, tensor->data, (size_t)bytes, memory->stream, err));
        copies[i] = copy;
    }
    return MOQ_OK;
}
