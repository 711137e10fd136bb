"""Scales that are NaN or zero over weights of zero, written as scales that every engine can multiply with."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moqext.reader.checkpoint_reader import CheckpointReader
from moqext.reader.formats.scale_values import decode_scales
from moqext.reader.matrices import round_to
from moqext.reader.naming import FUSED_GROUPS
from moqext.reader.problems import Problem
from moqext.reader.records import LayerRecord, Projection
from moqext.tools.repair.draft import Bytes, Draft, Edit, plain_rows, row_ranges

_ONE = {"F8_E4M3": 0x38}
"""Type of block scales -> the bits that ModelOpt writes for an empty block; 0, the least e8m0, for others."""

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _is_nan(dtype: str, scales: Bytes) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = scales & 0x7F == 0x7F if dtype == "F8_E4M3" else scales == 0xFF
    return result


class _Blocks:
    """The block scales of a weight, and the codes under each.

    Attributes:
        weight, scale: names of the tensors.
        dtype: of the scales.
    """

    def __init__(self, checkpoint: CheckpointReader, record: LayerRecord | Projection) -> None:
        self._checkpoint = checkpoint
        self.weight, self.scale = record.tensors["weight"], record.tensors["weight_scale"]
        self._codes, scales = (checkpoint.tensors[name] for name in (self.weight, self.scale))
        self.dtype = scales.dtype
        self._magnitude = 0x77 if self._codes.dtype == "U8" else 0x7F
        self.are_known = (
            self._codes.dtype in ("U8", "F8_E4M3")
            and self.dtype in ("F8_E4M3", "F8_E8M0", "U8")
            and len(self._codes.shape) > 1
            and self._codes.shape[:-1] == scales.shape[:-1]
            and scales.shape[-1] > 0
            and self._codes.shape[-1] % scales.shape[-1] == 0
        )

    def nan(self, rows: Bytes) -> NDArray[np.bool_]:
        """Which scales of some rows are NaN."""
        return _is_nan(self.dtype, rows)

    def codes(self, begin: int, end: int) -> Bytes:
        """The codes of rows [begin, end) without their signs, [..., blocks, bytes of a block]."""
        codes = plain_rows(self._checkpoint, self.weight, begin, end) & np.uint8(self._magnitude)
        columns = self._checkpoint.tensors[self.scale].shape[-1]
        return codes.reshape(*codes.shape[:-1], columns, codes.shape[-1] // columns)

    def count(self) -> tuple[int, int, int]:
        """Blocks whose scale is NaN: over codes that are zero, over NaN's code alone, and over others."""
        empty = dead = rest = 0
        for begin, end in row_ranges(self._checkpoint, self.scale):
            nan = self.nan(plain_rows(self._checkpoint, self.scale, begin, end))
            if not nan.any():
                continue
            codes = self.codes(begin, end)[nan]
            zero = (codes == 0).all(axis=-1)
            lost = (codes == self._magnitude).all(axis=-1)
            empty, dead = empty + int(zero.sum()), dead + int(lost.sum())
            rest += int((~zero & ~lost).sum())
        return empty, dead, rest


@dataclass(frozen=True, slots=True)
class NanBlocks:
    """The rule for block scales that are NaN.

    Attributes:
        over_nan: what is made of blocks whose codes are all those that a quantizer writes for NaN: "keep"
            refuses them, "zero" takes them for blocks of zeros.
    """

    over_nan: Literal["keep", "zero"]

    def repair(self, draft: Draft) -> None:
        """Writes 1 for scales that are NaN over blocks of zeros."""
        for problem in draft.unsolved("scale_not_finite"):
            record, role = draft.records.get(problem.tensor or "", (None, ""))
            if record is None or role != "weight_scale":
                draft.refuse(problem, "nothing else in the files tells its value")
                continue
            blocks = _Blocks(draft.checkpoint, record)
            if not blocks.are_known:
                draft.refuse(problem, "it is no scale of a block along the rows")
            else:
                self._repair(draft, problem, blocks)

    def _repair(self, draft: Draft, problem: Problem, blocks: _Blocks) -> None:
        empty, dead, rest = blocks.count()
        if rest:
            draft.refuse(problem, f"{rest:,} of them are over codes that are numbers, whose scale is lost")
            return
        if dead and self.over_nan == "keep":
            reason = (
                f"{dead:,} of them are over codes that a quantizer makes of NaN: blocks of zeros, or blocks "
                "whose scale was too large. --nan-blocks zero takes them for zeros"
            )
            draft.refuse(problem, reason)
            return

        def scales(rows: Bytes, begin: int, end: int) -> Bytes:
            return np.where(blocks.nan(rows), np.uint8(_ONE.get(blocks.dtype, 0)), rows)

        def codes(rows: Bytes, begin: int, end: int) -> Bytes:
            nan = blocks.nan(plain_rows(draft.checkpoint, blocks.scale, begin, end))
            width = rows.shape[-1] // nan.shape[-1]
            return np.where(np.repeat(nan, width, axis=-1), np.uint8(0), rows)

        draft.edit(blocks.scale, scales)
        if dead:
            draft.edit(blocks.weight, codes)
        what = (
            f"{empty + dead:,} NaN scales of empty blocks are {'1' if blocks.dtype in _ONE else '2^-127'} now"
        )
        draft.solve(problem, f"{what}; the codes of {dead:,} are 0 now" if dead else what, blocks.scale)


def repair_zero_layers(draft: Draft) -> None:
    """Writes a positive scale and zeros for a weight of zeros, whose codes and block scales are often NaN.

    A projection that engines fuse with others gets the largest of their scales, so that these stay.
    """
    for problem in draft.unsolved("all_zero_layer"):
        record, role = draft.records.get(problem.tensor or "", (None, ""))
        if record is None:
            continue
        scale = draft.checkpoint.tensors[record.tensors[role]]
        if scale.dtype in _FLOATS:
            factor = _scale_beside(draft, record, role) or 1.0
            values = np.full(prod(scale.shape), factor, np.float32)
            draft.set_value(scale.name, round_to(values, _FLOATS[scale.dtype]))
        elif scale.dtype in _ONE:
            factor = 1.0
            draft.edit(scale.name, _filled(_ONE[scale.dtype]))
        else:
            draft.refuse(problem, f"its scale is {scale.dtype}")
            continue
        if role == "weight_scale_2":
            blocks = record.tensors.get("weight_scale", "")
            if blocks:
                draft.edit(blocks, _filled(_ONE.get(draft.checkpoint.tensors[blocks].dtype, 0)))
        draft.edit(record.tensors["weight"], _filled(0))
        draft.solve(problem, f"a weight of zeros: codes 0, {role} {factor:.4g}", record.name)


def _filled(byte: int) -> Edit:
    """Makes every byte of the rows one and the same."""
    return lambda rows, begin, end: np.full_like(rows, byte)


def _scale_beside(draft: Draft, record: LayerRecord | Projection, role: str) -> float:
    """The largest scale of that role among projections that engines fuse with this one, or 0."""
    parent, _, last = record.name.rpartition(".")
    found = 0.0
    for name in _fused_with(last):
        tensor = f"{parent}.{name}.{role}"
        info = draft.checkpoint.tensors.get(tensor)
        if info is not None and info.dtype in _FLOATS:
            values = decode_scales(info.dtype, draft.checkpoint.tensor(tensor))
            found = max(found, float(values[np.isfinite(values)].max(initial=0)))
    return found


def _fused_with(name: str) -> Iterator[str]:
    for group in FUSED_GROUPS:
        if name in group:
            yield from (each for each in group if each != name)
