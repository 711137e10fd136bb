"""The quantizer that Transformers asks for checkpoints of `quant_method: "modelopt"`.

Before weights are loaded the model lies on the meta device: problems of the checkpoint are raised, and what
it holds quantized becomes `QuantLinear`s, whose empty tensors have the dtypes and shapes of the file and are
loaded like any other. Experts become `QuantMoE`s, which moqext fills from the files. Afterwards the layers
are prepared where they lie.

Hooks that had other names before Transformers 5.23 need none here: the base class's are right for both.
"""

import re
import warnings
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import HfQuantizer, auto, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from moqext import (
    Checkpoint,
    CheckpointError,
    LayerRecord,
    Projection,
    QuantConfig,
    UnsupportedQuantization,
)
from moqext.ops.spelling import Compute
from moqext_torch import QuantLinear
from moqext_torch.exchange import STORED, stored_tensor
from moqext_torch.prepared import PreparedModule, aligned
from moqext_torch.quant_linear import DTYPES
from moqext_torch.replace import SHOWN, find_places, refuse_problems
from moqext_transformers.dequantized import HINT, DequantizedLayers, split_experts
from moqext_transformers.experts import LoadedExperts
from moqext_transformers.fused_linear import FusedLinear, Part
from moqext_transformers.fusing import fuse
from moqext_transformers.naming import Names
from moqext_transformers.readable import make_readable
from moqext_transformers.saving import config_of_files

logger = logging.get_logger(__name__)


def _free_name() -> str:
    """The name that configurations are registered under: that of their files, unless Transformers has it."""
    taken = AUTO_QUANTIZATION_CONFIG_MAPPING.keys() | AUTO_QUANTIZER_MAPPING.keys()
    if "modelopt" not in taken:
        return "modelopt"
    warnings.warn(
        "Transformers has a reader for quant_method 'modelopt' already, which its from_pretrained goes on "
        "using; moqext_transformers.from_pretrained loads with moqext",
        RuntimeWarning,
        stacklevel=4,
    )
    return "moqext"


METHOD = _free_name()
OPTIONS = ("compute", "fuse", "dequantize_unsupported", "batch_invariant")
"""Fields of a configuration that tell how to load, and nothing of the checkpoint."""


@register_quantization_config(METHOD)
class ModelOptConfig(QuantizationConfigMixin):
    """The configuration of a ModelOpt checkpoint, kept for saving; moqext reads the files itself.

    Args:
        compute: as for `moqext_torch.QuantLinear`; like the other options it is no part of what is saved.
        fuse: whether `fuse` is applied to the model.
        dequantize_unsupported: whether layers whose algorithm does not run are dequantized; else they are
            refused.
        batch_invariant: as for `moqext_torch.QuantLinear`.
        fields: everything else.
    """

    def __init__(
        self,
        compute: Compute = "exact",
        fuse: bool = True,
        dequantize_unsupported: bool = False,
        batch_invariant: bool = False,
        **fields: Any,
    ) -> None:
        self.__dict__.update(fields)
        self.quant_method = METHOD
        self.compute = compute
        self.fuse = fuse
        self.dequantize_unsupported = dequantize_unsupported
        self.batch_invariant = batch_invariant

    def get_loading_attributes(self) -> dict[str, Any]:
        """The options, which Transformers takes from a configuration that is given to `from_pretrained`."""
        return {name: getattr(self, name) for name in OPTIONS}

    def to_dict(self) -> dict[str, Any]:
        """The fields of config.json."""
        fields = {name: value for name, value in super().to_dict().items() if name not in OPTIONS}
        return fields | {"quant_method": "modelopt"}


# Transformers asks those classes alone for options.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (
    *getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ()),
    ModelOptConfig,
)


