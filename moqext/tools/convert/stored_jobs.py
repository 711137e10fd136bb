"""Jobs that keep what is stored: codes and scales of quantized layers, with other names and shapes."""

from collections.abc import Callable, Iterator

import numpy as np

from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.tensor_files import TensorInfo
from moqext.reader.formats.scale_values import decode_scales
from moqext.reader.matrices import Float32
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.convert.jobs import CHUNK, Job, Pieces
from moqext.tools.convert.writer import TensorSpec


def records_of(checkpoint: CheckpointReader) -> Iterator[tuple[str, LayerRecord | Projection]]:
    """Everything with codes of its own, under the name that a configuration has for it."""
    for layer in checkpoint.layers():
        if layer.projections:
            yield from ((layer.name, projection) for projection in layer.projections)
        else:
            yield from ((linear.name, linear) for linear in layer.linears())


def plain_modules(kept: list[TensorInfo]) -> list[str]:
    """Modules with a matrix, or a stack of such, among tensors that are not quantized."""
    return [
        info.name.removesuffix(".weight")
        for info in kept
        if len(info.shape) in (2, 3) and info.name.endswith(".weight")
    ]


def in_order(checkpoint: CheckpointReader, jobs: list[Job]) -> list[Job]:
    """The jobs in the order of the source."""
    order = {name: place for place, name in enumerate(checkpoint.tensors)}
    return sorted(jobs, key=lambda job: order[job.source])


def copy_job(checkpoint: CheckpointReader, info: TensorInfo, name: str) -> Job:
    """The bytes of a tensor in plain order, E8M0 typed as bytes."""
    dtype = "U8" if info.dtype in ("F8_E8M0", "F4") else info.dtype

    def produce() -> Pieces:
        if not info.shape:
            yield name, checkpoint.tensor(info.name, raw=True)
            return
        step = max(1, CHUNK * info.shape[0] // max(1, info.nbytes))
        for begin in range(0, info.shape[0], step):
            yield name, checkpoint.rows(info.name, begin, min(begin + step, info.shape[0]))

    return Job(info.name, (TensorSpec(name, dtype, info.shape),), produce, info.nbytes)


def scale_job(
    checkpoint: CheckpointReader,
    info: TensorInfo,
    name: str,
    shape: tuple[int, ...],
    divisor_of: Callable[[np.float32], np.float32] | None = None,
) -> Job:
    """A scale as float32 in some shape; where `divisor_of` is given, as the divisor that is the same."""

    def produce() -> Pieces:
        divisors = None if divisor_of is None else checkpoint.files.divisor(info.name)
        values: Float32 = decode_scales(info.dtype, checkpoint.tensor(info.name, raw=True))
        if divisors is not None:
            values = divisors
        elif divisor_of is not None:
            values = np.array([divisor_of(value) for value in values.reshape(-1)], np.float32)
        yield name, values.reshape(shape)

    return Job(info.name, (TensorSpec(name, "F32", shape),), produce, info.nbytes)
