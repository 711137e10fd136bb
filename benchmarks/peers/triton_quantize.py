"""Quantization of activations to e4m3 in Triton, for peers whose products want codes.

codes = e4m3(x * inverse)                                one scale, given
codes = e4m3(x / scale), scale = max(amax / 448, least)  one a token, or one for 128 columns

Each reads x once and writes codes once. A token is held in the registers of a block; scales of groups are
written column by column ([K / 128][M]), where the products read them. Values are multiplied by the rounded
inverse of their scale, which may decide a tie otherwise than a division.

What bounds them is the copy bandwidth for many tokens (H200, 8192 x 8192: 4.2, 4.2 and 4.0 of 4.3 TB/s), and
the start of a kernel for few (1.1 to 1.7 us in a graph). Sizes of blocks are the best of six to fourteen that
were timed. With `pdl` a kernel is launched while its predecessor ends (programmatic dependent launch).

Needs Triton: import it only where that is installed.
"""

from typing import Any

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
LEAST_TOKEN = tl.constexpr(1.0 / (448.0 * 512.0))
LEAST_GROUP_AMAX = tl.constexpr(1e-10)
MANY = 1 << 20
"""Values from which on more of them are left to a block."""


@triton.jit
def _static(x, codes, inverse, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    factor = tl.load(inverse)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + at, mask=inside).to(tl.float32) * factor
    value = tl.minimum(tl.maximum(value, -E4M3_MAX), E4M3_MAX)
    tl.store(codes + at, value.to(tl.float8e4nv), mask=inside)


@triton.jit
def _token(x, codes, scales, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value)), E4M3_MAX), LEAST_TOKEN)
    tl.store(scales + row, scale)
    tl.store(codes + row * columns + at, (value * (1.0 / scale)).to(tl.float8e4nv), mask=inside)


@triton.jit
def _group(
    x,
    codes,
    scales,
    rows,
    columns,
    scale_rows,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, 128)
    at = row[:, None, None].to(tl.int64) * columns + group[None, :, None] * 128 + column[None, None, :]
    inside = (row[:, None] < rows) & (group[None, :] * 128 < columns)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 2), LEAST_GROUP_AMAX), E4M3_MAX)
    tl.store(scales + group[None, :] * scale_rows + row[:, None], scale, mask=inside)
    tl.store(codes + at, (value * (1.0 / scale)[:, :, None]).to(tl.float8e4nv), mask=inside[:, :, None])


def quantize_static(x: Any, inverse: Any, codes: Any, pdl: bool = False) -> None:
    """x, codes: [M, K] contiguous; inverse: one float32."""
    count = x.numel()
    block = 2048 if count < MANY else 4096
    grid = (triton.cdiv(count, block),)
    _static[grid](x, codes, inverse, count, BLOCK=block, PDL=pdl, num_warps=8, launch_pdl=pdl)


def quantize_token(x: Any, codes: Any, scales: Any, pdl: bool = False) -> None:
    """x, codes: [M, K] contiguous, K up to 65,536; scales: [M, 1] float32."""
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 256, 4), 16 if block < 1 << 15 else 32)
    _token[(rows,)](x, codes, scales, columns, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl)


def quantize_group(x: Any, codes: Any, scales: Any, pdl: bool = False) -> None:
    """x: [M, K] contiguous, codes: [M or more, K]; scales: float32 [K / 128, M or more], by columns of x."""
    rows, columns = x.shape
    groups, warps = (1, 4) if rows * columns < MANY else (4, 8)
    grid = (triton.cdiv(rows, 8), triton.cdiv(columns // 128, groups))
    options = {"num_warps": warps, "launch_pdl": pdl}
    _group[grid](x, codes, scales, rows, columns, scales.shape[1], ROWS=8, GROUPS=groups, PDL=pdl, **options)
