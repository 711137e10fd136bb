"""Heads of q and k in one kernel of moqext: their norms, the rotary embedding and the write to the cache.

vLLM's models call a kernel for each, which know no programmatic launch; that is a tenth of a token's time for
small models. Nothing in vLLM stands for the three together, so the forward of a model's attention is replaced
where its source is one that is known here. Another forward stays, and the model's own runs call by call where
tensors are others. In a graph that torch.compile makes the kernel is an operation.

The cache is written where vLLM's own function for that is a known one, too, which says how the cache is laid
out, and where it has the dtype of the model; vLLM's function then passes over the call. torch.compile's
graphs end at that function, so the operation in them looks the cache up when it runs.
"""

import functools
import logging
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from moqext import ops
from moqext_torch.op import is_plain_call
from moqext_torch.stepping_aside import tell_fusion
from moqext_torch.texts import digest
from moqext_vllm.settings import runs_ops

try:
    from vllm.model_executor.layers.attention.attention import get_attention_context
except ImportError:
    get_attention_context = None
try:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import (
        LayerNameType,
        _encode_layer_name,
        _resolve_layer_name,
        direct_register_custom_op,
    )
except ImportError:
    LayerNameType = None

logger = logging.getLogger("vllm.moqext")

MODELS = "vllm.model_executor.models"
CLASSES = (
    ("llama", "LlamaAttention"),
    ("mixtral", "MixtralAttention"),
    ("qwen2_moe", "Qwen2MoeAttention"),
    ("qwen3", "Qwen3Attention"),
    ("qwen3_moe", "Qwen3MoeAttention"),
)
WITHOUT_NORMS, WITH_NORMS = "68adeb64b91d", "4c23b5016f14"
"""Digests of the forwards of vLLM 0.32 and 0.33, by whether they norm the heads of q and k."""
KNOWN_WRITE = "4d62bbe30c24"
"""Digest of their function that writes a cache [blocks, heads, slots of a block, k beside v]."""
WIDTHS = (32, 64, 128, 256)
"""Widths of heads that moqext has a kernel for."""
HEADS, WRITES = "norms and rotary embedding of heads", "heads and the write to the cache"
"""Names of the two fusions in the log."""


def take_over() -> None:
    """Replaces the forward of the classes that are imported and known, once."""
    for module, name in CLASSES:
        found = getattr(sys.modules.get(f"{MODELS}.{module}"), name, None)
        if found is None or "moqext_own_forward" in vars(found):
            continue
        ours = {WITHOUT_NORMS: forward, WITH_NORMS: forward_with_norms}.get(digest(found.forward))
        if ours is None:
            tell_fusion(logger, HEADS, f"the forward of {name} is none that moqext knows")
            continue
        found.moqext_own_forward = found.forward
        found.forward = ours
        found.moqext_turns = False  # of one that is being made now
        found.__init__ = _deciding(found.__init__)


