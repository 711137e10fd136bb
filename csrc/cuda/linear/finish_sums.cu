/* Output of a linear by its sums in the workspace: see finish_sums.h. Moves the sums once and y
 * once, 16 bytes of y a thread. */
#include "cuda/device/ptx.h"
#include "cuda/linear/finish_sums.h"
#include "cuda/runtime/launch.h"

namespace moq {

#define THREADS 256
#define COLUMNS 8 /* columns of a thread: 16 bytes of y */

static __device__ __forceinline__ void load_sums(const moq_sums *a, int64_t at,
                                                 float (&value)[COLUMNS]) {
    const uint4 *from =
        (const uint4 *)((const uint8_t *)a->sums +
                        at * (a->dtype == MOQ_DT_F32 || a->dtype == MOQ_DT_I32 ? 4 : 2));
    uint4 word[2] = {from[0], {}};
    if (a->dtype == MOQ_DT_F32 || a->dtype == MOQ_DT_I32)
        word[1] = from[1];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        value[i] = a->dtype == MOQ_DT_I32 ? __int2float_rn((int)(&word[i / 4].x)[i % 4])
                                          : moq_load_one(word, i, a->dtype);
}

static __device__ __forceinline__ void store_one(const moq_sums *a, int64_t at, float value) {
    ((uint16_t *)a->out.data)[at] = (uint16_t)moq_narrow_pair(a->out.dtype, value, value);
}

static __device__ __forceinline__ void store_row(const moq_sums *a, int64_t row, int column,
                                                 const float (&value)[COLUMNS], bool aligned) {
    if (!aligned) {
        for (int i = 0; i < COLUMNS; i++)
            store_one(a, row * a->out.stride + column + i, value[i]);
        return;
    }
    uint32_t word[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++)
        word[i] = moq_narrow_pair(a->out.dtype, value[2 * i], value[2 * i + 1]);
    *(uint4 *)((uint16_t *)a->out.data + row * a->out.stride + column) =
        make_uint4(word[0], word[1], word[2], word[3]);
}

/* Writes y = round(sums * x_scale * w_scale + addend + bias). */
static __global__ void finish_sums(const __grid_constant__ moq_sums a, bool aligned) {
    int column = (int)(blockIdx.x * THREADS + threadIdx.x) * COLUMNS;
    wait_for_predecessor();
    if (column >= a.n)
        return;
    for (int64_t row = blockIdx.y; row < a.m; row += gridDim.y) {
        float value[COLUMNS];
        load_sums(&a, row * a.n + column, value);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            float factor = a.w_scale ? a.w_scale[column + i] : 1.0f;
            if (a.x_scale)
                factor = __fmul_rn(a.x_scale[row * a.x_stride], factor);
            value[i] = __fmul_rn(value[i], factor);
            if (a.out.addend)
                value[i] = __fadd_rn(value[i], moq_load_addend(&a.out, row, column + i));
            if (a.out.bias)
                value[i] = __fadd_rn(value[i], moq_load_bias(&a.out, column + i));
        }
        store_row(&a, row, column, value, aligned);
    }
}

moq_status moq_finish_sums(const moq_sums *sums, const char *what, void *stream, moq_err *err) {
    moq_output out = sums->out;
    bool aligned = (uintptr_t)out.data % 16 == 0 && out.stride % COLUMNS == 0;
    moq_launch launch = {};
    launch.what = what;
    launch.kernel = (const void *)finish_sums;
    unsigned wide = (unsigned)((sums->n / COLUMNS + THREADS - 1) / THREADS);
    launch.grid = dim3(wide, (unsigned)(sums->m < 65535 ? sums->m : 65535));
    launch.block = dim3(THREADS);
    launch.stream = (cudaStream_t)stream;
    launch.pdl = true;
    void *args[] = {(void *)sums, &aligned};
    return moq_cuda_launch(&launch, args, err);
}

} // namespace moq
