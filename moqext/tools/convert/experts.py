"""Experts stored one by one as stacked tensors, and stacked ones one by one.

Stacked ones are written as Transformers has them in memory: `<container>.gate_up_proj` [experts, 2 I, H],
gate before up, and `<container>.down_proj` [experts, H, I]. Single ones, as of gate in
`<container>.<E>.gate_proj.weight`, are [out, in]. Gate and up that alternate (gpt-oss) are told apart.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.matrices import Matrix
from moqext.reader.naming import INTERLEAVED_ARCHITECTURES, PROJECTIONS, parse_expert_name
from moqext.reader.records import Projection
from moqext.tools.convert.jobs import Job, Pieces, rounded
from moqext.tools.convert.writer import TensorSpec

Jobs = Iterator[tuple[Job, list[str]]]
"""Jobs, with the tensors of the source that they stand for."""

TRANSPOSED_MODELS = frozenset(("llama4", "llama4_text", "gpt_oss"))
"""Model types whose plain stacks are [experts, in, out]."""


def stacked_jobs(checkpoint: CheckpointReader, matrices: Mapping[str, Matrix], dtype: str) -> Jobs:
    """One job for each stack that experts stored one by one make.

    Raises:
        CheckpointError: an expert lacks a projection, has another shape than the first, or a bias.
    """
    containers: dict[str, dict[str, dict[int, Matrix]]] = defaultdict(lambda: defaultdict(dict))
    for matrix in matrices.values():
        expert = parse_expert_name(matrix.name.removesuffix(".bias"))
        role = PROJECTIONS.get(expert.projection) if expert else None
        if expert is None or role is None:
            continue
        if len(matrix.shape) != 2:
            _refuse(checkpoint, matrix.tensor, "biases of single experts have no name in a stack")
        containers[expert.container][role][expert.expert] = matrix
    for container, roles in containers.items():
        count = max(len(experts) for experts in roles.values())
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            present = [roles[role] for role in parts if role in roles]
            if not present:
                continue
            last = name if len(present) == len(parts) else "up_proj"
            stack = [
                [_expert(checkpoint, container, part, index) for part in present] for index in range(count)
            ]
            yield _stack(checkpoint, f"{container}.{last}", stack, dtype)


def _expert(checkpoint: CheckpointReader, container: str, part: Mapping[int, Matrix], index: int) -> Matrix:
    if index not in part:
        _refuse(checkpoint, container, f"expert {index} lacks a projection that others have")
    return part[index]


def _stack(
    checkpoint: CheckpointReader, name: str, experts: Sequence[Sequence[Matrix]], dtype: str
) -> tuple[Job, list[str]]:
    first = experts[0]
    for expert in experts:
        for matrix, other in zip(expert, first, strict=True):
            if matrix.shape != other.shape or matrix.shape[1] != first[0].shape[1]:
                _refuse(checkpoint, matrix.tensor, f"{list(matrix.shape)} does not fit {list(other.shape)}")
    rows = sum(matrix.shape[0] for matrix in first)

    def produce() -> Pieces:
        for expert in experts:
            for matrix in expert:
                for piece in rounded(matrix, dtype):
                    yield name, piece

    members = [matrix for expert in experts for matrix in expert]
    spec = TensorSpec(name, dtype, (len(experts), rows, first[0].shape[1]))
    job = Job(members[0].tensor, (spec,), produce, sum(matrix.nbytes for matrix in members))
    return job, [matrix.tensor for matrix in members]


def unstacked_jobs(checkpoint: CheckpointReader, matrices: Mapping[str, Matrix], dtype: str) -> Jobs:
    """One job for each stack, quantized or not, that writes its experts one by one, biases included."""
    for matrix in matrices.values():
        container, _, last = matrix.name.rpartition(".")
        role = PROJECTIONS.get(last)
        if len(matrix.shape) != 3 or role is None or parse_expert_name(matrix.name) is not None:
            continue
        if not prod(matrix.shape):
            continue  # no byte backs the number of experts
        transposed, interleaved = stack_layout(checkpoint, matrix)
        yield _unstack(matrix, container, role, dtype, transposed=transposed, interleaved=interleaved)
        bias = matrices.get(f"{matrix.name}_bias") or matrices.get(f"{matrix.name}.bias")
        if bias is not None:
            yield _unstack(bias, container, role, dtype, transposed=False, interleaved=interleaved)


def stack_layout(checkpoint: CheckpointReader, matrix: Matrix) -> tuple[bool, bool]:
    """Whether a stack is [experts, in, out], and whether gate and up alternate in it."""
    if isinstance(matrix.record, Projection):
        return matrix.record.transposed, matrix.record.interleaved
    transposed = checkpoint.model_config.get("model_type") in TRANSPOSED_MODELS
    alternate = not INTERLEAVED_ARCHITECTURES.isdisjoint(checkpoint.architectures)
    return transposed and not matrix.tensor.endswith(".weight"), alternate and "gate_up" in matrix.name


def _unstack(
    matrix: Matrix, container: str, role: str, dtype: str, *, transposed: bool, interleaved: bool
) -> tuple[Job, list[str]]:
    parts = ("gate_proj", "up_proj") if role == "gate_up" else (f"{role}_proj",)
    rest = matrix.shape[1:][::-1] if transposed else matrix.shape[1:]
    shape = (rest[0] // len(parts), *rest[1:])
    ending = "weight" if len(rest) == 2 else "bias"

    def names(expert: int) -> list[str]:
        return [f"{container}.{expert}.{part}.{ending}" for part in parts]

    def produce() -> Pieces:
        for expert, values in enumerate(itertools.chain.from_iterable(rounded(matrix, dtype))):
            values = values.T if transposed else values
            yield from zip(names(expert), split_parts(values, len(parts), interleaved), strict=True)

    specs = [TensorSpec(name, dtype, shape) for expert in range(matrix.shape[0]) for name in names(expert)]
    return Job(matrix.tensor, tuple(specs), produce, matrix.nbytes), [matrix.tensor]


def split_parts(values: NDArray[Any], count: int, interleaved: bool) -> list[NDArray[Any]]:
    """Gate and up of an expert's rows, where `count` is 2."""
    if interleaved:
        return [values[part::count] for part in range(count)]
    return np.split(values, count)


def _refuse(checkpoint: CheckpointReader, tensor: str, message: str) -> None:
    raise CheckpointError(f"experts cannot be stacked: {message}", file=checkpoint.directory, tensor=tensor)
