"""fuse: decoder layers in fewer kernels, where the model's text is one that is known.

A layer of Transformers has some 45 small kernels between its linears, which take longer than linears in four
bits. The modules that are known here keep their place, names and tensors and get a `forward` of the same
steps, each rounded where it was, in fewer calls: q, k and v are one linear, gate and up another, and norms,
activation and rotary embedding are one kernel each. Routers of experts are one behind their logits.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moqext_torch import QuantLinear, rms_norm, rotary_embedding, silu_and_mul
from moqext_torch.stepping_aside import tell_fusion
from moqext_torch.texts import digest, global_of
from moqext_transformers.fused_class import FUSED_DTYPES, Fused, FusedCall, text_of, turn_into
from moqext_transformers.fused_linear import FusedLinear, Part
from moqext_transformers.routers import fuse_router

logger = logging.getLogger(__name__)

Fusing = bool | str
"""Whether a module was fused, or why one that might be was not."""


def fuse(model: torch.nn.Module) -> dict[str, int]:
    """Fuses what is known in a model; `from_pretrained` does it by itself.

    State dicts and files stay those of the checkpoint: names, tensors, shapes. `self_attn.q_proj` and its
    like stay modules that can be called, and hold no tensors. A module that is put in their place, a hook on
    one and a patched `forward` work as without fusing, at the cost of calls. What is not known is left alone,
    and the log has a line for each kind and reason (level INFO).

    Args:
        model: with moqext's linears; it is changed in place. One that was fused stays as it is.

    Returns:
        How many "norms", "attentions", "mlps", "layers" and "routers" were fused by this call.

    Raises:
        RuntimeError: a linear to be fused, prepared before, has the checkpoint's tensors no more.
    """
    counts = dict.fromkeys(("norms", "attentions", "mlps", "layers", "routers"), 0)
    modules = {name: module for name, module in model.named_modules() if "forward" not in module.__dict__}
    for kind, turn in (
        ("norms", _fuse_norm),
        ("mlps", _fuse_mlp),
        ("attentions", _fuse_attention),
        ("layers", _fuse_layer),  # after their norms
        ("routers", fuse_router),  # by their blocks
    ):
        for name, module in modules.items():
            found = turn(module)
            if isinstance(found, str):
                tell_fusion(logger, kind, found, name)
            else:
                counts[kind] += found
    return counts


def _is_new(module: torch.nn.Module) -> bool:
    return not isinstance(module, Fused)


def _unknown(module: torch.nn.Module) -> str:
    return f"the forward of {type(module).__name__} is none that moqext knows"


def _has_linears(module: Any, *names: str) -> bool:
    """Whether there are moqext's linears of these names."""
    return all(isinstance(getattr(module, name, None), QuantLinear) for name in names)


# ------------------------------------------------------------------------------------------------- norms

NORM = "5cf66a5b73d6"
"""weight * (z / sqrt(mean(z * z) + eps), rounded): LlamaRMSNorm and those of its text."""


class _Norm(Fused):
    """An RMS norm in one kernel, with the sum before it where that is asked for."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The norm; with a residual, that of the sum, and the sum."""
        weight = self.weight
        wants = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        if hidden_states.dtype == weight.dtype and weight.dtype in FUSED_DTYPES and not wants:
            return rms_norm(hidden_states, weight, self.variance_epsilon, residual)
        if residual is None:
            return super().forward(hidden_states)
        total = residual + hidden_states
        return super().forward(total), total


def _fuse_norm(module: Any) -> Fusing:
    if text_of(module) == NORM:
        return turn_into(module, _Norm)
    return _is_new(module) and type(module).__name__.endswith("RMSNorm") and _unknown(module)


# -------------------------------------------------------------------------------------------------- mlps

MLP = "4a9e0f851f1a"
"""down_proj(act_fn(gate_proj(x)) * up_proj(x)): LlamaMLP."""
PACKED_MLP = "4fcc0ee7ccb0"
"""An MLP with gate and up in one linear: Phi3MLP."""


