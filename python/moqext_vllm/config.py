"""The configurations that vLLM asks how a layer is quantized, over `moqext.QuantConfig`.

They stand at module level, one for each name of vLLM's, because they are pickled to the engine's process.
"""

import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from vllm import envs
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    ModelOptMxFp8Config,
    ModelOptNvFp4Config,
    ModelOptQuantConfigBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moqext import ConfigError, LayerQuant, QuantConfig, detect
from moqext_torch.op import PAIR
from moqext_torch.stepping_aside import ReadConfig, Reason, read_config, tell_once
from moqext_vllm import hand_back
from moqext_vllm.check import Stored, check_checkpoint, is_unquantized_head, refuse_stored_table
from moqext_vllm.choices import Choices
from moqext_vllm.experts import MoqextModelOptMoEMethod
from moqext_vllm.kv_cache import MoqextKVCacheMethod, refuse_cache
from moqext_vllm.linear import MoqextModelOptLinearMethod

logger = logging.getLogger("vllm.moqext")

Semantics = Literal["vllm", "modelopt"]
RENAMES = {"nemotron_h": {"backbone.embedding.": "backbone.embed_tokens."}}
"""By type of a model: parts of names of Transformers 5 that vLLM's model does not know."""
ONLINE = "_online_quantization_args"
"""Name of a field that vLLM adds to a configuration for classes of its own."""


