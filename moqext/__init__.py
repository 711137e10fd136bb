"""Reads, checks, runs and converts NVIDIA ModelOpt checkpoints in FP8, NVFP4, MX and integer formats.

`Checkpoint` opens one, and `Checkpoint.load` makes a layer of it, which multiplies NumPy arrays and tensors
of any framework with DLPack. `LinearMethod` and `MoEMethod` are for tensors that the caller owns, `ops` has
operations on tensors, and `moqext.reference`, imported by itself, says in NumPy what the formats mean.
"""

from moqext import interrupts

if interrupts.is_program():
    interrupts.end_on_interrupt()  # until the command runs

try:
    from moqext import _C
except ImportError as error:
    if error.path != __file__:
        raise  # it is there and cannot be loaded
    import sysconfig

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        reason = (
            "free-threaded Python is not supported: the native part of moqext uses the stable ABI, which a "
            "build without the GIL does not load; use the build with the GIL of the same version"
        )
    else:
        reason = (
            f"moqext._C, the native part of moqext, is not built in {__path__[0]}: run "
            "`make demo` or `python setup.py build_ext --inplace` there, or `pip install .` and start Python "
            "elsewhere"
        )
    raise ImportError(reason, name="moqext._C") from None

from moqext import ops
from moqext._C import ConfigError, UnsupportedQuantization, num_threads, set_num_threads
from moqext.checkpoint import Checkpoint
from moqext.errors import CheckpointError
from moqext.layers.kv_cache import KVCacheMethod, KVScales
from moqext.layers.linear import LinearMethod
from moqext.layers.load import Layer
from moqext.layers.load_experts import ExpertLayer, ExpertPart
from moqext.layers.method import ParamSpec, Timing
from moqext.layers.moe import MoEMethod
from moqext.layers.read_stacks import stack_experts
from moqext.ops import route
from moqext.reader.config.quant_config import Conflict, LayerQuant, QuantConfig, detect
from moqext.reader.problems import Problem
from moqext.reader.records import KVRecord, LayerRecord, Projection
from moqext.tools.convert import Conversion
from moqext.tools.quantize import Quantization
from moqext.tools.repair import Repair, RepairPlan
from moqext.variables import check_variables

__version__: str = _C.build_info()["version"]
check_variables(stacklevel=2)
del check_variables

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Conflict",
    "Conversion",
    "ExpertLayer",
    "ExpertPart",
    "KVCacheMethod",
    "KVRecord",
    "KVScales",
    "Layer",
    "LayerQuant",
    "LayerRecord",
    "LinearMethod",
    "MoEMethod",
    "ParamSpec",
    "Problem",
    "Projection",
    "QuantConfig",
    "Quantization",
    "Repair",
    "RepairPlan",
    "Timing",
    "UnsupportedQuantization",
    "__version__",
    "detect",
    "num_threads",
    "ops",
    "route",
    "set_num_threads",
    "stack_experts",
]


def __dir__() -> list[str]:
    """The public names: those above and the modules that users import."""
    return sorted([*__all__, "reference"])
