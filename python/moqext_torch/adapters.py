"""Adapters of PEFT (LoRA, DoRA) beside quantized linears, which stay frozen; needs `peft`."""

import warnings
from typing import Any, TypeVar

from peft.tuners import lora

from moqext_torch.quant_linear import QuantLinear

Config = TypeVar("Config")

_MERGING = (
    "the weight is quantized, and nothing can be merged into it: save the adapter, load the model with its "
    "weights dequantized, and merge there (docs/torch.md)"
)


class QuantLoraLinear(lora.Linear):  # type: ignore[misc]
    """PEFT's adapters beside a `QuantLinear`."""

    def __init__(self, base_layer: Any, *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():  # PEFT does not know the layer, and says so each time
            warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            super().__init__(base_layer, *args, **options)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuses: there is no weight to merge into.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"merge: {_MERGING}")


def adapt(config: Config) -> Config:
    """Has a `LoraConfig` put its adapters beside `QuantLinear` modules, too.

    PEFT does not save that: it is done again for a configuration that was read, and handed to
    `PeftModel.from_pretrained(model, directory, config=...)`.

    Args:
        config: a `peft.LoraConfig`, changed in place.

    Returns:
        It.

    Raises:
        TypeError: a configuration of another kind of adapters.
    """
    if not isinstance(config, lora.LoraConfig):
        raise TypeError(f"config: expected a peft.LoraConfig, got {type(config).__name__}")
    register: Any = config._register_custom_module
    register({QuantLinear: QuantLoraLinear})
    return config
