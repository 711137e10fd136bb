/* Tiles of NVFP4 experts on Hopper for many tokens: their shapes, and what a step has.
 *
 * A tile is 512 rows of an expert's W by up to 64 rows of tokens, which are the columns of the
 * products, or 256 rows by up to 32, 64 or 128, or 128 by up to 288. Of four warpgroups each
 * multiplies two waves of 64 rows or one, of two warpgroups one. In the first product half of these
 * are rows of gate and half are the rows of up beside them: a wave of each, or, of one wave, 32
 * rows of each. A step is 64 columns, a unit of each slab and 128 bytes of each row; of tiles of up
 * to 64 rows it is twice or four times as much, as what a step costs beside its products is the
 * same. Tiles of 256 rows of W have half the columns of those of 512 to be shared out by. Steps
 * come in a ring (sm90_moe_prefill_nvfp4_copies.h).
 *
 * What bounds it: not the copies, but where rows are many the L2, which delivers 36 bytes a cycle
 * and multiprocessor to tiles of 288. */
#ifndef MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_TILE_H
#define MOQ_CUDA_MOE_SM90_SM90_MOE_PREFILL_NVFP4_TILE_H

#include "cuda/linear/sm90/nvfp4_prefill.h"
#include "cuda/moe/sm90/sm90_moe_prefill_tile.h"

namespace moq::moe_prefill {

#define UNIT_WORDS (MOQ_PACK_BYTES / 8)
#define WAVE_SLABS (WAVE_ROWS / MOQ_PACK_ROWS)
#define WAVE_BYTES (WAVE_SLABS * MOQ_PACK_BYTES)
#define COPIERS    2 /* warps that gather rows */
/* Bytes that warps of gate and of up hand each other of 16 rows, in a warpgroup. */
#define HANDED   2048
#define D_PIECES 3 /* of so many rows of d there is room for, in a warpgroup */

/* Tiles of up to MOST rows, of which N are multiplied, in steps of UNITS blocks of columns. */
template <nvfp4_prefill::operand_type TYPE, product_use FOR, int MOST, int N, int UNITS = 1,
          int WAVES = 1>
struct unit_shape {
    static constexpr nvfp4_prefill::operand_type type = TYPE;
    static constexpr product_use use = FOR;
    static constexpr bool pair = false, gated = FOR == OF_GATE_AND_UP;
    static constexpr bool large = MOST > 128;
    static constexpr int warpgroups = large ? 2 : 4, tokens = MOST, units = UNITS;
    static constexpr int waves = WAVES, box_units = UNITS > 2 ? 2 : UNITS;
    static constexpr int own_units = waves * units; /* of a warp in a step */
    static constexpr int T = N;
    static constexpr bool mixed = gated && waves == 1; /* a wave has rows of gate and of up */
    static constexpr int registers = large ? 224 : 112, copier_registers = large ? 56 : 32;
    static constexpr int box_rows = large ? 32 : 16; /* that the copy engine brings at a time */
    static constexpr int panel_bytes = tokens * 128, token_bytes = units * panel_bytes;
    static constexpr int weight_bytes = warpgroups * own_units * WAVE_BYTES;
    /* Where a warp's unit `own` is: waves are behind each other, of a wave the boxes of a slab's
     * neighbouring units. */
    static __host__ __device__ constexpr int unit_at(int own) {
        return own / units * (weight_bytes / 2) +
               own % units / box_units * (box_slabs * box_units * MOQ_PACK_BYTES) +
               own % box_units * MOQ_PACK_BYTES;
    }
    static constexpr int box_slabs = warpgroups * waves * WAVE_SLABS / 2;
    static constexpr int columns = box_slabs * MOQ_PACK_ROWS * (gated ? 1 : 2); /* of the output */
    static constexpr int columns_of_wave = mixed ? WAVE_ROWS / 2 : WAVE_ROWS;
    /* Rows whose products are one instruction, of those that come first. */
    static constexpr int part = N == 80 ? 48 : N == 112 ? 64 : N == 288 ? 144 : N;
    /* Groups of 16 columns whose operands are in registers at a time, twice: fewer where sums leave
     * less room. */
    static constexpr int depth = own_units == 1 || (waves == 2 && N == 64) ? 2 : 4;
    /* Bytes of scales of a step that a warp makes for its lanes: [unit][row g][group, rows g and
     * g + 8]. */
    static constexpr int scales = own_units * 128;
    static constexpr int at_once = large ? 32 : 16; /* rows of outputs that leave at a time */
    /* Bytes of outputs on their way, of a warpgroup: of a row of g and all, with what warps of gate
     * and of up hand each other; of d, unless it is stored from registers, pieces of some rows. */
    static constexpr bool from_registers = MOST <= 64;
    static constexpr bool rounds_d = TYPE == nvfp4_prefill::AS_BF16;
    static constexpr int row_bytes = columns_of_wave * 2;
    static constexpr int piece_bytes = at_once * (rounds_d ? 128 : 256);
    static constexpr int room = FOR != OF_D
                                    ? at_once * row_bytes + (mixed ? at_once / 16 * HANDED : 0)
                                : from_registers ? 0
                                                 : D_PIECES * piece_bytes;
    template <int M> using of_width = unit_shape<TYPE, FOR, MOST, M, UNITS, WAVES>;
};

/* ---- the order of tiles ---- */

/* How many columns of products a tile of so many rows has: one of a few numbers, for each of which
 * there is code; the largest one for what is rarely asked for, which is compiled for that alone. */
template <class S> static __device__ __forceinline__ int width_of(const gemm_args *a, int rows) {
    if (!is_usual<S::use>(&a->act))
        return S::tokens;
    if (S::large)
        return rows > 256 ? 288 : rows > 192 ? 256 : rows > 128 ? 192 : rows > 96 ? 128 : 96;
    if (S::tokens == 128)
        return rows > 32 ? max(64, (rows + 15) / 16 * 16) : 32;
    return rows > 16 ? (rows + 15) / 16 * 16 : 16;
}

/* Widths from the largest one on, 0 behind the last. */
template <class S> static __device__ __forceinline__ int width_after(int width) {
    if (S::large)
        return width == 288 ? 256 : width == 256 ? 192 : width == 192 ? 128 : width == 128 ? 96 : 0;
    return S::tokens == 128 && width <= 64 ? width - 32 : width - 16;
}

/* How many widths there are. */
template <class S> static __device__ __forceinline__ constexpr int widths_of(void) {
    return S::large ? 5 : S::tokens == 128 ? 6 : S::tokens / 16;
}

} // namespace moq::moe_prefill

#endif
