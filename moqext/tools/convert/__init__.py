"""A checkpoint written again with plain weights, or in another format: `Checkpoint.convert`.

Every tensor of the result is known from the headers of the source, so the files are planned first: which
tensor goes where, its type and shape. Then the weights pass through memory in pieces of a few megabytes. All
files get a temporary folder in the target directory and change places with those that are there at the end.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader, Progress
from moqext.reader.matrices import FLOAT_DTYPES
from moqext.reader.problems import Problem
from moqext.tools.convert.assemble import Files, assemble, files_beside
from moqext.tools.convert.compressed import plan_compressed
from moqext.tools.convert.configurations import Format, configurations
from moqext.tools.convert.files import config_dtype, plain_config
from moqext.tools.convert.fp8 import ALGO, LayerError, Requantizer
from moqext.tools.convert.modelopt import describe, plan_modelopt
from moqext.tools.convert.plan import Experts, Plan, make_plan, split
from moqext.tools.convert.shards import name_shards
from moqext.tools.convert.unread import take_in_unread

PLAIN_TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Names of the targets without quantization -> the type of the weights as the format spells it."""

TARGETS = (*PLAIN_TARGETS, "fp8", "modelopt", "compressed-tensors")

MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in one file, unless what belongs together has more."""

_Planned = tuple[Plan, dict[str, dict[str, Any]], list[LayerError]]
"""A plan, the JSON documents beside the tensors, and a list for errors."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        directory: where.
        files: names of the safetensors files.
        tensors: number of tensors.
        dequantized: number of weights that were codes in the source, whatever they are now.
        bytes_read, bytes_written: of tensors.
        seconds: wall time of reading, converting and writing them.
        notes: what was left out, in sentences.
        errors: what requantizing to FP8 changed, by weight, the worst first; empty for plain types.
    """

    directory: str
    files: tuple[str, ...]
    tensors: int
    dequantized: int
    bytes_read: int
    bytes_written: int
    seconds: float
    notes: tuple[str, ...]
    errors: tuple[LayerError, ...] = ()


def convert_checkpoint(
    checkpoint: CheckpointReader,
    out: str | os.PathLike[str],
    *,
    to: str,
    experts: Experts,
    overwrite: bool,
    max_shard_size: int,
    progress: Progress | None,
) -> Conversion:
    """See `Checkpoint.convert`."""
    if to not in TARGETS:
        raise ValueError(f"to: expected one of {', '.join(TARGETS)}, got {to!r}")
    if experts not in get_args(Experts):
        raise ValueError(f"experts: expected one of {', '.join(get_args(Experts))}, got {experts!r}")
    if to not in PLAIN_TARGETS and experts not in ("auto", "source"):
        raise ValueError(f'experts: expected "auto" or "source" with to={to!r}, got {experts!r}')
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size: expected a positive number of bytes, got {max_shard_size}")
    keep_cache = to not in PLAIN_TARGETS and _cache_algo(checkpoint, to) is not None
    refuse_errors(checkpoint, keep_cache=keep_cache)
    alone = checkpoint.file is not None  # beside one file of several may be anything
    checkpoint, taken = (checkpoint, []) if alone else take_in_unread(checkpoint)
    if taken:
        refuse_errors(checkpoint, keep_cache=keep_cache)
    plan, documents, errors = _plan(checkpoint, to, experts)
    if alone and Path(out).resolve() == checkpoint.directory.resolve():
        raise CheckpointError(f"is the directory of the file that is converted, {checkpoint.file}", file=out)
    named = name_shards(split(plan.jobs, max_shard_size), checkpoint.model_config)
    copied, left_out = files_beside(checkpoint)
    files = Files(*named, documents, copied)
    written = assemble(checkpoint, out, files, overwrite=overwrite, progress=progress)
    return Conversion(
        directory=os.fspath(out),
        files=tuple(named.shards),
        tensors=sum(len(job.tensors) for job in plan.jobs),
        dequantized=plan.dequantized,
        bytes_read=sum(job.reads for job in plan.jobs),
        bytes_written=written.nbytes,
        seconds=written.seconds,
        notes=(*(each.note for each in taken), *plan.notes, *left_out),
        errors=tuple(sorted(errors, key=lambda error: -error.relative_error)),
    )


def _plan(checkpoint: CheckpointReader, to: str, experts: Experts) -> _Planned:
    if to == "fp8":
        return _plan_fp8(checkpoint)
    if to == "modelopt":
        documents = _documents(checkpoint, describe(checkpoint), _model_dtype(checkpoint))
        return plan_modelopt(checkpoint), documents, []
    if to == "compressed-tensors":
        plan, described = plan_compressed(checkpoint)
        config = plain_config(checkpoint.model_config, FLOAT_DTYPES[_model_dtype(checkpoint)])
        return plan, {"config.json": config | {"quantization_config": described}}, []
    dtype = PLAIN_TARGETS[to]
    config = plain_config(checkpoint.model_config, FLOAT_DTYPES[dtype])
    return make_plan(checkpoint, dtype, experts), {"config.json": config} if config else {}, []


def _plan_fp8(checkpoint: CheckpointReader) -> _Planned:
    """The errors are there when the jobs are done."""
    dtype = _model_dtype(checkpoint)
    requantizer = Requantizer()
    kv_algo = _cache_algo(checkpoint, "fp8")
    plan = make_plan(checkpoint, dtype, "source", requantizer.job, keep_cache=kv_algo is not None)
    quantized, plain = {}, list(requantizer.plain)
    for job in plan.jobs:
        spec = job.tensors[0]
        module = spec.name.removesuffix(".weight")
        if spec.dtype == "F8_E4M3":
            quantized[module] = Format(ALGO)
        elif len(spec.shape) in (2, 3) and spec.name.endswith(".weight"):
            plain.append(module)
    if not quantized:
        message = (
            'nothing quantized to requantize: --to fp8 (to="fp8") turns quantized weights into FP8, and '
            "there are none"
        )
        raise CheckpointError(message, file=checkpoint.directory)
    described = configurations(checkpoint, quantized, plain, kv_algo)
    return plan, _documents(checkpoint, described, dtype), requantizer.errors


def _model_dtype(checkpoint: CheckpointReader) -> str:
    """The type of the model's plain weights as the format spells it."""
    named = config_dtype(checkpoint.model_config)
    return next((name for name, known in FLOAT_DTYPES.items() if known == named), "BF16")


