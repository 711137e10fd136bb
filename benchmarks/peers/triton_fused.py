"""silu_and_mul and RMS norm, then quantization to e4m3, in Triton: peers of `moqext.ops`.

A block has a row in its registers and reads it once. Roundings between the steps are those of `moqext.ops`,
the arithmetic is Triton's own (its exp, its order of sums), and values are multiplied by the inverse of their
scale. Needs Triton: import it only where that is installed.
"""

from typing import Any

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
LEAST_TOKEN = tl.constexpr(1.0 / (448.0 * 512.0))
LEAST_GROUP_AMAX = tl.constexpr(1e-10)


@triton.jit
def _emit(value, at, inside, row, codes, scales, inverse, columns, BLOCK: tl.constexpr, MODE: tl.constexpr):
    if MODE == "static":
        value = value * tl.load(inverse)
        value = tl.minimum(tl.maximum(value, -E4M3_MAX), E4M3_MAX)
    if MODE == "token":
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value)), E4M3_MAX), LEAST_TOKEN)
        tl.store(scales + row, scale)
        value = value * (1.0 / scale)
    if MODE == "group":
        groups = tl.reshape(value, (BLOCK // 128, 128))
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(groups), 1), LEAST_GROUP_AMAX), E4M3_MAX)
        group = tl.arange(0, BLOCK // 128)
        tl.store(scales + row * (columns // 128) + group, scale, mask=group * 128 < columns)
        value = tl.reshape(groups * (1.0 / scale)[:, None], (BLOCK,))
    tl.store(codes + row * columns + at, value.to(tl.float8e4nv), mask=inside)


@triton.jit
def _silu(x, codes, scales, inverse, columns, BLOCK: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + at, mask=inside, other=0.0)
    gate = gate / (1.0 + tl.exp(-gate))
    value = (gate.to(up.dtype).to(tl.float32) * up.to(tl.float32)).to(up.dtype).to(tl.float32)
    _emit(value, at, inside, row, codes, scales, inverse, columns, BLOCK, MODE)


@triton.jit
def _norm(
    x,
    weight,
    residual,
    residual_out,
    eps,
    codes,
    scales,
    inverse,
    columns,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    gain = tl.load(weight + at, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    z = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        z = (z + tl.load(residual + row * columns + at, mask=inside, other=0.0).to(tl.float32)).to(gain.dtype)
        tl.store(residual_out + row * columns + at, z, mask=inside)
        z = z.to(tl.float32)
    r = tl.rsqrt(tl.sum(z * z) / columns + eps)
    value = ((z * r).to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(gain.dtype).to(tl.float32)
    _emit(value, at, inside, row, codes, scales, inverse, columns, BLOCK, MODE)


def _warps(block: int) -> int:
    return min(max(block // 512, 4), 32)


def silu_and_mul(x: Any, mode: str, codes: Any, scales: Any, inverse: Any, pdl: bool = False) -> None:
    """x: [M, 2K] contiguous, codes: [M, K]; scales: [M] or [M, K / 128]; inverse: one float32."""
    rows, columns = codes.shape
    block = triton.next_power_of_2(columns)
    options = {"num_warps": _warps(block), "launch_pdl": pdl}
    _silu[(rows,)](x, codes, scales, inverse, columns, BLOCK=block, MODE=mode, PDL=pdl, **options)


def rms_norm(
    x: Any,
    weight: Any,
    eps: float,
    mode: str,
    codes: Any,
    scales: Any,
    inverse: Any,
    residual: Any = None,
    residual_out: Any = None,
    pdl: bool = False,
) -> None:
    """x, codes, residual, residual_out: [M, K] contiguous; the rest as for `silu_and_mul`."""
    rows, columns = codes.shape
    block = triton.next_power_of_2(columns)
    options = {"num_warps": _warps(block), "launch_pdl": pdl, "ADD": residual is not None}
    add = (residual, residual_out) if residual is not None else (x, x)
    _norm[(rows,)](
        x, weight, *add, eps, codes, scales, inverse, columns, BLOCK=block, MODE=mode, PDL=pdl, **options
    )
