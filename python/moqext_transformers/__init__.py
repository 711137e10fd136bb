"""moqext in Transformers: `from_pretrained` of a ModelOpt checkpoint, run from its own codes and scales.

    import moqext_transformers
    model = AutoModelForCausalLM.from_pretrained("DIR")

docs/transformers.md has the whole of it.
"""

from moqext_transformers.cache import kv_cache
from moqext_transformers.fusing import fuse
from moqext_transformers.loading import from_pretrained, load_config
from moqext_transformers.quantizer import ModelOptConfig, ModelOptQuantizer

__all__ = ["ModelOptConfig", "ModelOptQuantizer", "from_pretrained", "fuse", "kv_cache", "load_config"]
