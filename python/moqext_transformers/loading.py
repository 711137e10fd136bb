"""Directories that AutoModel does not give to moqext: the configuration is put together first."""

import json
import os
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from moqext import Checkpoint, ConfigError
from moqext.ops.spelling import Compute
from moqext.reader.producers.choose import PRODUCERS
from moqext.tools.convert.modelopt import describe
from moqext_transformers.quantizer import METHOD


def load_config(
    directory: str | os.PathLike[str],
    *,
    compute: Compute = "exact",
    fuse: bool = True,
    dequantize_unsupported: bool = False,
    batch_invariant: bool = False,
    **kwargs: Any,
) -> Any:
    """The configuration of a model with what ModelOpt says of its quantization, wherever that stands.

    It is in config.json, with `quant_method` or, from older exporters, without, or in hf_quant_config.json
    alone, which Transformers does not read. Of other producers that `Checkpoint` reads (compressed-tensors,
    `quant_method` fp8 and mxfp4) it is what ModelOpt would have said.

    Args:
        directory: of the checkpoint, or its name on the hub.
        compute: as for `moqext_torch.QuantLinear`.
        fuse: whether `fuse` is applied to the model.
        dequantize_unsupported: as for `ModelOptConfig`, like the next one.
        batch_invariant: as for `moqext_torch.QuantLinear`.
        kwargs: for `AutoConfig.from_pretrained`.

    Returns:
        A configuration for `from_pretrained(directory, config=...)`.

    Raises:
        ConfigError: no file says how it is quantized, or one says that a tool did which is not read.
    """
    config = AutoConfig.from_pretrained(directory, **kwargs)
    holder, found = config, getattr(config, "quantization_config", None)
    if found is None and (text := config.get_text_config(decoder=True)) is not config:
        holder, found = text, getattr(text, "quantization_config", None)
    if found is None:
        holder, found = config, _own_file(directory, kwargs)
    if found is None:
        raise ConfigError(
            f"{directory}: neither config.json nor hf_quant_config.json says how it is quantized"
        )
    fields = dict(found)
    method = fields.pop("quant_method", "modelopt")
    if method in PRODUCERS and "quant_algo" not in fields:
        fields = _as_modelopt(directory, kwargs)
    elif method not in ("modelopt", METHOD):
        raise ConfigError(f"{directory}: quantized by {method!r}, not by ModelOpt")
    if holder is not config:
        del holder.quantization_config
    options = {
        "compute": compute,
        "fuse": fuse,
        "dequantize_unsupported": dequantize_unsupported,
        "batch_invariant": batch_invariant,
    }
    config.quantization_config = fields | {"quant_method": METHOD} | options
    return config


def _as_modelopt(directory: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The fields that ModelOpt would have written for files of another producer, but `quant_method`."""
    name = os.fspath(directory)
    if os.path.isdir(name):
        name = os.path.join(name, kwargs.get("subfolder") or "")
    elif kwargs.get("revision"):
        name = f"{name}@{kwargs['revision']}"
    with Checkpoint(name, headers_only=True) as checkpoint:
        fields, _ = describe(checkpoint)
    return {field: value for field, value in fields.items() if field != "quant_method"}


def _own_file(directory: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """hf_quant_config.json, or None where there is none."""
    of_files = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    options = {name: kwargs[name] for name in of_files if name in kwargs}
    path = cached_file(
        os.fspath(directory), "hf_quant_config.json", _raise_exceptions_for_missing_entries=False, **options
    )
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    compute: Compute = "exact",
    fuse: bool = True,
    dequantize_unsupported: bool = False,
    batch_invariant: bool = False,
    auto_class: Any = AutoModelForCausalLM,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """A model of a checkpoint that `Checkpoint` reads, whichever file tells so, with a choice of `compute`.

    Args:
        directory: of the checkpoint, or its name on the hub.
        compute: as for `moqext_torch.QuantLinear`.
        fuse: whether `fuse` is applied to the model.
        dequantize_unsupported: whether linears and experts whose algorithm does not run become plain ones in
            the dtype of the model; else they are refused.
        batch_invariant: as for `moqext_torch.QuantLinear`, of linears and experts.
        auto_class: what makes the model, as `AutoModel`.
        config: what `load_config` returned, the options before among it; None calls it.
        kwargs: for `from_pretrained` of the class.

    Raises:
        ConfigError: as `load_config`.
        CheckpointError: a problem of severity "error" stands against the checkpoint.
        UnsupportedQuantization: an algorithm, or experts, that do not run.
        ValueError: model and checkpoint do not fit.
    """
    if config is None:
        options = {
            "compute": compute,
            "fuse": fuse,
            "dequantize_unsupported": dequantize_unsupported,
            "batch_invariant": batch_invariant,
        }
        config = load_config(directory, **options, **_for_config(kwargs))
    return auto_class.from_pretrained(directory, config=config, **kwargs)


def _for_config(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options that tell where files are."""
    names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
    return {name: kwargs[name] for name in (*names, "trust_remote_code") if name in kwargs}
