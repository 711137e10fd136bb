/* NVFP4 experts of many tokens on Hopper: products of rows of 16 bits with the exact weights of the
 * experts, packed as prepared. Tiles and how they are filled are sm90_moe_prefill_nvfp4_tile.h,
 * codes become operands in sm90_moe_prefill_nvfp4_products.h, and outputs leave as in
 * sm90_moe_prefill_nvfp4_outputs.h.
 *
 * What bounds it (docs/lab/experts-prefill.md): with few rows the instructions that decode, 80 of a
 * warp for a unit with the rest of the loop, so that schedulers issue in 65 to 70 of 100 cycles,
 * and how evenly tiles come out; with many rows the tensor cores, 1152 cycles of products a step of
 * 128 rows by 288. Between, in tiles of 256 rows by up to 128, both, as they slow each other. */
#include "cuda/choice/moe_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_launch.h"
#include "cuda/moe/sm90/sm90_moe_prefill_nvfp4_outputs.h"
#include "cuda/moe/sm90/sm90_moe_prefill_nvfp4_products.h"
#include "cuda/moe/sm90/sm90_moe_prefill_rows.h"

namespace moq::moe_prefill {

/* The tiles of the block, and the outputs on their way, of a warpgroup. */
typedef struct {
    scheduler_consumer tiles;
    uint32_t room;
    int next; /* piece of d */
    maps_of_d maps;
} unit_consumer;

/* Makes the tiles of one width. */
template <class S>
static __device__ __forceinline__ void make_tiles(const gemm_args *a, const unit_reader *t,
                                                  pipeline_state *slot, int group,
                                                  unit_consumer *path) {
    for_tiles_of_width<S>(a, &path->tiles, [&](place p) {
        float sum[S::waves][S::T / 2] = {};
        terms e[2] = {find_terms<S>(a, &p, group, 0), find_terms<S>(a, &p, group, S::waves - 1)};
        multiply<S>(t, a->steps, slot, sum);
        complete(&e[0]);
        complete(&e[1]);
        if constexpr (S::use != OF_D)
            write_g<S>(a, &p, path->room, e, group, sum);
#pragma unroll
        for (int i = 0; S::use == OF_D && i < S::waves; i++) {
            int column = column_of_wave<S>(&p, group, i);
            if constexpr (S::from_registers)
                store_d<S>(a, &p, &e[i], column, sum[i]);
            else
                write_d<S>(&path->maps, &p, path->room, &e[i], group, column, &path->next, sum[i]);
        }
    });
}

/* In the order of width_after. */
template <class S>
static __device__ __forceinline__ void consume(const gemm_args *a, const unit_reader *t, int group,
                                               unit_consumer path) {
    pipeline_state slot = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    fetch_next_tile(&path.tiles);
    make_tiles<S>(a, t, &slot, group, &path);
    if constexpr (S::large) {
        make_tiles<typename S::template of_width<256>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<192>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<128>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<96>>(a, t, &slot, group, &path);
    } else if constexpr (S::tokens == 128) {
        make_tiles<typename S::template of_width<112>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<96>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<80>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<64>>(a, t, &slot, group, &path);
        make_tiles<typename S::template of_width<32>>(a, t, &slot, group, &path);
    } else {
        if constexpr (S::tokens > 32) {
            make_tiles<typename S::template of_width<48>>(a, t, &slot, group, &path);
            make_tiles<typename S::template of_width<32>>(a, t, &slot, group, &path);
        }
        make_tiles<typename S::template of_width<16>>(a, t, &slot, group, &path);
    }
    if (S::use == OF_D && !S::from_registers)
        store_wait<0>();
}

#define BARRIERS (3 * MANY_STAGES + 2 * SCHEDULER_STAGES)

template <class S>
static __global__ void __launch_bounds__(128 * (S::warpgroups + 1), 1)
    experts_of_units(const __grid_constant__ CUtensorMap weights,
                     const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a,
                     const __grid_constant__ CUtensorMap whole_d,
                     const __grid_constant__ CUtensorMap eight_of_d) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[BARRIERS];
    __shared__ scheduler_state tiles;
    uint32_t full = fixed_shared_address(barrier), empty = full + 8 * MANY_STAGES;
    uint32_t gathered = empty + 8 * MANY_STAGES;
    uint32_t x = fixed_shared_address(smem), room = x + a.stages * S::token_bytes;
    uint32_t scales = room + S::warpgroups * S::room;
    uint32_t units = scales + S::warpgroups * 4 * 2 * S::scales;
    feed f = {&weights, &rows, &tiles, units, x, full, empty, gathered, gathered + 8 * MANY_STAGES};
    set_up<S>(&a, &f);
    if (threadIdx.x < S::warpgroups * 128) {
        more_registers<S::registers>();
        int group =
            __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
        unit_reader t = reader_of<S>(&f, scales, a.stages);
        consume<S>(&a, &t, group,
                   {{&tiles, f.posted}, room + group * S::room, 0, {&whole_d, &eight_of_d}});
    } else {
        fewer_registers<S::copier_registers>();
        fill<S>(&a, &f);
    }
}

/* ---- launch ---- */

/* What a launch needs to know of a shape and a use. */
typedef struct {
    int stage, room, warpgroups, box_slabs, units, box_units, box_rows, at_once;
    const void *kernel;
} unit_variant;

