"""Serving engines' kernels, where they happen to be installed: vLLM, DeepGEMM, FlashInfer.

Nothing is fetched or built for them. They were not installed where the recorded results come from, whose page
shows published figures of theirs; so a change of their interfaces shows here first, as a reason. Humming has
no adapter: it wants a packed layout of its own and compiles about 90 schedules for a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.layers import Layer
from benchmarks.peers import Bound
from benchmarks.peers.torch_linear import missing_module, quantization


@dataclass(frozen=True)
class Vllm:
    """vLLM's CUTLASS kernels behind vLLM's own quantization, one scale given or one a token."""

    name: str
    quant_algo: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch", "vllm")

    def weights(self, layer: Layer) -> Sequence[Any]:
        return [codes.T for codes in layer.codes]

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        from vllm import _custom_ops as ops

        rowwise = self.quant_algo == "FP8_PER_CHANNEL_PER_TOKEN"
        scale = layer.weight_scale.reshape(-1, 1) if rowwise else layer.weight_scale
        out = x.new_empty(len(x), layer.shape[0])

        def call(weight: Any) -> None:
            codes, scales = ops.scaled_fp8_quant(x, layer.input_scale, use_per_token_if_dynamic=rowwise)
            layer.torch.ops._C.cutlass_scaled_mm(out, codes, weight, scales, scale, None)

        return Bound(call, out, "vllm:cutlass_scaled_mm")


@dataclass(frozen=True)
class DeepGemm:
    """DeepGEMM behind the Triton quantization by groups; it compiles at first use."""

    name: str = "DeepGEMM"
    quant_algo: str = "FP8_PB_WO"
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch", "triton", "deep_gemm")

    def weights(self, layer: Layer) -> Sequence[Any]:
        return layer.codes

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        import deep_gemm

        rows = -(-len(x) // 4) * 4  # its scales are read by fours
        quantize = quantization(layer, x, rows)
        out = x.new_empty(len(x), layer.shape[0])

        def call(weight: Any) -> None:
            codes, scales = quantize()
            operands = (codes[: len(x)], scales[: len(x)]), (weight, layer.weight_scale)
            deep_gemm.fp8_gemm_nt(*operands, out, disable_ue8m0_cast=True)

        return Bound(call, out, "deep_gemm:fp8_gemm_nt")


@dataclass(frozen=True)
class FlashInfer:
    """FlashInfer's product by blocks for Hopper, which quantizes bfloat16 itself."""

    name: str = "FlashInfer"
    quant_algo: str = "FP8_PB_WO"
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch", "flashinfer")

    def weights(self, layer: Layer) -> Sequence[Any]:
        return layer.codes

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        out = x.new_empty(len(x), layer.shape[0])
        return Bound(
            lambda weight: fp8_blockscale_gemm_sm90(x, weight, weight_scale=layer.weight_scale, out=out),
            out,
            "flashinfer:fp8_blockscale_gemm_sm90",
        )


PEERS = [
    Vllm("vLLM per tensor", "FP8"),
    Vllm("vLLM per token", "FP8_PER_CHANNEL_PER_TOKEN"),
    DeepGemm(),
    FlashInfer(),
]
