/* NVFP4 experts of many tokens with FP8 products on Hopper (compute "fp8"): rows of e4m3 codes with
 * a scale a row, their columns in the order of operands (moq_cuda_quantize.paired), by the experts'
 * packed weights, folded to e4m3, in tiles of sm90_moe_prefill_folded.h.
 *
 * A step is 128 columns. With 288 rows its products take the tensor cores 1152 cycles, or 1530 with
 * the sums promoted; warps that fold beside them make that 2030, since they take turns with those
 * that promote, and with all copies and barriers it is some 2270. Outputs of a tile take 6000 (g)
 * to 9000 (d in float32). With few rows folding takes 700 cycles a step, and memory as much
 * (docs/lab/experts-prefill.md). */
#include "cuda/choice/moe_folded.h"
#include "cuda/moe/sm90/sm90_moe_prefill_folded.h"
#include "cuda/moe/sm90/sm90_moe_prefill_folded_outputs.h"
#include "cuda/moe/sm90/sm90_moe_prefill_launch.h"
#include "cuda/moe/sm90/sm90_moe_prefill_rows.h"

namespace moq::moe_prefill {

template <class S, product_use USE>
static __device__ __forceinline__ void
make_folded_tile(const folded_args *f, const folded_pipeline *t, const tile_queue *q, place *p,
                 pipeline_state *slot, int group, folded_path *w) {
    float sum[S::T / 2] = {};
    fetch_epilogue_operands<USE>(f, p, group, w->state);
    multiply_folded<S>(t, f->gemm.steps, slot, sum);
    place next = folded_place_after(&f->gemm, q); /* comes while outputs leave */
    write_folded<S, USE>(&f->gemm, p, group, w, sum);
    *p = next;
}

/* Makes a tile by the least products that have room for its rows and code for the activation. */
template <class S, product_use USE>
static __device__ __forceinline__ void
make_fitting_tile(const folded_args *f, const folded_pipeline *t, const tile_queue *q, place *p,
                  pipeline_state *slot, int group, folded_path *w) {
    constexpr bool WIDE = S::wide;
    constexpr int LEAST = WIDE ? 96 : 32, SOME = WIDE ? 192 : 64;
    int rows = __shfl_sync(0xffffffffu, p->rows.rows, 0); /* the compiler sees it is one */
    if (!is_usual<USE>(&f->gemm.act))
        rows = S::tokens;
    if (rows <= LEAST)
        make_folded_tile<folded_tile<WIDE, LEAST, 1>, USE>(f, t, q, p, slot, group, w);
    else if (rows <= SOME)
        make_folded_tile<folded_tile<WIDE, SOME / (WIDE ? 2 : 1), WIDE ? 2 : 1>, USE>(
            f, t, q, p, slot, group, w);
    else
        make_folded_tile<S, USE>(f, t, q, p, slot, group, w);
}

template <class S, product_use USE>
static __device__ __forceinline__ void
consume_folded(const folded_args *f, const folded_pipeline *t, int group, folded_path *w) {
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    tile_queue q = folded_queue(&f->gemm);
    place p = folded_place(&f->gemm, &q);
    for (; q.number < q.end; q.number += q.stride)
        make_fitting_tile<S, USE>(f, t, &q, &p, &slot, group, w);
    if (threadIdx.x % 128 == 0)
        wait_for_boxes<0>();
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(S::threads, 1)
    experts_folded(const __grid_constant__ CUtensorMap weights,
                   const __grid_constant__ CUtensorMap rows,
                   const __grid_constant__ CUtensorMap outputs,
                   const __grid_constant__ folded_args f) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[FOLDED_BARRIERS];
    __shared__ __align__(16) folded_epilogue_operands epilogue[2];
    uint32_t x = fixed_shared_address(smem), room = x + f.gemm.stages * S::token_bytes;
    uint32_t operands = room + OUT_BYTES, packed = operands + f.gemm.stages * OPERAND_STAGE;
    folded_barriers b = make_folded_barriers<S>(&f, barrier);
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* the compiler sees it is one */
    if (warp < MULTIPLIERS / 32) {
        more_registers<S::registers>();
        int group = warp / 4;
        folded_pipeline t = {b, wgmma_operand(operands + group * (OPERAND_STAGE / 2)),
                             wgmma_operand(x), f.gemm.stages};
        folded_path w = {&outputs, &epilogue[group], room + group * (OUT_BYTES / 2), 0};
        consume_folded<S, USE>(&f, &t, group, &w);
    } else if (warp < (MULTIPLIERS + S::folders) / 32) {
        fewer_registers<S::folder_registers>();
        fold_weights<S>(&f.gemm, &b, packed, operands, warp - MULTIPLIERS / 32);
    } else {
        fewer_registers<24>();
        int copier = warp - (MULTIPLIERS + S::folders) / 32;
        if (copier == 0 && is_elected())
            produce_packed<USE>(&f, &weights, &b, packed);
        else if (copier == 1 && is_elected())
            produce_shared_rows<S>(&f.gemm, &rows, &b, x);
    }
    __syncwarp();
    cluster_sync(); /* the other block may still copy to this one */
}

/* ---- launch ---- */

/* What a launch needs to know of a shape: the kernels by what they are for. */
typedef struct {
    int stage, box_rows, threads;
    const void *kernel[3];
} folded_variant;

template <bool WIDE> static folded_variant folded_variant_of(void) {
    typedef folded_tile<WIDE, WIDE ? 144 : 96, WIDE ? 2 : 1> S;
    return {S::token_bytes + OPERAND_STAGE + PACKED_STAGE,
            S::box_rows,
            S::threads,
            {(const void *)experts_folded<S, OF_GATE_AND_UP>,
             (const void *)experts_folded<S, OF_ONE>, (const void *)experts_folded<S, OF_D>}};
}

/* As many stages as fit. Dynamic shared memory is returned. */
static int folded_smem_layout(folded_args *f, const folded_variant *v, int limit) {
    int fixed = 1024 + FOLDED_BARRIERS * 8 + 2 * (int)sizeof(folded_epilogue_operands) + OUT_BYTES;
    int stages = (limit - fixed) / v->stage;
    f->gemm.stages = stages < FOLDED_STAGES ? stages : FOLDED_STAGES;
    MOQ_ASSERT(f->gemm.stages >= 2); /* one is folded while one is multiplied */
    return f->gemm.stages * v->stage + OUT_BYTES;
}

static moq_status multiply_nvfp4_fp8(const moe::expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    bool wide = p->tile_rows > MOQ_MOE_FOLDED_ROWS;
    folded_variant v = wide ? folded_variant_of<true>() : folded_variant_of<false>();
    int64_t k = spec->in_features, n = spec->out_features, blocks = moq_pack_blocks(k);
    int64_t slabs = moq_pack_slabs(n), pairs = spec->target.sm_count / 2;
    moq_cuda_device device;
    CUtensorMap weights, rows, outputs;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    folded_args f = {args_of(p, (k + FOLDED_STEP - 1) / FOLDED_STEP, slabs, 1),
                     p->weight->fold_scale};
    f.gemm.x_scale = (const float *)p->rows->scales;
    int shared = folded_smem_layout(&f, &v, device.shared_per_block);
    int64_t tiles = p->tiles * ((f.gemm.row_tiles + 1) / 2);
    if (tiles > INT32_MAX)
        return moq_fail(err, MOQ_ERR_VALUE, "x: %lld rows are too many for one call",
                        (long long)p->most_rows);
    MOQ_TRY(moq_tensor_map_words(&weights, p->weight->weight, p->call->spec->experts * slabs,
                                 blocks * (MOQ_PACK_BYTES / 8), 4, PACKED_SLAB / 8, err));
    MOQ_TRY(
        moq_tensor_map_rows(&rows, p->rows->data, p->most_rows, k, k, (uint32_t)v.box_rows, err));
    outputs = rows; /* not looked at where g comes out */
    if (!p->first)
        MOQ_TRY(moq_tensor_map_rows(&outputs, p->out, p->most_rows, n * 4, n * 4, OUT_ROWS, err));
    moq_launch launch = {.what = "product of experts",
                         .kernel = v.kernel[use_of(p)],
                         .grid = dim3((unsigned)(2 * (tiles < pairs ? tiles : pairs))),
                         .block = dim3((unsigned)v.threads),
                         .cluster = 2,
                         .shared = (size_t)shared,
                         .stream = (cudaStream_t)p->call->stream,
                         .pdl = true};
    void *parameters[] = {&weights, &rows, &outputs, &f};
    return moq_cuda_launch(&launch, parameters, err);
}

/* ---- the pipeline's hooks ---- */

static moe::row_format format_of(const moq_linear_spec *) {
    return moe::ROWS_TOKEN;
}

static moe::row_tiling tiling_of(const moq_moe_call *call, double) {
    return {moq_moe_folded_tile_rows(call->config), 1, false};
}

static moq_status load_x(const moe::slot_chunk *chunk, moe::expert_product *p, moe::expert_rows *x,
                         moq_err *err) {
    return make_paired_rows_of_x(chunk, p->groups, x, err);
}

/* The scale of g is that of a whole row, of which no block has all columns, so values are written.
 */
static int64_t u_bytes(const moq_moe_call *call) {
    const moq_linear_spec *w2 = &call->spec->w2;
    return moe::row_bytes(moe::ROWS_VALUES, w2->dtype, w2->in_features);
}

static const moe::expert_kernels NVFP4_FP8_PREFILL = {format_of, tiling_of, multiply_nvfp4_fp8,
                                                      load_x,    u_bytes,   make_paired_rows_of_g,
                                                      NULL,      true,      true};

MOQ_EXPERTS_ENTRY(nvfp4_fp8_prefill, NVFP4_FP8_PREFILL)

} // namespace moq::moe_prefill
