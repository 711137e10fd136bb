"""What variables tell the plug-in about kernels, and what vLLM finds compiled graphs by.

vLLM keeps on disk what torch.compile made. Its key has its own options and the sources it traced, but nothing
of what variables tell the plug-in: a graph that was made with other ones would be used again.
"""

import os
from typing import Any, Literal

from vllm.config import get_current_vllm_config_or_none

NAME = "moqext"
"""Where settings stand in vLLM's `additional_config`, which is part of the key."""


def read_ops() -> Literal["auto", "0", "1"]:
    """What MOQEXT_VLLM_OPS says: "0" for vLLM's own norms and activations, "1" for moqext's on the CPU, too.

    Returns:
        "auto" without it: moqext's on CUDA.

    Raises:
        ValueError: it says something else.
    """
    value = os.environ.get("MOQEXT_VLLM_OPS") or "auto"
    if value == "auto" or value == "0" or value == "1":
        return value
    raise ValueError(f"MOQEXT_VLLM_OPS: expected 0 or 1, got {value!r}")


def enter_settings(**settings: Any) -> None:
    """Makes settings part of the key of the engine whose model is being built.

    Args:
        settings: by name, anything that JSON has.
    """
    config = get_current_vllm_config_or_none()
    if config is not None and isinstance(config.additional_config, dict):
        config.additional_config.setdefault(NAME, {}).update(settings)