def read_semantics() -> Semantics:
    """The meaning of excluded names that MOQEXT_VLLM_EXCLUSION asks for: "vllm" without it.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get("MOQEXT_VLLM_EXCLUSION") or "vllm"
    if value == "vllm" or value == "modelopt":
        return value
    raise ValueError(f"MOQEXT_VLLM_EXCLUSION: expected vllm or modelopt, got {value!r}")


class MoqextConfig(Choices, ModelOptQuantConfigBase):  # type: ignore[misc]
    """A ModelOpt checkpoint's configuration, in front of the class of vLLM's that it stands for.

    Each is vLLM's own as well, with its fields: models of vLLM's ask for those, and layers that are not
    moqext's have the methods that it answers with.

    Attributes:
        NAME: what vLLM calls the family.
        read: what moqext read; its names are vLLM's after `apply_vllm_mapper`. None where it reads nothing
            of what vLLM runs: then all is vLLM's.
        stored: quantized layers outside of numbered ones, where the checkpoint's headers were read.
        rank: of low-rank pairs, where headers were read and there are some.
        renames: parts of names of tensors that vLLM's model does not know, and what it calls them.
        semantics: what its excluded names mean, as for `QuantConfig.is_excluded`.
    """

    NAME: ClassVar[str]
    STAND_IN: ClassVar[dict[str, Any]]
    """A configuration for vLLM's class where it refuses the checkpoint's."""
    read: ReadConfig | None
    stored: tuple[Stored, ...] | None = None
    rank: int | None = None
    renames: Mapping[str, str] = MappingProxyType({})
    semantics: Semantics

    # --------------------------------------------------------------------------------- what vLLM asks first

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The family's name where a checkpoint is of it: vLLM asks every family."""
        if not isinstance(hf_quant_cfg, dict):
            return None
        if detect(hf_quant_cfg) == cls.NAME:
            return cls.NAME
        found: str | None = super().override_quantization_method(hf_quant_cfg, user_quant, hf_config)
        return found

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Reads a configuration.

        Raises:
            ConfigError: it is none of ModelOpt, or says something that neither moqext nor vLLM knows.
            UnsupportedQuantization: its cache format, or its algorithm, runs with neither.
        """
        read: ReadConfig | None = None
        fault: ConfigError | None = None
        try:
            read = read_config({name: value for name, value in config.items() if name != ONLINE})
        except ConfigError as error:
            fault = error
        made: Self
        refusal: str | None = None
        try:
            made = super().from_config(config)
        except Exception as error:
            if read is None:
                raise ConfigError(f"{fault}; vLLM says: {error}") from error
            made, refusal = super().from_config({**cls.STAND_IN, "ignore": []}), str(error)
        made.read, made.refusal = read, refusal
        made.algorithms = [] if read is None else read.algorithms()
        made.semantics = read_semantics()
        made.read_options()
        if read is None:
            logger.warning("moqext cannot read this configuration and leaves it to vLLM: %s", fault)
            return made
        refuse_cache(read.config.kv_cache_quant_algo)
        reasons = {algorithm: made.reason(algorithm) for algorithm in made.algorithms}
        for algorithm, reason in reasons.items():
            if reason is not None and refusal is not None and not made.runs_any:
                raise hand_back.refusal("", f"quant_algo {algorithm}: {reason.why}", refusal)
        return made

    @property
    def config(self) -> QuantConfig:
        """The configuration as moqext read it."""
        assert self.read is not None
        return self.read.config

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that activations may have: with moqext float32, too."""
        own: list[torch.dtype] = super().get_supported_act_dtypes()
        return [*own, torch.float32] if self.runs_any else own

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Looks at the whole checkpoint: vLLM calls this before it loads anything.

        Raises:
            CheckpointError: there is something wrong with it.
        """
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        self.renames = RENAMES.get(getattr(hf_config, "model_type", None), {})
        if self.read is not None:
            self.stored, self.rank = check_checkpoint(model_name, bool(self.read.unknown))

    def get_checkpoint_weight_mapper(self) -> Any:
        """The renames of tensors besides those of vLLM's model."""
        from vllm.model_executor.models.utils import WeightsMapper

        own = super().get_checkpoint_weight_mapper()
        return own | WeightsMapper(orig_to_new_substr={PAIR: "", **self.renames})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames modules from the checkpoint's names to those of vLLM's model."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        if self.read is None:
            return
        config = self.config.expand_trailing_wildcards()
        fields: dict[str, Any] = {
            "exclude_modules": hf_to_vllm_mapper.apply_list(list(config.exclude_modules))
        }
        layers = config.to_dict()["quantization"].get("quantized_layers")
        if layers:
            fields["quantized_layers"] = hf_to_vllm_mapper.apply_dict(layers)
        unknown = hf_to_vllm_mapper.apply_dict(self.read.unknown)
        self.read = ReadConfig(config.replace(**fields), unknown)

    # ----------------------------------------------------------------------------------------- layer by layer

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer: moqext's, or vLLM's where that is better.

        Raises:
            ConfigError: parts of a fused layer, or experts, are quantized differently.
            UnsupportedQuantization: neither moqext nor vLLM runs the layer.
        """
        if not self.runs_any:
            return self._left_whole(layer, prefix)
        self.enter(semantics=self.semantics)
        if isinstance(layer, (Attention, MLAAttention)):
            return MoqextKVCacheMethod(self, prefix)
        is_head, is_experts = isinstance(layer, ParallelLMHead), isinstance(layer, RoutedExperts)
        if not (is_head or is_experts or isinstance(layer, LinearBase)):
            refuse_stored_table(layer, prefix, self.stored)
            return super().get_quant_method(layer, prefix)
        name = prefix.removesuffix(".routed_experts") or ("lm_head" if is_head else "")
        quant = self.layer_quant(name)
        if quant is None or (is_head and is_unquantized_head(layer, name, self.stored)):
            return None if is_experts else UnquantizedLinearMethod()
        return self._choose(quant, layer, prefix)

    def _left_whole(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The answer of vLLM where no algorithm of the checkpoint is moqext's."""
        for algorithm in self.algorithms:
            reason = self.reason(algorithm)
            assert reason is not None
            tell_once(logger, "vLLM", algorithm, reason.why, "")
        return super().get_quant_method(layer, prefix)

    def _choose(self, quant: LayerQuant, layer: Any, prefix: str) -> Any:
        """The method of a quantized layer."""
        assert self.read is not None
        algorithm, is_experts = self.read.algorithm_of(quant), isinstance(layer, RoutedExperts)
        reason = self.reason(algorithm)
        if reason is None and is_experts:
            reason = hand_back.reason_of_experts(layer.moe_config)
        if reason is not None and reason.runs and self.force:
            reason = None
        method: Any = None
        if reason is None or reason.runs:
            if is_experts:
                method = MoqextModelOptMoEMethod(
                    quant, prefix, self.compute, layer.moe_config, envs.VLLM_BATCH_INVARIANT
                )
            else:
                method = MoqextModelOptLinearMethod(
                    quant, prefix, self.compute, self.fast_accum, envs.VLLM_BATCH_INVARIANT, self.rank
                )
            fault = method.find_fault(layer)
            if fault is not None:
                reason = Reason(str(fault).removeprefix(f"{prefix}: "), runs=False)
        if reason is None:
            return method
        own, theirs = self._ask_vllm(layer, prefix)
        if own is not None:
            tell_once(logger, "vLLM", algorithm, reason.why, prefix)
            return own if reason.runs else hand_back.explain(own, prefix, f"{algorithm}: {reason.why}")
        if reason.runs:
            return method
        raise hand_back.refusal(prefix, f"{algorithm}: {reason.why}", theirs)

    def _ask_vllm(self, layer: Any, prefix: str) -> tuple[Any, object]:
        """The method that vLLM has of a quantized layer, or None and what it says."""
        if self.refusal is not None:
            return None, self.refusal
        try:
            own = super().get_quant_method(layer, prefix)
        except Exception as error:
            return None, error
        if own is None or isinstance(own, UnquantizedLinearMethod):
            return None, "it would not quantize the layer"
        return own, None

    def layer_quant(self, prefix: str) -> LayerQuant | None:
        """How a layer is quantized, None for one that is not.

        Args:
            prefix: its name in vLLM's model, empty where that gives it none.

        Raises:
            ConfigError: parts of a fused layer, or experts, are quantized differently.
        """
        if self.is_layer_excluded(prefix):
            return None
        config = self.config
        if not prefix or (not config.quantized_layers and config.moe_quant_algo is None):
            is_one = config.quant_algo not in (None, "MIXED_PRECISION")
            return LayerQuant(config.quant_algo, config.group_size, "quant_algo") if is_one else None
        shards = self.packed_modules_mapping.get(prefix.rpartition(".")[2], ())
        found = config.layer_quant(prefix, shards)
        return None if found.quant_algo is None else found

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether a layer is not quantized, whatever else the configuration says; as vLLM calls it."""
        if self.read is None or not prefix:
            return bool(super().is_layer_excluded(prefix))
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


class MoqextModelOptFp8Config(MoqextConfig, ModelOptFp8Config):  # type: ignore[misc]
    """FP8 in every scaling."""

    NAME = "modelopt"
    STAND_IN: ClassVar[dict[str, Any]] = {"quant_algo": "FP8"}


class MoqextModelOptFp4Config(MoqextConfig, ModelOptNvFp4Config):  # type: ignore[misc]
    """NVFP4 and its relatives."""

    NAME = "modelopt_fp4"
    STAND_IN: ClassVar[dict[str, Any]] = {"quant_algo": "NVFP4"}


class MoqextModelOptMxFp8Config(MoqextConfig, ModelOptMxFp8Config):  # type: ignore[misc]
    """MXFP8."""

    NAME = "modelopt_mxfp8"
    STAND_IN: ClassVar[dict[str, Any]] = {"quant_algo": "MXFP8"}


class MoqextModelOptMixedConfig(MoqextConfig, ModelOptMixedPrecisionConfig):  # type: ignore[misc]
    """Layers of several formats."""

    NAME = "modelopt_mixed"
    STAND_IN: ClassVar[dict[str, Any]] = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"": {"quant_algo": "FP8"}},
    }


CONFIGS: tuple[type[MoqextConfig], ...] = (
    MoqextModelOptFp8Config,
    MoqextModelOptFp4Config,
    MoqextModelOptMxFp8Config,
    MoqextModelOptMixedConfig,
)