@register_quantizer(METHOD)
class ModelOptQuantizer(HfQuantizer):
    """Loads and saves models with moqext's linears and experts; see docs/transformers.md."""

    requires_calibration = True

    def __init__(self, quantization_config: ModelOptConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._renamed: dict[str, str] = {}  # tensors that the checkpoint has under another producer's names
        self._translated: set[str] = (
            set()
        )  # those of another producer, which are saved under ModelOpt's names
        self._translations: list[Any] = []
        self._restated: dict[tuple[str, str], str] = {}  # module and role of what a file has in another form
        self._dequantized = DequantizedLayers()
        self._dtypes: dict[str, torch.dtype] = {}  # of what is not quantized, as the model wants it
        self._about = {
            "compute": quantization_config.compute,
            "batch_invariant": quantization_config.batch_invariant,
        }
        self._experts = LoadedExperts(self._about)
        self._directory: Path | None = None
        self._stored_config: QuantConfig | None = None
        self._stored: dict[str, LayerRecord | Projection] = {}  # by the names that a state dict has
        self._kv: dict[str, torch.Tensor] = {}  # cache scales, by tensor
        self.kv_scales: dict[str, dict[str, Any]] = {}
        self.kv_cache_quant_algo: str | None = None

    # ------------------------------------------------------------------------------------------- loading

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses offloading to disk before anything is read."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map: moqext's prepared weights cannot be offloaded to disk")

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Refuses what activations cannot have. Exporters write the dtype of codes as the model's, too."""
        if dtype is not None and dtype.itemsize == 1:
            return torch.bfloat16
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, device_map: Any = None, **kwargs: Any
    ) -> Any:
        if not checkpoint_files:
            raise ValueError(
                f"{type(model).__name__}: moqext needs the checkpoint's files, and was given a state dict; "
                "moqext_torch.replace_linears takes any model"
            )
        self._directory = Path(checkpoint_files[0]).parent
        with Checkpoint(self._directory) as checkpoint:
            refuse_problems(checkpoint)
            _refuse_other_orders(checkpoint)
            _refuse_packed_type(checkpoint)
            _report_warnings(checkpoint)
            names = Names(model, checkpoint)
            self._renamed |= names.respelled(model)
            self._stored_config = checkpoint.config
            cache = self._read_cache_scales(checkpoint)
            ignored = {names.loaded(checkpoint.files.source(tensor).name) for tensor in cache}
            try:
                ignored |= self._replace(model, checkpoint, names, device_map)
            except UnsupportedQuantization as error:
                if self.quantization_config.dequantize_unsupported:
                    raise
                raise UnsupportedQuantization(f"{error}; {HINT}") from error
        self._dtypes = {name: tensor.dtype for name, tensor in _plain_tensors(model).items()}
        own = self._experts.patterns() | self._dequantized.patterns()
        patterns = set(model._keys_to_ignore_on_load_unexpected or ()) | own
        patterns |= {f"{re.escape(tensor)}$" for tensor in ignored}
        model._keys_to_ignore_on_load_unexpected = patterns
        quantized = [f"{name}.{role}" for name, part in self._stored.items() for role in part.tensors]
        missing = {
            pattern
            for pattern in model._keys_to_ignore_on_load_missing or ()
            if not any(re.search(pattern, tensor) for tensor in quantized)
        }
        model._keys_to_ignore_on_load_missing = missing | own
        return model

    def _replace(self, model: Any, checkpoint: Checkpoint, names: Names, device_map: Any) -> set[str]:
        """Puts moqext's layers in their places; returns the tensors that none of them takes."""
        dequantizes = self.quantization_config.dequantize_unsupported
        records = _records_of(model, checkpoint, names)
        aside: dict[str, LayerRecord] = {}
        if dequantizes:
            records, aside = split_experts(
                model, checkpoint, records, names, self.quantization_config.compute
            )
        places, experts = find_places(model, checkpoint, records, names)
        linears: dict[str, QuantLinear] = {}
        for name, place in places.items():
            names.refuse_converted(place.record)
            try:
                if place.record.kind == "linear":
                    linears[name] = self._empty(
                        checkpoint, names, name, place.record, place.module.weight.dtype
                    )
            except UnsupportedQuantization:
                if not dequantizes:
                    raise
                aside[name] = place.record
        self._experts.replace(model, checkpoint, experts, names, device_map)
        self._dequantized.replace(
            model, {name: place.record for name, place in places.items() if name not in linears} | aside
        )
        for name, linear in linears.items():
            model.set_submodule(name, linear)
        _untie(model, linears.keys() | aside.keys())
        self._stored = {name: places[name].record for name in linears}
        for group in experts.values():
            for part in (*group.record.members, *group.record.projections):
                self._stored |= dict.fromkeys((part.name, names.without_head(part.name)), part)
        return {
            names.loaded(checkpoint.files.source(tensor).name)
            for name, place in places.items()
            for role, tensor in place.record.tensors.items()
            if role != "weight" and (name not in linears or _is_unused(linears[name], role))
        }

    def _empty(
        self, checkpoint: Checkpoint, names: Names, name: str, record: LayerRecord, dtype: torch.dtype
    ) -> QuantLinear:
        """A layer on meta, its tensors shaped as in the file: scalars have many shapes."""
        linear = QuantLinear.empty_like([record], dtype=dtype, device="meta", **self._about)
        for role, tensor in record.tensors.items():
            held = getattr(linear, role, None)
            if held is None:
                continue  # a scale that the format does not use
            info = checkpoint.files.source(tensor)
            if tuple(held.shape) != tuple(info.shape):
                linear.register_buffer(role, held.new_empty(info.shape))
            if role == "bias":
                linear.bias = torch.nn.Parameter(held.to(STORED[info.dtype]), requires_grad=False)
            if not names.reaches(info.name, f"{name}.{role}"):
                self._renamed[names.loaded(info.name)] = f"{name}.{role}"
                if info.name != tensor:
                    self._translated.add(names.loaded(info.name))
            if checkpoint.files.is_changed(tensor):
                self._restated[name, role] = tensor
        return linear

    def _read_cache_scales(self, checkpoint: Checkpoint) -> set[str]:
        """Keeps the scales of a quantized cache, and says once that they are there."""
        config = checkpoint.config
        self.kv_cache_quant_algo = config.kv_cache_quant_algo if config is not None else None
        for record in checkpoint.kv_scales():
            of_heads = record.tensors.keys() & {"k_scale", "v_scale", "q_scale"} - record.values.keys()
            scales = {role: stored_tensor(checkpoint, record.tensors[role]) for role in of_heads}
            self.kv_scales[record.name] = {**record.values, **scales}  # the cache refuses those of heads
            self._kv |= {tensor: stored_tensor(checkpoint, tensor) for tensor in record.tensors.values()}
        if self.kv_cache_quant_algo is not None:
            use = (
                "generate(past_key_values=moqext_transformers.kv_cache(model)) uses it"
                if self.kv_cache_quant_algo == "FP8"
                else "it is not used"
            )
            logger.warning_once(
                f"The checkpoint is meant for a key/value cache in {self.kv_cache_quant_algo}: {use}; the "
                "caches of Transformers keep the dtype of the model."
            )
        return set(self._kv)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Adds the names of tensors that another producer called differently."""
        from transformers.core_model_loading import WeightRenaming

        renamed = {old: WeightRenaming(re.escape(old), new) for old, new in self._renamed.items()}
        self._translations = [renamed[old] for old in self._translated & renamed.keys()]
        return [*weight_conversions, *renamed.values()]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear) and module.weight.is_meta:
                raise ValueError(f"{name}: moqext's weights cannot be offloaded; let device_map name devices")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = aligned(tensor.data)
        assert self._directory is not None  # of the hook before
        with Checkpoint(self._directory) as checkpoint:
            for (name, role), tensor in self._restated.items():
                module = model.get_submodule(name)
                module.register_buffer(
                    role, stored_tensor(checkpoint, tensor).to(getattr(module, role).device)
                )
            self._dequantized.fill(model, checkpoint, self._dtypes)
        if self._translations:
            model._weight_conversions = [
                each
                for each in model._weight_conversions
                if not any(each is own for own in self._translations)
            ]
        if self.quantization_config.fuse:
            fuse(model)
        make_readable(model)
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                try:
                    module.prepare()
                except (ValueError, TypeError) as error:
                    raise CheckpointError(f"{_stored_name(model, name, module)}: {error}") from error
        for name, tensor in _plain_tensors(model).items():
            wanted = self._dtypes.get(name, tensor.dtype)
            if tensor.dtype != wanted and tensor.dtype.itemsize == 2:  # renamed ones, before 5.23
                tensor.data = tensor.data.to(wanted)
        with Checkpoint(self._directory) as checkpoint:
            self._experts.read(model, checkpoint)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor may have another shape than the model's: codes of a table, dequantized later."""
        return self._dequantized.is_table(param_name)

    # -------------------------------------------------------------------------------------------- saving

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether `save_pretrained` can write what was loaded."""
        if self._dequantized:
            logger.warning("Layers of the checkpoint were dequantized: it cannot be written again.")
        return not self._dequantized

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The checkpoint's tensors, cache scales included; fits the configuration that is saved to them."""
        state = {**self._experts.restore(model.state_dict()), **self._kv}
        fields = self.quantization_config.to_dict()
        fields = config_of_files(model, state, self._stored, fields, self._stored_config)
        vars(self.quantization_config).update(fields, quant_method=METHOD)
        return state, {}

    @property
    def is_trainable(self) -> bool:
        """The weights are frozen: adapters beside them can be trained, as gradients go through linears."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The layers are one operation each for torch.compile."""
        return True


