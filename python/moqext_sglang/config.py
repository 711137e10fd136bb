"""QuantizationConfigs of SGLang that ask moqext which layer is quantized how.

Each is a subclass of SGLang's own for the name, since SGLang tests for those, and holds its fields. What is
excluded, and which algorithm a layer has, is answered by `moqext.QuantConfig` in the producer's meaning.
"""

import logging
import os
from collections.abc import Mapping
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
from moqext.algorithms import ALGORITHMS
from moqext.config import LayerQuant
from moqext_sglang.cache import MoqextKVCacheMethod
from moqext_sglang.experts import MoqextFusedMoEMethod
from moqext_sglang.linear import MoqextLinearMethod

logger = logging.getLogger(__name__)

COMPUTES = ("exact", "auto", "fp8")


def compute_wanted() -> str:
    """MOQEXT_SGLANG_COMPUTE, "exact" where it is not set.

    Raises:
        ValueError: it is none that there is.
    """
    wanted = os.environ.get("MOQEXT_SGLANG_COMPUTE", "exact")
    if wanted not in COMPUTES:
        raise ValueError(f"MOQEXT_SGLANG_COMPUTE: expected one of {', '.join(COMPUTES)}, got {wanted!r}")
    return wanted


def read_config(config: Mapping[str, Any]) -> QuantConfig:
    """A configuration as SGLang hands it over, which adds entries of its own and renames the method.

    Raises:
        ConfigError: as `QuantConfig.from_dict`.
    """
    document = {
        name: value for name, value in config.items() if name not in ("packed_modules_mapping", "hf_config")
    }
    if str(document.get("quant_method", "")).startswith("modelopt"):
        document["quant_method"] = "modelopt"
    return QuantConfig.from_dict(document)


def algorithms_of(config: QuantConfig) -> list[str]:
    """The algorithms that layers of a checkpoint have."""
    listed = {layer.quant_algo for layer in config.quantized_layers.values()}
    if config.quant_algo != "MIXED_PRECISION":
        listed.add(config.quant_algo)
    return sorted(name for name in listed if name is not None)


def runs(config: QuantConfig) -> bool:
    """Whether moqext has a method for each layer of a checkpoint."""
    return all(ALGORITHMS[name].linear is not None for name in algorithms_of(config))


def sglang_name(config: QuantConfig) -> str:
    """What SGLang calls the method of a checkpoint."""
    if config.quant_algo == "MIXED_PRECISION":
        return "modelopt_mixed"
    return "modelopt_fp4" if "FP4" in str(config.quant_algo) else "modelopt_fp8"


class _MoqextConfig:
    """What the three have in common, in front of SGLang's class.

    Attributes:
        checkpoint: what the checkpoint says, its names changed to SGLang's; None where SGLang quantizes a
            checkpoint itself while it loads, which stays its own.
        compute: as for `moqext.LinearMethod`.
    """

    checkpoint: QuantConfig | None = None
    compute: str = "exact"
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
        checkpoint = read_config(config)
        if not runs(checkpoint):
            return cls._left_to_sglang(config, checkpoint)
        made = own.from_config(_as_sglang_reads(checkpoint, config.get("packed_modules_mapping")))
        made.checkpoint, made.compute = checkpoint, compute_wanted()
        named = ", ".join(algorithms_of(checkpoint)) or "no layer"
        logger.info("moqext runs this checkpoint (%s); MOQEXT_SGLANG=0 leaves it to SGLang", named)
        for conflict in checkpoint.conflicts:
            logger.warning("moqext: %s", conflict)
        return made

    @classmethod
    def _left_to_sglang(cls, config: dict[str, Any], checkpoint: QuantConfig) -> Any:
        """SGLang's own configuration, where layers have an algorithm that moqext does not run."""
        names = [name for name in algorithms_of(checkpoint) if ALGORITHMS[name].linear is None]
        base: Any = cls.__mro__[2]
        try:
            made = base.from_config(config)
        except ValueError as error:
            raise UnsupportedQuantization(
                f"quant_algo {checkpoint.quant_algo}: moqext does not run {', '.join(names)}, and SGLang "
                f"says: {error}"
            ) from error
        logger.warning("moqext does not run %s: this checkpoint is left to SGLang", ", ".join(names))
        return made

    @classmethod
    def for_online_weight_quantization(cls, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own: it quantizes, and there is no ModelOpt checkpoint."""
        return ModelOptFp4Config.for_online_weight_quantization(*args, **kwargs)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """What activations may be."""
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
            return MoqextLinearMethod(self, found.quant_algo, found.group_size, self.compute, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._of_embedding(prefix)
        if isinstance(layer, FusedMoE):
            found = self.layer_quant(prefix)
            self._refuse_other_shared_experts(layer, prefix, found)
            if found.quant_algo is None:
                return None
            return MoqextFusedMoEMethod(self, found.quant_algo, found.group_size, self.compute, prefix)
        return None

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
    """Checkpoints in FP8 in any scaling."""


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
"""What takes the place of SGLang's classes, by SGLang's names."""
