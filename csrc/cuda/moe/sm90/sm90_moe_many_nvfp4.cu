/* NVFP4 experts of many tokens on Hopper: products of rows of 16 bits with the exact weights of the
 * experts, packed as prepared, in tiles of sm90_moe_many_tile.h. Codes become operands in registers
 * as for linears (cuda/linear/sm90/sm90_nvfp4_many_products.h).
 *
 * A step is 64 columns: 16 KB of rows or less in the 128-byte swizzle and a unit of each of 16
 * slabs, in a ring of eight to twelve. A tile of 256 by 128 takes 1024 cycles of products a step,
 * in which its 16384 weights take 17 instructions for 8, two sevenths of what can be issued; L2 has
 * to deliver 25 bytes a cycle and multiprocessor. It is the tensor cores that bound it, and what
 * tiles of 128 rows leave empty. */
#include "cuda/linear/sm90/sm90_nvfp4_many_products.h"
#include "cuda/moe/sm90/sm90_moe_many_launch.h"

namespace moq::moe_many {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)
#define WAVE_SLABS (WAVE_ROWS / MOQ_PACK_ROWS)

/* Tiles of up to MOST rows of tokens, of which N are multiplied. */
template <nvfp4_many::operand_type TYPE, int MOST, int N>
struct nvfp4_shape : nvfp4_many::tile<TYPE, N, MOQ_ALONE, false> {
    static constexpr bool groups = false, writes_codes = false, fine = MOST == 64, half = true,
                          three = MOST == 128;
    static constexpr int warpgroups = 2, registers = 232, copier_registers = 40;
    static constexpr float unit = MOQ_NVFP4_FACTOR;
    static constexpr int row_unit = MOQ_PACK_ROWS, box_step = UNIT_WORDS;
    static constexpr int box_bytes = WAVE_SLABS * MOQ_PACK_BYTES;
    static constexpr int weight_bytes = 2 * warpgroups * box_bytes, weight_stage = weight_bytes;
    static constexpr int tokens = MOST, box_rows = MOST / 4, lag = 3;
    static constexpr int token_bytes = MOST * 128, row_stage = token_bytes;
    template <int M> using of_width = nvfp4_shape<TYPE, MOST, M>;
};

/* A warpgroup's two waves, whose units lie apart. */
typedef struct {
    nvfp4_many::consumer_ring wave[2];
} two_waves;

/* Adds the products of a tile's steps. The waves take turns: one is decoded while the products of
 * the other are under way, so that a thread has the operands of two units. */
template <class S>
static __device__ __forceinline__ void
multiply_by_turns(const two_waves *t, int steps, ring_place *slot, float (&sum)[2][S::T / 2]) {
    nvfp4_many::operand_unit first, second;
    ring_place before = *slot;
    nvfp4_many::decode<S>(&t->wave[0], slot, &first);
#pragma unroll 1
    for (int step = 0;; step++) {
        nvfp4_many::issue<S>(&t->wave[0], slot, &first, sum[0]);
        if (step > 0) {
            wgmma_wait<1>();
            nvfp4_many::release<S>(&t->wave[0], &before);
        }
        nvfp4_many::decode<S>(&t->wave[1], slot, &second);
        nvfp4_many::issue<S>(&t->wave[1], slot, &second, sum[1]);
        before = *slot;
        advance(slot, t->wave[0].stages);
        if (step + 1 == steps)
            break;
        wgmma_wait<1>();
        nvfp4_many::decode<S>(&t->wave[0], slot, &first);
    }
    wgmma_wait<0>();
    stay_here(sum[0]);
    stay_here(sum[1]);
    nvfp4_many::release<S>(&t->wave[0], &before);
}

/* Queues the products of both waves of a stage behind those of the one before, whose end it waits
 * for. */
template <class S>
static __device__ __forceinline__ void
follow(const two_waves *t, ring_place *slot, ring_place *before, bool first,
       const nvfp4_many::operand_unit (&o)[2], float (&sum)[2][S::T / 2]) {
    nvfp4_many::issue<S>(&t->wave[0], slot, &o[0], sum[0]);
    nvfp4_many::issue<S>(&t->wave[1], slot, &o[1], sum[1]);
    if (!first) {
        wgmma_wait<2>();
        nvfp4_many::release<S>(&t->wave[0], before);
    }
    *before = *slot;
    advance(slot, t->wave[0].stages);
}

template <class S>
static __device__ __forceinline__ void decode_both(const two_waves *t, const ring_place *slot,
                                                   nvfp4_many::operand_unit (&o)[2]) {
    nvfp4_many::decode<S>(&t->wave[0], slot, &o[0]);
    nvfp4_many::decode<S>(&t->wave[1], slot, &o[1]);
}

/* The same a step at a time, with the operands of two: where products are short it is the way from
 * codes to operands that bounds a step, and two units at once are ready sooner. */
template <class S>
static __device__ __forceinline__ void
multiply_by_steps(const two_waves *t, int steps, ring_place *slot, float (&sum)[2][S::T / 2]) {
    nvfp4_many::operand_unit even[2], odd[2];
    ring_place before = *slot;
    decode_both<S>(t, slot, even);
#pragma unroll 1
    for (int step = 0;; step += 2) {
        follow<S>(t, slot, &before, step == 0, even, sum);
        if (step + 1 == steps)
            break;
        decode_both<S>(t, slot, odd);
        follow<S>(t, slot, &before, false, odd, sum);
        if (step + 2 == steps)
            break;
        decode_both<S>(t, slot, even);
    }
    wgmma_wait<0>();
    stay_here(sum[0]);
    stay_here(sum[1]);
    nvfp4_many::release<S>(&t->wave[0], &before);
}

