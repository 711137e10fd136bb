"""Tells swizzled block scales by their values, where the file says nothing.

Rows and columns of a real weight differ in size, so that log2 of its block scales is to a large part a row's
value plus a column's: some 75 % of the variance, 20 % when read in the wrong order. Weights of equal rows and
columns have no such part in either order. Exchanged nibbles leave every block scale what it is: no value of a
file tells of them.

Compared are the shares under both orders, less what chance gives: p / (n - 1) of n values with p free means.
Without structure a share varies as the Beta distribution does. An alarm takes 6 standard deviations of the
difference, and `FLOOR` more; `docs/formats.md` has the simulation behind it. Scales of 4 columns say
nothing: swizzling them moves whole rows.
"""

from collections.abc import Mapping
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray

from moqext import ops
from moqext.reader.files.tensor_files import TensorFiles
from moqext.reader.formats.layouts import TILE, Layout
from moqext.reader.formats.scale_values import decode_scales
from moqext.reader.problems import Problem, make_problem

FLOOR = 0.15
"""Share of the variance by which the other order has to explain more, chance aside."""

SIGMAS = 6

ROWS = 512
"""Rows of a weight's scales that are looked at, out of its middle."""

SAMPLE_BYTES = 32 << 20
"""Bytes of scales that are read in all; of more, every second weight is left out, then two of three ..."""


def explained(values: NDArray[np.float64]) -> float:
    """The share of the variance of a matrix that rows and columns explain, less what chance gives."""
    rows, columns = values.shape
    centred = values - values.mean()
    total = float(np.square(centred).sum())
    if not total or rows < 2 or columns < 2:
        return 0.0
    of_rows = columns * float(np.square(centred.mean(axis=1)).sum())
    of_columns = rows * float(np.square(centred.mean(axis=0)).sum())
    chance = (rows + columns - 2) / (rows * columns - 1)
    return float(((of_rows + of_columns) / total - chance) / (1 - chance))


def limit(rows: int, columns: int) -> float:
    """The difference of the two shares beyond which one order is taken for the true one."""
    n, p = rows * columns, rows + columns - 2
    variance = 2 * p * (n - 1 - p) / ((n - 1) ** 2 * (n + 1)) / (1 - p / (n - 1)) ** 2
    return FLOOR + SIGMAS * sqrt(2 * variance)


def shares(files: TensorFiles, layout: Layout) -> tuple[float, float, float]:
    """Shares that are explained as stored and unswizzled, and the limit, of some rows of a weight."""
    rows, columns = layout.shape[-2:]
    count = min(rows, ROWS)
    first = (rows - count) // 2 // TILE[0] * TILE[0]
    matrix = prod(layout.shape[:-2]) // 2 * rows  # of stacked experts the one in the middle
    begin = (matrix + first) * columns
    stored = files.raw(layout.scale, begin, begin + count * columns).reshape(count, columns)
    values = []
    for scales in (stored, np.asarray(ops.unswizzle_block_scales(stored, stored.shape))):
        decoded = decode_scales(files.tensors[layout.scale].dtype, scales).astype(np.float64)
        # Zero and NaN, as weights of zero have, count as the least scale of e4m3.
        values.append(np.log2(np.maximum(np.nan_to_num(np.abs(decoded), nan=0.0), 2.0**-9)))
    return explained(values[0]), explained(values[1]), limit(count, columns)


def judge_layouts(files: TensorFiles, layouts: Mapping[str, Layout]) -> dict[str, Problem]:
    """The problems of weights whose scales look stored in the other order than they are read in.

    Where weights speak against what is read and none for it, those that say nothing are doubtful as well.
    """
    candidates = {module: layout for module, layout in layouts.items() if layout.is_open}
    total = sum(min(each.shape[-2], ROWS) * each.shape[-1] for each in candidates.values())
    step = max(1, -(-total // SAMPLE_BYTES))
    problems: dict[str, Problem] = {}
    confirmed = 0
    for module in list(candidates)[::step]:
        layout = candidates[module]
        stored, unswizzled, least = shares(files, layout)
        swizzled = layout.scale_layout == "swizzled"
        apart = stored - unswizzled if swizzled else unswizzled - stored
        confirmed += apart < -least
        if apart > least:
            message = (
                f"rows and columns explain {stored:.0%} of the variance of its block scales as stored, "
                f"{unswizzled:.0%} in the 128 x 4 order of cuBLAS; {_said(layout)}"
            )
            problems[module] = _doubt(module, layout, message)
    if problems and not confirmed:
        first = next(iter(problems))
        for module, layout in candidates.items():
            if module not in problems and layout.scale_layout == candidates[first].scale_layout:
                message = f"{first} has block scales that look {_other(layout)}; {_said(layout)}"
                problems[module] = _doubt(module, layout, message)
    return problems


def _doubt(module: str, layout: Layout, message: str) -> Problem:
    return make_problem("doubtful_scale_layout", message, layer=module, tensor=layout.scale)


def _other(layout: Layout) -> str:
    return "linear" if layout.scale_layout == "swizzled" else "swizzled"


def _said(layout: Layout) -> str:
    said = f"they are read {layout.evidence}" if layout.evidence else "nothing in the file says which it is"
    return (
        f"{said}: --scale-layout swizzled or --scale-layout linear decides (in Python "
        'Checkpoint(..., scale_layout="swizzled"))'
    )
