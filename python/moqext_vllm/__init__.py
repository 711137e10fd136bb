"""moqext in vLLM: a plug-in that serves ModelOpt checkpoints from their own codes and scales.

vLLM finds it by itself, through the entry point `moqext` of `vllm.general_plugins`. docs/vllm.md has the
whole of it.
"""

from importlib.util import find_spec

if find_spec("vllm") is None:
    raise ImportError("moqext_vllm needs vLLM, which is not installed: pip install vllm", name="vllm")

from moqext_vllm.plugin import register

__all__ = ["register"]
