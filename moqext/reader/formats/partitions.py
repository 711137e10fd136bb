"""Linears that a file holds fused, with a scale for each of their parts: which rows are whose.

q, k and v in one qkv_proj, or gate and up in one gate_up_proj, usually have one scale, as of one linear. Some
tools keep the scale of each part: FP8 weights with `weight_scale` [3] or [2]. The rows of gate and up are
halves; those of q, k and v follow from the heads that config.json tells.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moqext.reader.formats.stored import FLOATS, Tensor
from moqext.reader.naming import FUSED_NAMES
from moqext.reference import as_float32

KNOWN = ("qkv_proj", "gate_up_proj")
"""Names that tell how parts follow each other."""


class Scalar(NamedTuple):
    """A scale of the whole, which stands for the scales of parts where the format is told."""

    dtype: str
    shape: tuple[int, ...] = ()


def parts_of(module: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the parts that have an FP8 scale each; none where there is one scale, or one a row."""
    weight, scale = tensors["weight"], tensors.get("weight_scale")
    parts = FUSED_NAMES.get(module.rpartition(".")[2], ())
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2 or scale is None or scale.dtype not in FLOATS:
        return ()
    several = tuple(scale.shape) == (len(parts),) and len(parts) not in (1, weight.shape[0])
    return parts if several else ()


def rows_of_parts(module: str, rows: int, model: Mapping[str, Any]) -> tuple[int, ...]:
    """The rows of each part, in their order; none where they are not known.

    Args:
        module: name of the linear.
        rows: of the whole.
        model: what config.json holds.
    """
    name = module.rpartition(".")[2]
    if name == "gate_up_proj":
        return (rows // 2, rows // 2) if rows % 2 == 0 else ()
    if name != "qkv_proj":
        return ()
    text = model.get("text_config")
    for config in (model, text if isinstance(text, Mapping) else {}):
        heads, width = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        keys = _size(config, "num_key_value_heads") or heads
        columns = _size(config, "head_dim") or (width // heads if heads else 0)
        found = (heads * columns, keys * columns, keys * columns)
        if all(found) and sum(found) == rows:
            return found
    return ()


def _size(config: Mapping[str, Any], key: str) -> int:
    """A positive number of a configuration, else 0."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def scale_of_rows(scale: NDArray[Any], partitions: tuple[int, ...]) -> NDArray[Any]:
    """The scales of parts as one for each row, float32; as they are where there are no parts."""
    return np.repeat(as_float32(scale).reshape(-1), partitions) if partitions else scale
