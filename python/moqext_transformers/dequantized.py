"""Quantized layers of a checkpoint that become plain ones of the model: tables, and what does not run.

An embedding is looked up, so its table is dequantized always. Linears and experts are where moqext has no
method for their algorithm and the user asked for it. These stand aside while Transformers loads the rest, so
that it takes none of their tensors, and get their weights afterwards.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from moqext import Checkpoint, CheckpointError, LayerRecord, Projection, UnsupportedQuantization
from moqext.ops.spelling import Compute
from moqext.reader.matrices import matrix_of
from moqext.reader.naming import PROJECTIONS
from moqext_torch import QuantMoE
from moqext_torch.exchange import stored_tensor
from moqext_torch.experts import find_experts
from moqext_transformers.naming import Names

HINT = (
    "moqext_transformers.from_pretrained(DIR, dequantize_unsupported=True) dequantizes such layers, and "
    "`python -m moqext convert DIR OUT --to bf16` the whole checkpoint"
)


class _Aside(torch.nn.Module):
    """Stands where a module stood, so that tensors of that name find no place.

    The module inside is materialized where the device map says, and not initialized: it gets its weights
    later.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        for inner in module.modules():
            inner._is_hf_initialized = True  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module inside: modules around it initialize its weight, too."""
        if name in self._modules:
            return self._modules[name]
        return getattr(self._modules["module"], name)


def split_experts(
    model: Any, checkpoint: Checkpoint, records: Iterable[LayerRecord], names: Names, compute: Compute
) -> tuple[list[LayerRecord], dict[str, LayerRecord]]:
    """The layers without groups of experts that do not run, and those, by the module that has all of them."""
    modules = {names(name): (name, module) for name, module in model.named_modules()}
    kept, aside = [], {}
    for record in records:
        try:
            for place in find_experts(checkpoint, modules, [record])[0].values():
                QuantMoE.empty_like(checkpoint, place.record, compute=compute, device="meta", **place.options)
            kept.append(record)
        except UnsupportedQuantization:
            aside[modules[record.name][0]] = record
    return kept, aside


class DequantizedLayers:
    """All layers of a model that are quantized in the checkpoint and plain in the model."""

    def __init__(self) -> None:
        self._tables: dict[str, LayerRecord] = {}
        self._aside: dict[str, LayerRecord] = {}

    def __bool__(self) -> bool:
        return bool(self._tables or self._aside)

    def replace(self, model: Any, layers: Mapping[str, LayerRecord]) -> None:
        """Takes layers, by their names in the model, out of Transformers' way.

        Tables stay, as heads are tied to them; their codes are loaded first.

        Raises:
            UnsupportedQuantization: a module of experts that keeps its weights in no way that is known.
        """
        for name, record in layers.items():
            if record.kind == "moe":
                _find_stacks(model.get_submodule(name), record)
        self._tables = {name: record for name, record in layers.items() if record.kind == "embedding"}
        self._aside = {name: record for name, record in layers.items() if record.kind != "embedding"}
        for name in self._aside:
            model.set_submodule(name, _Aside(model.get_submodule(name)))

    def patterns(self) -> set[str]:
        """Patterns of the names of tensors that Transformers is not to load."""
        return {rf"(^|\.){re.escape(name)}\." for name in self._aside}

    def is_table(self, tensor: str) -> bool:
        """Whether a tensor of the model is one of the embeddings."""
        return tensor.removesuffix(".weight") in self._tables

    def fill(self, model: Any, checkpoint: Checkpoint, dtypes: Mapping[str, torch.dtype]) -> None:
        """Reads and dequantizes all of them, and puts the modules back.

        Args:
            model: loaded.
            checkpoint: where they are stored.
            dtypes: of the model's tensors, by name.

        Raises:
            CheckpointError: a weight cannot be told from its tensors.
            ValueError: a module was offloaded.
        """
        for name, record in self._tables.items():
            weight = model.get_submodule(name).weight
            weight.requires_grad_(False)
            table = _weight(checkpoint, record, dtypes[f"{name}.weight"])
            weight.data = table.to(weight.device)  # of heads that are tied to it, too
        for name, record in self._aside.items():
            module = model.get_submodule(name).module
            if any(tensor.is_meta for tensor in module.parameters()):
                raise ValueError(f"{name}: moqext's weights cannot be offloaded; let device_map name devices")
            with torch.no_grad():
                if record.kind == "moe":
                    _fill_experts(module, checkpoint, record)
                else:
                    _fill_linear(module, checkpoint, record)
            model.set_submodule(name, module.requires_grad_(False))


def _weight(checkpoint: Checkpoint, record: LayerRecord | Projection, dtype: torch.dtype) -> torch.Tensor:
    """The factor of x, [.., out, in]: pre_quant_scale and the low-rank pair are part of it.

    Raises:
        CheckpointError: a code is NaN, or a value does not fit into the dtype.
    """
    matrix = matrix_of(checkpoint, record)
    values = matrix.rows(0, matrix.shape[0])
    transposed = isinstance(record, Projection) and record.transposed
    weight = torch.from_numpy(np.ascontiguousarray(values.swapaxes(1, 2) if transposed else values)).to(dtype)
    if not weight.isfinite().all():
        message = f"{record.name}: a code is NaN, or a value does not fit into {dtype}"
        raise CheckpointError(message, file=checkpoint.directory, tensor=record.tensors["weight"])
    return weight


def _fill_linear(module: Any, checkpoint: Checkpoint, record: LayerRecord) -> None:
    weight = _weight(checkpoint, record, module.weight.dtype)
    module.weight.copy_(weight if isinstance(module, torch.nn.Linear) else weight.T)  # of a Conv1D
    if module.bias is not None:
        module.bias.copy_(stored_tensor(checkpoint, record.tensors["bias"]))


_STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of a module of experts; each may have a bias beside it."""


