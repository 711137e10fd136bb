"""What config.json says of experts that their tensors do not: the activation, and how many a token has.

The same thing goes by many names, in config.json itself or in the part that describes the text model of a
larger one, and is one value or a list of one for each layer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from moqext.moe import Activation
from moqext.naming import INTERLEAVED_ARCHITECTURES

_TEXT_MODELS = ("text_config", "language_config", "llm_config", "thinker_config")
_ACTIVATIONS = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function")
"""An architecture with two activations has that of its experts under the more special name."""
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
_SPELLINGS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu2": "relu2",
    "relu_squared": "relu2",
    "swigluoai": "swigluoai",
}
_LAYER = re.compile(r"(?:^|\.)layers\.(?P<index>[0-9]{1,6})(?:\.|$)")


class ExpertConfig(NamedTuple):
    """What a layer of experts computes, apart from its tensors.

    Attributes:
        activation: as `MoEMethod` has it; None where config.json names none, or one that it does not have.
        alpha, beta, limit: of the activation, None for its own.
        top_k: experts of a token, None where config.json does not say.
        unknown: what config.json asks for that `MoEMethod` does not compute, as "hidden_act 'mish'"; else "".
    """

    activation: Activation | None
    alpha: float | None
    beta: float | None
    limit: float | None
    top_k: int | None
    unknown: str


def read_expert_config(config: Mapping[str, Any], architectures: Sequence[str], layer: str) -> ExpertConfig:
    """What config.json says of the experts of a layer.

    Args:
        config: the content of config.json.
        architectures: of the checkpoint.
        layer: name of the container of experts, which has the number of the layer in it.
    """
    settings = _text_model(config)
    top_k = _number(_first(settings, _TOP_K, layer))
    spelled = _first(settings, _ACTIVATIONS, layer)
    after = _number(_of_layer(settings.get("swiglu_limits"), layer))
    if after:
        what = f"swiglu_limits {after:g}, which clamps after the activation"
        return ExpertConfig(None, None, None, None, _count(top_k), what)
    alpha, limit = (_number(_of_layer(settings.get(f"swiglu_{name}"), layer)) for name in ("alpha", "limit"))
    # gpt-oss calls its activation silu.
    by_name = not INTERLEAVED_ARCHITECTURES.isdisjoint(architectures) or spelled == "swigluoai"
    if by_name or alpha is not None:
        return ExpertConfig("swigluoai", alpha, None, limit, _count(top_k), "")
    if not isinstance(spelled, str):
        return ExpertConfig(None, None, None, limit or None, _count(top_k), "")
    activation = _SPELLINGS.get(spelled.lower())
    unknown = "" if activation else f"the activation {spelled[:64]!r}"
    return ExpertConfig(activation, None, None, limit or None, _count(top_k), unknown)


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text model: those of the whole, and before them those of the part of its own."""
    for name in _TEXT_MODELS:
        part = config.get(name)
        if isinstance(part, Mapping):
            return cast(Mapping[str, Any], {**config, **_text_model(part)})
    return config


def _first(settings: Mapping[str, Any], names: Sequence[str], layer: str) -> Any:
    found = (_of_layer(settings.get(name), layer) for name in names)
    return next((value for value in found if value is not None), None)


def _of_layer(value: Any, layer: str) -> Any:
    """A setting of one layer, where there is a list of them."""
    if not isinstance(value, list):
        return value
    match = _LAYER.search(layer)
    index = int(match["index"]) if match else len(value)
    return value[index] if index < len(value) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(value: float | None) -> int | None:
    return int(value) if value is not None and value == int(value) and value > 0 else None
