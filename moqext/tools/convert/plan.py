"""Which tensors a conversion writes, in which order and files, decided from the headers of the source."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.files.tensor_files import TensorInfo
from moqext.reader.files.tensor_header import DTYPE_BITS
from moqext.reader.formats.stored import is_small
from moqext.reader.matrices import FLOAT_DTYPES, Matrix, quantized_matrices
from moqext.reader.naming import KV_ROLES, parse_tensor_name
from moqext.reader.records import Projection
from moqext.tools.convert.experts import TRANSPOSED_MODELS, stacked_jobs, unstacked_jobs
from moqext.tools.convert.files import config_dtype
from moqext.tools.convert.jobs import Job, matrix_job, plain_job, turned_job

Experts = Literal["auto", "source", "stacked", "unstacked"]

STACKED_MODELS = frozenset(
    ("qwen3_vl_moe", "qwen3_vl_moe_text", "granitemoe", "granitemoeshared", "granitemoehybrid")
)
"""Model types whose exports store experts one by one, and of which Transformers loads stacked ones only."""


MISSPELT: dict[tuple[object, str], str] = {
    ("nemotron_h", "backbone.embedding.weight"): "backbone.embeddings.weight"
}
"""Model type and tensor of exports whose names the producer did not turn back to the model's -> its name."""


class Plan(NamedTuple):
    """The jobs in the order of the source, how many of its weights were codes, and what is said about it."""

    jobs: list[Job]
    dequantized: int
    notes: list[str]


def make_plan(
    checkpoint: CheckpointReader,
    dtype: str,
    experts: Experts,
    quantized_job: Callable[[Matrix, str], Job] | None = None,
    *,
    keep_cache: bool = False,
) -> Plan:
    """The plan of all that is written: weights that were codes, plain tensors, and no scales of the source.

    Args:
        checkpoint: the source.
        dtype: "BF16", "F16" or "F32".
        experts: how experts are stored; see `Checkpoint.convert`.
        quantized_job: makes the job of a weight that is codes in the source; then plain tensors keep their
            types. None dequantizes.
        keep_cache: whether the scales of the KV cache are kept.

    Raises:
        CheckpointError: codes that belong to no layer, or experts that cannot be stacked or unstacked.
    """
    kept, notes = sort_plain(checkpoint, keep_cache=keep_cache)
    model_type = checkpoint.model_config.get("model_type")
    names = {info.name: MISSPELT.get((model_type, info.name), info.name) for info in kept}
    notes += [f"{old} is written as {new}" for old, new in names.items() if old != new]
    model_dtype = config_dtype(checkpoint.model_config)
    types = {info.name: info.dtype for info in kept}
    if quantized_job is None:
        quantized_job = matrix_job
        types = {info.name: _plain_dtype(info, dtype, model_dtype) for info in kept}
    quantized = {matrix.tensor: matrix for matrix in quantized_matrices(checkpoint)}
    turned = experts == "auto" and quantized_job is matrix_job and model_type in TRANSPOSED_MODELS
    if experts == "auto":
        experts = "stacked" if model_type in STACKED_MODELS else "source"
    jobs: list[Job] = []
    done: set[str] = set()
    if experts != "source":
        plain = {
            info.name: Matrix(checkpoint, info.name.removesuffix(".weight"), info.name, info.shape)
            for info in kept
            if info.dtype in FLOAT_DTYPES
        }
        make = stacked_jobs if experts == "stacked" else unstacked_jobs
        for job, sources in make(checkpoint, plain | quantized, dtype):
            jobs.append(job)
            done.update(sources)
    for name, matrix in quantized.items():
        if name not in done:
            make_job = turned_job if turned and _is_out_in(matrix) else quantized_job
            jobs.append(make_job(matrix, dtype))
    rest = [info for info in kept if info.name not in done]
    jobs += [plain_job(checkpoint, info, names[info.name], types[info.name]) for info in rest]
    order = {name: place for place, name in enumerate(checkpoint.tensors)}
    return Plan(sorted(jobs, key=lambda job: order[job.source]), len(quantized), notes)


def _is_out_in(matrix: Matrix) -> bool:
    """Whether it is a stack of experts [experts, out, in]."""
    return isinstance(matrix.record, Projection) and not matrix.record.transposed


def _plain_dtype(info: TensorInfo, dtype: str, model_dtype: str | None) -> str:
    """The type a plain tensor gets: what the model was saved in is changed, what it keeps wider is not."""
    of_model = info.dtype in ("BF16", "F16") or (info.dtype == "F32" and model_dtype == "float32")
    return dtype if of_model else info.dtype


def sort_plain(
    checkpoint: CheckpointReader, *, keep_cache: bool = False
) -> tuple[list[TensorInfo], list[str]]:
    """The tensors that are kept beside the quantized weights, and notes about what is left out.

    Raises:
        CheckpointError: codes belong to no layer, or a tensor has a type that the format does not name.
    """
    owned: dict[str, str] = {}
    modules = set()
    for matrix in quantized_matrices(checkpoint):
        assert matrix.record is not None
        modules.add(matrix.name)
        owned.update((tensor, role) for role, tensor in matrix.record.tensors.items())
    kept = []
    cache, leftover, unowned = [], [], []
    for name, info in checkpoint.tensors.items():
        named = parse_tensor_name(name)
        role = owned.get(name) or (named.role if named else None)
        if role in KV_ROLES:
            if keep_cache:
                kept.append(info)
            else:
                cache.append(name)
        elif role == "leftover":
            leftover.append(name)
        elif name in owned or (named is not None and named.module in modules and role != "bias"):
            if role == "bias":
                kept.append(info)
        elif role in (None, "weight", "bias") or (named is not None and named.part == "scale"):
            if info.dtype not in DTYPE_BITS:
                message = f"cannot be converted: its type {info.dtype[:40]!r} is not known"
                raise CheckpointError(message, file=checkpoint.directory, tensor=name)
            if is_small(info) and info.dtype not in ("U8", "I8"):
                message = f"cannot be converted: codes of type {info.dtype} that belong to no layer"
                raise CheckpointError(message, file=checkpoint.directory, tensor=name)
            kept.append(info)
        else:
            unowned.append(name)
    told = [
        (cache, "KV-cache scale"),
        (leftover, "tensor of the quantizer's inner state"),
        (unowned, "scale of nothing quantized"),
    ]
    return kept, [_not_written(len(names), what) for names, what in told if names]


def _not_written(count: int, what: str) -> str:
    noun, of, rest = what.partition(" of ")
    return f"{count:,} {noun}{'' if count == 1 else 's'}{of}{rest} not written"


def split(jobs: Iterable[Job], max_bytes: int) -> list[list[Job]]:
    """The jobs by file: as many as fit, at least one."""
    shards: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        if shards[-1] and size + job.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(job)
        size += job.nbytes
    return shards
