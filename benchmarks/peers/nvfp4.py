"""Who else multiplies NVFP4 weights by bfloat16 activations on Hopper.

cuBLAS behind a kernel that dequantizes, a product in Triton, and vLLM's Marlin where vLLM happens to be
installed; its adapter has not run, and published figures stand for it (benchmarks/published_h200.json).
Humming has no adapter: see `benchmarks.peers.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from benchmarks import nvfp4
from benchmarks.layers import NVFP4, Layer
from benchmarks.peers import Bound
from benchmarks.peers.torch_linear import missing_module


@dataclass(frozen=True)
class Dequantized:
    """The weight written out in bfloat16 in every call, then torch's product: no second weight is kept."""

    name: str = "dequantize, cuBLAS"
    quant_algo: str = NVFP4
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch", "triton")

    def weights(self, layer: Layer) -> Sequence[Any]:
        return [(codes, layer.weight_scale.clone()) for codes in layer.codes]

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        from benchmarks.peers import triton_nvfp4

        wide = x.new_empty(layer.shape)
        out = x.new_empty(len(x), layer.shape[0])

        def call(weight: Any) -> None:
            triton_nvfp4.dequantize(*weight, layer.second_scale, wide)
            layer.torch.mm(x, wide.T, out=out)

        return Bound(call, out, "triton:dequantize, torch:mm")


@dataclass(frozen=True)
class TritonLinear:
    """Codes decoded as they are multiplied."""

    name: str = "Triton"
    quant_algo: str = NVFP4
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch", "triton")

    def weights(self, layer: Layer) -> Sequence[Any]:
        codes = nvfp4.halves(layer.torch, layer.codes[0], 128)
        return [(codes.clone(), layer.weight_scale.clone()) for _ in layer.codes]

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        from benchmarks.peers import triton_nvfp4

        torch, (rows, columns) = layer.torch, layer.shape
        chip = torch.cuda.get_device_properties(x.device).multi_processor_count
        shape = triton_nvfp4.shape_for(len(x), rows, columns, chip)
        out = x.new_empty(len(x), rows)
        parts = x.new_empty(shape.parts, len(x), rows, dtype=torch.float32)

        def call(weight: Any) -> None:
            triton_nvfp4.multiply(x, weight, layer.second_scale, out, parts, shape)

        return Bound(call, out, "triton:{}x{} x {}".format(*shape[:3]))


@dataclass(frozen=True)
class Marlin:
    """vLLM's, with the weights as vLLM prepares them."""

    name: str = "Marlin"
    quant_algo: str = NVFP4
    environment: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        return missing_module("torch", "vllm")

    def weights(self, layer: Layer) -> Sequence[Any]:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

        prepared = []
        for codes in layer.codes:
            own = SimpleNamespace(
                weight=codes,
                weight_scale=layer.weight_scale,
                weight_global_scale=layer.second_scale,
                output_size_per_partition=layer.shape[0],
                input_size_per_partition=layer.shape[1],
                params_dtype=layer.torch.bfloat16,
            )
            marlin_utils_fp4.prepare_fp4_layer_for_marlin(own)
            prepared.append(own)
        return prepared

    def bind(self, layer: Layer, weights: Sequence[Any], x: Any) -> Bound:
        from vllm import _custom_ops as ops
        from vllm.scalar_type import scalar_types

        out = x.new_empty(len(x), layer.shape[0])
        sizes = {"size_m": len(x), "size_n": layer.shape[0], "size_k": layer.shape[1]}
        unused = dict.fromkeys(("b_bias", "a_scales", "b_zeros", "g_idx", "perm"))

        def call(weight: Any) -> None:
            tensors = {
                "b_q_weight": weight.weight,
                "b_scales": weight.weight_scale,
                "global_scale": weight.weight_global_scale,
                "workspace": weight.workspace,
            }
            ops.marlin_gemm(a=x, c=out, b_q_type=scalar_types.float4_e2m1f, **tensors, **unused, **sizes)

        return Bound(call, out, "vllm:marlin_gemm")


PEERS = [Dequantized(), TritonLinear(), Marlin()]
