"""Reads NVIDIA ModelOpt checkpoints exactly and runs their FP8 and NVFP4 layers on DLPack tensors."""

from moqext import _C
from moqext._C import ConfigError, UnsupportedQuantization
from moqext.checkpoint import Checkpoint
from moqext.config import Conflict, LayerQuant, QuantConfig, detect
from moqext.errors import CheckpointError
from moqext.problems import Problem

__version__: str = _C.build_info()["version"]

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Conflict",
    "LayerQuant",
    "Problem",
    "QuantConfig",
    "UnsupportedQuantization",
    "__version__",
    "detect",
]
