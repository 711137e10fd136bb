"""A quantized checkpoint made of an unquantized one: `Checkpoint.quantize`.

Files are planned from the headers of the source, then weights pass through memory a piece at a time, as in a
conversion. Codes and scales are those of ModelOpt's max calibration, bit for bit, and so is which weights
share a scale. A run that was killed is gone on with by the next that writes the same.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moqext import _C
from moqext.algorithms import STATIC_ACTIVATIONS
from moqext.errors import CheckpointError
from moqext.ops.quantize_weights import SEARCHED, WRITTEN, ScaleSearch
from moqext.ops.spelling import Device, device_name
from moqext.reader.checkpoint_reader import CheckpointReader, Progress
from moqext.reader.naming import is_vision
from moqext.tools.convert import MAX_SHARD_SIZE, refuse_errors
from moqext.tools.convert.assemble import Files, assemble, files_beside
from moqext.tools.convert.jobs import Job, Pieces, plain_job
from moqext.tools.convert.journal import journal_key
from moqext.tools.convert.plan import split
from moqext.tools.convert.shards import name_shards
from moqext.tools.convert.unread import take_in_unread
from moqext.tools.convert.writer import TensorSpec
from moqext.tools.quantize.configurations import configurations
from moqext.tools.quantize.jobs import Part, quantized_job
from moqext.tools.quantize.quantizers import DeviceQuantizer, HostQuantizer, Quantizer
from moqext.tools.quantize.rules import Rule, Selection, algorithm, parse_rule
from moqext.tools.quantize.scales import (
    CACHES,
    amax_of,
    cache_scales,
    check_amax,
    input_scale,
    missing,
    read_scales,
)
from moqext.tools.quantize.weights import Amaxes, Weight, find_weights, fused_unlike, is_expert, same_input

__all__ = ["MAX_SHARD_SIZE", "Quantization", "check_options", "quantize_checkpoint"]

NO_SCALES = "none"
"""In place of a file of scales: formats that want static ones are written without."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The result of quantizing a checkpoint.

    Attributes:
        directory: where.
        files: names of the safetensors files.
        tensors: number of tensors.
        quantized: algorithm -> number of weights with codes.
        bytes_read, bytes_written: of tensors, those that an earlier run did among them.
        bytes_kept: bytes that an earlier run, which was ended, had written.
        seconds: wall time of reading, quantizing and writing them.
        notes: what is odd, in sentences.
    """

    directory: str
    files: tuple[str, ...]
    tensors: int
    quantized: dict[str, int]
    bytes_read: int
    bytes_written: int
    bytes_kept: int
    seconds: float
    notes: tuple[str, ...]


def quantize_checkpoint(
    checkpoint: CheckpointReader,
    out: str | os.PathLike[str],
    *,
    to: str | None,
    rules: Sequence[str | tuple[str, str]],
    exclude: Sequence[str],
    scales: str | os.PathLike[str] | Mapping[str, float] | None,
    scale_search: ScaleSearch | None,
    kv_cache: str | None,
    device: Device,
    overwrite: bool,
    max_shard_size: int,
    progress: Progress | None,
) -> Quantization:
    """See `Checkpoint.quantize`."""
    to, parsed = check_options(to, rules, scale_search)
    if kv_cache is not None and kv_cache not in CACHES:
        raise ValueError(f"kv_cache: expected one of {', '.join(CACHES)}, or None, got {kv_cache!r}")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size: expected a positive number of bytes, got {max_shard_size}")
    place = device_name(device)
    if place != "cpu":
        _C.PinnedMemory(1, place)
    _refuse_quantized(checkpoint)
    refuse_errors(checkpoint, done="quantized")
    alone = checkpoint.file is not None
    checkpoint, taken = (checkpoint, []) if alone else take_in_unread(checkpoint)
    selection = Selection(to, parsed, exclude, checkpoint.model_config)
    weights, others = find_weights(checkpoint)
    algos = {
        weight.module: algo for weight in weights if (algo := selection.quant_algo(weight.module)) is not None
    }
    told = [each.note for each in taken]
    unused = [f"{pattern!r} fits no linear" for pattern in selection.unused()]
    told += unused
    chosen = [weight for weight in weights if weight.module in algos]
    if not chosen:
        raise CheckpointError("; ".join(["no linear to quantize is left", *unused]), file=checkpoint.name)
    amax = _input_amax(scales, algos)
    quantizer: Quantizer = HostQuantizer()
    if place != "cpu":
        quantizer = DeviceQuantizer(place, max(info.nbytes for info in checkpoint.tensors.values()))
    jobs = _jobs(checkpoint, weights, algos, amax, scale_search, quantizer)
    told += _notes(weights, algos, scale_search)
    if kv_cache is not None:
        cached = _cache_jobs(checkpoint, amax)
        jobs += cached
        if not cached:
            told.append("scales say nothing of the cache: no scales of it are written, and 1.0 applies")
    plain = [*others, *(weight.module for weight in weights if weight.module not in algos)]
    inline, own = configurations(algos, chosen, plain, None if kv_cache is None else CACHES[kv_cache])
    documents = {"hf_quant_config.json": own}
    if checkpoint.model_config:
        config = {
            key: value for key, value in checkpoint.model_config.items() if key != "quantization_config"
        }
        documents["config.json"] = config | {"quantization_config": inline}
    named = name_shards(split(jobs, max_shard_size), checkpoint.model_config)
    copied, left_out = files_beside(checkpoint)
    identity = _identity(checkpoint, named.shards, amax)
    key = journal_key([_C.build_info()["version"], own, scale_search, identity])
    files = Files(*named, documents, copied)
    written = assemble(
        checkpoint,
        out,
        files,
        overwrite=overwrite,
        progress=progress,
        key=key,
        workers=quantizer.workers,
    )
    return Quantization(
        directory=os.fspath(out),
        files=tuple(named.shards),
        tensors=sum(len(job.tensors) for job in jobs),
        quantized=dict(Counter(algos.values())),
        bytes_read=sum(job.reads for job in jobs),
        bytes_written=written.nbytes,
        bytes_kept=written.kept,
        seconds=written.seconds,
        notes=(*told, *left_out),
    )


def check_options(
    to: str | None, rules: Sequence[str | tuple[str, str]], search: ScaleSearch | None
) -> tuple[str | None, list[Rule]]:
    """The algorithm and the rules, of which one names an algorithm.

    Raises:
        ValueError: none does, or there is no such algorithm, rule or search.
    """
    parsed = [parse_rule(rule) for rule in rules]
    to = None if to is None else algorithm(to, "to")
    algos = {to, *(rule.quant_algo for rule in parsed)} - {None}
    if not algos:
        raise ValueError(f"to: expected an algorithm, or a rule with one, of {', '.join(WRITTEN)}")
    if search is not None and search not in SEARCHED:
        raise ValueError(f"scale_search: expected one of {', '.join(SEARCHED)}, got {search!r}")
    if search is not None and algos.isdisjoint(SEARCHED[search]):
        message = f"scale_search: {search} is for {', '.join(SEARCHED[search])}, and none of these is written"
        raise ValueError(message)
    return to, parsed


def _refuse_quantized(checkpoint: CheckpointReader) -> None:
    if checkpoint.config is not None or checkpoint.layers():
        message = "is quantized already; `moqext convert DIR OUT --to bf16` makes plain weights of it first"
        raise CheckpointError(message, file=checkpoint.directory)


def _input_amax(
    scales: str | os.PathLike[str] | Mapping[str, float] | None, algos: Mapping[str, str]
) -> dict[str, float]:
    """The largest magnitude of activations by module; empty where none are written.

    Raises:
        CheckpointError: the file cannot be used, or is missing and needed, or lacks a module.
    """
    static = [module for module, algo in algos.items() if algo in STATIC_ACTIVATIONS]
    if scales is None:
        if static:
            named = ", ".join(sorted({algos[module] for module in static}))
            raise CheckpointError(
                f"{named} wants scales of activations: moqext_transformers.calibrate makes a file of them "
                f'for --scales FILE (scales=); --scales {NO_SCALES} (scales="{NO_SCALES}") writes none'
            )
        return {}
    if isinstance(scales, Mapping):
        amax = check_amax(scales)
    elif os.fspath(scales) == NO_SCALES:
        return {}
    else:
        amax = read_scales(scales)
    if lacking := missing(amax, static):
        more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
        file = None if isinstance(scales, Mapping) else scales
        raise CheckpointError(f"scales: no amax of the activations of {lacking[0]}{more}", file=file)
    return amax


def _jobs(
    checkpoint: CheckpointReader,
    weights: Sequence[Weight],
    algos: Mapping[str, str],
    amax: Mapping[str, float],
    search: ScaleSearch | None,
    quantizer: Quantizer,
) -> list[Job]:
    """The jobs of all tensors, in the order of the source."""
    chosen = [weight for weight in weights if weight.module in algos]
    together = {member.module: group for group in same_input(chosen, algos) for member in group}
    sharing = {
        module: group
        if _share(group, algos[module])
        else [member for member in group if member.module == module]
        for module, group in together.items()
    }
    largest = Amaxes(sharing, quantizer.amax)
    by_tensor: dict[str, list[Weight]] = {}
    for weight in weights:
        by_tensor.setdefault(weight.tensor, []).append(weight)
    jobs = []
    for name, info in checkpoint.tensors.items():
        members = by_tensor.get(name, ())
        if not any(weight.module in algos for weight in members):
            jobs.append(plain_job(checkpoint, info, name, info.dtype))
            continue
        parts = [
            Part(weight, algo, _input_scale(together[weight.module], algo, amax))
            if (algo := algos.get(weight.module)) is not None
            else Part(weight)
            for weight in members
        ]
        jobs.append(quantized_job(parts, quantizer, largest, search))
    return jobs


def _cache_jobs(checkpoint: CheckpointReader, amax: Mapping[str, float]) -> list[Job]:
    """The jobs of the scales of the cache, which have no source."""
    names = [name for name in checkpoint.tensors if not is_vision(name)]
    modules = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    jobs = []
    for tensor, scale in cache_scales(amax, modules).items():

        def produce(tensor: str = tensor, scale: np.float32 = scale) -> Pieces:
            yield tensor, np.asarray(scale)

        jobs.append(Job(tensor, (TensorSpec(tensor, "F32", ()),), produce, 0))
    return jobs


def _share(group: Sequence[Weight], algo: str) -> bool:
    """Whether weights of one input share their largest magnitude: under FP8 those of an expert alone."""
    return algo != "FP8" or is_expert(group[0])


def _input_scale(group: Sequence[Weight], algo: str, amax: Mapping[str, float]) -> np.float32 | None:
    """The scale of the one input of a group; None where none is written."""
    if not amax or algo not in STATIC_ACTIVATIONS:
        return None
    return input_scale(max(amax_of(amax, weight.module) or 0.0 for weight in group), algo)


def _notes(weights: Sequence[Weight], algos: Mapping[str, str], search: ScaleSearch | None) -> list[str]:
    notes = []
    unsearched = sorted({algo for algo in algos.values() if algo not in SEARCHED.get(search or "", ())})
    if search is not None and unsearched:
        notes.append(
            f"scales of {', '.join(unsearched)} were not searched for: {search} has none to try there"
        )
    if unlike := fused_unlike(weights, algos):
        more = f" and {len(unlike) - 1:,} more" if len(unlike) > 1 else ""
        notes.append(
            f"{unlike[0]}{more}: linears that engines fuse, as q, k and v, differ in their algorithms"
        )
    return notes


def _identity(
    checkpoint: CheckpointReader, shards: Mapping[str, Sequence[Job]], amax: Mapping[str, float]
) -> Any:
    """JSON values for what is read and what is written."""
    files = [(os.fspath(path.resolve()), path.stat()) for path in map(Path, checkpoint.files.files)]
    written = {file: [job.tensors for job in jobs] for file, jobs in shards.items()}
    return [[path, status.st_size, status.st_mtime_ns] for path, status in files], written, dict(amax)
