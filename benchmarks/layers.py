"""Layers that the CUDA benchmarks run, and what their outputs have to be.

A layer has a normal weight, quantized for real to e4m3 or e2m1 codes and scales as a checkpoint holds them,
in several copies that together exceed the last cache, so that the weight of every call comes from memory. All
peers of an algorithm work on the same codes and the same activations. The reference quantizes the activations
as the algorithm says, multiplies what the codes mean in float64, and is computed for 64 tokens at most.

torch is imported by the callers; this module works on any of its devices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import nvfp4
from moqext.tools.bench import PEER, copies

ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")

NVFP4, NVFP4_FP8, W4A16 = "NVFP4", "NVFP4, fp8", "W4A16_NVFP4"
NVFP4_ALGOS = (NVFP4, NVFP4_FP8, W4A16)
"""NVFP4 weights as their algorithm says, and multiplied as e4m3; W4A16_NVFP4 has NVFP4's kernels."""

SHAPES = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
    (51200, 5120),
    (5120, 25600),
    (2112, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
)
"""Projections of models of 8, 32, 70 and 671 billion weights: (out_features, in_features)."""

QUICK_SHAPES = ((4096, 4096), (7168, 2048), (8192, 8192), (28672, 4096), (4096, 14336), (4096, 7168))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)

ROTATION = 260_000_000
"""Bytes of weights that take turns at least: five times the last cache of an H200."""

CHECKED_TOKENS = 64
E4M3_MAX = 448.0
BLOCK = 128


def shape_of(text: str) -> tuple[int, int]:
    """An option's "OUTxIN".

    Raises:
        argparse.ArgumentTypeError: It is not of that form.
    """
    try:
        rows, columns = map(int, text.split("x"))
    except ValueError:
        rows, columns = 0, 0
    if rows < 1 or columns < 1:
        raise argparse.ArgumentTypeError(f"expected OUTxIN as in 4096x14336, got {text!r}")
    return rows, columns


