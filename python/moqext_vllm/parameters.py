"""Parameters that vLLM's loaders fill with the tensors of a checkpoint, and what of them was never filled.

A slot is what one tensor of a checkpoint fills: the rows of one of the layers that are fused. Loaders that
come through here leave a note of each slot. Others do not, so before loading every slot holds a mark, too:
floats a NaN of certain bits, e4m3 nothing but NaN, packed fp4 nothing but minus zero, int4 and int8 nothing
but the lowest code. Exporters write NaN and minus zero for weights of zeros, and a slot of them counts as
filled by its note.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)

from moqext import ParamSpec
from moqext_torch.exchange import NAMED, as_bytes
from moqext_vllm.dummies import make_up

_FLOAT_MARK = 0x7FE5A5A5
_MARKS = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0x88, torch.int8: 0x80}
BLOCK = 128
"""Rows, and columns, that share a scale of FP8_PB_WO."""
OF_INPUT = ("pre_quant_scale", "lora_a")
"""Tensors that meet x and not rows: each layer that is fused has one of its own."""


def marked(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the default device whose slots all count as never filled."""
    return mark(torch.empty(tuple(shape), dtype=dtype))


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Has all slots of a tensor count as never filled."""
    if tensor.dtype == torch.float32:
        tensor.view(torch.int32).fill_(_FLOAT_MARK)
    elif tensor.dtype in _MARKS:
        tensor.view(torch.uint8).fill_(_MARKS[tensor.dtype])
    else:
        tensor.fill_(float("nan"))
    return tensor


def begin_load(param: torch.Tensor) -> None:
    """Marks a parameter whose first slot is about to be filled.

    At a reload it is memory that nothing has written, or holds the prepared tensors of before. vLLM counts
    what a loader copies, and calls it for a tensor without memory first.
    """
    if not param.is_meta and not hasattr(param, "moqext_filled"):
        mark(param.data)
        param.moqext_filled = set()  # type: ignore[attr-defined]


def note(param: torch.Tensor, *slots: Any) -> None:
    """Leaves a note that slots of a parameter were filled, after `begin_load`."""
    if not param.is_meta:
        param.moqext_filled.update(slots)  # type: ignore[attr-defined]


def noted(param: torch.Tensor) -> set[Any]:
    """The slots that were filled by what leaves notes."""
    found: set[Any] = getattr(param, "moqext_filled", set())
    return found


def fit_dtype(param: torch.Tensor, loaded: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of a checkpoint in a dtype that its parameter may be copied from without changing values.

    Args:
        param: the parameter.
        loaded: the tensor.
        name: of layer and role, for messages.

    Raises:
        TypeError: copying would make other numbers of it.
    """
    if param.dtype == torch.uint8 and loaded.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        return loaded.view(torch.uint8)
    loaded = as_bytes(loaded) if param.dtype == torch.uint8 else loaded
    wide = param.is_floating_point() and param.dtype.itemsize > 1
    if loaded.dtype != param.dtype and not (
        wide and loaded.is_floating_point() and loaded.dtype.itemsize > 1
    ):
        expected = "a float of 16 bits or more" if wide else str(param.dtype).removeprefix("torch.")
        found = str(loaded.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected {expected}, got a tensor of {found}")
    return loaded


def was_skipped(param: torch.Tensor) -> bool:
    """Whether a reload filled no slot of a parameter."""
    return not hasattr(param, "moqext_filled")


def end_load(layer: torch.nn.Module) -> None:
    """Has the next load of a layer's parameters count as a reload."""
    for param in layer.parameters(recurse=False):
        if hasattr(param, "moqext_filled"):
            del param.moqext_filled


def is_marked(slot: torch.Tensor) -> bool:
    """Whether nothing was ever written to a slot."""
    if slot.numel() == 0:
        return False
    first = slot.reshape(-1)[:1] if slot.is_contiguous() else slot[:1]
    return bool(_marks(first).all()) and bool(_marks(slot).all())


def find_marked(stack: torch.Tensor, halves: int = 1) -> list[tuple[int, int]]:
    """The slots of a stack of experts to which nothing was ever written: the expert, and which half of it.

    It asks the device once for what all slots begin with, and for the rest of those that begin with a mark.

    Args:
        stack: [experts, ...], contiguous.
        halves: slots of an expert, behind each other.
    """
    if stack.numel() == 0:
        return []
    each = stack.view(len(stack), halves, -1)
    begins = _marks(each[:, :, 0]).cpu()
    return [(expert, half) for expert, half in begins.nonzero().tolist() if is_marked(each[expert, half])]


def _marks(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements are marks."""
    if tensor.dtype == torch.float32:
        return tensor.contiguous().view(torch.int32) == _FLOAT_MARK
    if tensor.dtype in _MARKS:
        return tensor.view(torch.uint8) == _MARKS[tensor.dtype]
    return tensor.isnan()


def slots(tensor: torch.Tensor, partitions: Sequence[int], role: str = "weight") -> list[torch.Tensor]:
    """The slots of a tensor of fused layers: rows, pairs of them, blocks or single values, layer by layer."""
    if role in OF_INPUT:
        return list(tensor.chunk(len(partitions)))
    rows = tensor.shape[0] if tensor.dim() else 0
    blocks = [-(-part // BLOCK) for part in partitions]
    pairs = blocks if any(part % 2 for part in partitions) else [part // 2 for part in partitions]
    for sizes in (partitions, pairs, blocks, [1] * len(partitions)):
        if rows == sum(sizes):
            return list(tensor.split(list(sizes)))
    return [tensor]


class PartitionedBlockScale(BlockQuantScaleParameter):  # type: ignore[misc]
    """Block scales whose layers begin at a block of their own, even where their rows are no whole blocks.

    Args:
        partitions: rows of each layer that is fused.
        options: of vLLM's class.
    """

    def __init__(self, *, partitions: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.sizes = [-(-rows // BLOCK) for rows in partitions]
        self.starts = [0, *accumulate(self.sizes)]

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **where: Any) -> None:
        """Loads one of the fused layers; rows of blocks are this layer's own."""
        super().load_merged_column_weight(loaded_weight, **self._place(where))

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **where: Any) -> None:
        """Loads q, k or v; rows of blocks are this layer's own."""
        super().load_qkv_weight(loaded_weight, **self._place(where))

    def _place(self, where: dict[str, Any]) -> dict[str, Any]:
        shard = where.get("shard_id")
        if shard is None or isinstance(shard, tuple):
            return where
        index = self._shard_id_as_int(shard)
        return where | {"shard_offset": self.starts[index], "shard_size": self.sizes[index]}


def make_parameter(
    role: str,
    spec: ParamSpec,
    partitions: Sequence[int],
    weight_loader: Callable[..., Any],
    layer: str = "",
    in_blocks: bool = False,
) -> torch.nn.Parameter:
    """The parameter of a linear's tensor, of the class that tells vLLM's loaders how to split it.

    Args:
        role: its name in the checkpoint.
        spec: from `LinearMethod.checkpoint_params`.
        partitions: rows of each layer that is fused, on this rank.
        weight_loader: vLLM's.
        layer: its name, for messages.
        in_blocks: whether scales are those of blocks of rows and columns.
    """
    rows, count = sum(partitions), len(partitions)
    shape = spec.shape
    if role in OF_INPUT and count > 1:
        shape = (count, *([shape[0] // count] if role == "lora_a" else []), shape[-1])
    data = marked(shape, NAMED[spec.dtype])
    if role in OF_INPUT and count > 1:
        made = BasevLLMParameter(data=data, weight_loader=weight_loader)
    elif role in OF_INPUT:
        made = RowvLLMParameter(data=data, input_dim=len(shape) - 1, weight_loader=weight_loader)
    elif role == "lora_b":
        made = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=weight_loader)
    elif len(spec.shape) == 2 and spec.dtype == "float32" and in_blocks:
        made = PartitionedBlockScale(
            partitions=partitions, data=data, input_dim=1, output_dim=0, weight_loader=weight_loader
        )
    elif len(spec.shape) == 2 and spec.dtype == "float32":
        made = GroupQuantScaleParameter(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
    elif role == "weight" and spec.dtype == "uint8":  # int4, of which two rows share a byte
        made = PackedvLLMParameter(
            data=data,
            input_dim=1,
            output_dim=0,
            packed_dim=0,
            packed_factor=2,
            weight_loader=weight_loader,
        )
    elif len(spec.shape) == 2:
        made = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=weight_loader)
    elif role == "weight_scale" and spec.shape == (rows,) and rows != len(partitions):
        made = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=weight_loader)
    else:
        made = PerTensorScaleParameter(data=data, weight_loader=weight_loader)
    made.weight_loader = _in_shape(weight_loader, f"{layer}.{role}", count)
    make_up(role, made)
    return made


def as_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Scales as [rows, columns] of blocks: exporters write [rows, 1, columns, 1], too, or one value."""
    if scales.dim() == 4:
        return scales.flatten(2).flatten(0, 1)
    return scales.reshape(1, 1) if scales.numel() == 1 else scales


def _in_shape(weight_loader: Callable[..., Any], name: str, count: int) -> Callable[..., Any]:
    """A loader that takes scales in every shape of exporters, and one for a layer that is fused on disk.

    Args:
        weight_loader: vLLM's.
        name: of layer and role, for messages.
        count: of the layers that are fused.
    """
    axis = {"lora_a": -2, "lora_b": -1}.get(name.rpartition(".")[2])

    def load(param: Any, loaded_weight: torch.Tensor, *rest: Any, **options: Any) -> Any:
        begin_load(param)
        loaded_weight = fit_dtype(param, loaded_weight, name)
        if axis is not None and loaded_weight.shape[axis] != param.shape[axis]:
            got = list(loaded_weight.shape)
            raise ValueError(f"{name}: expected a pair of rank {param.shape[axis]}, got shape {got}")
        shard = rest[0] if rest else options.get("loaded_shard_id")
        shards = _shards(shard, count)
        if isinstance(param, PerTensorScaleParameter):
            if shard is None or isinstance(shard, tuple):
                own = [param.data[index : index + 1] for index in shard] if shard else [param.data]
                for slot in own:
                    slot.copy_(loaded_weight.reshape(-1))
                note(param, *shards)
                return None
            loaded_weight = loaded_weight.reshape(1)
        elif type(param) is BasevLLMParameter:  # each layer's own, and whole on every rank
            for shard in shards:
                slot = param.data[shard]
                if loaded_weight.numel() != slot.numel():
                    got = list(loaded_weight.shape)
                    raise ValueError(f"{name}: expected shape {list(slot.shape)}, got {got}")
                slot.copy_(loaded_weight.reshape(slot.shape))
            note(param, *shards)
            return None
        elif isinstance(param, (ChannelQuantScaleParameter, RowvLLMParameter)) and param.dim() == 1:
            loaded_weight = loaded_weight.reshape(-1)
        elif isinstance(param, PartitionedBlockScale):
            loaded_weight = as_blocks(loaded_weight)
        result = weight_loader(param, loaded_weight, *rest, **options)
        note(param, *shards)
        return result

    return load


def _shards(shard: Any, count: int) -> tuple[int, ...]:
    """The slots that a shard of vLLM's loaders fills: one, several, or all where it names none."""
    if shard is None:
        return tuple(range(count))
    if isinstance(shard, tuple):
        return shard
    return ({"q": 0, "k": 1, "v": 2}.get(shard, shard),)
