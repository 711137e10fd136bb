"""NVFP4 weights of the CUDA benchmarks: quantized from normal values, and what they mean.

Two e2m1 codes a byte, the even column in the low half; an e4m3 scale for each 16 columns of a row; one
float32 scale for all. Formulas in torch, apart from moqext's own, so that one checks the other.
"""

from __future__ import annotations

from typing import Any

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Magnitudes at which the code grows by one, and whether a tie does: to the even one."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(torch: Any, weight: Any) -> tuple[Any, Any, Any]:
    """uint8 [N, K / 2], e4m3 [N, K / 16] and a float32 number, of a float32 weight [N, K]."""
    rows = len(weight)
    second = weight.abs().max() / (E2M1_MAX * E4M3_MAX)
    groups = weight.reshape(rows, -1, GROUP)
    scale = (groups.abs().amax(2) / (E2M1_MAX * second)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    values = groups / (scale.float() * second).clamp(min=1e-30)[..., None]
    codes = torch.signbit(values).to(torch.uint8) * 8
    magnitude = values.abs()
    for limit, tie in STEPS:
        codes += magnitude >= limit if tie else magnitude > limit
    pairs = codes.reshape(rows, -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scale, second


def values(torch: Any, codes: Any, scale: Any) -> Any:
    """float32 [N, K]: e2m1 times the scale of its group, exact."""
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], 2).reshape(len(codes), -1, GROUP)
    return (table[pairs.int()] * scale.float()[..., None]).reshape(len(codes), -1)


def meaning(torch: Any, codes: Any, scale: Any, second: Any) -> Any:
    """The weight that a layer stands for, float64 [N, K]."""
    return values(torch, codes, scale).double() * second.double()


def folded_meaning(torch: Any, codes: Any, scale: Any, second: Any) -> Any:
    """The weight in float64 once scales of groups are folded into e4m3, with a power of two a row."""
    exact = values(torch, codes, scale)
    fraction, exponent = torch.frexp(exact.abs().amax(1) / E4M3_MAX)
    factor = torch.where(fraction > 0, torch.exp2((exponent - (fraction == 0.5).int()).float()), 1.0)
    weight = (exact / factor[:, None]).to(torch.float8_e4m3fn).double()
    return weight * factor.double()[:, None] * second.double()


def halves(torch: Any, codes: Any, block: int) -> Any:
    """Codes in another order, for kernels that read a block of columns as two halves.

    A byte has the codes of a column of a block's first half, low, and of the same column of its second half.

    Args:
        codes: uint8 [N, K / 2] of a checkpoint.
        block: Columns of a block; K is a multiple of it.
    """
    columns = torch.stack([codes & 15, codes >> 4], 2).reshape(len(codes), -1, 2, block // 2)
    return (columns[:, :, 0] | columns[:, :, 1] << 4).reshape(len(codes), -1)
