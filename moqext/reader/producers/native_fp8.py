"""Checkpoints of `quant_method: fp8`, in which makers of models store them (DeepSeek-V3, Qwen3-FP8).

    weight_block_size    tensors of a linear [N, K]                              read as
    [128, 128]           weight e4m3, weight_scale_inv float [N/128, K/128]      FP8_PB_WO
    none, static         weight e4m3, weight_scale (_inv), input_scale           FP8
    none, dynamic        weight e4m3, weight_scale (_inv): one                   FP8_PER_CHANNEL_PER_TOKEN

`weight_scale_inv` multiplies, in spite of its name. With activations scaled by token the one scale of a
weight stands for every row. A module without a scale is not quantized, whether `modules_to_not_convert` has
it or not; stacked experts have `<projection>_scale_inv`. DeepSeek-V4 keeps its experts in MXFP4, codes in i8
or F4 beside a `scale` in E8M0, under the same configuration.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from moqext.reader.files.tensor_header import TensorInfo
from moqext.reader.producers.fields import Fields
from moqext.reader.producers.producer import View, plain_modules, quantized_modules

_RENAMED = {
    "weight_scale_inv": "weight_scale",
    "activation_scale": "input_scale",
    "activation_scale_inv": "input_scale",
}
_STACKED = re.compile(r"(?P<stack>.+\.(?:gate_up_proj|gate_proj|up_proj|down_proj))_scale_inv")


class NativeFp8:
    """The reading of one checkpoint; see `Producer`."""

    def __init__(self, file: str, path: str, document: Mapping[str, Any]) -> None:
        """Reads the configuration; arguments as of `CompressedTensors`."""
        fields = Fields(file, path, document)
        block = fields.numbers("weight_block_size")
        if block not in (None, [128, 128]):
            raise fields.wrong("weight_block_size", "[128, 128]", str(block))
        code = fields.text("fmt")
        if code not in (None, "e4m3", "float8_e4m3fn"):
            raise fields.wrong("fmt", "e4m3", code)
        scheme = fields.text("activation_scheme") or "dynamic"
        if scheme not in ("dynamic", "static"):
            raise fields.wrong("activation_scheme", "'dynamic' or 'static'", scheme)
        self._by_row = block is None and scheme == "dynamic"
        whole = "FP8" if scheme == "static" else "FP8_PER_CHANNEL_PER_TOKEN"
        self._algo = whole if block is None else "FP8_PB_WO"
        self._ignored = [*fields.texts("modules_to_not_convert"), *fields.texts("ignored_layers")]

    def document(self, tensors: Mapping[str, TensorInfo], names: Collection[str]) -> dict[str, Any]:
        """See `Producer`."""
        excluded = sorted({*self._ignored, *plain_modules(tensors)})
        quantization: dict[str, Any] = {
            "quant_algo": self._algo,
            "kv_cache_quant_algo": None,
            "exclude_modules": excluded,
        }
        algos = {
            module: self._algo if tensors[f"{module}.weight"].dtype == "F8_E4M3" else "MXFP4"
            for module in quantized_modules(tensors)
        }
        if "MXFP4" in algos.values():
            quantization["quant_algo"] = "MIXED_PRECISION"
            quantization["quantized_layers"] = {
                module: {"quant_algo": algo} for module, algo in algos.items()
            }
        return {"producer": {"name": "quant_method fp8", "version": None}, "quantization": quantization}

    def notes(self) -> tuple[str, ...]:
        """See `Producer`."""
        return ()

    def rename(self, tensor: str) -> str:
        """See `Producer`."""
        module, dot, role = tensor.rpartition(".")
        if dot and role in _RENAMED:
            return f"{module}.{_RENAMED[role]}"
        stacked = _STACKED.fullmatch(tensor)
        return f"{stacked['stack']}_weight_scale" if stacked else tensor

    def view(self, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> View | None:
        """See `Producer`."""
        name = self.rename(info.name)
        if self._by_row and info.numel == 1 and name.endswith(".weight_scale"):
            weight = tensors.get(name.removesuffix("_scale"))
            if weight is not None and weight.dtype == "F8_E4M3" and len(weight.shape) == 2:
                return View(name, weight.shape[:1], "rows")
        return View(name, info.shape)
