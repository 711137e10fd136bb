"""Weights to the codes and scales that ModelOpt's exporter stores."""

from typing import Any, Literal

import numpy as np

from moqext import _C
from moqext.algorithms import ALGORITHMS, names_where

ScaleSearch = Literal["mse", "4over6"]

WRITTEN = names_where(
    lambda algorithm: (
        algorithm.codes in ("e4m3", "e2m1") and not algorithm.pre_quant_scale and not algorithm.low_rank
    )
)
"""Algorithms that `quantize_weight` makes."""

SEARCHED: dict[str, tuple[str, ...]] = {
    "mse": tuple(
        name
        for name in WRITTEN
        if ALGORITHMS[name].scales != "tensor"
        and (ALGORITHMS[name].codes == "e2m1" or ALGORITHMS[name].scale_dtype == "float32")
    ),
    "4over6": tuple(name for name in WRITTEN if ALGORITHMS[name].second == "parts"),
}
"""Search -> the algorithms that have scales for it."""


def quantize_weight(
    weight: Any,
    quant_algo: str,
    *,
    amax: float | None = None,
    group_size: int | None = None,
    search: ScaleSearch | None = None,
) -> dict[str, Any]:
    """The tensors that ModelOpt's exporter stores for a weight, bit for bit, with max calibration.

    - FP8: weight E4M3 [N, K], weight_scale float32 [] = amax / 448; w / scale is rounded to the dtype of the
      weight before it is rounded to E4M3;
    - FP8_PER_CHANNEL_PER_TOKEN: the same by row, weight_scale [N], rounded once;
    - FP8_PB_WO: by tiles of 128 x 128, weight_scale [Nt, 1, Kt, 1], or [] for one tile;
    - NVFP4, W4A16_NVFP4, W4A8_NVFP4_FP8: weight fp4 [N, K/2], weight_scale E4M3 [N, K/g], weight_scale_2
      float32 [] = amax / 2688, or amax / 448 for W4A8_NVFP4_FP8;
    - MXFP4, W4A8_MXFP4_FP8: weight fp4 [N, K/2], weight_scale E8M0 [N, K/32];
    - MXFP8: weight E4M3 [N, K], weight_scale E8M0 [N, K/32].

    Formulas: docs/formats.md. A weight of zeros alone has scales of 1 and codes of 0, where the exporter
    stores NaN.

    Args:
        weight: [N, K] of float32, float16 or bfloat16 (or raw uint16), contiguous, finite, on the host or a
            CUDA device.
        quant_algo: its name, in any spelling a configuration may have.
        amax: largest magnitude of all weights that share a scale with this one: that of FP8, that of a single
            tile, or weight_scale_2. Default: of this weight.
        group_size: of formats with groups; default 16 for NVFP4 and W4A16_NVFP4, else 32.
        search: "mse" tries scales near that of the largest magnitude and keeps that of the least squared
            error, of each row, tile or group; "4over6" (NVFP4, W4A16_NVFP4) those that bring a group's
            largest to 6 or to 4.

    Returns:
        weight and weight_scale where the weight is, with the same bits on every device, and, where the
        algorithm has it, weight_scale_2 as a NumPy array. On a device work is queued on the current stream
        of the weight's framework; without `amax`, formats with one scale or a weight_scale_2 read the weight
        twice and wait in between.

    Raises:
        UnsupportedQuantization: an algorithm that is not in this list.
        TypeError: another dtype.
        ValueError: a shape that is none, K not divisible by the group, a search that the algorithm has no
            scales for, or infinity or NaN where the largest magnitude is looked for.
        BufferError: memory that has gaps, or a device that cannot be used.
    """
    codes, scales, second = _C.quantize_weight(
        weight, quant_algo, amax=amax, group_size=group_size, search=search
    )
    result = {"weight": codes, "weight_scale": scales}
    if second is not None:
        result["weight_scale_2"] = np.float32(second).reshape(())
    return result


def weight_amax(weight: Any) -> float:
    """The largest magnitude of a tensor of any shape, as `quantize_weight` takes one; NaN if one is NaN.

    On a device it waits for the work on the current stream.
    """
    return _C.weight_amax(weight)
