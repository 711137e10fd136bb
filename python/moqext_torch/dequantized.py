"""The weight of a linear as numbers, from its prepared tensors, wherever they are.

Rows are made some at a time, so that little besides the result is in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch

from moqext import ops

VALUES_AT_ONCE = 1 << 22
"""Values of a weight of which there are float32 copies at a time."""

BLOCK = 128
"""Rows and columns of a tile of FP8_PB_WO, and rows of a tile of swizzled block scales."""

_Rows = Callable[[int, int], torch.Tensor]
"""Values of rows, in float32 and without the scale of a row."""


def weight_of(
    params: Mapping[str, torch.Tensor],
    shape: tuple[int, int],
    out_partitions: Sequence[int],
    group_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight W of y = x Wᵀ that prepared tensors stand for, [rows, columns], on their device.

    `pre_quant_scale` and low-rank pairs are in it. Products of codes and scales are float32 and are rounded
    once more to `dtype`. Where a kernel folds scales into FP8 codes as it reads them, the weight is that
    before.

    Args:
        params: what `LinearMethod.prepare` returned, as tensors of torch.
        shape: (rows, columns).
        out_partitions: rows of each layer that is fused.
        group_size: of the method.
        dtype: of the result.
    """
    rows, columns = shape
    values = _reader(params, shape, out_partitions, group_size or 16)
    scale, smooth = params.get("output_scale"), params.get("pre_quant_scale")
    weight = torch.empty(shape, dtype=dtype, device=params["weight"].device)
    step = max(2, VALUES_AT_ONCE // columns // 2 * 2)  # rows of int4 come in pairs
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = values(first, last)
        if scale is not None:
            part = part * scale[first:last, None]
        if "lora_b" in params:
            part = part + _low_rank(params, out_partitions, first, last)
        weight[first:last] = part if smooth is None else part * smooth
    return weight


def _reader(
    params: Mapping[str, torch.Tensor], shape: tuple[int, int], partitions: Sequence[int], group: int
) -> _Rows:
    """How rows are read: formats are told by the dtypes and shapes of their tensors."""
    codes, scales = params["weight"], params.get("weight_scale")
    if codes.dim() == 3:  # packed for CUDA
        codes, scales = ops.unpack_nvfp4(codes, shape, group)
    if codes.dtype == torch.uint8 and codes.shape[1] == shape[1]:
        return lambda first, last: (
            _int4(codes[first // 2 : (last + 1) // 2]) * _spread(scales[first:last], shape[1])
        )
    if codes.dtype == torch.uint8:
        if scales.numel() != shape[0] * (shape[1] // group) or scales.shape[0] != shape[0]:
            scales = _unswizzled(scales, partitions, shape[1] // group)
        scales = scales.view(torch.float8_e4m3fn)
        return lambda first, last: (
            _fp4(codes[first:last]) * _spread(scales[first:last].float().abs(), shape[1])
        )  # kernels do not read the sign of a scale
    if scales is None:
        return lambda first, last: codes[first:last].float()
    if scales.dtype == torch.float32:
        line = _block_rows(partitions).to(codes.device)
        return lambda first, last: (
            codes[first:last].float() * _spread(scales[line[first:last]], shape[1], BLOCK)
        )
    return lambda first, last: codes[first:last].float() * _spread(_powers(scales[first:last]), shape[1])


def _unswizzled(scales: torch.Tensor, partitions: Sequence[int], columns: int) -> torch.Tensor:
    """Block scales row by row; in the swizzled order every partition begins a new tile."""
    tiles = scales.split([-(-rows // BLOCK) * BLOCK for rows in partitions])
    parts = [
        ops.unswizzle_block_scales(tile, (rows, columns))
        for tile, rows in zip(tiles, partitions, strict=True)
    ]
    return torch.cat(parts)


def _spread(scales: torch.Tensor, columns: int, each: int | None = None) -> torch.Tensor:
    """Scales of columns from those of their groups, of `each` columns or of equal size."""
    return scales.repeat_interleave(each or columns // scales.shape[1], 1)[:, :columns]


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Powers of two of e8m0 bytes, of which 0 is 2^-127."""
    exponents = exponents.int()
    return torch.where(exponents == 0, 1 << 22, exponents << 23).to(torch.int32).view(torch.float32)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two values of each byte of fp4."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).to(device)


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    return _pairs(codes.device)[codes.int()].flatten(1)


def _int4(codes: torch.Tensor) -> torch.Tensor:
    """Values of pairs of rows, the even one in the low nibble."""
    both = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).float()
    return torch.where(both > 7, both - 16, both)


def _block_rows(partitions: Sequence[int]) -> torch.Tensor:
    """The row of tiles of each row; every partition begins a new one."""
    lines, first = [], 0
    for rows in partitions:
        lines.append(first + torch.arange(rows) // BLOCK)
        first += -(-rows // BLOCK)
    return torch.cat(lines)


def _low_rank(
    params: Mapping[str, torch.Tensor], partitions: Sequence[int], first: int, last: int
) -> torch.Tensor:
    """Rows of the product of the pairs, each partition's own."""
    a, b = params["lora_a"].float(), params["lora_b"].float()
    rank, found, begin = b.shape[1], [], 0
    for part, rows in enumerate(partitions):
        low, high = max(first, begin), min(last, begin + rows)
        if low < high:
            found.append(b[low:high] @ a[part * rank : (part + 1) * rank])
        begin += rows
    return torch.cat(found)
