"""Reads NVIDIA ModelOpt checkpoints exactly and runs their FP8 and NVFP4 layers on DLPack tensors."""

from moqext import _C
from moqext._C import ConfigError, UnsupportedQuantization

__version__: str = _C.build_info()["version"]

__all__ = ["ConfigError", "UnsupportedQuantization", "__version__"]
