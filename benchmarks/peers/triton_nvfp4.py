"""NVFP4 weights in Triton: dequantized to bfloat16, or multiplied by bfloat16 activations as they are read.

The product makes y transposed, y[n, m] = sum_k W[n, k] x[m, k], so that the decoded weight is the operand
that may come from registers and a tile has as few tokens as there are. Codes are in the order of
`benchmarks.nvfp4.halves`, which leaves x as it is: the low halves of a block's bytes are its first columns,
the high ones its second. In bfloat16 a code's bits are e2m1 * 2^-126, a scale's value times 2^119 makes the
product w * 2^-7, both exact. With few tokens K is divided among blocks, and a second kernel adds the parts in
order.

Needs Triton: import it only where that is installed.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK = 128
"""Columns of a step."""


@triton.jit
def _decode(nibbles, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    bits = ((nibbles & 7).to(tl.uint16) << 6) | ((nibbles & 8).to(tl.uint16) << 12)
    values = bits.to(tl.bfloat16, bitcast=True)
    factors = (scales.to(tl.float32) * 6.646139978924579e35).to(tl.bfloat16)  # 2^119
    grouped = tl.reshape(values, (ROWS, COLUMNS // 16, 16)) * factors[:, :, None]
    return tl.reshape(grouped, (ROWS, COLUMNS))


@triton.jit
def _multiply(
    x,
    codes,
    scales,
    second,
    out,
    tokens,
    rows,
    columns,
    part_steps,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    HALF: tl.constexpr = STEP // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    steps = columns // STEP
    at, group = tl.arange(0, HALF), tl.arange(0, HALF // 16)
    code_at = codes + (row % rows)[:, None].to(tl.int64) * (columns // 2) + at[None, :]
    scale_at = scales + (row % rows)[:, None].to(tl.int64) * (columns // 16) + group[None, :]
    x_at = x + (token % tokens)[None, :] * columns + at[:, None]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(part * part_steps, min(steps, (part + 1) * part_steps)):
        pairs = tl.load(code_at + step * HALF)
        first = tl.load(scale_at + step * (STEP // 16))
        last = tl.load(scale_at + step * (STEP // 16) + HALF // 16)
        sums = tl.dot(_decode(pairs & 15, first, ROWS, HALF), tl.load(x_at + step * STEP), sums)
        sums = tl.dot(_decode(pairs >> 4, last, ROWS, HALF), tl.load(x_at + step * STEP + HALF), sums)
    sums *= tl.load(second) * 128.0
    out_at = out + (part * tokens + token[None, :]).to(tl.int64) * rows + row[:, None]
    inside = (row[:, None] < rows) & (token[None, :] < tokens)
    tl.store(out_at, sums if SPLIT else sums.to(tl.bfloat16), mask=inside)


@triton.jit
def _add(parts, out, count, PARTS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((VALUES,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(tl.bfloat16), mask=at < count)


@triton.jit
def _dequantize(codes, scales, second, out, count, PAIRS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    pairs = tl.load(codes + at, mask=at < count, other=0)
    group = tl.program_id(0).to(tl.int64) * (PAIRS // 8) + tl.arange(0, PAIRS // 8)
    scale = tl.load(scales + group, mask=group * 8 < count, other=0.0).to(tl.float32) * tl.load(second)
    both = tl.join(pairs & 15, pairs >> 4)
    bits = ((both & 7).to(tl.uint16) << 9) | ((both & 8).to(tl.uint16) << 12)  # e2m1 * 2^-14
    values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    values = tl.reshape(values, (PAIRS // 8, 16)) * scale[:, None]
    where = out + tl.program_id(0).to(tl.int64) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    inside = tl.program_id(0).to(tl.int64) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS) < 2 * count
    tl.store(where, tl.reshape(values, (2 * PAIRS,)).to(tl.bfloat16), mask=inside)


class Shape(NamedTuple):
    """A tile, and how often K is divided."""

    tokens: int
    rows: int
    parts: int
    warps: int
    stages: int


def shape_for(tokens: int, rows: int, columns: int, multiprocessors: int) -> Shape:
    """The best of a few that were timed, by the number of tokens; parts of K fill the chip."""
    tile = min(max(triton.next_power_of_2(tokens), 16), 256 if tokens >= 512 else 128)
    height, warps = (64, 4) if tile <= 32 else (128, 8)
    blocks = triton.cdiv(rows, height) * triton.cdiv(tokens, tile)
    parts = 1
    while blocks * parts < 2 * multiprocessors and parts < 8 and columns // BLOCK >= 8 * parts:
        parts *= 2
    return Shape(tile, height, parts, warps, 3)


def multiply(x: Any, weight: tuple[Any, Any], second: Any, out: Any, parts: Any, shape: Shape) -> None:
    """x: [M, K] contiguous; weight: codes of `halves`, scales; out: [M, N]; parts: float32 [parts, M, N]."""
    (codes, scales), (tokens, columns), rows = weight, x.shape, out.shape[1]
    grid = (triton.cdiv(rows, shape.rows), triton.cdiv(tokens, shape.tokens), shape.parts)
    sizes = (tokens, rows, columns, triton.cdiv(columns // BLOCK, shape.parts))
    target = out if shape.parts == 1 else parts
    options = {"num_warps": shape.warps, "num_stages": shape.stages, "STEP": BLOCK}
    tile = {"TOKENS": shape.tokens, "ROWS": shape.rows, "SPLIT": shape.parts > 1}
    _multiply[grid](x, codes, scales, second, target, *sizes, **tile, **options)
    if shape.parts > 1:
        count = out.numel()
        values = 256 if count < 1 << 18 else 1024
        options = {"VALUES": values, "PDL": True, "num_warps": 4, "launch_pdl": True}
        _add[(triton.cdiv(count, values),)](parts, out, count, PARTS=shape.parts, **options)


def dequantize(codes: Any, scales: Any, second: Any, out: Any) -> None:
    """Codes and scales of a checkpoint to bfloat16 [N, K]."""
    pairs = 2048
    grid = (triton.cdiv(codes.numel(), pairs),)
    _dequantize[grid](codes, scales, second, out, codes.numel(), PAIRS=pairs, num_warps=8)
