"""Variables that tell the plug-in about kernels, and their part of the key of vLLM's compiled graphs.

vLLM keeps on disk what torch.compile made. Its key has its own options and the sources it traced, but nothing
of what variables tell the plug-in: a graph that was made with other ones would be used again.
"""

import functools
import os
from typing import Any, Literal

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from moqext.environment import environment

NAME = "moqext"
"""Where settings stand in vLLM's `additional_config`, which is part of the key."""


def read_ops() -> Literal["auto", "0", "1"]:
    """The choice for norms, activations and routing that MOQEXT_VLLM_OPS makes.

    Returns:
        "0" for vLLM's own, "1" for moqext's on the CPU, too, and without it "auto": moqext's on CUDA.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get("MOQEXT_VLLM_OPS") or "auto"
    if value == "auto" or value == "0" or value == "1":
        return value
    raise ValueError(f"MOQEXT_VLLM_OPS: expected 0 or 1, got {value!r}")


def runs_ops() -> bool:
    """Whether moqext runs vLLM's norms, activations and routing here.

    Not where the user wants results that do not depend on the batch, which vLLM has kernels of its own for.

    Raises:
        ValueError: as for `read_ops`.
    """
    switch = read_ops()
    here = (current_platform.is_cuda() and has_cuda()) or (switch == "1" and current_platform.is_cpu())
    return here and switch != "0" and not envs.VLLM_BATCH_INVARIANT


@functools.cache
def has_cuda() -> bool:
    """Whether moqext was built with its kernels for GPUs."""
    return bool(environment()["moqext"]["cuda"])


def read_fast_accum() -> bool:
    """Whether MOQEXT_VLLM_FAST_ACCUM is "1": products of FP8 may sum as the tensor cores do.

    Raises:
        ValueError: it says something that is neither 0 nor 1.
    """
    return _read_switch("MOQEXT_VLLM_FAST_ACCUM")


def read_force() -> bool:
    """Whether MOQEXT_VLLM_FORCE is "1": moqext runs what it can, even where vLLM would be faster.

    Raises:
        ValueError: it says something that is neither 0 nor 1.
    """
    return _read_switch("MOQEXT_VLLM_FORCE")


def read_compressed_tensors() -> bool:
    """Whether MOQEXT_VLLM_COMPRESSED_TENSORS is "1": checkpoints of compressed-tensors are moqext's, too.

    Raises:
        ValueError: it says something that is neither 0 nor 1.
    """
    return _read_switch("MOQEXT_VLLM_COMPRESSED_TENSORS")


def _read_switch(name: str) -> bool:
    value = os.environ.get(name) or "0"
    if value == "0" or value == "1":
        return value == "1"
    raise ValueError(f"{name}: expected 0 or 1, got {value!r}")


def enter_settings(**settings: Any) -> None:
    """Makes settings part of the key of the engine whose model is being built.

    Args:
        settings: by name, anything that JSON has.
    """
    config = get_current_vllm_config_or_none()
    if config is not None and isinstance(config.additional_config, dict):
        config.additional_config.setdefault(NAME, {}).update(settings)