template <class S, product_use USE>
static __device__ __forceinline__ void make_tile(const gemm_args *a, const two_waves *t,
                                                 const place *p, ring_place *slot, const way_out *w,
                                                 int group) {
    float sum[2][S::T / 2] = {};
    if constexpr (S::tokens == 64)
        multiply_by_steps<S>(t, a->steps, slot, sum);
    else
        multiply_by_turns<S>(t, a->steps, slot, sum);
    write_tile<S, USE>(a, p, group, 1.0f, w, sum);
}

template <class S, product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const two_waves *t,
                                               const way_out *w, int group) {
    ring_place slot = {0, 0};
    wait_for_predecessor();
    launch_dependents(); /* which know by then that the grouping is done */
    for (tile_queue q = tiles_of_block<S>(a); q.number < q.end; q.number += q.stride) {
        place p = place_at<S>(a, q.number);
        with_width<S, USE>(a, p.rows.rows, [&](auto width) {
            typedef typename S::template of_width<decltype(width)::columns> narrow;
            make_tile<narrow, USE>(a, t, &p, &slot, w, group);
        });
    }
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(128 * (S::warpgroups + 1), 1)
    experts_nvfp4(const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[3 * MANY_STAGES];
    __shared__ __align__(8) float board[S::warpgroups][BOARD];
    __shared__ uint32_t most[2][TURNED];
    __shared__ uint32_t places[GATHERERS][BOARD / GATHERERS];
    uint32_t x = fixed_shared_address(smem), units = x + a.stages * S::row_stage;
    uint32_t turn = units + a.stages * S::weight_stage;
    ring_barriers b = make_barriers<S>(&a, barrier);
    if (threadIdx.x < S::warpgroups * 128) {
        more_registers<S::registers>();
        int group =
            __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); /* the compiler sees it is one */
        int lane = threadIdx.x % 32;
        two_waves t;
#pragma unroll
        for (int wave = 0; wave < 2; wave++) {
            uint32_t own =
                units + (2 * group + wave) * S::box_bytes + threadIdx.x % 128 / 32 * MOQ_PACK_BYTES;
            t.wave[wave] = {b.rows,
                            b.empty,
                            wgmma_operand(x),
                            own + moq_pack_word_at(lane / 4, lane % 4, 0),
                            own + moq_pack_scale_at(lane / 4, 0),
                            a.stages};
        }
        way_out w = {board[group], turn + group * (MANY_TURN_BYTES / S::warpgroups), most};
        consume<S, USE>(&a, &t, &w, group);
    } else {
        fewer_registers<S::copier_registers>();
        copy_ring of_weights = {&weights, units, b.rows, b.empty};
        copy_ring of_rows = {&rows, x, b.rows, b.empty};
        produce<S, USE>(&a, &of_weights, &of_rows, 0, places);
    }
}

/* ---- launch ---- */

/* What a launch needs to know of a shape: the kernels by what they are for. */
typedef struct {
    int stage, box_rows, warpgroups;
    const void *kernel[3];
} variant;

template <nvfp4_many::operand_type TYPE, int MOST> static variant variant_of(void) {
    typedef nvfp4_shape<TYPE, MOST, MOST> S;
    const void *one = NULL; /* such layers have small tiles */
    if constexpr (MOST == 64)
        one = (const void *)experts_nvfp4<S, OF_ONE>;
    return {S::weight_stage + S::row_stage,
            S::box_rows,
            S::warpgroups,
            {(const void *)experts_nvfp4<S, OF_GATE_AND_UP>, one,
             (const void *)experts_nvfp4<S, OF_D>}};
}

template <nvfp4_many::operand_type TYPE> static variant variant_for(int rows) {
    return rows == 64 ? variant_of<TYPE, 64>() : variant_of<TYPE, 128>();
}

moq_status multiply_nvfp4(const many_product *p, moq_err *err) {
    const moe::expert_product *e = &p->product;
    const moq_linear_spec *spec = e->spec;
    variant v = spec->dtype == MOQ_DT_F16 ? variant_for<nvfp4_many::AS_F16>(e->tile_rows)
                                          : variant_for<nvfp4_many::AS_BF16>(e->tile_rows);
    int64_t k = spec->in_features, blocks = moq_pack_blocks(k);
    int64_t slabs = moq_pack_slabs(spec->out_features);
    moq_cuda_device device;
    CUtensorMap weights, rows;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(p, blocks, slabs, v.warpgroups);
    int shared = lay_out(&a, v.stage, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_words(&weights, e->weight->weight, p->moe->experts * slabs,
                                 blocks * UNIT_WORDS, WAVE_SLABS, UNIT_WORDS, err));
    rows = weights; /* not looked at where rows are gathered */
    if (!p->gathered)
        MOQ_TRY(moq_tensor_map_rows(&rows, e->rows->data, e->most_rows, k * 2,
                                    moe::row_bytes(moe::ROWS_VALUES, spec->dtype, k),
                                    (uint32_t)v.box_rows, err));
    return launch(p, v.kernel[use_of(p)], &a, shared, &weights, &rows, v.warpgroups, false, err);
}

} // namespace moq::moe_many