def _deciding(make: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of an attention, after which the layer knows whether moqext turns its heads."""

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if type(self).__init__ is init:  # a subclass may change what there is, after this
            self.moqext_turns = _is_ours(self, getattr(self, "q_norm", None), getattr(self, "k_norm", None))

    return init


def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention without norms of heads."""
    return _run(self, positions, hidden_states, None, None)


def forward_with_norms(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention with norms of the heads of q and k."""
    return _run(self, positions, hidden_states, self.q_norm, self.k_norm)


def _run(
    self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, q_norm: Any, k_norm: Any
) -> torch.Tensor:
    compiles = torch.compiler.is_compiling()
    if not self.moqext_turns or (compiles and LayerNameType is None):
        result: torch.Tensor = self.moqext_own_forward(positions, hidden_states)
        return result
    qkv, _ = self.qkv_proj(hidden_states)
    sizes, rotary = [self.q_size, self.kv_size, self.kv_size], self.rotary_emb
    cache: dict[str, torch.Tensor] = {}
    if _fits(qkv, positions, q_norm):
        table = rotary._match_cos_sin_cache_dtype(qkv)
        heads = self.q_size // rotary.head_size, self.kv_size // rotary.head_size
        q_weight, k_weight = (None if norm is None else norm.weight.data for norm in (q_norm, k_norm))
        eps = 0.0 if q_norm is None else q_norm.variance_epsilon
        if compiles:
            name = _encode_layer_name(self.attn.layer_name)
            torch.ops.vllm.moqext_qk_norm_rope(qkv, positions, table, *heads, q_weight, k_weight, eps, name)
        else:
            cache = _find_cache(self.attn, qkv)
            ops.qk_norm_rope(
                qkv, positions, table, *heads, q_weight=q_weight, k_weight=k_weight, eps=eps, **cache
            )
        q, k, v = qkv.split(sizes, dim=-1)
    else:
        q, k, v = qkv.split(sizes, dim=-1)
        q, k = (
            part if norm is None else norm(part.unflatten(-1, (-1, rotary.head_size))).flatten(-2)
            for part, norm in ((q, q_norm), (k, k_norm))
        )
        q, k = rotary(positions, q, k)
    attended = _attend_stored(self.attn, q, k, v) if cache else self.attn(q, k, v)
    output: torch.Tensor = self.o_proj(attended)[0]
    return output


def _turn_in_graph(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    q_heads: int,
    k_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    layer_name: LayerNameType,
) -> None:
    """Runs the kernel as an operation of a compiled graph.

    A piece of a model that is captured by itself has no part of the cache: vLLM's function, which stands
    between two pieces, runs at each replay.
    """
    if not qkv.is_cuda:
        _turn_in_steps(qkv, positions, table, ((q_heads, q_weight), (k_heads, k_weight)), eps)
        return
    context = get_forward_context()
    attn = context.no_compile_layers[_resolve_layer_name(layer_name)]
    cache = {} if context.cudagraph_runtime_mode.name == "PIECEWISE" else _find_cache(attn, qkv)
    ops.qk_norm_rope(
        qkv, positions, table, q_heads, k_heads, q_weight=q_weight, k_weight=k_weight, eps=eps, **cache
    )
    if cache:
        attn.impl.moqext_stored = True  # until vLLM's function comes


def _turn_in_steps(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    parts: tuple[tuple[int, torch.Tensor | None], ...],
    eps: float,
) -> None:
    """Turns heads on the CPU, part by part."""
    width, begin = table.shape[1], 0
    cos, sin = (half.repeat(1, 2)[None] for half in table[positions].split(width // 2, -1))
    for count, weight in parts:
        part = qkv[:, begin : begin + count * width].view(1, len(qkv), count, width)
        value = part if weight is None else ops.rms_norm(part, weight, eps)
        part.copy_(ops.rotary_embedding(value, cos, sin))
        begin += count * width


def _returns_nothing(*args: Any) -> None:
    """The operation as a graph knows it."""


if LayerNameType is not None:
    direct_register_custom_op(
        "moqext_qk_norm_rope", _turn_in_graph, mutates_args=["qkv"], fake_impl=_returns_nothing
    )


def _attend_stored(attn: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Attention of keys and values that are in the cache already."""
    attn.impl.moqext_stored = True
    try:
        return attn(q, k, v)
    finally:
        attn.impl.moqext_stored = False


def _find_cache(attn: Any, qkv: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of `qk_norm_rope` for what is to be stored of qkv, none where vLLM stores it."""
    if not _stores(attn):
        return {}
    _, _, pages, slots = get_attention_context(attn.layer_name)
    if slots is None or pages.dim() != 4:
        return {}  # nothing is stored when memory is measured
    if pages.dtype != qkv.dtype:
        tell_fusion(logger, WRITES, "the cache has another dtype than the model, with scales")
        return {}
    keys, values = pages.transpose(1, 2).split(attn.impl.head_size, dim=-1)
    return {"k_cache": keys, "v_cache": values, "slots": slots}


def _stores(attn: Any) -> bool:
    """Whether moqext may write the layer's cache; vLLM's function passes over what it wrote, from then on."""
    impl = attn.impl
    known: bool | None = vars(impl).get("moqext_stores")
    if known is None:
        why = _find_other_write(attn)
        if why:
            tell_fusion(logger, WRITES, why, attn.layer_name)
        known = not why
        impl.moqext_stores, impl.moqext_stored = known, False
        if known:
            impl.do_kv_cache_update = MethodType(_store_once, impl)
    return known


def _find_other_write(attn: Any) -> str:
    """The reason why moqext does not write a layer's cache, empty for none."""
    if get_attention_context is None:
        return "this vLLM has no get_attention_context"
    if digest(getattr(type(attn.impl), "do_kv_cache_update", None)) != KNOWN_WRITE:
        return f"the write of {type(attn.impl).__name__} is none that moqext knows"
    if attn.attn_type != "decoder" or attn.kv_sharing_target_layer_name is not None:
        return "the layer has no keys and values of its own"
    return "" if attn.query_quant is None else "queries are quantized"


def _store_once(impl: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of `do_kv_cache_update`."""
    if impl.moqext_stored:
        impl.moqext_stored = False
    else:
        type(impl).do_kv_cache_update(impl, *args, **kwargs)


def _is_ours(attention: Any, q_norm: Any, k_norm: Any) -> bool:
    """Whether the layer is of a model of moqext and has a rotary embedding and norms of the usual kind."""
    config = getattr(getattr(attention.attn, "quant_method", None), "quant_config", None)
    if not (runs_ops() and getattr(config, "runs_neighbours", False)):
        return False
    why = _find_unusual(attention.rotary_emb, q_norm, k_norm)
    if why:
        tell_fusion(logger, HEADS, why, attention.attn.layer_name)
    return not why


def _find_unusual(rotary: Any, q_norm: Any, k_norm: Any) -> str:
    """The reason why moqext's kernel does not do a rotary embedding and norms of heads, empty for none."""
    usual = isinstance(rotary, RotaryEmbedding) and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
    if not usual:
        return f"the rotary embedding is a {type(rotary).__name__}"
    if not rotary.is_neox_style or rotary.rotary_dim != rotary.head_size:
        return "the rotary embedding is interleaved, or turns a part of a head"
    if rotary.head_size not in WIDTHS:
        return f"heads of {rotary.head_size} values"
    if rotary.use_flashinfer or getattr(rotary, "use_aiter", False):
        return "another library has the rotary embedding"
    return "" if _are_usual(q_norm, k_norm, rotary.head_size) else "norms of heads are no usual ones"


def _are_usual(q_norm: Any, k_norm: Any, width: int) -> bool:
    """Whether there are no norms, or two that differ in their weights only."""
    if q_norm is None or k_norm is None:
        return q_norm is k_norm
    return q_norm.variance_epsilon == k_norm.variance_epsilon and all(
        isinstance(norm, RMSNorm)
        and norm.has_weight
        and norm.variance_size_override is None
        and norm.hidden_size == width
        for norm in (q_norm, k_norm)
    )


def _fits(qkv: torch.Tensor, positions: torch.Tensor, q_norm: Any) -> bool:
    """Whether moqext has a call, with one position for each row: on the CPU in a compiled graph alone."""
    return (
        (torch.compiler.is_compiling() or (qkv.is_cuda and is_plain_call(qkv)))
        and qkv.dim() == 2
        and (qkv.dtype in (torch.bfloat16, torch.float16) or not qkv.is_cuda)
        and (q_norm is None or q_norm.weight.dtype == qkv.dtype)
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and positions.is_contiguous()
    )
