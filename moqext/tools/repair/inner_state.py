"""Tensors of the quantizer's inner state that an export left behind, and scales that only they still have.

Before ModelOpt 0.46 exports of weights that were compressed in memory could write every other block scale, or
the block scales of one second-level scale beside another. The true ones are then among what was left behind,
`weight_quantizer._scale` and `weight_quantizer._double_scale`, or lost.
"""

from math import prod

import numpy as np

from moqext.reader.formats.scale_values import decode_scales
from moqext.reader.problems import Problem
from moqext.tools.repair.draft import Draft, plain_rows, row_ranges

_SCALE, _SECOND = ".weight_quantizer._scale", ".weight_quantizer._double_scale"
_DROPPED = {
    "weight_quantizer": ("weight_scale", ("_amax", "_scale", "_double_scale", "_global_amax")),
    "input_quantizer": ("input_scale", ("_amax",)),
}
"""Quantizer -> the scale of a layer, and tensors of the quantizer that nothing needs where that scale is."""

_GROUPS = (16, 32)
"""Weights of a block, in formats with two levels of scales."""

_LARGEST = 448.0
"""The largest block scale of a weight under its own second-level scale: what max calibration makes of it."""


def repair_inner_state(draft: Draft) -> None:
    """Puts true scales in their place, and leaves out what engines do not know."""
    for problem in draft.unsolved("partial_scales"):
        _restore(draft, problem)
    for problem in draft.unsolved("conflicting_tensors"):
        if (problem.tensor or "").endswith(_SECOND):
            _choose_second(draft, problem)
    for problem in draft.unsolved("leftover_tensor"):
        tensor = problem.tensor or ""
        outer, _, part = tensor.rpartition(".")
        module, _, quantizer = outer.rpartition(".")
        scale, parts = _DROPPED.get(quantizer, ("", ()))
        if part not in parts or f"{module}.{scale}" not in draft.checkpoint.tensors:
            draft.refuse(problem, "whether the result needs it is not known")
        else:
            if draft.outputs.get(tensor) is not None and draft.outputs[tensor].name == tensor:
                draft.drop(tensor)
            draft.solve(problem, "left out, engines do not know it", tensor)


def _restore(draft: Draft, problem: Problem) -> None:
    """Writes the whole block scales, and the second-level scale that goes with them."""
    module, tensors = problem.layer or "", draft.checkpoint.files.tensors
    whole, second = tensors.get(module + _SCALE), tensors.get(module + _SECOND)
    if whole is None or second is None:
        missing = "_scale" if whole is None else "_double_scale"
        draft.refuse(problem, f"weight_quantizer.{missing}, which had what is lost, is not in the files")
        return
    weight, stored, other = (tensors.get(f"{module}.{role}") for role in _ROLES)
    if weight is None or stored is None or other is None or weight.dtype != "U8" or len(weight.shape) != 2:
        draft.refuse(problem, "it has not the weight, weight_scale and weight_scale_2 of NVFP4")
        return
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    groups = prod(whole.shape) // max(rows, 1)
    fits = rows * groups == prod(whole.shape) and any(groups * size == columns for size in _GROUPS)
    if not fits or whole.dtype != stored.dtype or prod(second.shape) != 1 or second.dtype != other.dtype:
        draft.refuse(problem, f"{whole.name} has not the scales of a weight [{rows}, {columns}] either")
        return
    draft.drop(stored.name)
    draft.rename(whole.name, stored.name, (rows, groups))
    draft.outputs[whole.name].beside = stored
    draft.set_value(other.name, draft.checkpoint.files.raw(second.name, 0, second.nbytes))
    draft.solve(problem, "scales of both levels are those of its weight_quantizer", stored.name)
    for each in draft.unsolved("conflicting_tensors"):
        if each.tensor == second.name:
            draft.solve(each, "it is the weight_scale_2 now", other.name)


_ROLES = ("weight", "weight_scale", "weight_scale_2")


def _choose_second(draft: Draft, problem: Problem) -> None:
    """Writes the second-level scale under which the block scales were made, if their largest tells which.

    The block with the largest weight has the scale 448 under the weight's own second-level scale; scales that
    were made for a larger one are smaller by the ratio of the two.
    """
    module, files = problem.layer or "", draft.checkpoint.files
    stored, kept, own = (f"{module}{end}" for end in (".weight_scale", ".weight_scale_2", _SECOND))
    values = [decode_scales(files.tensors[name].dtype, files.tensor(name)).ravel() for name in (kept, own)]
    if any(each.size != 1 or not each[0] > 0 for each in values):
        draft.refuse(problem, "the two are not one positive number each")
        return
    ratio = float(values[1][0] / values[0][0])
    largest = _largest(draft, stored)
    expected = _round_e4m3(_LARGEST * ratio)
    if largest == _LARGEST and expected != _LARGEST:
        raw = np.asarray(values[1], np.float32)
        if files.tensors[kept].dtype != "F32":
            draft.refuse(problem, f"{kept} is {files.tensors[kept].dtype}, not F32")
            return
        draft.set_value(kept, raw)
        draft.solve(problem, f"{own}, under which the largest block scale is {_LARGEST:g}", kept)
    elif largest == expected != _LARGEST:
        draft.solve(problem, f"kept: its block scales are those of {own} times the ratio, {ratio:.4g}", kept)
    else:
        reason = f"the largest block scale is {largest:g}, and would be {_LARGEST:g} or {expected:g}"
        draft.refuse(problem, f"{reason}: which of the two is meant, it does not tell")


def _largest(draft: Draft, tensor: str) -> float:
    dtype = draft.checkpoint.tensors[tensor].dtype
    found = 0.0
    for begin, end in row_ranges(draft.checkpoint, tensor):
        values = decode_scales(dtype, plain_rows(draft.checkpoint, tensor, begin, end))
        found = max(found, float(values[np.isfinite(values)].max(initial=0)))
    return found


def _round_e4m3(value: float) -> float:
    """The value rounded to E4M3, to nearest even."""
    codes = np.arange(127, dtype=np.uint8)  # 0x7f is NaN
    values = decode_scales("F8_E4M3", codes).astype(np.float64)
    apart = np.abs(values - value)
    return float(min(values[apart == apart.min()], key=lambda each: int(np.searchsorted(values, each)) % 2))
