"""Linears, experts and layers that are gone whole, told by config.json and by what is beside them."""

from collections import Counter
from typing import Any, NamedTuple

import pytest

import moqext
from moqext.reader.findings.completeness import find_missing_layers
from moqext.reader.findings.find_layers import find_layers

SHAPES = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "gate": (96, 64), "up": (96, 64)}
SHAPES |= {"down": (64, 96)}
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


class Info(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def linear(name: str, shape: tuple[int, int]) -> dict[str, Info]:
    return {f"{name}.weight": Info("F8_E4M3", shape), f"{name}.weight_scale": Info("F32", ())}


def layer(number: int, *linears: str, container: str = "model.layers") -> dict[str, Info]:
    tensors = {f"{container}.{number}.norm.weight": Info("BF16", (64,))}
    for name in linears or ATTENTION + MLP:
        last = name.rpartition(".")[2].partition("_")[0]
        tensors |= linear(f"{container}.{number}.{name}", SHAPES.get(last, (64, 64)))
    return tensors


def experts(number: int, count: int, router: bool = True) -> dict[str, Info]:
    mlp = f"model.layers.{number}.mlp"
    tensors = {f"{mlp}.gate.weight": Info("BF16", (4, 64))} if router else {}
    for expert in range(count):
        for name in ("gate", "up", "down"):
            tensors |= linear(f"{mlp}.experts.{expert}.{name}_proj", SHAPES[name])
    return tensors


def lost(tensors: dict[str, Info], model: dict[str, Any] | None = None, **options: Any) -> list[str]:
    """The modules that are missing, as the problems name them."""
    config = moqext.QuantConfig.from_dict({"quantization": {"quant_algo": "FP8"}})
    found = find_layers(tensors, config, model=model, **options).all_problems()
    codes = ("missing_linear", "missing_expert", "shape_mismatch")
    return [f"{problem.code} {problem.layer}" for problem in found if problem.code in codes]


def without(names: tuple[str, ...], *gone: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in gone)


ALL = ATTENTION + MLP
LLAMA = {"num_hidden_layers": 3}


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("name", ALL)
def test_a_linear_that_is_gone_whole_is_named(layers: int, name: str) -> None:
    """Scales and all: nothing else in the files tells."""
    tensors = {}
    for number in range(layers):
        tensors |= layer(number, *(without(ALL, name) if number == layers - 2 else ALL))
    found = lost(tensors, {"num_hidden_layers": layers})
    assert found == [f"missing_linear model.layers.{layers - 2}.{name}"]


@pytest.mark.parametrize("name", ["mlp.up_proj", "mlp.down_proj", "self_attn.k_proj"])
def test_one_layer_alone_tells_by_what_is_of_no_use(name: str) -> None:
    assert lost(layer(0, *without(ALL, name))) == [f"missing_linear model.layers.0.{name}"]


def test_a_whole_network_that_is_gone_from_one_layer_is_named() -> None:
    tensors = layer(0) | layer(1, *ATTENTION) | layer(2)
    assert lost(tensors) == [f"missing_linear model.layers.1.{name}" for name in sorted(MLP)]


def test_linears_of_any_name_are_compared_in_layers_between_others() -> None:
    tensors = {}
    for number in range(4):
        names = ("attn.wqkv", "ff.a") if number == 2 else ("attn.wqkv", "attn.wout", "ff.a")
        tensors |= layer(number, *names, container="transformer_blocks")
    assert lost(tensors) == ["missing_linear transformer_blocks.2.attn.wout"]


@pytest.mark.parametrize(
    "model",
    [{"num_experts": 4}, {"text_config": {"num_local_experts": 4}}, {"n_routed_experts": 4}, {}],
    ids=["one part", "text model", "routed", "by the router"],
)
def test_experts_that_are_gone_from_the_end(model: dict[str, Any]) -> None:
    tensors = layer(0, *ATTENTION) | experts(0, 3)
    assert lost(tensors, model) == ["missing_expert model.layers.0.mlp.experts"]
    assert lost(layer(0, *ATTENTION) | experts(0, 4), model) == []


def test_experts_of_another_layer_tell_where_nothing_else_does() -> None:
    tensors = experts(0, 4, router=False) | experts(1, 3, router=False)
    assert lost(tensors) == ["missing_expert model.layers.1.mlp.experts"]


def test_experts_that_are_not_quantized_are_counted_too() -> None:
    plain = {
        name: Info("BF16", info.shape) for name, info in experts(0, 3).items() if name.endswith(".weight")
    }
    assert lost(plain, {"num_experts": 4}) == ["missing_expert model.layers.0.mlp.experts"]


@pytest.mark.parametrize("count", [3, 4])
def test_stacked_experts_are_counted(count: int) -> None:
    base = "model.layers.0.mlp.experts"
    tensors = {
        f"{base}.gate_up_proj": Info("F8_E4M3", (count, 64, 192)),
        f"{base}.gate_up_proj_weight_scale": Info("F32", ()),
        f"{base}.down_proj": Info("F8_E4M3", (count, 96, 64)),
        f"{base}.down_proj_weight_scale": Info("F32", ()),
    }
    assert lost(tensors, {"num_local_experts": 4}) == [f"missing_expert {base}"] * (count < 4)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_router_without_experts(layers: int) -> None:
    tensors = {}
    for number in range(layers):
        tensors |= layer(number, *ATTENTION) | experts(number, 4 if number else 0)
    assert lost(tensors, {"num_experts": 4}) == ["missing_expert model.layers.0.mlp.experts"]


def test_experts_of_another_width_than_config_json_names() -> None:
    tensors = layer(0, *ATTENTION) | experts(0, 4)
    model = {"num_experts": 4, "intermediate_size": 512}
    assert lost(tensors, model | {"moe_intermediate_size": 96}) == []
    assert lost(tensors, model | {"moe_intermediate_size": 192}) == [
        "shape_mismatch model.layers.0.mlp.experts"
    ]


# Layers that models do have, of several kinds in one checkpoint: name -> linears of each layer, config.json.
INDEXED = (*ATTENTION, "self_attn.indexer.wq_b", *MLP)
SHARED = without(ALL, "self_attn.k_proj", "self_attn.v_proj")
HEALTHY: dict[str, tuple[list[tuple[str, ...]], dict[str, Any]]] = {
    "k is v in full attention": (
        [ALL, ALL, without(ALL, "self_attn.v_proj")],
        {"attention_k_eq_v": True, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "keys and values of an earlier layer": ([ALL, ALL, SHARED, SHARED], {"num_kv_shared_layers": 2}),
    "one layer with keys of an earlier one": ([ALL, ALL, SHARED], {"num_kv_shared_layers": 1}),
    "indexers in some layers": ([INDEXED, ALL, INDEXED, ALL], {}),
    "an indexer that one layer lacks by a list": (
        [INDEXED, ALL, INDEXED, INDEXED],
        {"indexer_types": ["full", "shared", "full", "full"]},
    ),
    "layers without attention": (
        [ALL, ALL, MLP],
        {"block_configs": [{"attention": {"no_op": number == 2}} for number in range(3)]},
    ),
    "a mixer of several kinds": (
        [("mixer.up_proj", "mixer.down_proj"), ("mixer.in_proj", "mixer.out_proj"), ATTENTION],
        {"hybrid_override_pattern": "-M*"},
    ),
    "the first layer without what others take from it": (
        [ALL, (*ALL, "attn.v_lora"), (*ALL, "attn.v_lora"), (*ALL, "attn.v_lora")],
        {},
    ),
    "attention with a gate": ([(*ALL, "self_attn.gate_proj")] * 2, {}),
    "no gate": ([(*ATTENTION, "mlp.up_proj", "mlp.down_proj")] * 2, {}),
    "speculation in a layer beyond the last": (
        [ALL, ALL, (*ALL, "eh_proj")],
        {"num_hidden_layers": 2},
    ),
    "one layer with what none else has": ([(*ALL, "bias_table"), ALL, ALL], {}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_layers_that_models_have_are_no_loss(name: str) -> None:
    layers, model = HEALTHY[name]
    tensors = {}
    for number, linears in enumerate(layers):
        tensors |= layer(number, *linears)
    assert lost(tensors, {"num_hidden_layers": len(layers)} | model) == []


def test_dense_layers_before_those_of_experts_are_no_loss() -> None:
    tensors = layer(0) | layer(1, *ATTENTION) | experts(1, 4) | layer(2, *ATTENTION) | experts(2, 4)
    assert lost(tensors, {"num_hidden_layers": 3, "n_routed_experts": 4, "first_k_dense_replace": 1}) == []


def test_what_a_missing_file_held_is_reported_once() -> None:
    tensors = layer(0) | layer(1, *ATTENTION) | layer(2)
    assert lost(tensors, whole=False) == []


def test_layers_that_do_nothing_are_not_missing() -> None:
    nothing, something = {"no_op": True}, {"no_op": False}
    blocks = [{"attention": part, "ffn": part} for part in (something, nothing, nothing)]
    model: dict[str, Any] = {"num_hidden_layers": 3, "block_configs": blocks}
    assert find_missing_layers(layer(0), model) == find_missing_layers(layer(0) | layer(1), model) == []
    blocks[2] = {"attention": nothing, "ffn": something}
    (problem,) = find_missing_layers(layer(0), model)
    assert Counter(problem.message.split())["model.layers.2"] == 1


def test_counts_that_are_no_numbers_tell_nothing() -> None:
    """A damaged config.json had an object in the place of a count."""
    for count in ({"n": 4}, [{"n": 4}, None], "4", -1, True):
        assert lost(experts(0, 4), {"num_experts": count, "moe_intermediate_size": count}) == []


def test_a_gate_without_an_activation_is_none() -> None:
    """TimesFM calls the two linears of its feed-forward network `gate_proj` and `down_proj`."""
    tensors = {}
    for number in range(2):
        tensors |= layer(number, *without(ALL, "mlp.up_proj"))
    assert lost(tensors, {"num_hidden_layers": 2}) == []
    told = [f"missing_linear model.layers.{number}.mlp.up_proj" for number in range(2)]
    assert lost(tensors, {"num_hidden_layers": 2, "hidden_act": "silu"}) == told


def test_stages_with_other_numbers_of_blocks_have_lost_nothing() -> None:
    """PP-OCR's encoder has stages without blocks between some that have two."""
    tensors = {}
    for stage, count in enumerate((2, 0, 2, 2)):
        own = [f"blocks.{block}.conv" for block in range(count)]
        tensors |= layer(stage, "downsample.conv", *own, container="encoder.blocks")
    assert lost(tensors, {"model_type": "ocr"}) == []
