"""The quantization configuration of a model that is saved, fitted to the tensors that are written.

Names of a saved checkpoint may be others than those of the one that was loaded, and what is not quantized may
be in float32 then, which a reader takes for lost codes wherever a rule says "quantized". So the lists of the
configuration follow the tensors: every layer that is codes has its algorithm, every other weight is excluded.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from moqext import ConfigError, LayerRecord, Projection, QuantConfig

_WRAPPERS = frozenset(("", "model", "language_model", "model.language_model", "language_model.model"))
"""Modules that readers may leave out of a name: excluding one might exclude everything."""


def config_of_files(
    model: Any,
    state: Mapping[str, torch.Tensor],
    parts: Mapping[str, LayerRecord | Projection],
    fields: Mapping[str, Any],
    stored: QuantConfig | None,
) -> dict[str, Any]:
    """The configuration for what `save_pretrained` writes of a model.

    Args:
        model: whose renaming of tensors holds.
        state: its tensors, by their names in it.
        parts: what its modules were in the checkpoint that was loaded, by the names that `state` has.
        fields: as for `fitted_config`, like the next.
        stored: the configuration of that checkpoint.
    """
    values = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    files = revert_weight_conversion(model, values)
    by_tensor = {id(tensor): name for name, tensor in files.items()}  # renaming hands them on
    names = {}
    for name in parts:
        weight = next((own for own in (f"{name}.weight", name) if own in values), None)
        if weight is not None:
            names[name] = by_tensor.get(id(values[weight]), weight).removesuffix(".weight")
    formats = {saved: (parts[name].quant_algo, parts[name].group_size) for name, saved in names.items()}
    renamed = {parts[name].name: saved for name, saved in names.items()}
    # save_original_format=False keeps the names of the model
    return fitted_config(fields, stored, (files, state), formats, renamed)


def fitted_config(
    fields: Mapping[str, Any],
    stored: QuantConfig | None,
    tensors: Sequence[Mapping[str, torch.Tensor]],
    formats: Mapping[str, tuple[str, int | None]],
    renamed: Mapping[str, str],
) -> dict[str, Any]:
    """The fields of a configuration, with lists that say of each tensor what it is.

    Args:
        fields: of config.json, in any form that `QuantConfig` reads.
        stored: the checkpoint's whole configuration, for fields that say too little alone.
        tensors: everything that is saved, for each naming that the files may have; values are not looked at.
        formats: algorithm and group size of the quantized modules, by the names in the files.
        renamed: modules whose names were others in the checkpoint -> their names in the files.

    Returns:
        The fields; those that are right already stay word for word.
    """
    fitted = deepcopy(dict(fields))
    try:
        config = QuantConfig.from_dict(fitted)
    except ConfigError:
        if stored is None:
            raise
        config, fitted = stored, stored.to_dict()
    listed = {
        renamed.get(name, name): {"quant_algo": layer.quant_algo, "group_size": layer.group_size}
        for name, layer in config.quantized_layers.items()
    }
    if listed:
        changed = config.replace(quantized_layers=_without_none(listed))
        for name, (algo, group_size) in formats.items():
            if _algo_of(changed, name) is None:
                listed[name] = {"quant_algo": algo, "group_size": group_size}
        if listed.keys() != config.quantized_layers.keys():
            _put(fitted, "quantized_layers", ("quantized_layers",), _without_none(listed))
            config = QuantConfig.from_dict(fitted)
    entries = _exclusions(config, tensors, formats)
    if entries != list(config.exclude_modules):
        _put(fitted, "exclude_modules", ("ignore", "exclude_modules"), entries)
    return fitted


def _without_none(listed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in layer.items() if value is not None}
        for name, layer in listed.items()
    }


def _put(fields: dict[str, Any], name: str, spellings: tuple[str, ...], value: Any) -> None:
    """Sets a field wherever it stands, under whichever of its names; where it is nowhere, under its own."""
    inner = fields.get("quantization")
    holders: list[Any] = [fields, *([inner] if isinstance(inner, dict) else [])]
    places = [(holder, own) for holder in holders for own in spellings if own in holder]
    for holder, own in places or [(holders[-1], name if len(holders) > 1 else spellings[0])]:
        holder[own] = value


def _exclusions(
    config: QuantConfig, tensors: Sequence[Mapping[str, torch.Tensor]], quantized: Iterable[str]
) -> list[str]:
    """The exclusion list: entries that no quantized module contradicts, and what they leave out."""
    quantized = set(quantized)
    entries = list(config.exclude_modules)
    if wrong := _excluded_of(quantized, config, entries):
        entries = [entry for entry in entries if not _excluded_of(wrong, config, [entry])]
    for named in tensors:
        config = config.replace(exclude_modules=entries)
        lacking = [name for name in _plain_modules(named) if _algo_of(config, name) is not None]
        codes = [name for name, tensor in named.items() if tensor.dtype.itemsize == 1]
        occupied = {parent for name in codes for parent in _parents(name)}
        added = sorted({_widest(name, occupied) for name in lacking})
        # Readers let names begin with `model.` or not, so that a wide entry may fit more than meant.
        entries = entries + (sorted(lacking) if _excluded_of(quantized, config, added) else added)
    return entries


def _excluded_of(names: Iterable[str], config: QuantConfig, entries: Sequence[str]) -> set[str]:
    """The names that an exclusion list covers, those left out of which only some fused parts are covered."""
    asked = config.replace(exclude_modules=entries)
    found = set()
    for name in names:
        with suppress(ConfigError):
            if asked.is_excluded(name):
                found.add(name)
    return found


def _plain_modules(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Modules with a weight of floats: linears, tables, convolutions, stacks of experts."""
    return [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
        if tensor.dim() == 3 or (tensor.dim() == 2 and name.endswith(".weight"))
    ]


def _widest(name: str, occupied: set[str]) -> str:
    """The outermost module around one, itself perhaps, that has nothing quantized in it.

    A numbered one is not taken for all that is in it: some readers look for entries as parts of names, and
    `layers.1` is a part of `layers.10`.
    """
    for parent in reversed(list(_parents(name))):
        if parent not in occupied and parent not in _WRAPPERS and not parent.rpartition(".")[2].isdigit():
            return parent
    return name


def _parents(name: str) -> Iterable[str]:
    """The modules around one, from the innermost."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _algo_of(config: QuantConfig, name: str) -> str | None:
    """The algorithm of a module; None also where the rules of its parts disagree."""
    try:
        return config.layer_algo(name)
    except ConfigError:
        return None
