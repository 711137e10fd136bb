"""Activation scales: the file that calibration writes and a quantizer reads.

One JSON object: `{"format": "moqext-activations", "version": 1, "amax": {MODULE: NUMBER, ...}}`. A number is
the largest magnitude of what a linear was given, in the unquantized model, so that one file serves every
format. Modules are named as in the checkpoint; experts of one container share `<container>.gate_up_proj`
(what gate and up are given) and `<container>.down_proj`. Keys and values of an attention that has a cache are
`<attention>.k_cache` and `<attention>.v_cache`.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moqext.algorithms import ALGORITHMS
from moqext.errors import CheckpointError
from moqext.reader.files.untrusted import open_file, parse_object
from moqext.reader.naming import PROJECTIONS, parse_expert_name

FORMAT = "moqext-activations"
VERSION = 1

CACHE_ROLES = ("k_cache", "v_cache")
"""Last parts of the names of keys and values."""

_CACHE_TENSORS = {"k_cache": "k_proj.k_scale", "v_cache": "v_proj.v_scale"}
CACHES = {"fp8": "FP8", "nvfp4": "NVFP4"}
"""Options of a quantized cache -> their algorithms."""
_CACHE_MAX = 448.0
"""The divisor of magnitudes for scales of the cache: of FP8, and since ModelOpt 0.42 of NVFP4."""

_ZERO_AMAX = {"NVFP4": 6.0}
"""Algorithm -> the amax of activations that are always zero; of others the largest of the format."""


def write_scales(file: str | os.PathLike[str], amax: Mapping[str, float]) -> None:
    """Writes the file, whole or not at all.

    Args:
        file: its path.
        amax: module -> largest magnitude of its input.
    """
    document = {"format": FORMAT, "version": VERSION, "amax": dict(sorted(amax.items()))}
    draft = Path(f"{os.fspath(file)}.part")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)


def read_scales(file: str | os.PathLike[str]) -> dict[str, float]:
    """The largest magnitudes by module.

    Raises:
        CheckpointError: it cannot be read, is another file, or has a number that is no magnitude.
    """
    path = Path(file)
    with open_file(path) as (opened, _):
        document = parse_object(opened.read(), path, "scales of activations")
    if document.get("format") != FORMAT or not isinstance(document.get("amax"), dict):
        message = (
            f"is no file of activation scales, as moqext_transformers.calibrate writes them ({FORMAT!r})"
        )
        raise CheckpointError(message, file=path)
    if document.get("version") != VERSION:
        message = f"version: expected {VERSION}, found {document.get('version')!r}"
        raise CheckpointError(message, file=path)
    try:
        return check_amax(document["amax"])
    except ValueError as error:
        raise CheckpointError(str(error), file=path) from None


def check_amax(amax: Mapping[str, Any]) -> dict[str, float]:
    """The magnitudes as numbers of float32.

    Raises:
        ValueError: one is no finite number from 0 on.
    """
    checked = {}
    for module, value in amax.items():
        number = float(value) if isinstance(value, (int, float)) and type(value) is not bool else math.nan
        if not (0 <= number <= float(np.finfo(np.float32).max)):
            raise ValueError(f"amax of {module}: expected a finite number from 0 on, got {value!r}")
        checked[module] = number
    return checked


def amax_of(amax: Mapping[str, float], module: str) -> float | None:
    """The magnitude that stands for a module: its own, or for an expert that of its container."""
    if module in amax:
        return amax[module]
    expert = parse_expert_name(module)
    role = PROJECTIONS.get(expert.projection) if expert else None
    if expert is None or role is None:
        return None
    shared = "down_proj" if role == "down" else "gate_up_proj"
    return amax.get(f"{expert.container}.{shared}")


def input_scale(amax: float, quant_algo: str) -> np.float32:
    """The `input_scale` of a linear: amax over the largest value of its activations' format."""
    most = ALGORITHMS[quant_algo].input_max
    return np.float32(amax or _ZERO_AMAX.get(quant_algo, most)) / np.float32(most)


def cache_scales(amax: Mapping[str, float], modules: Iterable[str]) -> dict[str, np.float32]:
    """The scales of the cache by the names of their tensors.

    Args:
        amax: magnitudes by module.
        modules: every module of the checkpoint; an attention that is not among them has no scales.
    """
    known = set(modules)
    scales = {}
    for name, largest in amax.items():
        attention, _, role = name.rpartition(".")
        if role in _CACHE_TENSORS and attention in known:
            scales[f"{attention}.{_CACHE_TENSORS[role]}"] = np.float32(largest or _CACHE_MAX) / np.float32(
                _CACHE_MAX
            )
    return scales


def missing(amax: Mapping[str, float], modules: Iterable[str]) -> list[str]:
    """The modules for which there is no magnitude."""
    return [module for module in modules if amax_of(amax, module) is None]
