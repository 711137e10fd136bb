"""KVCacheMethod: the scales of a quantized key/value cache, resolved and checked.

A checkpoint stores one scale for the keys and one for the values of an attention layer (dequantized =
code x scale), sometimes one for the queries, often none at all although the cache format is announced.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moqext._C import UnsupportedQuantization, cache_algorithms
from moqext.layers.method import ParamSpec
from moqext.ops.scalars import DIVISOR_ABOVE, FLOAT32_MAX, is_number

SUPPORTED = tuple(name for name, has_method in cache_algorithms().items() if has_method)
_SCALES = ("k_scale", "v_scale", "q_scale")
_DTYPES = ("float32", "float64", "float16", "bfloat16")


class KVScales(NamedTuple):
    """Scales an attention kernel uses: quantized = value / scale.

    Attributes:
        k_scale: Of the keys.
        v_scale: Of the values.
        q_scale: Of the queries, for attention that runs in FP8.
        calibrated: True when the checkpoint had at least one of k_scale and v_scale.
        notes: What was assumed, in sentences; empty when every scale came from the checkpoint.
    """

    k_scale: float
    v_scale: float
    q_scale: float
    calibrated: bool
    notes: tuple[str, ...]


class KVCacheMethod:
    """The cache of one attention layer.

    Args:
        kv_cache_quant_algo: "FP8", "NVFP4" in any case, or None for a cache that is not quantized.

    Raises:
        UnsupportedQuantization: Another cache format ("INT8", "NVFP4_AFFINE"), or none that is known.
        TypeError: It is no name.
    """

    __slots__ = ("kv_cache_quant_algo",)

    def __init__(self, kv_cache_quant_algo: str | None) -> None:
        if kv_cache_quant_algo is not None and not isinstance(kv_cache_quant_algo, str):
            raise TypeError(f"kv_cache_quant_algo: expected a str or None, got {type(kv_cache_quant_algo)}")
        algo = None if kv_cache_quant_algo is None else kv_cache_quant_algo.upper()
        if algo is not None and algo not in SUPPORTED:
            raise UnsupportedQuantization(
                f"kv_cache_quant_algo {kv_cache_quant_algo!r} has no cache method; "
                f"supported are {', '.join(SUPPORTED)} and None"
            )
        self.kv_cache_quant_algo = algo

    @property
    def checkpoint_params(self) -> dict[str, ParamSpec]:
        """The scalars a checkpoint may hold for an attention layer; shape () or (1,)."""
        return {name: ParamSpec((), "float32", "scale", False) for name in _SCALES}

    def prepare(self, params: Mapping[str, Any]) -> KVScales:
        """Resolves the scales of one layer.

        Both of k_scale and v_scale: used as they are. One of them: it serves both. Neither: 1.0, which is
        what presets without calibration mean. q_scale: 1.0 where it is missing. A cache that is not
        quantized has 1.0 everywhere, whatever the checkpoint holds.

        Args:
            params: "k_scale", "v_scale" and "q_scale" as tensors of one value (float32, float16, bfloat16;
                raw uint16 is bfloat16) or as numbers; any may be missing or None.

        Raises:
            ValueError: A scale that is zero, negative, infinite or NaN, or no float32 whose reciprocal is one
                (2^-128, 2.9e-39, is too small), has more than one value, or has another name.
            TypeError: A scale of another dtype, or none at all.
        """
        if not isinstance(params, Mapping):
            raise TypeError(f"params: expected a mapping of names to scales, got {type(params)}")
        unknown = sorted(set(params) - set(_SCALES))
        if unknown:
            raise ValueError(f"params: expected only {', '.join(_SCALES)}, got {', '.join(unknown)}")
        scales = {name: _scale(name, params.get(name)) for name in _SCALES}
        if self.kv_cache_quant_algo is None:
            return KVScales(1.0, 1.0, 1.0, False, ())
        notes = []
        k, v, q = scales["k_scale"], scales["v_scale"], scales["q_scale"]
        calibrated = not (k is None and v is None)
        if not calibrated:
            notes.append("no k_scale and no v_scale: both are 1.0")
        elif k is None or v is None:
            present, missing = ("v_scale", "k_scale") if k is None else ("k_scale", "v_scale")
            notes.append(f"no {missing}: {present} serves both")
        if q is None:
            q = 1.0
            notes.append("no q_scale: it is 1.0")
        k, v = k or v or 1.0, v or k or 1.0
        if calibrated and k == v == 1.0:
            notes.append(
                "k_scale and v_scale are exactly 1.0: the producer clamped them, or did not calibrate"
            )
        return KVScales(k, v, q, calibrated, tuple(notes))

    def __repr__(self) -> str:
        return f"KVCacheMethod({self.kv_cache_quant_algo!r})"


def _scale(name: str, value: Any) -> float | None:
    """A number, or a tensor of one value, as a float; None stays None."""
    if value is None:
        return None
    number = float(value) if is_number(value) else _read(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a positive finite value, got {number!r}")
    if not DIVISOR_ABOVE < number <= FLOAT32_MAX:
        raise ValueError(
            f"{name}: expected a float32 whose reciprocal is one, above {DIVISOR_ABOVE:.4g} and at most "
            f"{FLOAT32_MAX:.4g}, got {number!r}"
        )
    return number


def _read(name: str, tensor: Any) -> float:
    """The value of a tensor of one element."""
    if not hasattr(tensor, "item"):
        raise TypeError(f"{name}: expected a number or a tensor of one value, got {type(tensor)}")
    if hasattr(type(tensor), "mask"):
        raise TypeError(f"{name}: expected an array without a mask, got {type(tensor)}")
    shape = tuple(getattr(tensor, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"{name}: expected one value, got shape {list(shape)}")
    dtype = str(getattr(tensor, "dtype", "")).rpartition(".")[2]  # torch's begin with "torch."
    if dtype == "uint16":  # the bits of a bfloat16: the upper half of a float32
        return float(np.array(tensor.item() << 16, np.uint32).view(np.float32))
    if dtype not in _DTYPES:
        raise TypeError(f"{name}: expected {', '.join(_DTYPES)}, got {dtype}")
    return float(tensor.item())
