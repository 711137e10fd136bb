"""`load_format="dummy"`: vLLM makes weights up and loads nothing, as for benchmarks and profiles.

It fills floats with numbers of both signs, which no scale may be, unless a parameter says what it wants;
bytes it may leave as they are.
"""

import logging

import torch
from vllm.config import get_current_vllm_config_or_none

logger = logging.getLogger("vllm.moqext")

SCALES = {"weight_scale": 1e-2, "weight_scale_2": 1e-3, "input_scale": 1e-2, "pre_quant_scale": 1.0}
SCALES |= {"weight_global_scale": 1e3, "input_global_scale": 1e2}
"""Values of scales: codes times them make weights of some hundredths. Block scales, in E4M3, are 1."""
POWER = 120
"""Block scales of MX: 2^-7."""
SEED = 1234

_said: set[str] = set()


def makes_weights_up() -> bool:
    """Whether the engine whose model is being built loads nothing."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def make_up(role: str, param: torch.nn.Parameter) -> None:
    """Has a parameter count as filled, with what vLLM is to leave in it, where it loads nothing.

    Args:
        role: its name in the layer.
        param: as it was made.
    """
    if not makes_weights_up():
        return
    if not _said:
        _said.add(role)
        logger.info("load_format is dummy: scales are made up as well, and nothing is looked for in files")
    kind = role.removeprefix("w13_").removeprefix("w2_")
    if kind in SCALES:
        value = POWER if param.dtype == torch.uint8 else 1.0
        value = SCALES[kind] if param.dtype == torch.float32 else value
        param.dummy_weight_value = value  # type: ignore[attr-defined]
        param.data.fill_(value)
    elif param.dtype in (torch.uint8, torch.int8) and not param.is_meta:
        generator = torch.Generator(param.device).manual_seed(SEED)
        param.data.view(torch.uint8).random_(0, 256, generator=generator)
