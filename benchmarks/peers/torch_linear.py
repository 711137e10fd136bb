"""torch: the layer in bfloat16, and `_scaled_mm` behind the quantization that each algorithm asks for.

`_scaled_mm` is cuBLASLt with its first choice of an algorithm, which gets the 32 MiB of workspace that the
library asks for on Hopper (`WORKSPACE`, to be set before torch is imported). Its sums are promoted to
float32, or kept in the tensor cores' 14 bits ("fast"). x is quantized by the Triton kernels beside this file,
which may overlap with the product before them ("PDL"), or by what `torch.compile` makes of the formulas
("compiled": never faster, so not among the usual peers).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.layers import Layer, quantize_activations
from benchmarks.peers import Bound
from moqext.tools.bench import PEER

WORKSPACE = {"CUBLASLT_WORKSPACE_SIZE": "32768"}

NAMES = {
    "FP8": "torch tensorwise",
    "FP8_PER_CHANNEL_PER_TOKEN": "torch rowwise",
    "FP8_PB_WO": "torch blockwise",
}


def missing_module(*names: str) -> str | None:
    """Why a peer that needs these modules cannot run, None where they are installed."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)} not installed" if lacking else None


@dataclass(frozen=True)
class Bfloat16:
    """`torch.mm` on the weight in bfloat16: what `F.linear` without bias calls, but into a given result."""

    name: str = "torch bfloat16"
    quant_algo: str = PEER
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch")

    def weights(self, layer: Layer) -> Sequence[Any]:
        return [codes.T for codes in layer.codes]

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        out = x.new_empty(len(x), layer.shape[0])
        return Bound(
            lambda weight: layer.torch.mm(x, weight, out=out),
            out,
            "torch:mm",
            lambda weight: layer.torch.mm(x, weight),
        )


@dataclass(frozen=True)
class ScaledProduct:
    """`torch._scaled_mm`."""

    quant_algo: str
    fast: bool
    pdl: bool = False
    compiled: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = {"fast": self.fast, "PDL": self.pdl, "compiled": self.compiled}
        return ", ".join([NAMES[self.quant_algo], *(name for name, chosen in options.items() if chosen)])

    def missing(self) -> str | None:
        return missing_module("torch", "triton")

    def weights(self, layer: Layer) -> Sequence[Any]:
        return [codes.T for codes in layer.codes]

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        torch = layer.torch
        rows = len(x)
        if self.quant_algo == "FP8_PB_WO":
            rows = -(-rows // 4) * 4  # cuBLASLt wants groups of four rows
        quantize = (
            compiled_quantization(layer, x, rows)
            if self.compiled
            else quantization(layer, x, rows, pdl=self.pdl)
        )
        scale = weight_scale(layer)
        out = x.new_empty(rows, layer.shape[0])

        def call(weight: Any) -> None:
            codes, scales = quantize()
            torch._scaled_mm(
                codes, weight, scales, scale, out_dtype=torch.bfloat16, use_fast_accum=self.fast, out=out
            )

        return Bound(call, out[: len(x)], "torch:_scaled_mm")


def weight_scale(layer: Layer) -> Any:
    """Scales as `_scaled_mm` wants them: one, [1, N], or blocks by columns, the columns padded to four."""
    if layer.quant_algo == "FP8":
        return layer.weight_scale
    if layer.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return layer.weight_scale.reshape(1, -1)
    blocks = layer.weight_scale
    padded = blocks.new_zeros(blocks.shape[0], -(-blocks.shape[1] // 4) * 4)
    padded[:, : blocks.shape[1]] = blocks
    return padded[:, : blocks.shape[1]].T


def quantization(layer: Layer, x: Any, rows: int, pdl: bool = False) -> Callable[[], tuple[Any, Any]]:
    """Quantizes x in Triton, into the same buffers every time: e4m3 [rows, K] and its scales."""
    from benchmarks.peers import triton_quantize as kernels

    torch = layer.torch
    codes = x.new_zeros(rows, x.shape[1], dtype=torch.float8_e4m3fn)
    if layer.quant_algo == "FP8":
        inverse = 1 / layer.input_scale
        return lambda: (kernels.quantize_static(x, inverse, codes, pdl), (codes, layer.input_scale))[1]
    if layer.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN":
        scales = x.new_ones(rows, 1, dtype=torch.float32)
        return lambda: (kernels.quantize_token(x, codes, scales, pdl), (codes, scales))[1]
    groups = x.new_ones(x.shape[1] // 128, rows, dtype=torch.float32)
    return lambda: (kernels.quantize_group(x, codes, groups, pdl), (codes, groups.T))[1]


def compiled_quantization(layer: Layer, x: Any, rows: int) -> Callable[[], tuple[Any, Any]]:
    """The quantization of x by `torch.compile`; the first call takes seconds."""
    torch = layer.torch

    def formulas(values: Any) -> tuple[Any, Any]:
        padded = torch.nn.functional.pad(values, (0, 0, 0, rows - len(values)))
        codes, scales = quantize_activations(torch, padded, layer)
        return codes, scales.T.contiguous().T if layer.quant_algo == "FP8_PB_WO" else scales

    run = torch.compile(formulas, dynamic=False)
    return lambda: run(x)


PEERS = [
    Bfloat16(),
    *(ScaledProduct(algo, fast) for algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN") for fast in (True, False)),
    *(ScaledProduct(algo, True, pdl=True) for algo in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")),
    *(ScaledProduct("FP8_PB_WO", False, pdl=pdl) for pdl in (False, True)),
]
COMPILED = [ScaledProduct(algo, algo != "FP8_PB_WO", compiled=True) for algo in NAMES]
