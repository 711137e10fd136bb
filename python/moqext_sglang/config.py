"""QuantizationConfigs of SGLang that ask moqext which layer is quantized how.

Each is a subclass of SGLang's own for the name, since SGLang tests for those, and holds its fields. What is
excluded, and which algorithm a layer has, is answered by `moqext.QuantConfig` in the producer's meaning.
"""

import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.modelopt_quant import (
    ModelOptFp4Config,
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from moqext import QuantConfig, UnsupportedQuantization
from moqext.reader.config.quant_config import LayerQuant
from moqext_sglang.cache import MoqextKVCacheMethod
from moqext_sglang.experts import MoqextFusedMoEMethod
from moqext_sglang.hand_back import (
    ask_sglang,
    is_runnable,
    read_force,
    reason_of_algorithm,
    reason_of_experts,
)
from moqext_sglang.linear import MoqextLinearMethod
from moqext_torch.stepping_aside import ReadConfig, Reason, read_config, tell_once

logger = logging.getLogger(__name__)

COMPUTES = ("exact", "auto", "fp8", "fp4")


def compute_wanted() -> str:
    """MOQEXT_SGLANG_COMPUTE, "exact" where it is not set.

    Raises:
        ValueError: it is none that there is.
    """
    wanted = os.environ.get("MOQEXT_SGLANG_COMPUTE", "exact")
    if wanted not in COMPUTES:
        raise ValueError(f"MOQEXT_SGLANG_COMPUTE: expected one of {', '.join(COMPUTES)}, got {wanted!r}")
    return wanted


def read_checkpoint(config: Mapping[str, Any]) -> ReadConfig:
    """A configuration as SGLang hands it over, which adds entries of its own and renames the method.

    Raises:
        ConfigError: as `QuantConfig.from_dict`, but for algorithms of layers that only SGLang may know.
    """
    document = {
        name: value for name, value in config.items() if name not in ("packed_modules_mapping", "hf_config")
    }
    if str(document.get("quant_method", "")).startswith("modelopt"):
        document["quant_method"] = "modelopt"
    return read_config(document)


def runs_any(read: ReadConfig) -> bool:
    """Whether moqext has a method for some layer of a checkpoint, on any machine, or there is no layer."""
    algorithms = read.algorithms()
    return not algorithms or any(map(is_runnable, algorithms))


def sglang_name(config: QuantConfig) -> str:
    """SGLang's name of the method of a checkpoint."""
    if config.quant_algo == "MIXED_PRECISION":
        return "modelopt_mixed"
    return "modelopt_fp4" if "FP4" in str(config.quant_algo) else "modelopt_fp8"


class _MoqextConfig:
    """The part that the three configurations have in common, in front of SGLang's class.

    Attributes:
        checkpoint: what the checkpoint says, its names changed to SGLang's; None where SGLang quantizes a
            checkpoint itself while it loads, which stays its own.
        unknown: algorithms that moqext's reader does not know, by the names of their layers.
        compute: as for `moqext.LinearMethod`.
        force: whether moqext runs what it can, even where SGLang would be faster.
        engine: SGLang's own configuration of the checkpoint, for layers that are SGLang's; None where it
            refuses the checkpoint.
        refusal: what it says then.
    """

    checkpoint: QuantConfig | None = None
    unknown: Mapping[str, str] = MappingProxyType({})
    compute: str = "exact"
    force: bool = False
    engine: Any = None
    refusal: str | None = None
    packed_modules_mapping: dict[str, list[str]] | None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Reads a configuration of ModelOpt.

        Raises:
            ConfigError: it holds something unknown or contradictory.
            UnsupportedQuantization: an algorithm that neither moqext nor SGLang runs.
        """
        own: Any = super()
        if str(config.get("quant_method", "")).lower() == "fp8":  # of other makers, quantized by SGLang
            return own.from_config(config)
        base: Any = cls.__mro__[2]
        try:
            engine, refusal = base.from_config(config), None
        except Exception as error:  # of whatever kind: SGLang does not run the checkpoint
            engine, refusal = None, str(error)
        read = read_checkpoint(config)
        compute, force = compute_wanted(), read_force()
        reasons = {name: _reason(name, compute, force or engine is None) for name in read.algorithms()}
        if reasons and None not in reasons.values():
            return _left_to_sglang(read.config, reasons, engine, refusal)
        made = own.from_config(_as_sglang_reads(read.config, config.get("packed_modules_mapping")))
        made.checkpoint, made.unknown, made.compute = read.config, read.unknown, compute
        made.force, made.engine, made.refusal = force, engine, refusal
        kept = [name for name, reason in reasons.items() if reason is None]
        named = ", ".join(kept) or "no layer"
        logger.info("moqext runs this checkpoint (%s); MOQEXT_SGLANG=0 leaves it to SGLang", named)
        for conflict in read.config.conflicts:
            logger.warning("moqext: %s", conflict)
        return made

    @classmethod
    def for_online_weight_quantization(cls, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own: it quantizes, and there is no ModelOpt checkpoint."""
        return ModelOptFp4Config.for_online_weight_quantization(*args, **kwargs)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """The dtypes that activations may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest chip that moqext is built for."""
        return 80

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        """Changes the names of a checkpoint to those of SGLang's model."""
        own: Any = super()
        own.apply_weight_name_mapper(hf_to_sglang_mapper)
        if self.checkpoint is None:
            return
        given = self.checkpoint.to_dict()["quantization"]
        fields = {"exclude_modules": hf_to_sglang_mapper.apply_list(given["exclude_modules"])}
        if "quantized_layers" in given:
            fields["quantized_layers"] = hf_to_sglang_mapper.apply_dict(given["quantized_layers"])
        self.checkpoint = self.checkpoint.replace(**fields)
        self.unknown = hf_to_sglang_mapper.apply_dict(dict(self.unknown))
        if self.engine is not None:
            self.engine.apply_weight_name_mapper(hf_to_sglang_mapper)

    def layer_quant(self, prefix: str) -> LayerQuant:
        """How a module of SGLang's model is quantized.

        Raises:
            ConfigError: parts of a fused module, or experts of a layer, differ.
        """
        assert self.checkpoint is not None
        packed = (self.packed_modules_mapping or {}).get(prefix.rpartition(".")[2])
        return self.checkpoint.layer_quant(prefix, packed if isinstance(packed, (list, tuple)) else ())

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether a module is excluded, as the producer means it; models ask before they make layers."""
        if self.checkpoint is None:
            own: Any = super()
            return bool(own.is_layer_excluded(prefix))
        packed = self.packed_modules_mapping or {}
        usable = {name: parts for name, parts in packed.items() if isinstance(parts, (list, tuple))}
        return self.checkpoint.is_excluded(prefix, usable)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer; that of unquantized ones where the checkpoint excludes it.

        Raises:
            UnsupportedQuantization: the layer, named, has no kernel where it is.
            ConfigError: as `layer_quant`.
        """
        if self.checkpoint is None:
            own: Any = super()
            return own.get_quant_method(layer, prefix)
        if isinstance(layer, RadixAttention):
            algo = self.checkpoint.kv_cache_quant_algo
            return None if algo is None else MoqextKVCacheMethod(self, algo, prefix)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            found = self.layer_quant(prefix)
            if found.quant_algo is None:
                return UnquantizedLinearMethod()
            return self._choose(MoqextLinearMethod, found, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._of_embedding(prefix)
        if isinstance(layer, FusedMoE):
            found = self.layer_quant(prefix)
            self._refuse_other_shared_experts(layer, prefix, found)
            if found.quant_algo is None:
                return None
            return self._choose(MoqextFusedMoEMethod, found, layer, prefix)
        return None

    def _choose(self, method: type, found: LayerQuant, layer: Any, prefix: str) -> Any:
        """The method of a quantized layer, moqext's or SGLang's.

        Raises:
            UnsupportedQuantization: neither runs it.
        """
        assert self.checkpoint is not None
        algorithm = ReadConfig(self.checkpoint, dict(self.unknown)).algorithm_of(found)
        reason = _reason(algorithm, self.compute, self.force or self.engine is None)
        if reason is None and method is MoqextFusedMoEMethod:
            reason = reason_of_experts()
        if reason is None:
            try:
                return method(self, found.quant_algo, found.group_size, self.compute, prefix)
            except UnsupportedQuantization as error:
                reason = Reason(str(error), runs=False)
        return ask_sglang(self, layer, prefix, algorithm, reason)

    def _of_embedding(self, prefix: str) -> Any:
        """SGLang's method for an embedding that the checkpoint lists as NVFP4; embeddings are not else."""
        listed = self.checkpoint.quantized_layers.get(prefix) if self.checkpoint is not None else None
        if listed is None or listed.quant_algo is None:
            return None
        nvfp4 = getattr(self, "nvfp4_config", None)
        made = getattr(modelopt_quant, "ModelOptNvFp4EmbeddingMethod", None)  # 0.5.17 has none
        if listed.quant_algo != "NVFP4" or nvfp4 is None or made is None:
            raise UnsupportedQuantization(f"{prefix}: no embedding in {listed.quant_algo}")
        return made(nvfp4)

    def _refuse_other_shared_experts(self, layer: Any, prefix: str, found: LayerQuant) -> None:
        """Raises where shared experts that SGLang keeps among the routed ones are stored in another way."""
        if not getattr(layer, "num_fused_shared_experts", 0):
            return
        parent = prefix.rpartition(".")[0]
        shared = {
            self.layer_quant(f"{parent}.{name}").quant_algo for name in ("shared_experts", "shared_expert")
        }
        if shared != {found.quant_algo}:
            raise UnsupportedQuantization(
                f"{prefix}: experts are {found.quant_algo}, shared ones among them "
                f"{', '.join(sorted(map(str, shared)))}; start SGLang with --disable-shared-experts-fusion"
            )


def _reason(algorithm: str, compute: str, wanted: bool) -> Reason | None:
    """Why layers of an algorithm are SGLang's; where moqext is `wanted` only what it cannot run is."""
    reason = reason_of_algorithm(algorithm, compute)
    return None if reason is not None and reason.runs and wanted else reason


def _left_to_sglang(
    config: QuantConfig, reasons: Mapping[str, Reason | None], engine: Any, refusal: str | None
) -> Any:
    """SGLang's own configuration of a checkpoint of which moqext runs no layer.

    Raises:
        UnsupportedQuantization: SGLang refuses it, too.
    """
    named = ", ".join(reasons)
    if engine is None:
        raise UnsupportedQuantization(
            f"quant_algo {config.quant_algo}: moqext does not run {named} here, and SGLang says: {refusal}"
        )
    for algorithm, reason in reasons.items():
        assert reason is not None
        tell_once(logger, "SGLang", algorithm, reason.why, "")
    return engine


def _as_sglang_reads(config: QuantConfig, packed: Any) -> dict[str, Any]:
    """A configuration in the one shape that each class of SGLang's accepts, for the fields it keeps."""
    inner = config.to_dict()["quantization"]
    name = sglang_name(config)
    told = {
        "modelopt_fp8": {"quant_algo": "FP8"},
        "modelopt_fp4": {"quant_algo": "NVFP4", "group_size": inner.get("group_size") or 16},
        "modelopt_mixed": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": inner.get("quantized_layers"),
        },
    }[name]
    kept = {"ignore": inner["exclude_modules"], "kv_cache_quant_algo": inner["kv_cache_quant_algo"]}
    return {**told, **kept, "packed_modules_mapping": packed}


class MoqextFp8Config(_MoqextConfig, ModelOptFp8Config):
    """Checkpoints in FP8 in any scaling, and in formats of int8 and int4, which SGLang has no name for."""


class MoqextFp4Config(_MoqextConfig, ModelOptFp4Config):
    """Checkpoints in NVFP4 and its variants."""


class MoqextMixedPrecisionConfig(_MoqextConfig, ModelOptMixedPrecisionConfig):
    """Checkpoints that say of each layer what it is."""


CONFIGS: dict[str, Any] = {
    "modelopt": MoqextFp8Config,
    "modelopt_fp8": MoqextFp8Config,
    "modelopt_fp4": MoqextFp4Config,
    "modelopt_mixed": MoqextMixedPrecisionConfig,
}
"""The classes in the place of SGLang's, by SGLang's names."""
