"""Writes codes and scales as compressed-tensors stores them, for FP8, NVFP4 and the MX formats.

Each role of ModelOpt has this form there:

role                          written as
weight of 4 bits              weight_packed, its bytes
weight of FP8                 weight
weight_scale of a tensor      float32 [1]        of rows    float32 [N, 1]
             of blocks        float32 [N/128, K/128]        of groups    its bytes
weight_scale_2 s              weight_global_scale, the divisor in place of s, float32 [1]
input_scale s of NVFP4        input_global_scale, 1 / s, float32 [1]
input_scale of FP8            float32 [1]
k_scale, v_scale              of the attention, float32 [1]
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moqext.algorithms import ALGORITHMS, Algorithm
from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.formats.scale_values import decode_scales
from moqext.reader.formats.stored import FLOATS
from moqext.reader.naming import is_embedding, parse_tensor_name
from moqext.reader.producers.compressed_tensors import NAME
from moqext.reader.producers.reciprocal import divisor_of, tell_differences
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.convert.jobs import Job, plain_job
from moqext.tools.convert.plan import Plan, sort_plain
from moqext.tools.convert.stored_jobs import copy_job, in_order, plain_modules, records_of, scale_job

_CACHE = ("k_scale", "v_scale", "q_scale")
_NO_FORM = (
    'has no form in compressed-tensors that is written here; --to bf16 (to="bf16") writes plain weights'
)


class Scheme(NamedTuple):
    """How compressed-tensors calls a format.

    Attributes:
        style: its `format`.
        weights: arguments of weights.
        inputs: those of activations, None where these are plain.
    """

    style: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None

    @property
    def is_static(self) -> bool:
        """Whether activations have a stored scale."""
        return self.inputs is not None and self.inputs["dynamic"] is not True


def _args(bits: int, strategy: str, *, dynamic: bool | str = False, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
        **more,
    }


_NVFP4: dict[str, Any] = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MX: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8"}
_TOKEN = _args(8, "token", dynamic=True)


def _scheme_of(facts: Algorithm) -> Scheme | None:
    """The form that an algorithm has there. Whether MXFP4 quantizes activations no file of ModelOpt says."""
    if facts.pre_quant_scale or facts.low_rank or facts.codes not in ("e4m3", "e2m1"):
        return None
    if facts.scales == "tensor":
        return Scheme("float-quantized", _args(8, "tensor"), _args(8, "tensor"))
    if facts.scales == "rows":
        return Scheme("float-quantized", _args(8, "channel"), _TOKEN)
    if facts.scales == "blocks":
        weights = _args(8, "block", block_structure=[128, 128])
        return Scheme("float-quantized", weights, _args(8, "group", dynamic=True, group_size=128))
    if facts.linear != "as_is":
        return None
    if facts.codes == "e4m3":
        return Scheme("mxfp8-quantized", _args(8, "group", **_MX), _args(8, "group", dynamic=True, **_MX))
    if facts.second is None:
        return Scheme("mxfp4-pack-quantized", _args(4, "group", **_MX), None)
    inputs = _args(4, "tensor_group", dynamic="local", **_NVFP4) if facts.input_scale else None
    return Scheme("nvfp4-pack-quantized", _args(4, "tensor_group", **_NVFP4), inputs)


_SCHEMES = {name: scheme for name, facts in ALGORITHMS.items() if (scheme := _scheme_of(facts)) is not None}
"""Algorithms that have a form there."""

_FOR_WEIGHTS = {
    f"{name} for weights": _SCHEMES[name]._replace(inputs=None)
    for name in _SCHEMES
    if ALGORITHMS[name].input_scale is not None
}
"""Forms of layers that lack the scale of activations of their algorithm: they were never calibrated."""

_FORMS = _SCHEMES | _FOR_WEIGHTS


def plan_compressed(checkpoint: CheckpointReader) -> tuple[Plan, dict[str, Any]]:
    """The plan of everything that is written, and the quantization_config.

    Raises:
        CheckpointError: nothing is quantized, or a layer is that has no form there.
    """
    kept, notes = sort_plain(checkpoint, keep_cache=True)
    jobs: list[Job] = []
    schemes: dict[str, list[str]] = defaultdict(list)
    second: list[str] = []
    for name, record in records_of(checkpoint):
        algo = _algo(checkpoint, record)
        schemes[algo].append(name)
        jobs += [
            _stored_job(checkpoint, record, role, tensor)
            for role, tensor in record.tensors.items()
            if role != "bias" and (role != "input_scale" or _FORMS[algo].is_static)
        ]
        second += [
            tensor
            for role, tensor in record.tensors.items()
            if role == "weight_scale_2" and checkpoint.files.divisor(tensor) is None
        ]
    if not schemes:
        message = "nothing quantized to write as compressed-tensors does"
        raise CheckpointError(message, file=checkpoint.directory)
    cache = {
        tensor: f"{kv.name}.{role}" for kv in checkpoint.kv_scales() for role, tensor in kv.tensors.items()
    }
    for info in kept:
        named = parse_tensor_name(info.name)
        if named is not None and named.role in _CACHE and info.dtype in FLOATS and info.numel == 1:
            jobs.append(scale_job(checkpoint, info, cache.get(info.name, info.name), (1,)))
        else:
            jobs.append(plain_job(checkpoint, info, info.name, info.dtype))
    ignored = sorted(module for module in plain_modules(kept) if not is_embedding(module))
    notes += _reciprocals(checkpoint, second)
    weights = sum(map(len, schemes.values()))
    kv_algo = checkpoint.config.kv_cache_quant_algo if checkpoint.config else None
    if kv_algo is not None and not cache:
        notes.append(f"a cache in {kv_algo} is not announced: there are no scales, which its readers expect")
        kv_algo = None
    plan = Plan(in_order(checkpoint, jobs), weights, notes)
    return plan, _configuration(checkpoint, schemes, ignored, kv_algo)


def _reciprocals(checkpoint: CheckpointReader, tensors: list[str]) -> list[str]:
    """A sentence on the divisors that are written for factors."""
    pairs = []
    for tensor in tensors:
        values = decode_scales(checkpoint.tensors[tensor].dtype, checkpoint.tensor(tensor, raw=True))
        pairs += [(divisor_of(value), value) for value in np.asarray(values).reshape(-1)]
    return tell_differences("factors", pairs)


def _algo(checkpoint: CheckpointReader, record: LayerRecord | Projection) -> str:
    """The key of the scheme that a layer gets."""
    why = ""
    if isinstance(record, Projection):
        why = "experts in one tensor"
    elif record.kind != "linear" or record.partitions:
        why = f"a quantized {record.kind}" if record.kind != "linear" else "a scale for each part of a linear"
    elif record.quant_algo not in _SCHEMES or record.group_size not in (None, _group_size(record.quant_algo)):
        why = record.format
    if why:
        raise CheckpointError(f"{why} {_NO_FORM}", file=checkpoint.directory, tensor=record.tensors["weight"])
    for_weights = f"{record.quant_algo} for weights"
    uncalibrated = for_weights in _FORMS and "input_scale" not in record.tensors
    return for_weights if uncalibrated else record.quant_algo


def _group_size(algo: str) -> int:
    """The size of the groups or blocks that a scheme has."""
    size: int = _SCHEMES[algo].weights.get("group_size", 128)
    return size


def _stored_job(
    checkpoint: CheckpointReader, record: LayerRecord | Projection, role: str, tensor: str
) -> Job:
    """The job of one tensor of a linear."""
    info = checkpoint.tensors[tensor]
    weights = _SCHEMES[record.quant_algo].weights
    packed = weights["num_bits"] == 4
    if role == "weight":
        return copy_job(checkpoint, info, f"{record.name}.weight_packed" if packed else tensor)
    if role == "weight_scale_2":
        return scale_job(checkpoint, info, f"{record.name}.weight_global_scale", (1,), divisor_of)
    if role == "input_scale" and packed:
        return scale_job(checkpoint, info, f"{record.name}.input_global_scale", (1,), np.reciprocal)
    name = f"{record.name}.{role}"
    if role == "weight_scale" and "group_size" in weights:
        return copy_job(checkpoint, info, name)
    rows, columns = record.shape[-2:]
    shapes = {
        "tensor": (1,),
        "channel": (rows, 1),
        "block": (-(-rows // 128), -(-columns // 128)),
    }
    return scale_job(checkpoint, info, name, shapes[weights["strategy"]] if role == "weight_scale" else (1,))


def _configuration(
    checkpoint: CheckpointReader, schemes: Mapping[str, list[str]], ignored: list[str], kv_algo: str | None
) -> dict[str, Any]:
    """The quantization_config."""
    groups: dict[str, Any] = {}
    for number, (algo, modules) in enumerate(schemes.items()):
        scheme = _FORMS[algo]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else modules,
            "weights": dict(scheme.weights),
            "input_activations": None if scheme.inputs is None else dict(scheme.inputs),
            "output_activations": None,
            "format": scheme.style,
        }
    styles = {_FORMS[algo].style for algo in schemes}
    if kv_algo not in (None, "FP8"):
        raise CheckpointError(f"a cache in {kv_algo} {_NO_FORM}", file=checkpoint.directory)
    return {
        "quant_method": NAME,
        "quantization_status": "compressed",
        "format": styles.pop() if len(styles) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None if kv_algo is None else _args(8, "tensor"),
    }
