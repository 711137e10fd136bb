"""A key/value cache in FP8 under the checkpoint's scales."""

from typing import Any

import torch
from transformers import Cache

try:
    from transformers.cache_utils import Fp8QuantizedLayer
except ImportError:  # before 5.23
    Fp8QuantizedLayer = None

from moqext import KVCacheMethod, UnsupportedQuantization


def kv_cache(model: Any) -> Cache:
    """A cache for `generate(past_key_values=...)` that keeps keys and values as the checkpoint says.

    E4M3 codes under the scales of each attention, 1.0 where it has none; a value beyond the scale's range
    saturates. Keys and values of the first call reach the attention unquantized, as in every quantized cache
    of Transformers, later ones quantized.

    Args:
        model: from `from_pretrained`.

    Raises:
        UnsupportedQuantization: the checkpoint's cache is not FP8, or this Transformers has no FP8 cache.
        ValueError: the model has attention that does not see everything (sliding windows), which this cache
            cannot serve, or was not loaded by moqext.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if not hasattr(quantizer, "kv_scales"):
        raise ValueError("model: expected one that moqext_transformers has loaded")
    if quantizer.kv_cache_quant_algo != "FP8":
        raise UnsupportedQuantization(f"the checkpoint's cache is {quantizer.kv_cache_quant_algo}, not FP8")
    if Fp8QuantizedLayer is None:
        raise UnsupportedQuantization("this version of Transformers has no FP8 cache; 5.23 has")
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"model: its attention is {', '.join(sorted(kinds))}; the cache is for full_attention"
        )
    method = KVCacheMethod("FP8")
    scales = [method.prepare(found) for found in _by_layer(quantizer.kv_scales, config.num_hidden_layers)]
    return Cache(layers=[_ScaledLayer(each.k_scale, each.v_scale) for each in scales])


def _by_layer(scales: dict[str, dict[str, float]], count: int) -> list[dict[str, float]]:
    """The scales of each layer, by the number in the attention's name."""
    numbered = {
        int(part): found for name, found in scales.items() for part in name.split(".") if part.isdigit()
    }
    return [numbered.get(number, {}) for number in range(count)]


if Fp8QuantizedLayer is not None:

    class _ScaledLayer(Fp8QuantizedLayer):
        """Keys and values of one layer under given scales."""

        def __init__(self, k_scale: float, v_scale: float) -> None:
            super().__init__()
            self.k_scale, self.v_scale = k_scale, v_scale

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            self._quantized_keys = self._quantize(key_states, self.k_scale)
            self._quantized_values = self._quantize(value_states, self.v_scale)

        def _quantize(self, tensor: torch.Tensor, scale: Any = None) -> tuple[torch.Tensor, Any]:
            scale = 1.0 if scale is None else scale
            codes = (tensor.float() / scale).clamp(-self.fp8_max, self.fp8_max)
            return codes.to(self.fp8_dtype), scale
