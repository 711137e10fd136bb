"""What vLLM finds graphs by that torch.compile made and vLLM keeps on disk.

Its key has its own options and the sources it traced, but nothing of what variables tell the plug-in: a graph
that was made with other ones would be used again.
"""

from typing import Any

from vllm.config import get_current_vllm_config_or_none

NAME = "moqext"


def enter_setting(name: str, value: Any) -> None:
    """Makes a setting part of the key of the engine whose model is being built.

    Args:
        name: of the setting.
        value: anything that JSON has.
    """
    config = get_current_vllm_config_or_none()
    if config is not None and isinstance(config.additional_config, dict):
        config.additional_config.setdefault(NAME, {})[name] = value