def _gated(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """silu(gate) * up."""
    if gate_up.dtype in FUSED_DTYPES:
        return silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return activation(gate) * up


class _MLP(FusedCall):
    def fused_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_gated(self.fused_gate_up(x), self.act_fn))


class _PackedMLP(FusedCall):
    def fused_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_gated(self.gate_up_proj(hidden_states), self.activation_fn))


def _is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def _fuse_mlp(module: Any) -> Fusing:
    text, parts = text_of(module), ("gate_proj", "up_proj")
    is_packed = text == PACKED_MLP and _has_linears(module, "gate_up_proj")
    if not is_packed and not _has_linears(module, *parts):
        return False
    if text not in (MLP, PACKED_MLP):
        return _unknown(module)
    activation = module.activation_fn if is_packed else module.act_fn
    if not _is_silu(activation):
        return f"the activation is {type(activation).__name__}, and moqext's is SiLU"
    if is_packed:
        return turn_into(module, _PackedMLP, "activation_fn")
    if not _join(module, "fused_gate_up", parts):
        return UNLIKE
    return turn_into(module, _MLP, *parts, "act_fn")


UNLIKE = "their linears differ in format, dtype, input scale or bias"


def _join(module: Any, name: str, parts: tuple[str, ...]) -> bool:
    """Puts one linear beside those of the given names, which become parts of it."""
    fused = FusedLinear.join([getattr(module, part) for part in parts])
    if fused is None:
        return False
    for index, part in enumerate(parts):
        setattr(module, part, Part(fused, index))
    setattr(module, name, fused)  # behind the parts, as load_state_dict goes
    return True


# -------------------------------------------------------------------------------------------- attentions

ATTENTION = {
    "846481825c2f": "llama",
    "7426162820bb": "llama",  # from 5.24 on: caches are given what is left over
    "3901ee31f202": "qwen2",
    "6e70dd145672": "qwen2",
    "7986041b11ad": "mistral",
    "b20589918c59": "mistral",
    "3772093d3b0b": "qwen3",
    "e7ff52fc6f65": "qwen3",
}
"""Texts of attention that differ in norms of heads, in where a window stands, and in the cache's call."""
NEW_CACHE = ("7426162820bb", "6e70dd145672", "b20589918c59", "e7ff52fc6f65")
ROTARY = {"apply_rotary_pos_emb": "d7bb227c7094", "rotate_half": "b59dbfffe0ee"}
"""Rotary embedding of the halves of a head."""


