"""The kernels between linears for `benchmarks.llama_fused`, in Triton, without and with programmatic launch.

With programmatic launch a kernel tells at its start that the next one may be launched, and waits for the one
before it only where it reads what that one wrote. moqext's linears ask for their weights before they wait, so
they do that while the kernel ahead of them still runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Columns of silu_and_mul for a block."""


@triton.jit
def _add_norm(
    x,
    more,
    weight,
    out,
    total,
    columns,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    inside = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    scale = tl.load(weight + column, inside, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(more + place, inside, 0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    value = value.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), inside)


@triton.jit
def _silu_and_mul(gate_up, out, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + 2 * row * columns + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * columns + column, inside, 0.0).to(tl.float32)
    value = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    places,
    keys,
    values,
    tokens,
    length,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, token = row // tokens, row % tokens
    low = tl.arange(0, HALF)
    high = low + HALF
    dtype = qkv.dtype.element_ty
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    x, y = tl.load(source + low), tl.load(source + high)
    if head < HEADS + KV_HEADS:
        angle = token * 2 * HALF
        a, b = x.to(tl.float32), y.to(tl.float32)
        ac = (a * tl.load(cos + angle + low).to(tl.float32)).to(dtype).to(tl.float32)
        bs = (b * tl.load(sin + angle + low).to(tl.float32)).to(dtype).to(tl.float32)
        bc = (b * tl.load(cos + angle + high).to(tl.float32)).to(dtype).to(tl.float32)
        as_ = (a * tl.load(sin + angle + high).to(tl.float32)).to(dtype).to(tl.float32)
        x, y = (ac - bs).to(dtype), (bc + as_).to(dtype)
    if head < HEADS:
        tl.store(source + low, x)
        tl.store(source + high, y)
    else:
        place = tl.load(places + token)
        if head < HEADS + KV_HEADS:
            target = keys + ((batch * KV_HEADS + head - HEADS) * length + place) * 2 * HALF
        else:
            target = values + ((batch * KV_HEADS + head - HEADS - KV_HEADS) * length + place) * 2 * HALF
        tl.store(target + low, x)
        tl.store(target + high, y)


class TritonNeighbours:
    """The functions of `TorchNeighbours` as one kernel each.

    Args:
        pdl: whether they are launched programmatically.
    """

    def __init__(self, pdl: bool) -> None:
        self.pdl = pdl
        self._launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `TorchNeighbours`."""
        columns = x.shape[-1]
        out = torch.empty_like(x)
        total = x if more is None else torch.empty_like(x)
        _add_norm[(x.numel() // columns,)](
            x,
            x if more is None else more,
            weight,
            out,
            total,
            columns,
            eps,
            ADD=more is not None,
            BLOCK=triton.next_power_of_2(columns),
            PDL=self.pdl,
            num_warps=8,
            **self._launch,
        )
        return out, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `TorchNeighbours`."""
        columns = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], columns))
        grid = (out.numel() // columns, triton.cdiv(columns, COLUMNS))
        _silu_and_mul[grid](gate_up, out, columns, BLOCK=COLUMNS, PDL=self.pdl, **self._launch)
        return out

    def rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, places: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """See `TorchNeighbours`; products and sums are rounded as there, each by itself."""
        batch, tokens, heads, head_dim = qkv.shape
        kv_heads, length = keys.shape[1:3]
        _rotate[(batch * tokens, heads)](
            qkv,
            cos,
            sin,
            places,
            keys,
            values,
            tokens,
            length,
            HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            PDL=self.pdl,
            num_warps=1,
            **self._launch,
        )
