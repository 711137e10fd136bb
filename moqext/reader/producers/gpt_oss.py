"""Checkpoints of `quant_method: mxfp4`, as gpt-oss: experts [E, N, K] in one tensor a projection.

    <projection>_blocks  u8 [E, N, K/32, 16], two codes a byte      read as  <projection>  u8 [E, N, K/2]
    <projection>_scales  u8 [E, N, K/32], E8M0                      <projection>_weight_scale
    <projection>_bias    float [E, N]                               the same

Everything but the experts is plain.
"""

from collections.abc import Collection, Mapping
from typing import Any

from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.producers.fields import Fields
from moqext.reader.producers.producer import View, plain_modules

_BLOCKS, _SCALES = "_blocks", "_scales"


class GptOss:
    """The reading of one checkpoint; see `Producer`."""

    def __init__(self, file: str, path: str, document: Mapping[str, Any]) -> None:
        """Reads the configuration; arguments as of `CompressedTensors`."""
        fields = Fields(file, path, document)
        self._ignored = fields.texts("modules_to_not_convert")

    def document(self, tensors: Mapping[str, TensorInfo], names: Collection[str]) -> dict[str, Any]:
        """See `Producer`."""
        quantization = {
            "quant_algo": "MXFP4",
            "kv_cache_quant_algo": None,
            "exclude_modules": sorted({*self._ignored, *plain_modules(tensors)}),
        }
        return {"producer": {"name": "quant_method mxfp4", "version": None}, "quantization": quantization}

    def notes(self) -> tuple[str, ...]:
        """See `Producer`."""
        return ()

    def rename(self, tensor: str) -> str:
        """See `Producer`."""
        if tensor.endswith(_BLOCKS):
            return tensor.removesuffix(_BLOCKS)
        return f"{tensor.removesuffix(_SCALES)}_weight_scale" if tensor.endswith(_SCALES) else tensor

    def view(self, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> View | None:
        """See `Producer`."""
        if info.name.endswith(_BLOCKS) and len(info.shape) == 4 and info.dtype == "U8":
            *outer, blocks, half = info.shape
            return View(self.rename(info.name), (*outer, blocks * half))
        return View(self.rename(info.name), info.shape)
