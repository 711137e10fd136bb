"""Linears of compressed-tensors, where MOQEXT_VLLM_COMPRESSED_TENSORS=1 asks for moqext.

vLLM's own configuration says which scheme a layer has. Those in FP8 and NVFP4 are moqext's, from their own
codes and scales; experts, caches and all other schemes keep vLLM's methods.
"""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from vllm import envs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moqext import ConfigError, LayerQuant, ParamSpec
from moqext.reader.producers.compressed_tensors import Scheme, read_scheme
from moqext.reader.producers.fields import Fields
from moqext.reader.producers.reciprocal import factors_of
from moqext_torch.stepping_aside import tell_once
from moqext_vllm.check import check_checkpoint
from moqext_vllm.choices import Choices
from moqext_vllm.linear import MoqextModelOptLinearMethod, take_shards

logger = logging.getLogger("vllm.moqext")

FORMATS = ("float-quantized", "naive-quantized", "nvfp4-pack-quantized")
"""Formats of layers that are moqext's."""
PACKED = MappingProxyType(
    {"weight": "weight_packed", "weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
)
"""Tensors of NVFP4 by ModelOpt's names."""
FACTORS: Mapping[str, Callable[[Any], Any]] = {"weight_scale_2": factors_of, "input_scale": np.reciprocal}
"""Functions that make scales of ModelOpt of divisors, by the names of the scales."""


class MoqextCompressedTensorsLinearMethod(MoqextModelOptLinearMethod):
    """`MoqextModelOptLinearMethod` for the tensors of compressed-tensors.

    Args:
        scheme: of the layer.
        options: as for the base.
    """

    def __init__(self, scheme: Scheme, *options: Any) -> None:
        super().__init__(LayerQuant(scheme.algo, scheme.group_size, "config_groups"), *options)
        self.by_row = scheme.by_row
        if scheme.algo.endswith("NVFP4"):
            self.names = PACKED

    def _register(self, layer: torch.nn.Module, role: str, spec: ParamSpec, loader: Any) -> None:
        if self.by_row and role == "weight_scale":
            spec = spec._replace(shape=(len(self.partitions),))
        super()._register(layer, role, spec, loader)

    def _loaded(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        found = super()._loaded(layer)
        for role in FACTORS.keys() & found.keys() & self.names.keys():
            with np.errstate(divide="ignore"):  # of zero it is no scale, and refused as such
                found[role] = torch.from_numpy(FACTORS[role](found[role].numpy()))
        if self.by_row:
            found["weight_scale"] = found["weight_scale"].repeat_interleave(torch.tensor(self.partitions))
        return found


take_shards(MoqextCompressedTensorsLinearMethod)


class MoqextCompressedTensorsConfig(Choices, CompressedTensorsConfig):  # type: ignore[misc]
    """vLLM's configuration, which answers with moqext's method for linears that moqext runs.

    Attributes:
        NAME: what vLLM calls the family.
    """

    NAME: ClassVar[str] = "compressed-tensors"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Reads a configuration as vLLM does, and its schemes as moqext does."""
        made: Self = super().from_config(config)
        made.read_options()
        schemes = map(made._scheme, made.target_scheme_map.values())
        made.algorithms = sorted({scheme.algo for scheme in schemes if isinstance(scheme, Scheme)})
        return made

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Looks at the whole checkpoint: vLLM calls this before it loads anything.

        Raises:
            CheckpointError: there is something wrong with it.
        """
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        if self.runs_any:
            check_checkpoint(model_name, has_unknown=True)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer: moqext's for linears that it runs, and vLLM's for all others."""
        if not self.runs_any:
            return super().get_quant_method(layer, prefix)
        self.enter()
        is_linear = isinstance(layer, (LinearBase, ParallelLMHead))
        entry = self.get_scheme_dict(layer, prefix) if is_linear else None
        if entry and entry.get("weights") is not None:
            method = self._choose(entry, layer, prefix)
            if not isinstance(method, str):
                return method
            tell_once(logger, "vLLM", entry["format"] or self.NAME, method, prefix)
        return super().get_quant_method(layer, prefix)

    def _choose(self, entry: Mapping[str, Any], layer: Any, prefix: str) -> Any:
        """The method of a quantized linear, or the reason why it is vLLM's."""
        parent, _, own = prefix.rpartition(".")
        parts = (f"{parent}.{part}".strip(".") for part in self.packed_modules_mapping.get(own, ()))
        if any(self.get_scheme_dict(layer, part) != entry for part in parts):
            return "parts of a fused layer have several schemes"
        scheme = self._scheme(entry)
        if isinstance(scheme, str):
            return scheme
        reason = self.reason(scheme.algo)
        if reason is not None:
            return reason.why
        method = MoqextCompressedTensorsLinearMethod(
            scheme, prefix, self.compute, self.fast_accum, envs.VLLM_BATCH_INVARIANT
        )
        fault = method.find_fault(layer)
        return method if fault is None else str(fault).removeprefix(f"{prefix}: ")

    def _scheme(self, entry: Mapping[str, Any]) -> Scheme | str:
        """The scheme of an entry of vLLM's `target_scheme_map`, or the reason why it is vLLM's."""
        style = entry.get("format") or self.quant_format or ""
        if style not in FORMATS or entry.get("output_activations"):
            return "moqext runs other formats of compressed-tensors here"
        if self.transform_config is not None:
            return "weights are transformed"
        arguments = {name: entry.get(name) for name in ("weights", "input_activations")}
        parts = {name: args.model_dump(mode="json") for name, args in arguments.items() if args is not None}
        try:
            scheme = read_scheme(Fields("config.json", "config_groups", parts), style)
        except ConfigError as error:
            return str(error)
        return scheme if not scheme.otherwise else f"it {scheme.otherwise}"
