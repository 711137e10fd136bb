"""A pass over the graphs of vLLM's compilation: norms that write codes for the FP8 linears behind them.

In eager mode and in graphs of the device a linear that comes to know its norm says so (`quantized_input`). In
a graph that torch.compile makes both stand to be seen.
"""

import inspect
import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from moqext_torch import norm_linear
from moqext_torch.stepping_aside import tell_fusion
from moqext_vllm.settings import runs_ops

logger = logging.getLogger("vllm.moqext")

try:
    from vllm.compilation.passes.inductor_pass import InductorPass
except ImportError:
    InductorPass = None


WHAT = "norms and FP8 linears of compiled graphs"
"""Name of the fusion in the log."""

if InductorPass is not None:

    class NormsAndLinears(InductorPass):  # type: ignore[misc]
        """`norm_linear.join_norms` as vLLM's compilation runs it."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            """Changes the graph."""
            joined = norm_linear.join_norms(graph)
            if joined:
                logger.debug("norms that write codes for the linear behind them: %d", joined)

        def uuid(self) -> str:
            """The part of the key of graphs on disk that the pass makes."""
            found: str = InductorPass.hash_source(inspect.getsource(norm_linear))
            return found


def install_pass() -> None:
    """Adds the pass to the engine whose model is being built, unless its user has one of their own.

    Raises:
        ValueError: MOQEXT_VLLM_OPS says something that nobody knows.
    """
    config: Any = get_current_vllm_config_or_none()
    if config is None or not runs_ops():
        return
    if InductorPass is None:
        tell_fusion(logger, WHAT, "this vLLM has no passes over graphs of Inductor")
        return
    passes = config.compilation_config.inductor_compile_config
    if not isinstance(passes.setdefault(current_platform.pass_key, NormsAndLinears()), NormsAndLinears):
        tell_fusion(logger, WHAT, f"the engine has a {current_platform.pass_key} of its own")