def _stored_name(model: Any, name: str, module: QuantLinear) -> str:
    """The name of a linear in the checkpoint; those of all that are fused into it."""
    if not isinstance(module, FusedLinear):
        return name
    parent = name.rpartition(".")[0]
    parts = [own for own, part in model.get_submodule(parent).named_children() if isinstance(part, Part)]
    return ", ".join(f"{parent}.{own}" for own in parts)


def _plain_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The parameters and buffers that are not of moqext's layers, by name."""
    return {
        f"{name}.{own}" if name else own: tensor
        for name, module in model.named_modules()
        if not isinstance(module, PreparedModule)
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


def _refuse_other_orders(checkpoint: Checkpoint) -> None:
    """Refuses layers whose scales or codes lie in another order: Transformers reads the files itself."""
    other = [layer for layer in checkpoint.layers() if not layer.is_plain]
    if other:
        raise CheckpointError(
            f"{other[0].name} is stored as {other[0].stored_form} ({len(other)} layers are), an order that "
            "Transformers hands over as it is; moqext_torch.replace_linears reads it, and `python -m moqext "
            "convert` writes plain weights",
            file=checkpoint.directory,
        )


def _refuse_packed_type(checkpoint: Checkpoint) -> None:
    """Refuses codes of the type F4, which Transformers reads in the files by itself and cannot reshape."""
    stored = checkpoint.files.tensors
    for layer in checkpoint.layers():
        for part in layer.members or layer.projections or (layer,):
            tensor = part.tensors.get("weight", "")
            if tensor in stored and stored[tensor].dtype == "F4":
                raise CheckpointError(
                    f"{tensor} has the type F4, which Transformers does not load; moqext_torch."
                    "replace_linears reads it, and `python -m moqext convert` writes plain weights",
                    file=checkpoint.directory,
                )


def _report_warnings(checkpoint: Checkpoint) -> None:
    """One line for all problems of severity "warning"."""
    found = Counter(problem.code for problem in checkpoint.problems if problem.severity == "warning")
    if found:
        counts = ", ".join(f"{code} ({count})" for code, count in found.items())
        logger.warning(f"{checkpoint.directory}: {counts}; `python -m moqext inspect` shows them all")


def _records_of(model: Any, checkpoint: Checkpoint, names: Names) -> list[LayerRecord]:
    """The quantized layers that this model is to have: not those of a head or of layers that it lacks.

    Transformers knows by patterns what of a checkpoint a model does without; a pattern that fits a module
    which this model has is wrong about it.
    """
    modules = {names(name) for name, _ in model.named_modules()}
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    layers = checkpoint.layers()
    loaded = {record.name: names.loaded(f"{record.name}.") for record in layers}
    outside = {name for name, own in loaded.items() if not own.startswith(f"{model.base_model_prefix}.")}
    if len(outside) == len(layers):  # the checkpoint itself is without a head
        outside = set()
    elif model.base_model is not model:  # it has a head, if another one perhaps
        outside = {name for name in outside if not any(part.isdigit() for part in name.split("."))}

    def is_done_without(record: LayerRecord) -> bool:
        parts = list(record.linears())
        if not modules.isdisjoint((record.name, *(part.name for part in parts))):
            return False
        tensors = [tensor for part in parts for tensor in part.tensors.values()]
        return record.name in outside or any(
            pattern.search(tensor) or pattern.search(names.loaded(tensor))
            for pattern in patterns
            for tensor in tensors
        )

    left_out = {record.name: None for record in layers if is_done_without(record)}
    if left_out:
        logger.warning(
            f"{type(model).__name__} does without layers that are quantized in the checkpoint: "
            + ", ".join(list(left_out)[:SHOWN])
            + (f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else "")
        )
    return [record for record in layers if record.name not in left_out]


def _is_unused(linear: QuantLinear, role: str) -> bool:
    """Whether a format has no use for a tensor, as FP8_PB_WO for an activation scale."""
    return role != "bias" and role not in linear.method.checkpoint_params


def _untie(model: Any, linears: Set[str]) -> None:
    """A quantized head has a weight of its own, whatever the configuration says."""
    tied = [key for key in model.all_tied_weights_keys if key.removesuffix(".weight") in linears]
    for key in tied:
        model.all_tied_weights_keys.pop(key)
    if tied:
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
