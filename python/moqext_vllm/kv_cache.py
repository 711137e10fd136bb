"""The scales of a quantized key/value cache, checked before vLLM takes them."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from moqext import CheckpointError, KVCacheMethod
from moqext_vllm.dummies import makes_weights_up
from moqext_vllm.parameters import is_marked, mark

ABSENT = -1.0
"""Value by which vLLM knows a scale that no checkpoint has."""
SCALES = ("k_scale", "v_scale", "q_scale")


def refuse_cache(kv_cache_quant_algo: str | None) -> None:
    """Raises where a cache format does not run, as the affine one with its biases.

    Raises:
        UnsupportedQuantization: it does not run.
    """
    KVCacheMethod(kv_cache_quant_algo)


class MoqextKVCacheMethod(BaseKVCacheMethod):  # type: ignore[misc]
    """Loads the scales of an attention's queries, keys and values as vLLM does; none that is no scale.

    Args:
        quant_config: the configuration that has this method.
        prefix: the attention's name.
    """

    def __init__(self, quant_config: Any, prefix: str) -> None:
        super().__init__(quant_config)
        self.prefix = prefix
        self.is_made_up = makes_weights_up()

    def create_weights(self, layer: torch.nn.Module) -> None:
        """Gives the attention a parameter for each scale, which stays absent where vLLM makes weights up.

        They are float32: vLLM's have the dtype of the model at first, whose rounding a reload then undoes. A
        scale that nothing fills has a mark, since a damaged checkpoint may hold vLLM's value for that.
        """
        super().create_weights(layer)
        for name in SCALES:
            if (scale := getattr(layer, name, None)) is not None:
                scale.data = scale.data.float()
                scale.dummy_weight_value = ABSENT
                if not self.is_made_up:
                    mark(scale.data)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Checks the scales, completes them (one of two serves both), and hands them to vLLM.

        Raises:
            CheckpointError: a scale is zero, negative, infinite or NaN.
        """
        held = {name: getattr(layer, name) for name in SCALES if getattr(layer, name, None) is not None}
        absent = {name for name, scale in held.items() if is_marked(scale.data.view(1))}
        if self.is_made_up:
            absent |= {name for name, scale in held.items() if float(scale) == ABSENT}
        found = {name: float(scale) for name, scale in held.items() if name not in absent}
        for name in absent:
            held[name].data.fill_(ABSENT)
        try:
            scales = KVCacheMethod(self.quant_config.config.kv_cache_quant_algo or "FP8").prepare(found)
        except ValueError as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        if {"k_scale", "v_scale"} & found.keys():
            held["k_scale"].data.fill_(scales.k_scale)
            held["v_scale"].data.fill_(scales.v_scale)
        super().process_weights_after_loading(layer)
