"""Experts of a checkpoint in a model that Transformers loads.

Transformers has the experts of a layer in one module, and stacks their tensors when it loads them; what it
does so is for plain weights. Here that module is replaced before weights are loaded, its tensors are reported
neither missing nor unexpected, and moqext reads them when the rest is there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moqext import Checkpoint, CheckpointError, UnsupportedQuantization
from moqext_torch import QuantMoE
from moqext_torch.experts import ExpertsPlace
from moqext_torch.prepared import DTYPES
from moqext_transformers.naming import Names
from moqext_transformers.stored_experts import StoredExperts


class _Group(NamedTuple):
    """The experts of one layer: where they are in the model, and what they are in the checkpoint."""

    name: str
    stored: StoredExperts
    outer: int
    """Modules that the checkpoint's names begin with and the model's do not: it is without a head."""


class LoadedExperts:
    """All experts of a model, from their places before anything is loaded to the tensors that are saved.

    Args:
        about: arguments of `moqext_torch.QuantMoE` that are the same for all.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._about = about
        self._groups: list[_Group] = []

    def replace(
        self,
        model: Any,
        checkpoint: Checkpoint,
        places: Mapping[str, ExpertsPlace],
        names: Names,
        device_map: Any,
    ) -> None:
        """Puts quantized experts without values in their places.

        Raises:
            UnsupportedQuantization: they do not run, or not on a device of the map.
        """
        made = {}
        for name, place in places.items():
            dtype = place.weight.dtype if place.weight.dtype in DTYPES else torch.bfloat16
            made[name] = QuantMoE.empty_like(
                checkpoint, place.record, dtype=dtype, device="meta", **self._about, **place.options
            )
            _refuse_devices(place, made[name], device_map)
            loaded = names.loaded(f"{place.record.name}.").removesuffix(".")
            outer = loaded.removesuffix(name).count(".") if loaded.endswith(f".{name}") else 0
            self._groups.append(_Group(name, StoredExperts(checkpoint, place.record), outer))
        for name, moe in made.items():
            places[name].install(model, moe)

    def patterns(self) -> set[str]:
        """Patterns of names that Transformers is not to load, its own and those of the file."""
        return {rf"(^|\.){re.escape(group.name)}\." for group in self._groups}

    def read(self, model: Any, checkpoint: Checkpoint) -> None:
        """Reads all experts to where Transformers has put their modules, and prepares them.

        Raises:
            CheckpointError: tensors that do not fit, or that no intact checkpoint holds.
            ValueError: they were offloaded.
        """
        for group, moe in self._modules(model):
            name = group.stored.record.name
            if moe.w13_weight.is_meta:
                raise ValueError(f"{name}: moqext's weights cannot be offloaded; let device_map name devices")
            moe.read(checkpoint, group.stored.record)
            try:
                moe.prepare()
            except UnsupportedQuantization as error:
                raise UnsupportedQuantization(f"{name}: {error}") from None
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"{name}: {error}") from error

    def restore(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict with the checkpoint's tensors in the place of stacks.

        Raises:
            ValueError: experts that share one value in the checkpoint differ now.
        """
        kept = dict(state)
        for group in self._groups:
            prefix = f"{group.name}.moe."
            stacks = {key.removeprefix(prefix): kept.pop(key) for key in state if key.startswith(prefix)}
            for name, tensor in group.stored.tensors(stacks).items():
                kept[name.split(".", group.outer)[-1]] = tensor
        return kept

    def _modules(self, model: Any) -> Iterator[tuple[_Group, QuantMoE]]:
        for group in self._groups:
            yield group, model.get_submodule(f"{group.name}.moe")


def _refuse_devices(place: ExpertsPlace, moe: QuantMoE, device_map: Any) -> None:
    """Raises where a device map names a device that the experts do not run on."""
    wanted = device_map.values() if isinstance(device_map, dict) else ()
    for device in wanted:
        if device in ("cpu", "disk", "meta"):
            continue
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        try:
            moe.method_on(where)
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{place.record.name}: {error}") from None
