"""Which experts of a container run together, told from its record: one `MoEMethod` for each format of theirs.

What a method cannot have is refused here by name, before a tensor is read: an expert whose projections
differ in format, experts that are not quantized at all, blocks that lie along the output.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS, BLOCK_SIZES
from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.naming import parse_expert_name
from moqext.reader.records import LayerRecord, Projection, format_name, is_gated, parts_of

MAX_EXPERTS = 65535
"""Experts of a layer. MOQ_MAX_EXPERTS of csrc/core/weight.h."""


@dataclass(frozen=True)
class ExpertForm:
    """Experts of a container that have one format.

    Attributes:
        quant_algo: canonical algorithm.
        group_size: weights per block scale, None without blocks.
        experts: their numbers in the container, in order.
        hidden_size, intermediate_size: of each.
        gated: whether they have a gate.
        interleaved: whether rows of gate and up take turns.
    """

    quant_algo: str
    group_size: int | None
    experts: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    gated: bool
    interleaved: bool

    @property
    def format(self) -> str:
        """Algorithm and group size in words, as `LayerRecord.format` has them."""
        return format_name(self.quant_algo, self.group_size)

    def options(self) -> dict[str, Any]:
        """The arguments of `MoEMethod` that say so."""
        return {
            "quant_algo": self.quant_algo,
            "num_experts": len(self.experts),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "gated": self.gated,
            "interleaved": self.interleaved,
            "group_size": self.group_size,
        }


def find_forms(checkpoint: CheckpointReader, record: LayerRecord) -> list[ExpertForm]:
    """The experts of a container by format, those of the first expert first.

    Raises:
        UnsupportedQuantization: no method has an expert of that format, or of those formats.
        CheckpointError: a problem of severity "error" stands against the record or a member.
    """
    errors = [problem for problem in record.all_problems() if problem.severity == "error"]
    if errors:
        text = "; ".join(f"{problem.code}: {problem.message}" for problem in errors[:3])
        raise CheckpointError(f"{record.name}: {text}", file=checkpoint.directory, tensor=errors[0].tensor)
    check_size(checkpoint, record)
    forms = _of_members(checkpoint, record) if record.members else [_of_projections(checkpoint, record)]
    for form in forms:
        _refuse_without_method(record, form)
    for projection in record.projections:
        _refuse_scales(checkpoint, projection)
    return forms


def check_size(checkpoint: CheckpointReader, record: LayerRecord) -> None:
    """Refuses numbers of experts that no tensor has to back, before anything is counted or allocated.

    Raises:
        CheckpointError: the experts are empty, or more than a layer can have.
    """
    if 0 in record.shape:
        raise CheckpointError(
            f"{record.name}: its experts are empty, {list(record.shape)}", file=checkpoint.directory
        )
    if record.shape[0] > MAX_EXPERTS:
        raise CheckpointError(
            f"{record.name}: {record.shape[0]} experts, a layer has at most {MAX_EXPERTS}",
            file=checkpoint.directory,
        )


def has_method(checkpoint: CheckpointReader, record: LayerRecord) -> bool:
    """Whether the experts of a container can run, damage to their tensors aside."""
    try:
        find_forms(checkpoint, record)
    except UnsupportedQuantization:
        return False
    except CheckpointError:
        pass
    return True


def _of_members(checkpoint: CheckpointReader, record: LayerRecord) -> list[ExpertForm]:
    experts: dict[int, dict[str, LayerRecord]] = defaultdict(dict)
    for member in record.members:
        if name := parse_expert_name(member.name):
            experts[name.expert][name.projection] = member
    for tensor in _plain_tensors(checkpoint, record, experts):
        dtype = checkpoint.tensors[tensor].dtype
        raise UnsupportedQuantization(
            f"{record.name}: {tensor} is stored as {dtype}, other experts are quantized; no method has both"
        )
    by_format: dict[tuple[str, int | None], list[int]] = defaultdict(list)
    for number, parts in sorted(experts.items()):
        formats = {part.format for part in parts.values()}
        if len(formats) > 1:
            each = ", ".join(f"{projection} {part.format}" for projection, part in parts.items())
            raise UnsupportedQuantization(
                f"{record.name}: expert {number} has {each}; the projections of an expert need one format"
            )
        part = next(iter(parts.values()))
        by_format[part.quant_algo, part.group_size].append(number)
    _, hidden, intermediate = record.shape
    return [
        ExpertForm(algo, group_size, tuple(numbers), hidden, intermediate, is_gated(record), False)
        for (algo, group_size), numbers in by_format.items()
    ]


def _plain_tensors(
    checkpoint: CheckpointReader, record: LayerRecord, experts: dict[int, dict[str, LayerRecord]]
) -> Iterator[str]:
    """The weights of experts of the container that are stored unquantized."""
    projections = dict.fromkeys(projection for parts in experts.values() for projection in parts)
    for number in range(record.shape[0]):
        for projection in projections:
            name = f"{record.name}.{number}.{projection}.weight"
            if projection not in experts.get(number, {}) and name in checkpoint.tensors:
                yield name


def _of_projections(checkpoint: CheckpointReader, record: LayerRecord) -> ExpertForm:
    other = next((part for part in record.projections if part.shape[0] != record.shape[0]), None)
    if other is not None:
        message = f"{other.name} has {other.shape[0]} experts, another projection {record.shape[0]}"
        raise CheckpointError(message, file=checkpoint.directory, tensor=other.tensors["weight"])
    formats = {format_name(part.quant_algo, part.group_size) for part in record.projections}
    if len(formats) > 1:
        each = ", ".join(f"{p.role} {format_name(p.quant_algo, p.group_size)}" for p in record.projections)
        raise UnsupportedQuantization(
            f"{record.name}: every expert has {each}; the projections of an expert need one format"
        )
    first = record.projections[0]
    experts, hidden, intermediate = record.shape
    return ExpertForm(
        first.quant_algo,
        first.group_size,
        tuple(range(experts)),
        hidden,
        intermediate,
        is_gated(record),
        any(part.interleaved for part in record.projections),
    )


def _refuse_without_method(record: LayerRecord, form: ExpertForm) -> None:
    facts = ALGORITHMS.get(form.quant_algo)
    if facts is None or facts.linear is None:
        raise UnsupportedQuantization(f"{record.name}: {form.quant_algo} has no method for experts")
    along = next((part for part in record.projections if part.block_axis == "out"), None)
    if along is not None:
        raise UnsupportedQuantization(
            f"{record.name}: the blocks of {along.name} ({form.format}) lie along its output, and a product "
            "needs them along its input"
        )
    if form.interleaved and facts.scales == "blocks":
        raise UnsupportedQuantization(
            f"{record.name}: gate and up take turns within blocks of {form.quant_algo}, which then have one "
            "scale for both"
        )


def _refuse_scales(checkpoint: CheckpointReader, projection: Projection) -> None:
    """Refuses scales that are of no rows: of blocks with both halves, of inputs, of halves in turns."""
    experts, rows, columns = projection.shape
    facts = ALGORITHMS[projection.quant_algo]
    both = projection.role == "gate_up"
    size = BLOCK_SIZES.get(projection.quant_algo)
    if size and both and rows > size and rows // 2 % size:
        raise UnsupportedQuantization(
            f"{projection.name}: gate and up of {rows // 2} rows are one weight in blocks of {size}, and one "
            f"has rows of both ({projection.quant_algo})"
        )
    values = prod(checkpoint.tensors[projection.tensors["weight_scale"]].shape)
    if facts.scales == "rows" and values not in (1, experts):
        if rows == columns:
            raise UnsupportedQuantization(
                f"{projection.name}: whether its scales are of rows or of columns cannot be told, as the "
                "experts are square"
            )
        if values == experts * columns:
            raise UnsupportedQuantization(
                f"{projection.name}: a scale for each input ({projection.quant_algo}), which no product has"
            )
    second = projection.tensors.get("weight_scale_2")
    if projection.interleaved and second and prod(checkpoint.tensors[second].shape) == 2 * experts:
        raise UnsupportedQuantization(
            f"{projection.name}: weight_scale_2 of two halves, and rows of gate and up that take turns"
        )


def instead_of_running(record: LayerRecord) -> str:
    """A hint what to do with experts that have no method."""
    first = parts_of(record)[0].name
    return (
        f"load them one by one, as {first!r}"
        if record.members
        else f"dequantize({first!r}) reads a projection"
    )
