"""moqext in Transformers: `from_pretrained` of a ModelOpt checkpoint, run from its own codes and scales.

    import moqext_transformers
    model = AutoModelForCausalLM.from_pretrained("DIR")

docs/transformers.md has the whole of it.
"""

from importlib.util import find_spec

if _absent := [name for name in ("torch", "transformers") if find_spec(name) is None]:
    raise ImportError(
        f"moqext_transformers needs {' and '.join(_absent)}, which is not installed: "
        f"pip install '.[transformers]' in a checkout of moqext, or pip install {' '.join(_absent)}",
        name=_absent[0],
    )

from moqext_transformers.cache import kv_cache
from moqext_transformers.calibration import calibrate
from moqext_transformers.fusing import fuse
from moqext_transformers.loading import from_pretrained, load_config
from moqext_transformers.quantizer import ModelOptConfig, ModelOptQuantizer

__all__ = [
    "ModelOptConfig",
    "ModelOptQuantizer",
    "calibrate",
    "from_pretrained",
    "fuse",
    "kv_cache",
    "load_config",
]
