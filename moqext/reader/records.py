"""Records of the quantized layers and cache scales that the reader finds in a checkpoint, plain data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moqext.algorithms import BLOCK_SIZES
from moqext.reader.naming import PROJECTIONS
from moqext.reader.problems import Problem

Kind = Literal["linear", "moe", "embedding", "convolution"]


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of all experts of a group, stored stacked in one 3-D tensor.

    Attributes:
        role: "gate_up", "gate", "up" or "down".
        name: the projection as named in the checkpoint, without a role.
        quant_algo: canonical algorithm.
        shape: (experts, out features, in features), whatever the order and packing in the file.
        transposed: True when the file has (experts, in, out), as Llama 4 and gpt-oss, False for (experts,
            out, in).
        block_axis: "in" or "out": the features that share a block scale, and that are packed into bytes where
            codes are; None without one-dimensional blocks.
        group_size: weights per block scale along that axis, 128 for square blocks, None without blocks.
        interleaved: True when gate and up alternate among the out features instead of following each other.
        tensors: role ("weight", "weight_scale", ...) -> tensor name.
        scale_layout, nibbles: as of a `LayerRecord`.
    """

    role: str
    name: str
    quant_algo: str
    shape: tuple[int, int, int]
    transposed: bool
    block_axis: Literal["in", "out"] | None
    group_size: int | None
    interleaved: bool
    tensors: Mapping[str, str]
    scale_layout: str = "linear"
    nibbles: str = "low"


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A quantized layer of a checkpoint: a linear, a group of experts, or an embedding table.

    Attributes:
        name: the module as named in the checkpoint; for experts the container, as
            `model.layers.0.mlp.experts`.
        kind: "linear", "moe", "embedding" or "convolution". An embedding is quantized like a linear without
            activation scale, and looked up by row, not multiplied. Convolutions, of FP8, are only read.
        quant_algo: the canonical algorithm that holds. The configuration's, where the tensors are such; else
            what the tensors say. "MIXED_PRECISION" for experts in several formats, "UNKNOWN" where neither
            names one.
        config_algo: what the configuration says, None when it does not quantize the layer.
        stored_algo: what the tensors say by themselves, None when they are in no known format. Formats that
            leave the same tensors behind are told apart by the configuration only.
        rule: the rule of the configuration that decided, in words.
        group_size: weights per block scale along the input, 128 for square blocks, None without blocks.
        shape: (out features, in features); for an embedding (entries, width); for experts (experts, hidden
            size, intermediate size); for a convolution that of its weight, (out channels, ...).
        tensors: role -> tensor name; for stacked experts "<projection role>.<role>"; empty for experts stored
            one by one, whose tensors are those of the members.
        problems: what is wrong with this layer, members apart.
        members: for experts stored one by one their linears, by expert then gate, up, down; else empty.
        projections: for stacked experts their projections, gate or gate_up first; else empty.
        size: bytes of all tensors of the layer, members included.
        weights: number of weights, to set `size` against.
        partitions: rows of the parts of a linear that is stored fused with a scale for each; else empty.
        scale_layout: "linear", or "swizzled" where the files have the block scales in the 128 x 4 order of
            cuBLAS; "mixed" for experts with both. `Checkpoint.tensor` hands them out in plain order.
        nibbles: "low", or "high" where the files have the even column in the high half of a byte; "mixed"
            for experts with both. `Checkpoint.tensor` hands codes out with the even one low.
        rank: of the low-rank pair of a linear in NVFP4_SVD; None where there is none.
    """

    name: str
    kind: Kind
    quant_algo: str
    config_algo: str | None
    stored_algo: str | None
    rule: str
    group_size: int | None
    shape: tuple[int, ...]
    tensors: Mapping[str, str]
    problems: tuple[Problem, ...] = ()
    members: tuple["LayerRecord", ...] = ()
    projections: tuple[Projection, ...] = ()
    size: int = 0
    weights: int = 0
    partitions: tuple[int, ...] = ()
    scale_layout: str = "linear"
    nibbles: str = "low"
    rank: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the files have scales and codes in ModelOpt's order, which other readers of them need."""
        return (self.scale_layout, self.nibbles) == ("linear", "low")

    @property
    def format(self) -> str:
        """Algorithm and group size in words, as "NVFP4 g16"; square blocks go without saying."""
        return format_name(self.quant_algo, self.group_size)

    @property
    def stored_form(self) -> str:
        """The format, and how the files differ from the order of ModelOpt, as "NVFP4 g16, swizzled"."""
        odd = [self.scale_layout] if self.scale_layout != "linear" else []
        odd += [f"nibbles {self.nibbles}"] if self.nibbles != "low" else []
        return ", ".join([self.format, *odd])

    @property
    def out_partitions(self) -> tuple[int, ...]:
        """Rows of a linear that have scales of their own: its parts where it has some, else all of them."""
        return self.partitions or (self.shape[0],)

    def linears(self) -> Iterator["LayerRecord"]:
        """The records that have tensors of their own: the members where there are some, else the layer."""
        if self.members:
            yield from self.members
        else:
            yield self

    def all_problems(self) -> Iterator[Problem]:
        """The problems of this layer and of its members."""
        yield from self.problems
        for member in self.members:
            yield from member.problems


@dataclass(frozen=True, slots=True)
class KVRecord:
    """The cache scales of one attention.

    Attributes:
        name: the attention module as named in the checkpoint.
        tensors: "k_scale", "v_scale", "q_scale", "k_bias", "v_bias" -> tensor name.
        problems: what is wrong with them.
        values: the scales, by role, when they were read.
    """

    name: str
    tensors: Mapping[str, str]
    problems: tuple[Problem, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)


class Findings(NamedTuple):
    """Everything quantized in a checkpoint."""

    layers: tuple[LayerRecord, ...]
    kv: tuple[KVRecord, ...]
    problems: tuple[Problem, ...]
    """Problems of the checkpoint as a whole, and of modules that no record stands for."""

    def all_problems(self) -> Iterator[Problem]:
        """Every problem, those of layers and cache scales included."""
        yield from self.problems
        for layer in self.layers:
            yield from layer.all_problems()
        for kv in self.kv:
            yield from kv.problems


def format_name(algo: str, group_size: int | None) -> str:
    """Algorithm and group size in words, as `LayerRecord.format` has them."""
    return algo if group_size is None or algo in BLOCK_SIZES else f"{algo} g{group_size}"


def parts_of(record: LayerRecord) -> tuple[LayerRecord | Projection, ...]:
    """The members of experts stored one by one, the projections of stacked ones."""
    return record.members or record.projections


def role_of(part: LayerRecord | Projection) -> str:
    """Which projection of an expert it is: "gate", "up", "gate_up" or "down"."""
    last = part.name.rpartition(".")[2]
    return PROJECTIONS.get(last, last)


def is_gated(record: LayerRecord) -> bool:
    """Whether the experts of a container have a gate."""
    return any(role_of(part) in ("gate", "gate_up") for part in parts_of(record))