def _documents(
    checkpoint: CheckpointReader, described: tuple[dict[str, Any], dict[str, Any]], dtype: str
) -> dict[str, dict[str, Any]]:
    """The JSON files of a quantized checkpoint, from what `configurations` returned."""
    inline, own = described
    documents = {"hf_quant_config.json": own}
    if checkpoint.model_config:
        config = plain_config(checkpoint.model_config, FLOAT_DTYPES[dtype])
        documents["config.json"] = config | {"quantization_config": inline}
    return documents


def _cache_algo(checkpoint: CheckpointReader, to: str) -> str | None:
    """How the cache is quantized where its scales are kept: beside FP8 weights in FP8 only."""
    algo = checkpoint.config.kv_cache_quant_algo if checkpoint.config else None
    return algo if to != "fp8" or algo == "FP8" else None


def refuse_errors(checkpoint: CheckpointReader, *, keep_cache: bool = False, done: str = "converted") -> None:
    """Refuses a checkpoint without weights, or with a problem under which they are not what they were.

    Args:
        checkpoint: what is to be converted.
        keep_cache: whether scales of the cache are written, and their problems count.
        done: what is done with it, for messages.

    Raises:
        CheckpointError: so it is; the message has the first problem of severity error.
    """
    if not checkpoint.files.has_weights:
        raise CheckpointError(f"nothing to be {done}: no safetensors files", file=checkpoint.directory)
    findings = checkpoint.findings(block_scales=True)
    layers = (problem for layer in findings.layers for problem in layer.all_problems())
    cache = (problem for kv in findings.kv for problem in kv.problems if keep_cache)
    problems = (*checkpoint.file_problems, *findings.problems, *layers, *cache)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        others = f" (and {len(errors) - 1} more; `inspect --problems` lists them)" if len(errors) > 1 else ""
        message = f"cannot be {done}: {_sentence(errors[0])}{others}"
        raise CheckpointError(message, file=checkpoint.directory)


def _sentence(problem: Problem) -> str:
    where = problem.layer or problem.tensor
    return f"{where}: {problem.code}: {problem.message}" if where else f"{problem.code}: {problem.message}"
