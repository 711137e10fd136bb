"""The linears and experts of a model by config.json alone, where no file has their shapes.

Models of the commonest form are known: attention of four projections, then a gated feed-forward network or
experts of that kind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moqext._C import UnsupportedQuantization
from moqext.algorithms import ALGORITHMS
from moqext.checkpoint import Checkpoint
from moqext.errors import CheckpointError
from moqext.layers.linear import LinearMethod
from moqext.layers.moe import MoEMethod
from moqext.reader.config.expert_config import read_expert_config
from moqext.reader.config.model_config import MAX_EXPERTS, MAX_LAYERS
from moqext.reader.config.quant_config import QuantConfig

EXPERTS = {"mixtral": "block_sparse_moe.experts", "qwen3_moe": "mlp.experts"}
"""Containers of experts by `model_type`, in a layer."""

MODELS = ("llama", "mistral", "qwen2", "qwen3", *EXPERTS)
"""Values of `model_type` whose sizes are known."""

MAX_SIZE = 1 << 24

Candidates = Iterator[tuple[str, Iterator[LinearMethod | MoEMethod]]]


def config_layers(checkpoint: Checkpoint, *, device: str, compute: str) -> Candidates:
    """Each layer of a pass by its name, with what makes its method; siblings of one format are fused.

    Args:
        checkpoint: of which the configuration is there.
        device: "cpu" or "cuda:N".
        compute: what is multiplied.

    Raises:
        CheckpointError: config.json is of no model in `MODELS`, or a size is missing.
    """
    config, quantization = checkpoint.model_config, checkpoint.config
    kind = config.get("model_type")
    if kind not in MODELS or quantization is None:
        raise CheckpointError(
            f"there are no weights, and sizes follow from config.json alone for model_type "
            f"{', '.join(MODELS)}, not {kind!r}: get the files, or name the model as org/name",
            file=checkpoint.directory,
        )
    sizes = _Sizes(checkpoint, config)
    options = {"device": device, "compute": compute}
    hidden = sizes("hidden_size")
    heads = sizes("num_attention_heads")
    keys = sizes("num_key_value_heads", heads)
    head = sizes("head_dim", max(1, hidden // heads))
    for number in range(sizes("num_hidden_layers", most=MAX_LAYERS)):
        layer = f"model.layers.{number}"
        qkv = {"q_proj": heads * head, "k_proj": keys * head, "v_proj": keys * head}
        yield from _linears(quantization, f"{layer}.self_attn", qkv, hidden, options)
        yield from _linears(quantization, f"{layer}.self_attn", {"o_proj": hidden}, heads * head, options)
        if kind in EXPERTS and _is_sparse(config, number):
            yield from _experts(checkpoint, quantization, f"{layer}.{EXPERTS[kind]}", sizes, options)
            continue
        inner = sizes("intermediate_size")
        yield from _linears(
            quantization, f"{layer}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, options
        )
        yield from _linears(quantization, f"{layer}.mlp", {"down_proj": hidden}, inner, options)
    if not config.get("tie_word_embeddings"):
        yield from _linears(quantization, "", {"lm_head": sizes("vocab_size")}, hidden, options)


class _Sizes:
    """Numbers of config.json by name; CheckpointError where one is missing or none."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        self._file, self._config = checkpoint.directory / "config.json", config

    def __call__(self, *names: Any, most: int = MAX_SIZE) -> int:
        """The first that is there, of names or a number in the place of the last."""
        for name in names:
            value = name if isinstance(name, int) else self._config.get(name)
            if type(value) is int and 0 < value <= most:
                return value
            if value is not None:
                break
        raise CheckpointError(f"{names[0]}: expected a number from 1 to {most}", file=self._file)


def _is_sparse(config: Mapping[str, Any], number: int) -> bool:
    """Whether a layer has experts, as Qwen's settings say it."""
    only = config.get("mlp_only_layers")
    step = config.get("decoder_sparse_step", 1)
    plain = isinstance(only, list) and number in only
    return not plain and (type(step) is not int or step < 1 or (number + 1) % step == 0)


def _linears(
    quantization: QuantConfig, parent: str, rows: Mapping[str, int], columns: int, options: dict[str, Any]
) -> Candidates:
    """Linears of one input: as one where they have one format."""
    names = {f"{parent}.{name}".lstrip("."): count for name, count in rows.items()}
    formats = {name: quantization.layer_quant(name)[:2] for name in names}
    groups = [names] if len(set(formats.values())) == 1 else [{name: count} for name, count in names.items()]
    for group in groups:
        algo, group_size = formats[next(iter(group))]
        if algo is not None:
            scaled = algo in ALGORITHMS and ALGORITHMS[algo].linear == "e4m3_tensor"
            about = {"group_size": group_size, "one_input_scale": scaled and len(group) > 1, **options}
            yield " + ".join(group), _linear(algo, columns, list(group.values()), about)


def _linear(algo: str, columns: int, rows: list[int], about: dict[str, Any]) -> Iterator[LinearMethod]:
    yield LinearMethod(algo, columns, rows, **about)


def _experts(
    checkpoint: Checkpoint, quantization: QuantConfig, name: str, sizes: _Sizes, options: dict[str, Any]
) -> Candidates:
    algo, group_size = quantization.layer_quant(name)[:2]
    if algo is None:
        return
    said = read_expert_config(checkpoint.model_config, checkpoint.architectures, name)
    number = sizes("num_experts", "num_local_experts", most=MAX_EXPERTS)
    inner = sizes("moe_intermediate_size", "intermediate_size")

    def make() -> Iterator[MoEMethod]:
        if said.top_k is None or said.unknown:
            raise UnsupportedQuantization(f"{name}: {said.unknown or 'no number of experts of a token'}")
        activation = said.activation or "silu"
        about = {"group_size": group_size, "activation": activation, **said.swiglu, **options}
        yield MoEMethod(algo, number, sizes("hidden_size"), inner, top_k=said.top_k, **about)

    yield name, make()
