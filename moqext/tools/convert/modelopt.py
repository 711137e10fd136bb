"""Writes codes and scales under ModelOpt's names and in its shapes, whoever wrote them.

    role                           written as
    weight                         its bytes, in plain order
    weight_scale of a tensor       float32 []                    of rows           float32 [N]
                 of blocks         float32 [N/128, 1, K/128, 1]  of groups         e4m3, or E8M0 in u8
    weight_scale_2, input_scale    float32 []
    scales of the cache            float32 []

Nothing is rounded: what is not float32 already, float32 holds. Only a divisor has no exact factor; the notes
tell how much weights differ with the one that is written.
"""

from typing import Any

import numpy as np

from moqext.algorithms import BLOCK_SIZES
from moqext.errors import CheckpointError
from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.formats.stored import FLOATS
from moqext.reader.naming import parse_tensor_name
from moqext.reader.producers.reciprocal import tell_differences
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.convert.configurations import Format, configurations
from moqext.tools.convert.jobs import Job, plain_job
from moqext.tools.convert.plan import Plan, sort_plain
from moqext.tools.convert.stored_jobs import copy_job, in_order, plain_modules, records_of, scale_job

_SPELLINGS = {
    "weight_scale_inv": "weight_scale",
    "scale": "weight_scale",
    "scale_weight": "weight_scale",
    "scale_2": "weight_scale_2",
    "scale_input": "input_scale",
}
"""Parts of names that ModelOpt spells in another way."""

_SCALES = ("weight_scale", "weight_scale_2", "input_scale")
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale")


def plan_modelopt(checkpoint: CheckpointReader) -> Plan:
    """The plan of everything that is written.

    Raises:
        CheckpointError: codes belong to no layer.
    """
    kept, notes = sort_plain(checkpoint, keep_cache=True)
    jobs: list[Job] = []
    divided: list[str] = []
    weights = 0
    for _, record in records_of(checkpoint):
        weights += 1
        for role, tensor in record.tensors.items():
            if role == "bias":
                continue
            jobs.append(_stored_job(checkpoint, record, role, tensor))
            if role == "weight_scale_2" and checkpoint.files.divisor(tensor) is not None:
                divided.append(tensor)
    for info in kept:
        named = parse_tensor_name(info.name)
        if named is not None and named.role in _CACHE_SCALES and info.dtype in FLOATS:
            jobs.append(scale_job(checkpoint, info, info.name, () if info.numel == 1 else info.shape))
        else:
            jobs.append(plain_job(checkpoint, info, info.name, info.dtype))
    return Plan(in_order(checkpoint, jobs), weights, [*notes, *_reciprocals(checkpoint, divided)])


def describe(checkpoint: CheckpointReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The quantization_config of config.json, and hf_quant_config.json, in ModelOpt's words.

    Raises:
        CheckpointError: there is nothing quantized, or codes belong to no layer.
    """
    quantized = {
        name: Format(record.quant_algo, record.group_size) for name, record in records_of(checkpoint)
    }
    if not quantized:
        raise CheckpointError("nothing quantized to write as ModelOpt does", file=checkpoint.directory)
    plain = plain_modules(sort_plain(checkpoint)[0])
    kv_algo = checkpoint.config.kv_cache_quant_algo if checkpoint.config else None
    return configurations(checkpoint, quantized, plain, kv_algo)


def _stored_job(
    checkpoint: CheckpointReader, record: LayerRecord | Projection, role: str, tensor: str
) -> Job:
    """The job of one tensor of a layer."""
    info = checkpoint.tensors[tensor]
    named = parse_tensor_name(tensor)
    name = tensor
    if named is not None and named.part in _SPELLINGS:
        name = tensor.removesuffix(named.part) + _SPELLINGS[named.part]
    blocks = record.quant_algo in BLOCK_SIZES and role == "weight_scale"
    if role not in _SCALES or not (info.dtype in FLOATS or blocks):
        return copy_job(checkpoint, info, name)
    shape = info.shape
    if blocks and len(shape) == 2 and isinstance(record, LayerRecord):
        shape = (shape[0], 1, shape[1], 1)
    elif info.numel == 1 and not (blocks and shape):
        shape = ()
    return scale_job(checkpoint, info, name, shape)


def _reciprocals(checkpoint: CheckpointReader, tensors: list[str]) -> list[str]:
    """A sentence on the factors that are written for divisors."""
    pairs: list[tuple[np.float32, np.float32]] = []
    for tensor in tensors:
        divisors = checkpoint.files.divisor(tensor)
        assert divisors is not None
        factors = np.asarray(checkpoint.tensor(tensor), np.float32)
        pairs += zip(divisors.reshape(-1), factors.reshape(-1), strict=True)
    return tell_differences("divisors", pairs)
