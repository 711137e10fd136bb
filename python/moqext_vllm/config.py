"""The configurations that vLLM asks how a layer is quantized, over `moqext.QuantConfig`.

They stand at module level, one for each name of vLLM's, because they are pickled to the engine's process.
"""

import logging
import os
from typing import Any, ClassVar, Literal, Self

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moqext import ConfigError, LayerQuant, QuantConfig, detect
from moqext_vllm.attention import take_over
from moqext_vllm.check import check_checkpoint
from moqext_vllm.compiled import install_pass
from moqext_vllm.experts import MoqextModelOptMoEMethod
from moqext_vllm.kv_cache import MoqextKVCacheMethod, refuse_cache
from moqext_vllm.linear import MoqextModelOptLinearMethod
from moqext_vllm.settings import enter_settings, read_fast_accum, read_ops

logger = logging.getLogger("vllm.moqext")

Semantics = Literal["vllm", "modelopt"]


def read_semantics() -> Semantics:
    """What MOQEXT_VLLM_EXCLUSION says excluded names mean: "vllm" without it.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get("MOQEXT_VLLM_EXCLUSION") or "vllm"
    if value == "vllm" or value == "modelopt":
        return value
    raise ValueError(f"MOQEXT_VLLM_EXCLUSION: expected vllm or modelopt, got {value!r}")


class MoqextConfig(QuantizationConfig):
    """A ModelOpt checkpoint's configuration.

    Attributes:
        NAME: what vLLM calls the family.
        config: what moqext read; its names are vLLM's after `apply_vllm_mapper`.
        semantics: what its excluded names mean, as for `QuantConfig.is_excluded`.
        compute: as for `moqext.LinearMethod`.
        fast_accum: as for `moqext.LinearMethod`, of linears.
    """

    NAME: ClassVar[str]

    def __init__(self, config: QuantConfig) -> None:
        super().__init__()
        self.config = config
        self.semantics = read_semantics()
        self.compute = os.environ.get("MOQEXT_VLLM_COMPUTE") or "exact"
        self.fast_accum = read_fast_accum()
        refuse_cache(config.kv_cache_quant_algo)

    # --------------------------------------------------------------------------------- what vLLM asks first

    def get_name(self) -> str:
        """The family's name."""
        return self.NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What activations may be."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that moqext runs on, 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The file that configurations stand in where config.json has none."""
        return ["hf_quant_config.json"]

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The family's name where a checkpoint is of it: vLLM asks every family."""
        if not isinstance(hf_quant_cfg, dict):
            return None
        return cls.NAME if detect(hf_quant_cfg) == cls.NAME else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Reads a configuration.

        Raises:
            ConfigError: it is none of ModelOpt, or says something that nobody knows.
            UnsupportedQuantization: its cache format does not run.
        """
        return cls(QuantConfig.from_dict(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Looks at the whole checkpoint: vLLM calls this before it loads anything.

        Raises:
            CheckpointError: there is something wrong with it.
        """
        check_checkpoint(model_name)

    def has_blocked_weights(self) -> bool:
        """Whether vLLM is to turn on its own quantization of blocks: moqext has its own."""
        return False

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames modules from the checkpoint's names to those of vLLM's model."""
        config = self.config.expand_trailing_wildcards()
        fields: dict[str, Any] = {
            "exclude_modules": hf_to_vllm_mapper.apply_list(list(config.exclude_modules))
        }
        layers = config.to_dict()["quantization"].get("quantized_layers")
        if layers:
            fields["quantized_layers"] = hf_to_vllm_mapper.apply_dict(layers)
        self.config = config.replace(**fields)

    # ----------------------------------------------------------------------------------------- layer by layer

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer.

        Raises:
            ConfigError: parts of a fused layer, or experts, are quantized differently.
        """
        enter_settings(
            compute=self.compute, fast_accum=self.fast_accum, ops=read_ops(), semantics=self.semantics
        )
        install_pass()
        take_over()
        if isinstance(layer, (Attention, MLAAttention)):
            return MoqextKVCacheMethod(self, prefix)
        if isinstance(layer, (LinearBase, ParallelLMHead)):
            quant = self.layer_quant(prefix)
            if quant is None:
                return UnquantizedLinearMethod()
            return MoqextModelOptLinearMethod(quant, prefix, self.compute, self.fast_accum)
        if isinstance(layer, RoutedExperts):
            quant = self.layer_quant(prefix.removesuffix(".routed_experts"))
            if quant is not None:
                return MoqextModelOptMoEMethod(quant, prefix, self.compute, layer.moe_config)
        return None

    def layer_quant(self, prefix: str) -> LayerQuant | None:
        """How a layer is quantized, None for one that is not.

        Args:
            prefix: its name in vLLM's model.

        Raises:
            ConfigError: parts of a fused layer, or experts, are quantized differently.
        """
        if self.is_layer_excluded(prefix):
            return None
        config = self.config
        if not config.quantized_layers and config.moe_quant_algo is None:
            return LayerQuant(config.quant_algo, config.group_size, "quant_algo")
        shards = self.packed_modules_mapping.get(prefix.rpartition(".")[2], ())
        found = config.layer_quant(prefix, shards)
        return None if found.quant_algo is None else found

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether a layer is not quantized, whatever else the configuration says; as vLLM calls it."""
        excluded = self.config.is_excluded(prefix, self.packed_modules_mapping, self.semantics)
        if self.semantics == "vllm":
            try:
                meant = self.config.is_excluded(prefix, self.packed_modules_mapping, "modelopt")
            except ConfigError:
                return excluded
            if meant != excluded:
                _say_difference(prefix, excluded)
        return excluded


_said: set[str] = set()


def _say_difference(prefix: str, excluded: bool) -> None:
    """Logs once a process, naming the first layer, that vLLM and ModelOpt read excluded names differently."""
    if not _said:
        logger.warning(
            "%s is %s by vLLM's rule for excluded modules, and %s as ModelOpt means them; "
            "MOQEXT_VLLM_EXCLUSION=modelopt chooses the latter",
            prefix,
            *(("excluded", "quantized") if excluded else ("quantized", "excluded")),
        )
        _said.add(prefix)


class MoqextModelOptFp8Config(MoqextConfig):
    """FP8 in every scaling."""

    NAME = "modelopt"


class MoqextModelOptFp4Config(MoqextConfig):
    """NVFP4 and its relatives."""

    NAME = "modelopt_fp4"


class MoqextModelOptMixedConfig(MoqextConfig):
    """Layers of several formats."""

    NAME = "modelopt_mixed"


CONFIGS: tuple[type[MoqextConfig], ...] = (
    MoqextModelOptFp8Config,
    MoqextModelOptFp4Config,
    MoqextModelOptMixedConfig,
)
