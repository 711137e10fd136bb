"""Stacks of experts back in the form of their checkpoint, for saving: the other way of `stack_experts`."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch

from moqext import Checkpoint, LayerRecord
from moqext.reader.naming import PROJECTIONS, parse_expert_name
from moqext_torch.exchange import STORED

_BYTES = {"U8": torch.uint8, "I8": torch.int8}


class _Target(NamedTuple):
    """A tensor of the checkpoint, and which part of which stack it is."""

    stack: str
    expert: int | None
    """None for all of them in one tensor."""
    half: int | None
    """0 for gate, 1 for up, None for all rows."""
    transposed: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredExperts:
    """How a checkpoint stores a group of experts: names, shapes and dtypes, without the values.

    Args:
        checkpoint: where they are stored.
        record: what they are there.
    """

    def __init__(self, checkpoint: Checkpoint, record: LayerRecord) -> None:
        self.record = record
        self._targets: dict[str, _Target] = {}
        parts = [PROJECTIONS[member.name.rpartition(".")[2]] for member in record.members]
        gated = "gate" in [*parts, *(projection.role for projection in record.projections)]
        for part, member in zip(parts, record.members, strict=True):
            name = parse_expert_name(member.name)
            assert name is not None, member.name
            self._add(checkpoint, part, gated, member.tensors, name.expert, transposed=False)
        for projection in record.projections:
            self._add(checkpoint, projection.role, gated, projection.tensors, None, projection.transposed)

    def _add(
        self,
        checkpoint: Checkpoint,
        part: str,
        gated: bool,
        tensors: Mapping[str, str],
        expert: int | None,
        transposed: bool,
    ) -> None:
        half = {"gate": 0, "up": 1}.get(part) if gated else None
        for role, tensor in tensors.items():
            info = checkpoint.tensors[tensor]
            stack = f"{'w2' if part == 'down' else 'w13'}_{role}"
            rows = None if role == "pre_quant_scale" else half  # of the one input
            dtype = STORED.get(info.dtype) or _BYTES[info.dtype]
            self._targets[tensor] = _Target(stack, expert, rows, transposed, tuple(info.shape), dtype)

    def tensors(self, stacks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint.

        Tensors that the format does not use, and that were not read therefore, are left out.

        Args:
            stacks: of all experts, by the names of `MoEMethod.checkpoint_params`.

        Raises:
            ValueError: experts that share one value in the checkpoint differ now.
        """
        found = {}
        for name, target in self._targets.items():
            if target.stack in stacks:
                found[name] = _cut(name, target, stacks[target.stack])
        return found


def _cut(name: str, target: _Target, stack: torch.Tensor) -> torch.Tensor:
    """A tensor of the checkpoint out of a stack."""
    part = stack if target.half is None else stack.chunk(2, dim=1)[target.half]
    if target.expert is not None:
        part = part[target.expert]
    if target.transposed and part.dim() == 3:
        part = part.transpose(1, 2)
    if (count := prod(target.shape)) != part.numel():  # one value of all, or one of gate and up
        rows = part.reshape(count, -1)
        if not rows.eq(rows[:, :1]).logical_or(rows.isnan()).all():
            raise ValueError(f"{name}: holds one value for several, which differ now")
        part = rows[:, 0]
    part = part.reshape(target.shape)
    if target.dtype.itemsize == 1:
        return part.contiguous().view(target.dtype).clone()
    return part.to(target.dtype, copy=True, memory_format=torch.contiguous_format)