def _find_stacks(module: Any, record: LayerRecord) -> None:
    """Raises where a module keeps other tensors than such stacks, or has no room for these experts."""
    held = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    known = {name for stack in _STACKS for name in (stack, f"{stack}_bias")}
    gates = held & {"gate_up_proj", "up_proj"}
    fits = held <= known and len(gates) == 1 and "down_proj" in held
    if fits and module.down_proj.numel() == prod(record.shape):
        return
    raise UnsupportedQuantization(
        f"{record.name}: {record.quant_algo}, and {type(module).__name__} in the model is no module that "
        f"holds {record.shape[0]} experts as stacks of {list(record.shape[1:])}"
    )


def _fill_experts(module: Any, checkpoint: Checkpoint, record: LayerRecord) -> None:
    """Fills the stacks of a module of experts, in the order of axes and rows that it has them in."""
    transposed = getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts")
    takes_turns = not getattr(module, "is_concatenated", True)
    gate = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
    for part, role, expert in _parts(record):
        name = "down_proj" if role == "down" else gate
        half = {"gate": 0, "up": 1}.get(role) if name == "gate_up_proj" else None
        stack = getattr(module, name)
        weight = _weight(checkpoint, part, stack.dtype)
        _put(stack.mT if transposed else stack, expert, weight, half, takes_turns)
        bias = getattr(module, f"{name}_bias", None)
        if bias is not None:
            if "bias" not in part.tensors:
                raise CheckpointError(f"{part.name}: a bias in the model alone", file=checkpoint.directory)
            _put(bias, expert, stored_tensor(checkpoint, part.tensors["bias"]), half, takes_turns)


def _parts(record: LayerRecord) -> Iterable[tuple[LayerRecord | Projection, str, int | None]]:
    """The weights of experts, what they are, and whose: None for those of all experts."""
    for projection in record.projections:
        yield projection, projection.role, None
    for member in record.members:
        container, _, last = member.name.rpartition(".")
        yield member, PROJECTIONS[last], int(container.rpartition(".")[2])


def _put(
    stack: torch.Tensor, expert: int | None, values: torch.Tensor, half: int | None, takes_turns: bool
) -> None:
    """Writes values to their place in a stack [experts, out, ..]: half 0 is gate, 1 is up, None both."""
    place = stack if expert is None else stack[expert]
    axis = 0 if expert is not None else 1
    if half is not None and takes_turns:
        place = place.unflatten(axis, (-1, 2)).select(axis + 1, half)
    elif half is not None:
        place = place.chunk(2, axis)[half]
    place.copy_(values)
