"""Where SGLang looks quantization methods up, and what moqext changes there.

SGLang has no function that registers a method, and tests the names of its own in many places. So moqext takes
over the values behind the names "modelopt", "modelopt_fp8", "modelopt_fp4" and "modelopt_mixed", with classes
that are subclasses of SGLang's. A hook lets SGLang recognise the algorithms that it does not know itself.
"""

from typing import Any

from sglang.srt.layers import linear
from sglang.srt.layers import quantization as tables
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from moqext_sglang.config import CONFIGS, read_checkpoint, runs_any, sglang_name
from moqext_sglang.linear import MoqextLinearMethod

_DETECTION = "sglang.srt.configs.model_config.ModelConfig._parse_modelopt_quant_config"


def register_methods() -> None:
    """See `moqext_sglang.register`."""
    methods = getattr(tables, "QUANTIZATION_METHODS", None)
    loaders = getattr(linear, "WEIGHT_LOADER_V2_SUPPORTED", None)
    if not isinstance(methods, dict) or not isinstance(loaders, list) or not CONFIGS.keys() <= methods.keys():
        raise RuntimeError(
            "moqext: this SGLang has no QUANTIZATION_METHODS with ModelOpt's names, or no "
            "WEIGHT_LOADER_V2_SUPPORTED; it goes on with its own methods"
        )
    if methods["modelopt_fp4"] is CONFIGS["modelopt_fp4"]:
        return
    methods.update(CONFIGS)
    getattr(tables, "CPU_QUANTIZATION_METHODS", {}).update(CONFIGS)
    loaders.append(MoqextLinearMethod.__name__)
    HookRegistry.register(_DETECTION, recognise, HookType.AFTER)


def recognise(result: dict[str, Any] | None, _: Any, document: dict[str, Any]) -> dict[str, Any] | None:
    """Answers SGLang about a configuration, with the algorithms that moqext alone runs.

    Args:
        result: SGLang's own answer, None where it would load the model as if it were not quantized.
        _: its ModelConfig.
        document: hf_quant_config.json, or {"quantization": quantization_config of config.json}.

    Returns:
        Another answer, or None for SGLang's own.

    Raises:
        ConfigError: ModelOpt wrote the configuration, and it holds something unknown.
    """
    if result is not None and result.get("quant_method") != "w4afp8":
        return None
    inner = document.get("quantization", document)
    if not isinstance(inner, dict) or not inner:
        return None
    producer = document.get("producer") or inner.get("producer") or {}
    name = str(producer.get("name", "")) if isinstance(producer, dict) else ""
    if inner.get("quant_method") != "modelopt" and not name.startswith("modelopt"):
        return None
    read = read_checkpoint(document if "producer" in document else inner)
    config = read.config
    if config.quant_algo is None:
        return None
    if not runs_any(read):
        return None
    return {"quant_method": sglang_name(config), "quant_algo": config.quant_algo}
