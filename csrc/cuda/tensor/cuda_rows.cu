/* Copies between a tensor of any strides and a matrix of its rows: rows[m, k] = tensor[..., k], or
 * back (cuda_rows.h).
 *
 * A block has SPAN columns of one row, so that the place of the row is found once for all of them.
 * Bound: memory if the values of a row are neighbours; otherwise sectors of 32 bytes, one value of
 * which is used. */
#include "core/invariant.h"
#include "cuda/device/ptx.h"
#include "cuda/runtime/launch.h"
#include "cuda/tensor/cuda_rows.h"

namespace moq::copied_rows {

#define THREADS 256
#define SPAN    1024 /* columns of a block */
#define MAX_Y   65535

typedef struct {
    void *tensor, *rows;
    int64_t count, columns;
    int64_t row_stride; /* stride of `rows` */
    int64_t step;       /* stride of the last dimension of the tensor */
    int leading;        /* other dimensions of the tensor */
    int64_t shape[MOQ_MAX_NDIM], stride[MOQ_MAX_NDIM];
} copy_args;

static __device__ __forceinline__ int64_t row_offset(const copy_args *a, int64_t row) {
    int64_t offset = 0;
    for (int i = a->leading - 1; i >= 0; i--) {
        offset += row % a->shape[i] * a->stride[i];
        row /= a->shape[i];
    }
    return offset;
}

template <typename value, bool gather>
static __global__ void __launch_bounds__(THREADS)
    copy_rows(const __grid_constant__ copy_args args) {
    launch_dependents();
    wait_for_predecessor();
    for (int64_t row = blockIdx.x; row < args.count; row += gridDim.x) {
        value *strided = (value *)args.tensor + row_offset(&args, row);
        value *packed = (value *)args.rows + row * args.row_stride;
        for (int64_t span = blockIdx.y; span * SPAN < args.columns; span += gridDim.y) {
            int64_t end = min((span + 1) * SPAN, args.columns);
            for (int64_t k = span * SPAN + threadIdx.x; k < end; k += THREADS) {
                if (gather)
                    packed[k] = strided[k * args.step];
                else
                    strided[k * args.step] = packed[k];
            }
        }
    }
}

/* Launches the copy; outputs have 16 or 32 bits, inputs may be codes. */
static const void *kernel_for(size_t size, bool gather) {
    if (size == 4)
        return gather ? (const void *)copy_rows<uint32_t, true>
                      : (const void *)copy_rows<uint32_t, false>;
    if (size == 2)
        return gather ? (const void *)copy_rows<uint16_t, true>
                      : (const void *)copy_rows<uint16_t, false>;
    MOQ_ASSERT(size == 1 && gather);
    return (const void *)copy_rows<uint8_t, true>;
}

static moq_status copy(const moq_tensor *tensor, const moq_tensor *rows, bool gather, void *stream,
                       moq_err *err) {
    int leading = tensor->ndim - 1;
    copy_args args = {.tensor = tensor->data,
                      .rows = rows->data,
                      .count = rows->shape[0],
                      .columns = rows->shape[1],
                      .row_stride = rows->stride[0],
                      .step = tensor->stride[leading],
                      .leading = leading};
    for (int i = 0; i < leading; i++) {
        args.shape[i] = tensor->shape[i];
        args.stride[i] = tensor->stride[i];
    }
    int64_t spans = (args.columns + SPAN - 1) / SPAN;
    moq_launch launch = {.what = gather ? "gathering the rows of x" : "scattering the rows of out",
                         .kernel = kernel_for(moq_dtype_size(tensor->dtype), gather),
                         .grid = dim3((unsigned)(args.count < INT32_MAX ? args.count : INT32_MAX),
                                      (unsigned)(spans < MAX_Y ? spans : MAX_Y)),
                         .block = dim3(THREADS),
                         .stream = (cudaStream_t)stream,
                         .pdl = true};
    void *parameters[] = {&args};
    return moq_cuda_launch(&launch, parameters, err);
}

extern "C" moq_status moq_cuda_gather_rows(const moq_tensor *tensor, const moq_tensor *rows,
                                           void *stream, moq_err *err) {
    return copy(tensor, rows, true, stream, err);
}

extern "C" moq_status moq_cuda_scatter_rows(const moq_tensor *rows, const moq_tensor *tensor,
                                            void *stream, moq_err *err) {
    return copy(tensor, rows, false, stream, err);
}

} // namespace moq::copied_rows
