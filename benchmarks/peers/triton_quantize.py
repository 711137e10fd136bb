"""Quantization of activations to e4m3 in Triton, for peers whose products want codes.

codes = e4m3(x * inverse)                                one scale, given
codes = e4m3(x / scale), scale = max(amax / 448, least)  one a token, or one for 128 columns

Each reads x once and writes codes once. A token is held in the registers of a block; scales of groups are
written column by column ([K / 128][M]), where the products read them. What bounds them is the copy bandwidth
for many tokens, and the start of a kernel, about 2 us in a graph, for few.

Needs Triton: import it only where that is installed.
"""

from typing import Any

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
LEAST_TOKEN = tl.constexpr(1.0 / (448.0 * 512.0))
LEAST_GROUP_AMAX = tl.constexpr(1e-10)


@triton.jit
def _static(x, codes, inverse, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(inverse)
    value = tl.minimum(tl.maximum(value, -E4M3_MAX), E4M3_MAX)
    tl.store(codes + at, value.to(tl.float8e4nv), mask=inside)


@triton.jit
def _token(x, codes, scales, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value)), E4M3_MAX), LEAST_TOKEN)
    tl.store(scales + row, scale)
    tl.store(codes + row * columns + at, (value * (1.0 / scale)).to(tl.float8e4nv), mask=inside)


@triton.jit
def _group(x, codes, scales, rows, columns, scale_rows, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, 128)
    at = row[:, None, None].to(tl.int64) * columns + group[None, :, None] * 128 + column[None, None, :]
    inside = (row[:, None] < rows) & (group[None, :] * 128 < columns)
    value = tl.load(x + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 2), LEAST_GROUP_AMAX), E4M3_MAX)
    tl.store(scales + group[None, :] * scale_rows + row[:, None], scale, mask=inside)
    tl.store(codes + at, (value * (1.0 / scale)[:, :, None]).to(tl.float8e4nv), mask=inside[:, :, None])


def quantize_static(x: Any, inverse: Any, codes: Any) -> None:
    """x, codes: [M, K] contiguous; inverse: one float32."""
    count = x.numel()
    block, warps = (1024, 4) if count < 1 << 20 else (4096, 8)
    _static[(triton.cdiv(count, block),)](x, codes, inverse, count, BLOCK=block, num_warps=warps)


def quantize_token(x: Any, codes: Any, scales: Any) -> None:
    """x, codes: [M, K] contiguous, K up to 65,536; scales: [M, 1] float32."""
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    few = rows <= 256  # blocks that wait for one row want many threads, blocks that share want few
    warps = min(max(block // (256 if few else 512), 4), 32)
    _token[(rows,)](x, codes, scales, columns, BLOCK=block, num_warps=warps)


def quantize_group(x: Any, codes: Any, scales: Any) -> None:
    """x: [M, K] contiguous, codes: [M or more, K]; scales: float32 [K / 128, M or more], by columns of x."""
    rows, columns = x.shape
    tile, groups, warps = (1, 4, 2) if rows * columns < 1 << 20 else (8, 4, 4)
    grid = (triton.cdiv(rows, tile), triton.cdiv(columns // 128, groups))
    _group[grid](x, codes, scales, rows, columns, scales.shape[1], ROWS=tile, GROUPS=groups, num_warps=warps)
