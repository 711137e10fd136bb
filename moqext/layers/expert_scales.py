"""Activation scales of experts: one for all of a layer, or one for each expert.

FP8 kernels quantize a token once for all of its experts, so a layer has one scale for each of the two
projections: the largest of any expert's, gate's or up's, with which nothing saturates that did not before.
NVFP4 activations have one scale for an expert, the larger of gate's and up's: block scales make up for it.
An expert without a scale has the largest of the others, as the producer gives it where it can.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

from moqext.ops.scalars import DIVISOR_ABOVE


def unify_input_scales(
    scales: NDArray[np.float32], name: str, *, per_expert: bool, stacklevel: int
) -> NDArray[np.float32] | None:
    """The scales with which experts quantize, from those of a checkpoint.

    Args:
        scales: [E] or [E, P], NaN for one that is absent.
        name: of the parameter, for messages.
        per_expert: one an expert, instead of one for all.
        stacklevel: of the warning that some are absent.

    Returns:
        The scales in their shape, equal within an expert; None where all are absent.

    Raises:
        ValueError: one is not positive and finite, or at most 2^-128.
    """
    absent = np.isnan(scales)
    bad = ~absent & ~(np.isfinite(scales) & (scales > DIVISOR_ABOVE))
    if bad.any():
        expert = int(np.argwhere(bad)[0][0])
        value = float(scales[bad].flat[0])
        raise ValueError(
            f"{name}: expected positive finite values above 2^-128, got {value:g} in expert {expert}"
        )
    if absent.all():
        return None
    largest = np.nanmax(scales)
    rows = absent.reshape(len(scales), -1).all(axis=1)
    if rows.any():
        warnings.warn(
            f"{name}: {int(rows.sum())} of {rows.size} experts have none, expert {int(np.argmax(rows))} the "
            f"first; the largest of the others, {float(largest):g}, serves them",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
    if not per_expert:
        return np.full_like(scales, largest)
    filled = np.where(np.isnan(scales), -np.inf, scales).reshape(len(scales), -1).max(axis=1)
    filled = np.where(rows, largest, filled).astype(np.float32)
    return np.broadcast_to(filled.reshape(-1, *[1] * (scales.ndim - 1)), scales.shape).copy()