class _Attention(FusedCall):
    """Attention with one linear for q, k and v, and one kernel that turns q and k."""

    def fused_forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Takes the model's arguments; the cache has two names, by the version of Transformers."""
        shape = hidden_states.shape[:-1]
        projected = self.fused_qkv(hidden_states).unflatten(-1, (-1, self.head_dim))
        queries, keys, values = (each.transpose(1, 2) for each in self._heads(projected, position_embeddings))
        cache = past_key_values if cache is None else cache
        if cache is not None:
            more = {"kwargs": kwargs} if self.gives_kwargs else {}
            keys, values = cache.update(keys, values, self.layer_idx, **more)
        dropout = self.attention_dropout if self.training else 0.0
        if self._is_one_token(queries, attention_mask, kwargs):
            attended, weights = self._attend_one(queries, keys, values, attention_mask, dropout), None
        else:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, self.eager_attention
            )
            attended, weights = attend(
                self,
                queries,
                keys,
                values,
                attention_mask,
                dropout=dropout,
                scaling=self.scaling,
                **self._window(),
                **kwargs,
            )
        return self.o_proj(attended.reshape(*shape, -1).contiguous()), weights

    def _heads(self, projected: torch.Tensor, angles: Any) -> tuple[torch.Tensor, ...]:
        """Turned q, turned k, and v, each [batch, tokens, heads, head_dim]."""
        q, kv = self._counts()
        turned = rotary_embedding(projected[:, :, : q + kv], *angles)
        return turned[:, :, :q], turned[:, :, q:], projected[:, :, q + kv :]

    def _counts(self) -> tuple[int, int]:
        """Heads of q, and of k and v."""
        rows = self.fused_qkv.out_partitions
        return rows[0] // self.head_dim, rows[1] // self.head_dim

    def _window(self) -> dict[str, Any]:
        """The arguments that this model alone gives its attention."""
        return {}

    def _is_one_token(self, queries: torch.Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
        """Whether torch's attention is asked about one token under a mask that all heads share."""
        return (
            self.config._attn_implementation == "sdpa"
            and queries.shape[2] == 1
            and isinstance(mask, torch.Tensor)
            and mask.dim() == 4
            and mask.shape[1] == 1
            and kwargs.get("position_bias") is None
            and kwargs.get("softcap") is None
        )

    def _attend_one(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        dropout: float,
    ) -> torch.Tensor:
        """Queries that share keys as rows of one head, so that no key is copied for each of them."""
        batch, heads, _, columns = queries.shape
        grouped = queries.reshape(batch, keys.shape[1], heads // keys.shape[1], columns)
        attended = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, dropout_p=dropout, scale=self.scaling
        )
        return attended.reshape(batch, 1, heads, columns)


class _WindowAttention(_Attention):
    """Qwen2: a window for some layers."""

    def _window(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class _ConfigWindowAttention(_Attention):
    """Mistral: a window for all layers."""

    def _window(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class _NormedAttention(_WindowAttention):
    """Qwen3: norms of the heads of q and k."""

    def _heads(self, projected: torch.Tensor, angles: Any) -> tuple[torch.Tensor, ...]:
        q, kv = self._counts()
        queries = self.q_norm(projected[:, :, :q].contiguous())
        keys = self.k_norm(projected[:, :, q : q + kv].contiguous())
        turned = (rotary_embedding(each, *angles) for each in (queries, keys))
        return *turned, projected[:, :, q + kv :]


_MIXINS = {
    "llama": _Attention,
    "qwen2": _WindowAttention,
    "mistral": _ConfigWindowAttention,
    "qwen3": _NormedAttention,
}


def _fuse_attention(module: Any) -> Fusing:
    text, parts = text_of(module), ("q_proj", "k_proj", "v_proj")
    forward: Callable[..., Any] = type(module).forward
    if not _has_linears(module, *parts):
        return False
    eager = global_of(forward, "eager_attention_forward")
    if text not in ATTENTION or eager is None:
        return _unknown(module)
    if not _turns_halves(forward):
        return f"the rotary embedding of {type(module).__name__} is none that moqext knows"
    if not _join(module, "fused_qkv", parts):
        return UNLIKE
    turn_into(module, _MIXINS[ATTENTION[text]], *parts)
    module.gives_kwargs, module.eager_attention = text in NEW_CACHE, eager
    return True


def _turns_halves(forward: Callable[..., Any]) -> bool:
    """Whether the rotary embedding that a forward calls is the known one."""
    apply = global_of(forward, "apply_rotary_pos_emb")
    if apply is None or digest(apply) != ROTARY["apply_rotary_pos_emb"]:
        return False
    half = global_of(apply, "rotate_half")
    return half is not None and digest(half) == ROTARY["rotate_half"]


# ------------------------------------------------------------------------------------------------ layers

LAYERS = ("81d96d2d9d08", "0a83a9a00cd4")
"""x + attention(norm(x)), then z + mlp(norm(z)): LlamaDecoderLayer, before 5.24 and from then on."""


class _Layer(FusedCall):
    """A layer whose second norm adds what comes before it."""

    def fused_forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes the model's arguments, of which all but the first go to attention."""
        for name, value in zip(self.argument_names, args, strict=False):
            kwargs[name] = value
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        normed, residual = self.post_attention_layernorm(attended, hidden_states)
        return residual + self.mlp(normed)


def _fuse_layer(module: Any) -> Fusing:
    text, norm = text_of(module), getattr(module, "post_attention_layernorm", None)
    if not isinstance(norm, _Norm) or not _is_new(module):
        return False
    if text not in LAYERS:
        return _unknown(module)
    cache = "past_key_values" if text == LAYERS[0] else "cache"
    turn_into(module, _Layer, "post_attention_layernorm")
    module.argument_names = ("attention_mask", "position_ids", cache, "use_cache", "position_embeddings")
    return True
