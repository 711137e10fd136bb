"""Settings of experts in config.json that their tensors do not tell: activation, and experts of a token.

A setting goes by many names, in config.json itself or in the part that describes the text model of a
larger one, and is one value or a list of one for each layer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from moqext.ops.spelling import SWIGLU, Activation
from moqext.reader.naming import INTERLEAVED_ARCHITECTURES

_TEXT_MODELS = ("text_config", "language_config", "llm_config", "thinker_config")
_ACTIVATIONS = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function")
"""An architecture with two activations has that of its experts under the more special name."""
TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
"""Settings that say how many experts a token has."""

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
MAX_TOP_K = 32
"""Experts of a token with which `MoEMethod` runs."""

_LAYER = re.compile(r"(?:^|\.)layers\.(?P<index>[0-9]{1,6})(?:\.|$)")


class ExpertConfig(NamedTuple):
    """Everything that a layer of experts computes by, apart from its tensors.

    Attributes:
        activation: as `MoEMethod` has it; None where config.json names none.
        alpha, beta, limit: of the activation, None for its own.
        top_k: experts of a token, None where config.json does not say.
        unknown: what config.json asks for and `MoEMethod` does not compute, as "the activation 'mish'", and
            then nothing else is told; else "".
    """

    activation: Activation | None
    alpha: float | None
    beta: float | None
    limit: float | None
    top_k: int | None
    unknown: str

    @property
    def swiglu(self) -> dict[str, float | None]:
        """The numbers of the activation, as arguments of `MoEMethod`."""
        return {name: getattr(self, name) for name in SWIGLU}


def read_expert_config(config: Mapping[str, Any], architectures: Sequence[str], layer: str) -> ExpertConfig:
    """The settings of config.json for the experts of a layer.

    Args:
        config: the content of config.json.
        architectures: of the checkpoint.
        layer: name of the container of experts, which has the number of the layer in it.
    """
    settings = _text_model(config)
    top_k = read_top_k(settings, layer)
    spelled = _first(settings, _ACTIVATIONS, layer)
    alpha, limit = (_number(_of_layer(settings.get(f"swiglu_{name}"), layer)) for name in ("alpha", "limit"))
    limit = limit if limit and limit > 0 else None
    # gpt-oss calls its activation silu.
    by_name = not INTERLEAVED_ARCHITECTURES.isdisjoint(architectures) or alpha is not None
    activation = "swigluoai" if by_name else _SPELLINGS.get(str(spelled).lower())
    unknown = ""
    if after := _number(_of_layer(settings.get("swiglu_limits"), layer)):
        unknown = f"swiglu_limits {after:g}, which clamps after the activation"
    elif isinstance(spelled, str) and activation is None:
        unknown = f"the activation {spelled[:64]!r}"
    elif limit is not None and activation not in (None, "silu", "swigluoai"):
        unknown = f"swiglu_limit {limit:g} of {activation}"
    elif top_k is not None and top_k > MAX_TOP_K:
        unknown = f"{top_k} experts for a token"
    if unknown:
        return ExpertConfig(None, None, None, None, None, unknown)
    return ExpertConfig(activation, alpha if activation == "swigluoai" else None, None, limit, top_k, "")


def read_top_k(settings: Mapping[str, Any], layer: str) -> int | None:
    """How many experts a token of a layer has, None where the settings do not say.

    Args:
        settings: of the text model, by any of `TOP_K_NAMES`.
        layer: as for `read_expert_config`.
    """
    return _count(_first(settings, TOP_K_NAMES, layer))


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
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    return float(value) if known else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
