"""moqext in PyTorch: quantized linears and experts as modules, custom ops, and a way into any model.

    model = moqext_torch.replace_linears(model, "DIR", load=True)

docs/torch.md has the whole of it.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError(
        "moqext_torch needs PyTorch, which is not installed: pip install '.[torch]' in a checkout of moqext, "
        "or pip install torch",
        name="torch",
    )

from moqext_torch.activations import rms_norm, rotary_embedding, silu_and_mul
from moqext_torch.exchange import as_torch, prepared_tensors
from moqext_torch.experts import QuantExperts
from moqext_torch.quant_linear import QuantLinear
from moqext_torch.quant_moe import QuantMoE
from moqext_torch.replace import replace_linears
from moqext_torch.routing import route

__all__ = [
    "QuantExperts",
    "QuantLinear",
    "QuantMoE",
    "as_torch",
    "prepared_tensors",
    "replace_linears",
    "rms_norm",
    "rotary_embedding",
    "route",
    "silu_and_mul",
]
