/* NVFP4 experts of many tokens on Hopper: products of rows of 16 bits with the exact weights of the
 * experts, packed as prepared, in tiles of sm90_many_tile.h. Codes become operands in registers as
 * for linears (cuda/linear/sm90/sm90_nvfp4_many_products.h).
 *
 * A step is 64 columns: 16 KB of rows in the 128-byte swizzle and a unit of each of 16 slabs, in a
 * ring of seven or eight. A tile of 256 by 128 takes 1024 cycles of products a step, in which its
 * 16384 weights take 17 instructions for 8, two sevenths of what can be issued; L2 has to deliver
 * 25 bytes a cycle and multiprocessor. It is the tensor cores that bound it, and what tiles of 128
 * rows leave empty. */
#include "cuda/linear/sm90/sm90_nvfp4_many_products.h"
#include "cuda/moe/sm90_many_launch.h"

namespace moq::moe_many {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)
#define WAVE_SLABS (WAVE_ROWS / MOQ_PACK_ROWS)

template <nvfp4_many::operand_type TYPE>
struct nvfp4_shape : nvfp4_many::tile<TYPE, T, MOQ_ALONE, false> {
    static constexpr bool groups = false;
    static constexpr float unit = MOQ_NVFP4_FACTOR;
    static constexpr int row_unit = MOQ_PACK_ROWS, box_step = UNIT_WORDS;
    static constexpr int box_bytes = WAVE_SLABS * MOQ_PACK_BYTES;
    static constexpr int weight_bytes = 4 * box_bytes, weight_stage = weight_bytes;
    static constexpr int row_stage = T * 128;
};

/* A warpgroup's two waves, whose units lie apart. */
typedef struct {
    nvfp4_many::consumer_ring wave[2];
} two_waves;

/* Queues the products of both waves of a stage behind those of the one before, whose end it waits
 * for. */
template <class S>
static __device__ __forceinline__ void
follow(const two_waves *t, ring_place *slot, ring_place *before, bool first,
       const nvfp4_many::operand_unit (&o)[2], float (&sum)[2][T / 2]) {
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
static __device__ __forceinline__ void decode(const two_waves *t, const ring_place *slot,
                                              nvfp4_many::operand_unit (&o)[2]) {
    nvfp4_many::decode<S>(&t->wave[0], slot, &o[0]);
    nvfp4_many::decode<S>(&t->wave[1], slot, &o[1]);
}

/* Adds the products of a tile's steps. */
template <class S>
static __device__ __forceinline__ void multiply(const two_waves *t, int steps, ring_place *slot,
                                                float (&sum)[2][T / 2]) {
    nvfp4_many::operand_unit even[2], odd[2];
    ring_place before = *slot;
    decode<S>(t, slot, even);
#pragma unroll 1
    for (int step = 0;; step += 2) {
        follow<S>(t, slot, &before, step == 0, even, sum);
        if (step + 1 == steps)
            break;
        decode<S>(t, slot, odd);
        follow<S>(t, slot, &before, false, odd, sum);
        if (step + 2 == steps)
            break;
        decode<S>(t, slot, even);
    }
    wgmma_wait<0>();
    stay_here(sum[0]);
    stay_here(sum[1]);
    nvfp4_many::release<S>(&t->wave[0], &before);
}

template <class S, product_use USE>
static __device__ __forceinline__ void consume(const gemm_args *a, const two_waves *t, float *board,
                                               uint32_t turn, int group) {
    ring_place slot = {0, 0};
    wait_for_predecessor();
    for (tile_queue q = tiles_of_block(a); q.number < q.end; q.number += q.stride) {
        place p = place_at(a, q.number);
        float sum[2][T / 2] = {};
        multiply<S>(t, a->steps, &slot, sum);
        write_tile<S, USE>(a, &p, group, 1.0f, board, turn, sum);
    }
}

template <class S, product_use USE>
static __global__ void __launch_bounds__(THREADS, 1)
    experts_nvfp4(const __grid_constant__ CUtensorMap weights,
                  const __grid_constant__ CUtensorMap rows, const __grid_constant__ gemm_args a) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier[3 * MANY_STAGES];
    __shared__ __align__(8) float board[2][T];
    uint32_t x = fixed_shared_address(smem), units = x + a.stages * S::row_stage;
    uint32_t turn = units + a.stages * S::weight_stage;
    launch_dependents();
    ring_barriers b = make_barriers(&a, barrier, 2); /* units arrive there, too */
    if (threadIdx.x < CONSUMERS) {
        more_registers<232>();
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
        consume<S, USE>(&a, &t, board[group], turn + group * (MANY_TURN_BYTES / 2), group);
    } else {
        fewer_registers<40>();
        copy_ring of_weights = {&weights, units, b.rows, b.empty};
        copy_ring of_rows = {&rows, x, b.rows, b.empty};
        if (threadIdx.x == CONSUMERS)
            produce_weights<S, USE>(&a, &of_weights);
        else if (threadIdx.x == CONSUMERS + 32)
            produce_rows<S>(&a, &of_rows, 0);
    }
}

/* ---- launch ---- */

template <nvfp4_many::operand_type TYPE> static const void *kernel_of(product_use use) {
    typedef nvfp4_shape<TYPE> S;
    return use == OF_GATE_AND_UP ? (const void *)experts_nvfp4<S, OF_GATE_AND_UP>
           : use == OF_ONE       ? (const void *)experts_nvfp4<S, OF_ONE>
                                 : (const void *)experts_nvfp4<S, OF_D>;
}

moq_status multiply_nvfp4(const many_product *p, moq_err *err) {
    const moe::expert_product *e = &p->product;
    const moq_linear_spec *spec = e->spec;
    int64_t k = spec->in_features, blocks = moq_pack_blocks(k);
    int64_t slabs = moq_pack_slabs(spec->out_features);
    moq_cuda_device device;
    CUtensorMap weights, rows;
    MOQ_TRY(moq_cuda_query_device(spec->device.index, &device, err));
    gemm_args a = args_of(p, blocks, slabs);
    int stage = nvfp4_shape<nvfp4_many::AS_BF16>::weight_stage + T * 128;
    int shared = lay_out(&a, stage, device.shared_per_block);
    MOQ_TRY(moq_tensor_map_words(&weights, e->weight->weight, p->moe->experts * slabs,
                                 blocks * UNIT_WORDS, WAVE_SLABS, UNIT_WORDS, err));
    MOQ_TRY(moq_tensor_map_rows(&rows, e->rows->data, e->most_rows, k * 2,
                                moe::row_bytes(moe::ROWS_VALUES, spec->dtype, k), T, err));
    const void *kernel = spec->dtype == MOQ_DT_F16 ? kernel_of<nvfp4_many::AS_F16>(use_of(p))
                                                   : kernel_of<nvfp4_many::AS_BF16>(use_of(p));
    return launch(p, kernel, &a, shared, &weights, &rows, err);
}

} // namespace moq::moe_many
