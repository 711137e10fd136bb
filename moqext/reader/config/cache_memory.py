"""Memory that the KV cache of a model takes, by its config.json.

An attention layer keeps two vectors of `num_key_value_heads * head_dim` for each token, or one of
`kv_lora_rank + qk_rope_head_dim` where attention is compressed (MLA); sliding attention keeps those of a
window. Layers of other kinds (Mamba, linear attention) keep a state that does not grow with the tokens and is
not counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moqext.algorithms import ALGORITHMS

_PLAIN_BYTES = 2.0
"""Bytes of an element of a cache that is not quantized."""

_ATTENTION = ("full_attention", "attention", "chunked_attention", "hybrid")
_SLIDING = "sliding_attention"


class CachePart(NamedTuple):
    """Layers that keep as much.

    Attributes:
        layers: how many.
        token_bytes: of one layer for each token.
        window: the most tokens they keep, None for all.
    """

    layers: int
    token_bytes: float
    window: int | None


def cache_parts(config: Mapping[str, Any], algo: str | None) -> tuple[CachePart, ...]:
    """The layers of a model that cache, by how much; empty where config.json does not tell.

    Args:
        config: what config.json holds; of a multimodal model its text part counts.
        algo: how the cache is quantized, None for 16 bits.
    """
    text = next(
        (config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config
    )
    layers = _number(text, "num_hidden_layers")
    values = _token_values(text)
    if layers is None or values is None:
        return ()
    size = values * _element_bytes(algo)
    full, sliding = _layers(text, layers)
    window = _number(text, "sliding_window")
    if window is None:
        full, sliding = full + sliding, 0
    parts = [CachePart(full, size, None), CachePart(sliding, size, window)]
    return tuple(part for part in parts if part.layers)


def cache_bytes(parts: Sequence[CachePart], tokens: int) -> float:
    """Bytes of the cache of one sequence of so many tokens."""
    return sum(part.layers * part.token_bytes * min(tokens, part.window or tokens) for part in parts)


def _element_bytes(algo: str | None) -> float:
    """Bytes of an element, with its share of a block's scale, which has one byte."""
    if algo is None:
        return _PLAIN_BYTES
    facts = ALGORITHMS.get(algo.removesuffix("_AFFINE"))
    if facts is None:
        return 1.0  # INT8, the one format of a cache that no weight is called by
    codes = 0.5 if facts.codes == "e2m1" else 1.0
    return codes + 1 / facts.group_size if facts.group_size else codes


def _token_values(config: Mapping[str, Any]) -> int | None:
    """Numbers that a layer keeps for a token."""
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    if rank is not None and rope is not None:
        return rank + rope
    heads = _number(config, "num_attention_heads")
    kept = _number(config, "num_key_value_heads") or heads
    width = _number(config, "head_dim")
    hidden = _number(config, "hidden_size")
    if width is None and hidden is not None and heads:
        width = hidden // heads
    return 2 * kept * width if kept is not None and width is not None else None


def _layers(config: Mapping[str, Any], count: int) -> tuple[int, int]:
    """How many layers have full and how many have sliding attention."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("*"), 0
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(kinds, list):
        # Without a list the window, where one is set and not switched off, is every layer's.
        windowed = _number(config, "sliding_window") and config.get("use_sliding_window", True)
        return (0, count) if windowed else (count, 0)
    return sum(kind in _ATTENTION for kind in kinds), sum(kind == _SLIDING for kind in kinds)


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else None
