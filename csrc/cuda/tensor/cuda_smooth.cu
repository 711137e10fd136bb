/* Smoothing on the device: rows[m, k] = round(x[m, k] * scale[k]) (cuda_smooth.h).
 *
 * A thread has 8 neighbours of a row, a block as many columns as it has threads for and then these
 * columns of further rows, so that it reads their scales once. Rows that are not aligned to 16
 * bytes are read value by value, and rows without one stride are gathered first. Bound: memory. */
#include "cuda/tensor/cuda_smooth.h"

#include "cuda/device/load.h"
#include "cuda/device/ptx.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_rows.h"

namespace moq::smoothing {

#define THREADS 128
#define PIECE   8 /* values of a thread */
#define SPAN    (THREADS * PIECE)
#define BLOCKS  2048 /* blocks, about as many at most */

typedef struct {
    moq_rows x;
    moq_output out;
    const float *scale;
    int64_t count, columns;
    bool aligned;
} smooth_args;

/* Eight values as they are in memory; 16-bit ones fill half of it. */
typedef struct {
    uint4 word[2];
} piece;

static __device__ __forceinline__ piece load_piece(const smooth_args &a, int64_t row, int64_t k) {
    piece p;
    bool wide = a.x.dtype == MOQ_DT_F32;
    const uint4 *from =
        (const uint4 *)((const uint8_t *)a.x.data + (row * a.x.stride + k) * (wide ? 4 : 2));
    p.word[0] = from[0];
    if (wide)
        p.word[1] = from[1];
    return p;
}

static __device__ __forceinline__ void smooth_piece(piece &p, const float (&scale)[PIECE],
                                                    moq_dtype dtype) {
    if (dtype == MOQ_DT_F32) {
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            uint32_t &word = (&p.word[i / 4].x)[i % 4];
            word = __float_as_uint(__fmul_rn(__uint_as_float(word), scale[i]));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
        uint32_t &word = (&p.word[0].x)[i];
        float2 pair = moq_widen_pair(word, dtype);
        word = moq_narrow_pair(dtype, __fmul_rn(pair.x, scale[2 * i]),
                               __fmul_rn(pair.y, scale[2 * i + 1]));
    }
}

static __device__ __forceinline__ void store_piece(const smooth_args &a, int64_t row, int64_t k,
                                                   const piece &p) {
    bool wide = a.out.dtype == MOQ_DT_F32;
    uint4 *to = (uint4 *)((uint8_t *)a.out.data + (row * a.out.stride + k) * (wide ? 4 : 2));
    to[0] = p.word[0];
    if (wide)
        to[1] = p.word[1];
}

static __global__ void __launch_bounds__(THREADS)
    smooth_rows(const __grid_constant__ smooth_args a) {
    int64_t k = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * PIECE;
    int64_t left = a.columns - k;
    float scale[PIECE];
    launch_dependents();
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        scale[i] = i < left ? a.scale[k + i] : 0.0f;
    wait_for_predecessor();
    for (int64_t row = blockIdx.y; row < a.count && left > 0; row += gridDim.y) {
        if (a.aligned && left >= PIECE) {
            piece p = load_piece(a, row, k);
            smooth_piece(p, scale, a.x.dtype);
            store_piece(a, row, k, p);
            continue;
        }
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            if (i < left)
                moq_store_output(
                    &a.out, row, (int)(k + i),
                    __fmul_rn(moq_load_one(a.x.data, row * a.x.stride + k + i, a.x.dtype),
                              scale[i]),
                    0.0f);
        }
    }
}

extern "C" moq_status moq_cuda_smooth_rows(const moq_tensor *x, const float *scale,
                                           const moq_tensor *rows, void *stream, moq_err *err) {
    moq_tensor from;
    if (!moq_tensor_as_rows(x, &from) || (from.shape[1] > 1 && from.stride[1] != 1)) {
        MOQ_TRY(moq_cuda_gather_rows(x, rows, stream, err));
        from = *rows;
    }
    int64_t size = (int64_t)moq_dtype_size(from.dtype);
    smooth_args args = {.x = moq_rows_of(&from),
                        .out = {rows->data, rows->stride[0], rows->dtype, MOQ_DT_NONE, NULL},
                        .scale = scale,
                        .count = rows->shape[0],
                        .columns = rows->shape[1],
                        .aligned =
                            (uintptr_t)from.data % 16 == 0 && from.stride[0] * size % 16 == 0};
    int64_t spans = (args.columns + SPAN - 1) / SPAN, height = (BLOCKS + spans - 1) / spans;
    moq_launch launch = {
        .what = "smoothing x",
        .kernel = (const void *)smooth_rows,
        .grid = dim3((unsigned)spans, (unsigned)(args.count < height ? args.count : height)),
        .block = dim3(THREADS),
        .stream = (cudaStream_t)stream,
        .pdl = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::smoothing
