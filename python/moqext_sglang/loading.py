"""Parameters of a linear that SGLang's loaders fill, and which of their slots are filled.

SGLang cuts a tensor of the checkpoint for its rank and for the part of a fused layer, and copies it to where
it belongs; the class of a parameter tells how. What was copied is written down, so that a slot that never
was is an error instead of whatever was in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)

from moqext import CheckpointError, ParamSpec
from moqext.algorithms import ALGORITHMS
from moqext_torch.exchange import NAMED, as_bytes
from moqext_torch.op import LOW_RANK

_PARTS = {"q": 0, "k": 1, "v": 2}
BLOCK = 128
"""Rows and columns that share a scale of FP8_PB_WO."""


class BlockScales(ModelWeightParameter):
    """Scales of blocks of rows: SGLang counts rows of the weight where these have one for BLOCK of them.

    Args:
        rows: of each part of the layer; a part begins with a block of its own.
        options: as for the class of SGLang.
    """

    def __new__(cls, data: torch.Tensor, rows: Sequence[int], **options: Any) -> Any:
        """The parameter itself."""
        return super().__new__(cls, data, **options)

    def __init__(self, data: torch.Tensor, rows: Sequence[int], **options: Any) -> None:
        super().__init__(data=data, **options)
        blocks = [-(-count // BLOCK) for count in rows]
        self._blocks = {sum(rows[:part]): sum(blocks[:part]) for part in range(len(rows))}

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **where: Any) -> None:
        """Loads one part of a fused layer."""
        super().load_merged_column_weight(loaded_weight, **self._in_blocks(where))

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **where: Any) -> None:
        """Loads q, k or v."""
        super().load_qkv_weight(loaded_weight, **self._in_blocks(where))

    def _in_blocks(self, where: dict[str, Any]) -> dict[str, Any]:
        size, offset = -(-where["shard_size"] // BLOCK), self._blocks[where["shard_offset"]]
        return where | {"shard_size": size, "shard_offset": offset}


def columns_of_a_scale(quant_algo: str, group_size: int | None) -> int:
    """How many columns of a row share a scale of the weight, where neighbours may have another; else 1."""
    usual = ALGORITHMS[quant_algo].group_size
    return 1 if usual is None else group_size or usual


class Slots:
    """Which tensors of a checkpoint a linear has been given.

    Args:
        prefix: name of the layer.
        quant_algo: of the layer.
        rows: of each layer that is fused in it.
    """

    def __init__(self, prefix: str, quant_algo: str, rows: Sequence[int]) -> None:
        self.prefix = prefix
        self.facts = ALGORITHMS[quant_algo]
        self.rows = list(rows)
        self.parts = len(rows)
        self._filled: dict[str, set[int]] = {}
        self.fresh: set[str] = set()  # roles that were loaded since the layer was prepared
        self._pair: dict[str, torch.nn.Parameter] = {}

    @property
    def rank(self) -> int | None:
        """Rank of the low-rank pair of each part; None where there is none."""
        return self._pair["lora_b"].shape[1] if self._pair else None

    def parameter(self, role: str, spec: ParamSpec, load: Callable[..., Any]) -> torch.nn.Parameter:
        """An empty parameter of a role.

        Args:
            role: as `LinearMethod.checkpoint_params` calls it.
            spec: from there.
            load: SGLang's loader of the layer.
        """
        data = torch.empty(spec.shape, dtype=NAMED[spec.dtype])
        self._filled[role] = set()
        filling = self._loader(role, load)
        matrix: dict[str, Any] = {"input_dim": 1, "output_dim": 0, "weight_loader": filling}
        if role == "weight" and self.facts.codes == "int4":
            return PackedvLLMParameter(data=data, packed_factor=2, packed_dim=0, **matrix)
        if role == "weight":
            return ModelWeightParameter(data=data, **matrix)
        if role in LOW_RANK:
            self._pair[role] = (
                RowvLLMParameter(data=data, input_dim=1, weight_loader=filling)
                if role == "lora_a"
                else ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=filling)
            )
            return self._pair[role]
        if role == "pre_quant_scale":
            return RowvLLMParameter(data=data, input_dim=0, weight_loader=filling)
        if role != "weight_scale" or self.facts.scales == "tensor":
            scale: Any = PerTensorScaleParameter(data=data, weight_loader=filling)
            scale.needs_scalar_to_array = True
            return scale
        if self.facts.scales == "rows":
            return ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=filling)
        if self.facts.scales == "blocks":
            return BlockScales(data, self.rows, **matrix)
        return GroupQuantScaleParameter(data=data, **matrix)

    def _loader(self, role: str, load: Callable[..., Any]) -> Callable[..., None]:
        def fill(param: Any, loaded: torch.Tensor, *shard: Any, **named: Any) -> None:
            which = self._which(role, shard[0] if shard else named.get("loaded_shard_id"))
            if isinstance(param, BlockScales) and len(which) > 1:
                raise CheckpointError(f"{self.prefix}: {role}: one tensor for several parts")
            if role == "pre_quant_scale" and role in self.fresh:
                self._refuse_another_input(param, loaded)
            loaded = as_bytes(loaded) if param.dtype == torch.uint8 else loaded
            if role in LOW_RANK:
                self._take_rank(role, loaded)
            if role == "lora_a" and self.parts > 1:
                for part in which:
                    param.data.chunk(self.parts)[part].view(loaded.shape).copy_(loaded)
            else:
                load(param, in_shape(loaded, param.dim()), *shard, **named)
            self._filled[role] |= which
            self.fresh.add(role)

        return fill

    def _take_rank(self, role: str, loaded: torch.Tensor) -> None:
        """Gives low-rank pairs the rank of the first one that is loaded.

        Raises:
            CheckpointError: the tensor is of another rank than those before, or no matrix.
        """
        shape = list(loaded.shape)
        rank = shape[LOW_RANK.index(role)] if len(shape) == 2 else 0
        if rank > 0 and not any(self._filled[each] for each in LOW_RANK):
            a, b = (self._pair[each] for each in LOW_RANK)
            a.data = a.data.new_empty(self.parts * rank, a.shape[1])
            b.data = b.data.new_empty(b.shape[0], rank)
        if rank != self.rank:
            raise CheckpointError(
                f"{self.prefix}: {role}: expected one of a pair of rank {self.rank}, got shape {shape}"
            )

    def _which(self, role: str, shard: Any) -> set[int]:
        """The parts that a tensor is for."""
        if shard is None:
            return set(range(self.parts))
        found = {_PARTS.get(each, each) for each in (shard if isinstance(shard, tuple) else (shard,))}
        if not all(isinstance(each, int) and 0 <= each < self.parts for each in found):
            raise CheckpointError(f"{self.prefix}: {role} for part {shard!r} of {self.parts}")
        return found

    def _refuse_another_input(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        """Raises where a part has other factors of the input than one before."""
        if loaded.numel() == param.numel() and not torch.equal(
            param.data.cpu(), loaded.reshape(param.shape).to(param.dtype).cpu()
        ):
            raise CheckpointError(
                f"{self.prefix}: its parts have one input, and so one pre_quant_scale, but differ in it"
            )

    def given(self, specs: dict[str, ParamSpec]) -> list[str]:
        """The roles that the checkpoint has.

        Raises:
            CheckpointError: a slot was never filled.
        """
        found = []
        for role, filled in self._filled.items():
            absent = not filled and not specs[role].required
            shared = role == "pre_quant_scale" and bool(filled)
            missing = [] if absent or shared else sorted(set(range(self.parts)) - filled)
            if missing:
                part = "" if self.parts == 1 else f" of part {missing[0]}"
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(f"{self.prefix}: {role}{part}{more} was never loaded")
            if not absent:
                found.append(role)
        return found


def in_shape(loaded: torch.Tensor, rank: int) -> torch.Tensor:
    """A tensor of a checkpoint without the extents of 1 that exporters add, or with those they took away.

    Scales of rows are [N, 1] or [N], those of blocks [A, 1, B, 1], [A, B], or [] where there is one.
    """
    if loaded.dim() == 0 and rank == 2:
        return loaded.reshape(1, 1)
    if loaded.dim() == 4 and rank == 2 and loaded.shape[1] == loaded.shape[3] == 1:
        return loaded[:, 0, :, 0]
    if loaded.dim() == 2 and rank == 1 and loaded.shape[1] == 1:
        return loaded[:, 0]
    return loaded