def method_arguments(quant_algo: str) -> dict[str, str]:
    """Arguments of `LinearMethod` for one of `ALGOS` or `NVFP4_ALGOS`."""
    name, _, compute = quant_algo.partition(", ")
    return {"quant_algo": name, "compute": compute or "exact"}


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized layer on a device.

    Attributes:
        torch: The module.
        quant_algo: One of `ALGOS` or `NVFP4_ALGOS`, or `PEER` for the weight in bfloat16.
        shape: (out_features, in_features).
        codes: Copies of the weight: e4m3, pairs of e2m1 in uint8, or bfloat16 for `PEER`.
        weight_scale: float32: one, one a row, or one for each 128 x 128 block; e4m3, one for each 16 columns
            of a row, with e2m1; None for `PEER`.
        input_scale: float32, one: the static scale of the activations, None where they have their own.
        second_scale: float32, of all scales of groups; None where there are none.
    """

    torch: Any
    quant_algo: str
    shape: tuple[int, int]
    codes: Sequence[Any]
    weight_scale: Any
    input_scale: Any = None
    second_scale: Any = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of one copy of the weight with its scales."""
        tensors = (self.codes[0], self.weight_scale, self.second_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def bytes(self, tokens: int) -> int:
        """Bytes that a call has to move: the weight, x and y in bfloat16, each once."""
        return self.weight_bytes + 2 * tokens * sum(self.shape)

    def flop(self, tokens: int) -> int:
        """Two for each weight and token."""
        return 2 * tokens * self.shape[0] * self.shape[1]

    def checkpoint(self, copy: int) -> dict[str, Any]:
        """The tensors of one copy under the names of a checkpoint."""
        tensors = {
            "weight": self.codes[copy],
            "weight_scale": self.weight_scale,
            "weight_scale_2": self.second_scale,
            "input_scale": self.input_scale,
        }
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(slots=True)
class Problem:
    """A shape with its activations, and its layers as they are asked for.

    Attributes:
        torch: The module.
        shape: (out_features, in_features).
        x: bfloat16 [tokens, in_features], normal; fewer tokens are its first rows.
        weight: float32 [out_features, in_features], normal.
        rotate: Bytes of weights that take turns at least.
    """

    torch: Any
    shape: tuple[int, int]
    x: Any
    weight: Any
    rotate: int = ROTATION
    _layers: dict[str, Layer] = field(default_factory=dict)
    _meaning: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(
        cls, torch: Any, shape: tuple[int, int], tokens: int, device: str, seed: int, rotate: int = ROTATION
    ) -> Problem:
        """Fresh normal data for up to `tokens` rows."""
        source = torch.Generator(device).manual_seed(seed)
        x = torch.randn(tokens, shape[1], generator=source, device=device, dtype=torch.bfloat16)
        weight = torch.randn(shape, generator=source, device=device, dtype=torch.float32)
        return cls(torch, shape, x, weight, rotate)

    def layer(self, quant_algo: str) -> Layer:
        """The weight quantized as `quant_algo` says; the same object every time."""
        if quant_algo not in self._layers:
            self._layers[quant_algo] = self._make(quant_algo)
        return self._layers[quant_algo]

    def _make(self, quant_algo: str) -> Layer:
        torch, second = self.torch, None
        if quant_algo in (NVFP4_FP8, W4A16):
            return replace(self.layer(NVFP4), quant_algo=quant_algo)
        if quant_algo == PEER:
            codes, scale = self.weight.to(torch.bfloat16), None
        elif quant_algo == NVFP4:
            codes, scale, second = nvfp4.quantize(torch, self.weight)
        else:
            codes, scale = quantize_weight(torch, self.weight, quant_algo)
        count = copies(codes.numel() * codes.element_size(), self.rotate)
        static = None
        if quant_algo == "FP8":
            static = (self.x.abs().max().float() / E4M3_MAX).reshape(1)
        rotated = [codes] + [codes.clone() for _ in range(count - 1)]
        return Layer(torch, quant_algo, self.shape, rotated, scale, static, second)

    def expected(self, quant_algo: str, rows: Any) -> Any:
        """float64 output for some rows of x, by their numbers."""
        layer = self.layer(quant_algo)
        if quant_algo not in self._meaning:
            self._meaning[quant_algo] = weight_meaning(self.torch, layer).double()
        x = activation_meaning(self.torch, self.x[rows], layer)
        return x @ self._meaning[quant_algo].T


def checked_rows(torch: Any, tokens: int, device: str) -> Any:
    """Numbers of the rows of an output that are compared: all, or as many from both ends."""
    half = CHECKED_TOKENS // 2
    if tokens <= CHECKED_TOKENS:
        return torch.arange(tokens, device=device)
    return torch.cat([torch.arange(half, device=device), torch.arange(tokens - half, tokens, device=device)])


def relative_error(torch: Any, got: Any, expected: Any) -> float:
    """Frobenius norm of the difference over that of what was expected; NaN where `got` has one."""
    return float(torch.linalg.norm(got.double() - expected) / torch.linalg.norm(expected))


def quantize_weight(torch: Any, weight: Any, quant_algo: str) -> tuple[Any, Any]:
    """e4m3 codes [N, K] and the float32 scales of a checkpoint, amax / 448 each."""
    rows, columns = weight.shape
    if quant_algo == "FP8":
        scale = (weight.abs().max() / E4M3_MAX).reshape(1)
        wide = scale
    elif quant_algo == "FP8_PER_CHANNEL_PER_TOKEN":
        scale = weight.abs().amax(1) / E4M3_MAX
        wide = scale[:, None]
    else:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        padded = torch.nn.functional.pad(
            weight.abs(), (0, blocks[1] * BLOCK - columns, 0, blocks[0] * BLOCK - rows)
        )
        scale = padded.reshape(blocks[0], BLOCK, blocks[1], BLOCK).amax((1, 3)) / E4M3_MAX
        wide = spread_blocks(scale, rows, columns)
    return to_e4m3(torch, weight / wide), scale


def spread_blocks(scale: Any, rows: int, columns: int) -> Any:
    """One value for each 128 x 128 block as one for each element."""
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def to_e4m3(torch: Any, values: Any) -> Any:
    """Rounded to nearest even; what is too large saturates, as torch's own cast does not."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def weight_meaning(torch: Any, layer: Layer) -> Any:
    """The weight that the codes stand for, float64 [N, K]."""
    if layer.second_scale is not None:
        find = nvfp4.folded_meaning if layer.quant_algo == NVFP4_FP8 else nvfp4.meaning
        return find(torch, layer.codes[0], layer.weight_scale, layer.second_scale)
    codes = layer.codes[0].double()
    if layer.weight_scale is None:
        return codes
    scale = layer.weight_scale.double()
    if layer.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return codes * scale[:, None]
    if layer.quant_algo == "FP8_PB_WO":
        return codes * spread_blocks(scale, *layer.shape)
    return codes * scale


def activation_meaning(torch: Any, x: Any, layer: Layer) -> Any:
    """The activations that quantized rows of x stand for, float64 [rows, K]."""
    if layer.quant_algo in (PEER, NVFP4, W4A16):
        return x.double()
    codes, scale = quantize_activations(torch, x, layer)
    if layer.quant_algo == "FP8_PB_WO":
        scale = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return codes.double() * scale.double()


def quantize_activations(torch: Any, x: Any, layer: Layer) -> tuple[Any, Any]:
    """e4m3 codes and scales ([1], [rows, 1] or one for each group) as `moqext.ops.quantize` has them.

    amax is divided by a tensor: torch on CUDA divides by a number by multiplying, one bit off. Where amax is
    448 times a power of two, a sixteenth of all values are ties, which that bit would decide.
    """
    values = x.float()
    most = values.new_full((), E4M3_MAX)
    if layer.quant_algo == "FP8":
        return to_e4m3(torch, values * (1 / layer.input_scale)), layer.input_scale
    if layer.quant_algo in ("FP8_PER_CHANNEL_PER_TOKEN", NVFP4_FP8):
        least = 1 / (E4M3_MAX * 512)
        scale = (values.abs().amax(1, keepdim=True) / most).clamp(min=least)
        return to_e4m3(torch, values / scale), scale
    padded = torch.nn.functional.pad(values, (0, -x.shape[1] % BLOCK))
    groups = padded.reshape(len(x), -1, BLOCK)
    scale = groups.abs().amax(2).clamp(min=1e-10) / most
    codes = to_e4m3(torch, groups / scale[..., None]).reshape(padded.shape)
    return codes[:, : x.shape[1]], scale
