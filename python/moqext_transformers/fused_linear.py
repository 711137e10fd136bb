"""Linears of one input as one call, which a state dict still has under the names of each.

A `FusedLinear` holds the tensors of its parts, one below the other, and is in no state dict; a `Part` stands
where a linear stood, without tensors, and writes and reads its rows under that linear's names.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Self

import torch

from moqext_torch import QuantLinear
from moqext_torch.prepared import as_carrier

SHARED = "pre_quant_scale"
"""The tensor that belongs to the input, so that all parts have the same."""


class FusedLinear(QuantLinear):
    """The linears `join` was given, as one.

    For each part, `part_shapes` has the shapes of its tensors in the checkpoint, where scalars have many, and
    `part_specs` those that the format gives them.
    """

    part_shapes: tuple[dict[str, torch.Size], ...]
    part_specs: tuple[dict[str, tuple[int, ...]], ...]
    _pending: dict[int, dict[str, torch.Tensor]]

    @classmethod
    def join(cls, linears: Sequence[torch.nn.Module]) -> Self | None:
        """One linear for several, or None where they are not alike enough for one call.

        Args:
            linears: prepared, or with the tensors of the checkpoint; they stay as they are.

        Raises:
            RuntimeError: a prepared one has the checkpoint's tensors no more.
        """
        if not all(type(linear) is QuantLinear and len(linear.out_partitions) == 1 for linear in linears):
            return None
        first: Any = linears[0]
        stored = [linear.stored_tensors() for linear in linears]
        if len({_kind(linear, held) for linear, held in zip(linears, stored, strict=True)}) > 1:
            return None
        if any(not _all_equal([held[role] for held in stored]) for role in _shared_roles(stored[0])):
            return None
        specs = tuple(
            {role: linear.method.checkpoint_params[role].shape for role in held if role != "bias"}
            | {"bias": (linear.out_features,)}
            for linear, held in zip(linears, stored, strict=True)
        )
        if any(
            tensor.numel() != prod(of[role])
            for of, held in zip(specs, stored, strict=True)
            for role, tensor in held.items()
        ):
            return None  # one scale that stands for many
        fused = cls(
            first.in_features,
            [linear.out_features for linear in linears],
            first.quant_algo,
            bias="bias" in stored[0],
            group_size=first.group_size,
            compute=first.compute,
            batch_invariant=first.batch_invariant,
            dtype=first.dtype,
            device="meta",
            optional=[role for role in ("input_scale", SHARED) if role in stored[0]],
            rank=first.rank,
        )
        fused.part_shapes = tuple({role: tensor.shape for role, tensor in held.items()} for held in stored)
        fused.part_specs, fused._pending = specs, {}
        fused._take(fused._check(fused._joined(stored)))
        return fused.train(first.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies x, by the tensors that parts were given last."""
        self.take_pending()
        return super().forward(x)

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the checkpoint, with those that parts were given last."""
        self.take_pending()
        return super().stored_tensors()

    def rows(self, index: int) -> slice:
        """Columns of a part's outputs."""
        begin = sum(self.out_partitions[:index])
        return slice(begin, begin + self.out_partitions[index])

    def part_tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a part as its checkpoint has them: copies."""
        found = {}
        for role, tensor in self.stored_tensors().items():
            shape = self.part_shapes[index][role]
            if role != SHARED:
                lengths = [specs[role][0] for specs in self.part_specs]
                tensor = tensor.narrow(0, sum(lengths[:index]), lengths[index])
            found[role] = tensor.reshape(shape).clone()
        return found

    def take_part(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps new tensors of a part until `take_pending`: scales of all parts change at once.

        Args:
            index: of the part.
            tensors: some of `part_shapes`; what is not given stays.

        Raises:
            ValueError: one has another shape.
            TypeError: one has another dtype.
        """
        for role, tensor in tensors.items():
            shape = self.part_shapes[index][role]
            if tensor.numel() != shape.numel():
                raise ValueError(f"{role}: expected shape {list(shape)}, got {list(tensor.shape)}")
            self._refuse_dtype(role, tensor)
        if tensors:
            self._pending[index] = self._pending.get(index, {}) | dict(tensors)

    def take_pending(self) -> None:
        """Takes the tensors of parts that were given, and prepares again, in place, if it was prepared.

        Raises:
            ValueError: `prepare` refuses them, or the parts' pre_quant_scale are not the same.
            RuntimeError: some of a part are to stay, and the layer has them no more.
        """
        if not self._pending:
            return
        device = self.weight.device
        given, self._pending = self._pending, {}
        parts = []
        for index, shapes in enumerate(self.part_shapes):
            new = {role: tensor.detach().to(device) for role, tensor in given.get(index, {}).items()}
            parts.append(new if new.keys() == shapes.keys() else self.part_tensors(index) | new)
        if SHARED in parts[0] and not _all_equal([part[SHARED] for part in parts]):
            raise ValueError(f"{SHARED}: linears fused along rows need the same")
        tensors = self._check(self._joined(parts))
        if self.is_prepared:
            self._prepare(tensors)
        else:
            self._take(tensors)

    def _joined(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The tensors of all parts, one below the other."""
        found = {}
        for role, first in parts[0].items():
            shaped = [
                part[role].reshape(specs[role]) for part, specs in zip(parts, self.part_specs, strict=True)
            ]
            if role == SHARED:
                found[role] = first
            elif first.element_size() == 1:
                found[role] = torch.cat([as_carrier(tensor) for tensor in shaped]).view(first.dtype)
            else:
                found[role] = torch.cat(shaped)
        return found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the parts do."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes what the parts, which stand before this module, were given."""
        try:
            self.take_pending()
        except (ValueError, TypeError, RuntimeError) as error:
            error_msgs.append(f"{prefix.removesuffix('.')}: {error}")


class Part(torch.nn.Module):
    """A linear that is rows of a `FusedLinear`.

    Its call multiplies all of them; the model calls the fused one.

    Args:
        fused: the linear that has its tensors.
        index: which part of it this is.
    """

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self._fused = (fused,)  # no submodule of this one
        self.index = index
        self.in_features = fused.in_features
        self.out_features = fused.out_partitions[index]
        self.quant_algo = fused.quant_algo

    @property
    def fused(self) -> FusedLinear:
        """The linear that has the tensors."""
        return self._fused[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies as the linear that stood here did."""
        y: torch.Tensor = self.fused(x)
        return y[..., self.fused.rows(self.index)]

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and name in self.fused.part_shapes[self.index]:
            raise AttributeError(
                f"{name}: this linear is part of a fused one, whose tensors load_state_dict changes; a model "
                "loaded with fuse=False has them here"
            )
        super().__setattr__(name, value)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads this part alone."""
        result = super().load_state_dict(*args, **kwargs)
        self.fused.take_pending()
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        tensors = self.fused.part_tensors(self.index)
        destination.update({prefix + role: tensor for role, tensor in tensors.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        shapes = self.fused.part_shapes[self.index]
        own = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
        if strict:
            unexpected_keys += [key for role, key in own.items() if role not in shapes]
        missing_keys += [prefix + role for role in shapes if role not in own]
        try:
            self.fused.take_part(self.index, {role: state_dict[own[role]] for role in shapes if role in own})
        except (ValueError, TypeError) as error:
            error_msgs.append(f"{prefix}{error}")

    def extra_repr(self) -> str:
        """The line of the part in print(model)."""
        rows = self.fused.rows(self.index)
        return f"{self.in_features} -> {self.out_features}, rows {rows.start} to {rows.stop - 1} of one"


def _kind(linear: Any, stored: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """The facts that linears of one call have in common."""
    return (
        linear.quant_algo,
        linear.group_size,
        linear.rank,
        linear.in_features,
        linear.compute,
        linear.batch_invariant,
        linear.dtype,
        linear.weight.device,
        frozenset((role, tensor.dtype) for role, tensor in stored.items()),
    )


def _shared_roles(stored: Mapping[str, torch.Tensor]) -> list[str]:
    """The tensors that describe the input: with several input scales one call has nothing to gain."""
    return [role for role in ("input_scale", SHARED) if role in stored]


def _all_equal(tensors: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(tensor.flatten(), tensors[0].flatten()) for tensor in tensors)
