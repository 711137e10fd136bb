/* Rows of e4m3 codes of x, one a slot, by the scale of the slot's expert: expert_rows.cu's
 * ROWS_TENSOR, bit by bit, for many rows. A warp has a row, and asks for 2048 columns at once; a
 * block a row, as there, is bound by the way from the slot to x. */
#include "cuda/device/ptx.h"
#include "cuda/moe/sm90/sm90_moe_many_rows.h"
#include "cuda/runtime/launch.h"

namespace moq::moe_many {

#define ROW_WARPS 8
#define AT_ONCE   4 /* chunks of a lane */

typedef struct {
    moq_rows x; /* from the chunk's first token on */
    moe::slot_groups groups;
    const float *input_scale; /* [E, parts] */
    int parts, top_k, k;
    uint8_t *codes; /* [rows, k] */
    int rows;
} code_args;

static __global__ void __launch_bounds__(32 * ROW_WARPS)
    make_codes(const __grid_constant__ code_args a) {
    int row = (int)(blockIdx.x * ROW_WARPS + threadIdx.x / 32), lane = threadIdx.x % 32;
    launch_dependents();
    wait_for_predecessor();
    if (row >= a.rows)
        return;
    int count = a.groups.count[0], slot = a.groups.slot[row], expert = a.groups.owner[row];
    if (row >= count || slot < 0)
        return;
    int64_t token = slot / a.top_k;
    float factor = __frcp_rn(a.input_scale[(int64_t)expert * a.parts]);
    for (int base = lane * 16; base < a.k; base += 32 * 16 * AT_ONCE) {
        moq_chunk chunk[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (base + 512 * i < a.k)
                chunk[i] = moq_load_chunk(&a.x, token, base + 512 * i);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float value[16];
            if (base + 512 * i >= a.k)
                break;
            moq_widen(&a.x, &chunk[i], value);
            *(uint4 *)(a.codes + (int64_t)row * a.k + base + 512 * i) =
                moq_codes_multiplied(value, factor);
        }
    }
}

moq_status make_codes_of_x(const moe::slot_chunk *chunk, const moe::slot_groups *groups,
                           const moe::expert_rows *rows, moq_err *err) {
    const moq_moe_call *call = chunk->call;
    const moq_linear_spec *w13 = &call->spec->w13;
    code_args a = {};
    a.x = moq_rows_of(call->x);
    a.x.data =
        (const uint8_t *)a.x.data + chunk->first * a.x.stride * (int64_t)moq_dtype_size(a.x.dtype);
    a.groups = *groups;
    a.input_scale = call->w13.input_scale;
    a.parts = w13->partition_count;
    a.top_k = call->spec->top_k;
    a.k = (int)w13->in_features;
    a.codes = (uint8_t *)rows->data;
    a.rows = (int)moe::most_rows(chunk);
    moq_launch launch = {.what = "rows of experts",
                         .kernel = (const void *)make_codes,
                         .grid = dim3((unsigned)((a.rows + ROW_WARPS - 1) / ROW_WARPS)),
                         .block = dim3(32 * ROW_WARPS),
                         .stream = (cudaStream_t)call->stream,
                         .overlap = true};
    void *parameters[] = {&a};
    return moq_cuda_launch(&launch, parameters, err);
}

} // namespace moq::moe_many
