"""The scales of a quantized key/value cache, as SGLang's attention reads them."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

from moqext import CheckpointError, KVCacheMethod, UnsupportedQuantization

logger = logging.getLogger(__name__)
_said: set[str] = set()


class MoqextKVCacheMethod(BaseKVCacheMethod):
    """Keys' and values' scales of one attention, checked by `moqext.KVCacheMethod`.

    Args:
        quant_config: the configuration that made it.
        kv_cache_quant_algo: as for `KVCacheMethod`.
        prefix: name of the attention.

    Raises:
        UnsupportedQuantization: a cache that has no method, as one with affine biases.
    """

    def __init__(self, quant_config: Any, kv_cache_quant_algo: str, prefix: str) -> None:
        super().__init__(quant_config)
        try:
            self.method = KVCacheMethod(kv_cache_quant_algo)
        except UnsupportedQuantization as error:
            raise UnsupportedQuantization(f"{prefix}: {error}") from None
        self.prefix = prefix
        self._loaded: set[str] = set()

    def create_weights(self, layer: torch.nn.Module) -> None:
        """Scales that remember whether they were loaded."""
        for name in ("k_scale", "v_scale"):
            scale: Any = torch.nn.Parameter(
                torch.tensor(float("nan"), dtype=torch.float32), requires_grad=False
            )
            scale._skip_weight_check = True
            scale.weight_loader = self._loader(name)
            setattr(layer, name, scale)

    def _loader(self, name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def load(scale: torch.Tensor, loaded: torch.Tensor) -> None:
            if loaded.numel() != 1:
                raise CheckpointError(f"{self.prefix}: {name}: expected one value, got {list(loaded.shape)}")
            scale.data.copy_(loaded.reshape(()))
            self._loaded.add(name)

        return load

    def process_weights_after_loading(self, layer: Any) -> None:
        """Resolves the scales: one serves both, none means 1.0, any other value is refused.

        Raises:
            CheckpointError: a scale that no intact checkpoint holds.
        """
        loaded = {name: getattr(layer, name).detach().cpu() for name in sorted(self._loaded)}
        try:
            scales = self.method.prepare(loaded)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.prefix}: {error}") from error
        for note in scales.notes:
            if note not in _said and not note.startswith("no q_scale"):
                _said.add(note)
                logger.warning("moqext: %s: %s", self.prefix, note)
        for name in ("k_scale", "v_scale"):
            value = getattr(scales, name)
            getattr(layer, name).data.fill_(value)
            setattr(layer, f"{name}_float", value)