template <class S> static unit_variant variant_of(void) {
    return {S::token_bytes + S::weight_bytes,
            S::warpgroups * (S::room + 4 * 2 * S::scales),
            S::warpgroups,
            S::box_slabs,
            S::units,
            S::box_units,
            S::box_rows,
            S::at_once,
            (const void *)experts_of_units<S>};
}

template <nvfp4_prefill::operand_type TYPE, product_use USE>
static unit_variant variant_of_tile(int rows, bool deep) {
    if (rows == 32)
        return variant_of<unit_shape<TYPE, USE, 32, 32, 4>>();
    if (deep)
        return variant_of<unit_shape<TYPE, USE, 64, 64, 2>>();
    if (rows == 64)
        return variant_of<unit_shape<TYPE, USE, 64, 64, 2, 2>>();
    if (rows == 128)
        return variant_of<unit_shape<TYPE, USE, 128, 128>>();
    return variant_of<unit_shape<TYPE, USE, 288, 288>>();
}

template <nvfp4_prefill::operand_type TYPE>
static unit_variant variant_for(const moe::expert_product *p) {
    int rows = p->tile_rows;
    bool deep = moq_moe_prefill_deep(p->call->spec, p->call->config);
    product_use use = use_of(p);
    return use == OF_D     ? variant_of_tile<TYPE, OF_D>(rows, deep)
           : use == OF_ONE ? variant_of_tile<TYPE, OF_ONE>(rows, deep)
                           : variant_of_tile<TYPE, OF_GATE_AND_UP>(rows, deep);
}

/* As many stages as fit beside the outputs; dynamic shared memory is returned. */
static int set_stages(gemm_args *a, const unit_variant *v, int limit) {
    int stages = (limit - 1024 - BARRIERS * 8 - (int)sizeof(scheduler_state) - v->room) / v->stage;
    a->stages = stages < MANY_STAGES ? stages : MANY_STAGES;
    MOQ_ASSERT(a->stages >= 2); /* of which one is filled while the other is multiplied */
    return a->stages * v->stage + v->room;
}

static moq_status multiply_nvfp4(const moe::expert_product *p, moq_err *err) {
    const moq_linear_spec *spec = p->spec;
    unit_variant v = spec->dtype == MOQ_DT_F16 ? variant_for<nvfp4_prefill::AS_F16>(p)
                                               : variant_for<nvfp4_prefill::AS_BF16>(p);
    int64_t k = spec->in_features, blocks = moq_pack_blocks(k);
    int64_t slabs = moq_pack_slabs(spec->out_features);
    int64_t row_of_d = spec->out_features * (p->d_dtype == MOQ_DT_BF16 ? 2 : 4);
    moq_cuda_device device;
    CUtensorMap weights, rows, of_d[2];
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(p, (blocks + v.units - 1) / v.units, slabs, v.box_slabs / WAVE_SLABS);
    int shared = set_stages(&a, &v, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_words(&weights, p->weight->weight, p->call->spec->experts * slabs,
                                 blocks * UNIT_WORDS, v.box_slabs, v.box_units * UNIT_WORDS, err));
    rows = of_d[0] = of_d[1] = weights; /* not looked at where rows are gathered, and g made */
    if (!p->gathered)
        MOQ_TRY(moq_tensor_map_rows(&rows, p->rows->data, p->most_rows, k * 2,
                                    moe::row_bytes(moe::ROWS_VALUES, spec->dtype, k),
                                    (uint32_t)v.box_rows, err));
    for (int i = 0; !p->first && i < 2; i++)
        MOQ_TRY(moq_tensor_map_rows(&of_d[i], p->out, p->most_rows, row_of_d, row_of_d,
                                    i ? 8u : (uint32_t)v.at_once, err));
    return launch(p, v.kernel, &a, shared, &weights, &rows, v.warpgroups, false, err, of_d);
}

/* ---- the pipeline's hooks ---- */

static moe::row_format format_of(const moq_linear_spec *) {
    return moe::ROWS_VALUES;
}

static moe::row_tiling tiling_of(const moq_moe_call *call, double) {
    return {moq_moe_prefill_tile_rows(call->spec, call->config), MOQ_MOE_PREFILL_ROWS_OF_D, false};
}

/* Small tiles gather their rows; large ones would wait for them (docs/lab/experts-prefill.md). */
static moq_status load_x(const moe::slot_chunk *chunk, moe::expert_product *p, moe::expert_rows *x,
                         moq_err *err) {
    const moq_moe_call *call = chunk->call;
    if (call->weights_on_input || call->w13.pre_quant_scale)
        return moe::make_rows_of_x(chunk, p->groups, x, err);
    if (chunk->tile_rows > 64) {
        p->early = true;
        return make_rows_of_tokens(chunk, p->groups, x, NULL, err);
    }
    int64_t stride = call->x->stride[0] * (int64_t)moq_dtype_size(call->x->dtype);
    x->data = (uint8_t *)call->x->data + chunk->first * stride;
    p->gathered = true;
    return MOQ_OK;
}

static int64_t u_bytes(const moq_moe_call *call) {
    const moq_linear_spec *w2 = &call->spec->w2;
    return call->w2.pre_quant_scale ? moe::row_bytes(moe::ROWS_VALUES, w2->dtype, w2->in_features)
                                    : 0;
}

static const moe::expert_kernels NVFP4_PREFILL = {
    format_of, tiling_of, multiply_nvfp4, load_x, u_bytes, moe::make_rows_of_g, NULL, true, true};

MOQ_EXPERTS_ENTRY(nvfp4_prefill, NVFP4_PREFILL)

} // namespace moq::moe_prefill
