"""Tensors whose type or shape says the same as the usual one, and how each is read in the usual one.

    stored                                              read as
    F4 [..., K], two codes in a byte:                   U8 [..., K/2];
    I8 beside scales of type F8_E8M0 (MXFP4):           U8;
    scales of FP8 and INT8 for each row, [N, 1]:        [N];
    those of stacked experts, [E, N, 1] or [E, 1, N]:   [E, N].

Everything but the files themselves has tensors in their usual form.
"""

from collections.abc import Mapping
from dataclasses import replace

from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.formats.stored import FLOATS

_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scale_weight")


def usual_forms(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors that have another form than the usual one, in that; bytes and places stay."""
    found = {}
    for name, info in tensors.items():
        if info.dtype == "F4" and info.shape and info.shape[-1] % 2 == 0:
            found[name] = replace(info, dtype="U8", shape=(*info.shape[:-1], info.shape[-1] // 2))
            continue
        if info.dtype not in ("I8", "F8_E4M3") or (scale := _scale_of(name, tensors)) is None:
            continue
        if info.dtype == "I8" and scale.dtype == "F8_E8M0":
            found[name] = replace(info, dtype="U8")
        elif scale.dtype in FLOATS and (shape := _row_scales(info.shape, scale.shape)):
            found[scale.name] = replace(scale, shape=shape)
    return found


def _scale_of(weight: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The scale beside a weight, of whichever name."""
    stem = weight.removesuffix(".weight")
    joint = "." if stem != weight else "_"
    named = (tensors.get(f"{stem}{joint}{role}") for role in _SCALES)
    return next((info for info in named if info is not None), None)


def _row_scales(weight: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """The usual shape of scales that have an axis of one value beside that of the rows; empty for others."""
    if len(weight) == 2 and weight[0] > 1 and scale == (weight[0], 1):
        return weight[:1]
    if len(weight) == 3 and min(weight[1:]) > 1:
        experts, rows, columns = weight
        if scale == (experts, rows, 1):
            return (experts, rows)
        if scale == (experts, 1, columns):
            return (experts, columns)
    return ()
