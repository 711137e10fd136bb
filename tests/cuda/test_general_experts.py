"""Experts of MXFP8, int8 and int4 weights on tensor cores: every format, tile, and strange routing."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod

from ..linear_cases import GENERAL, random_x
from ..moe_calls import as_values, check, check_on_two_streams, layer_of, moved_inputs, prepared, run
from ..moe_cases import ROUTINGS, random_expert_map, random_routing, random_stacks
from .cases import to_numpy, torch

pytestmark = pytest.mark.gpu

KERNEL = "cuda:sm80_general"
TOKENS = (1, 3, 12, 40, 100, 260)
"""With five experts and three slots a token they take tiles of 8, 16, 32 and 64 rows, and several of 64."""


def sizes_of(algo: str) -> tuple[int, int]:
    """Hidden and intermediate size, which end within a warp's step and within all warps' steps."""
    if "AWQ" in algo:
        return 384, 128
    return (352, 224) if algo == "MXFP8" else (336, 208)


def without_input_scales(tensors: Any) -> dict[str, Any]:
    """Stacks whose activations have a scale of each row instead."""
    return {name: tensor for name, tensor in tensors.items() if "input_scale" not in name}


def random_call(
    rng: Any, method: MoEMethod, params: Any, tokens: int, kind: str, ids_dtype: str = "int32", **options: Any
) -> tuple[Any, ...]:
    """x, router weights and ids, and y of them."""
    x = random_x(rng, (tokens, method.hidden_size), method.dtype)
    experts = method.global_num_experts
    weights, ids = random_routing(rng, tokens, method.top_k, experts, kind, ids_dtype)
    return x, weights, ids, run(method, params, x, weights, ids, **options)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo", GENERAL)
def test_tokens_and_routing(rng, monkeypatch, algo, dtype, gated):
    hidden, inner = sizes_of(algo)
    method = layer_of(monkeypatch, KERNEL, algo, 5, hidden, inner, top_k=3, dtype=dtype, gated=gated)
    stacks = random_stacks(rng, algo, 5, hidden, inner, gated=gated, bias="float32")
    params = prepared(method, stacks)
    for tokens in TOKENS:
        for kind in ROUTINGS:
            x, weights, ids, y = random_call(rng, method, params, tokens, kind, "int64")
            check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize(
    "algo, hidden, inner, group_size",
    [
        ("MXFP8", 32, 32, None),
        ("MXFP8", 64, 1056, None),
        ("MXFP8", 2048, 768, None),
        ("W8A16", 16, 16, None),
        ("W8A16", 48, 1040, None),
        ("W8A16", 272, 80, None),
        ("W8A8_SQ_PER_CHANNEL", 80, 4112, None),
        ("W8A8_SQ_PER_CHANNEL", 2064, 16, None),
        ("W4A16_AWQ", 128, 1152, None),
        ("W4A16_AWQ", 96, 32, 32),
        ("W4A16_AWQ", 288, 96, 96),
        ("W4A16_AWQ", 2048, 768, None),
        ("W4A8_AWQ", 192, 320, 64),
    ],
)
def test_sizes(rng, monkeypatch, algo, hidden, inner, group_size):
    """Steps that end early, groups of one product to many steps, rows that fill no tile."""
    method = layer_of(monkeypatch, KERNEL, algo, 4, hidden, inner, top_k=2, group_size=group_size)
    stacks = random_stacks(rng, algo, 4, hidden, inner, group_size=group_size)
    params = prepared(method, stacks)
    for tokens in (1, 15, 50, 150):
        x, weights, ids, y = random_call(rng, method, params, tokens, "random")
        check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo", GENERAL)
def test_a_share_of_experts_adds_to_its_output(rng, monkeypatch, algo):
    options = {"top_k": 4, "global_num_experts": 24}
    method = layer_of(monkeypatch, KERNEL, algo, 6, 256, 128, **options)
    stacks = random_stacks(rng, algo, 6, 256, 128, bias="float32")
    params, expert_map = prepared(method, stacks), random_expert_map(rng, 24, 6)
    for tokens in (5, 90):
        before = random_x(rng, (tokens, 256), "bfloat16")
        given = {"expert_map": expert_map, "out": before.copy(), "accumulate": True}
        x, weights, ids, y = random_call(rng, method, params, tokens, "hostile", **given)
        given = {"expert_map": expert_map, "global_num_experts": 24, "out": as_values(before, "bfloat16")}
        check(y, method, stacks, x, weights, ids, **given)


@pytest.mark.parametrize("algo", GENERAL)
def test_router_weights_on_the_input(rng, monkeypatch, algo):
    method = layer_of(monkeypatch, KERNEL, algo, 8, 256, 128, top_k=1)
    stacks = random_stacks(rng, algo, 8, 256, 128)
    params = prepared(method, stacks)
    for tokens in (1, 70):
        given = {"apply_router_weight_on_input": True}
        x, weights, ids, y = random_call(rng, method, params, tokens, "hostile", **given)
        check(y, method, stacks, x, weights, ids, **given)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2", "swigluoai"])
@pytest.mark.parametrize("algo", ["MXFP8", "W4A16_AWQ"])
def test_activations(rng, monkeypatch, algo, activation):
    method = layer_of(monkeypatch, KERNEL, algo, 6, 256, 128, top_k=2, activation=activation)
    stacks = random_stacks(rng, algo, 6, 256, 128, bias="float32")
    x, weights, ids, y = random_call(rng, method, prepared(method, stacks), 33, "skewed")
    check(y, method, stacks, x, weights, ids)


def test_int8_without_scales_of_inputs_has_one_a_row(rng, monkeypatch):
    """Rows longer than a block keeps, and of zeros, as on the CPU, where a code of g may be a neighbour."""
    for hidden, inner in ((144, 80), (2064, 48), (9216, 16)):
        sizes = "W8A8_SQ_PER_CHANNEL", 3, hidden, inner
        stacks = random_stacks(rng, *sizes)
        x = random_x(rng, (30, hidden), "bfloat16")
        x[7] = 0
        weights, ids = random_routing(rng, 30, 2, 3)
        monkeypatch.delenv("MOQEXT_KERNEL", raising=False)
        there = MoEMethod(*sizes, top_k=2)
        here = layer_of(monkeypatch, KERNEL, *sizes, top_k=2)
        expected, y = (
            as_values(
                run(method, without_input_scales(prepared(method, stacks)), x, weights, ids), "bfloat16"
            )
            for method in (there, here)
        )
        assert np.linalg.norm(y - expected) <= 1e-2 * np.linalg.norm(expected)
        assert not y[7].any()


@pytest.mark.parametrize(
    "algo, scaled", [*((algo, True) for algo in GENERAL), ("W8A8_SQ_PER_CHANNEL", False)]
)
def test_tokens_do_not_see_each_other(rng, monkeypatch, algo, scaled):
    """A NaN stays in its row, also among the slots of one tile."""
    method = layer_of(monkeypatch, KERNEL, algo, 4, 256, 128, top_k=2)
    params = prepared(method, random_stacks(rng, algo, 4, 256, 128))
    params = params if scaled else without_input_scales(params)
    for tokens in (8, 90):
        x, weights, ids, y = random_call(rng, method, params, tokens, "few")
        spoiled = x.copy()
        spoiled[7, 3] = 0x7FC0
        again = run(method, params, spoiled, weights, ids)
        rows = np.arange(tokens) != 7
        assert np.isnan(as_values(again, "bfloat16")[7]).all()
        np.testing.assert_array_equal(again[rows], y[rows])


def test_scales_at_odd_addresses(rng, monkeypatch):
    """Bytes of scales that cannot be read two at a time."""
    method = layer_of(monkeypatch, KERNEL, "MXFP8", 4, 256, 128, top_k=2)
    params = dict(prepared(method, random_stacks(rng, "MXFP8", 4, 256, 128)))
    x, weights, ids, y = random_call(rng, method, params, 20, "random")
    for name in ("w13_weight_scale", "w2_weight_scale"):
        scale = params[name]
        room = torch.empty(scale.numel() + 1, dtype=torch.uint8, device="cuda")[1:]
        params[name] = room.view(scale.dtype).view(scale.shape).copy_(scale)
        assert params[name].data_ptr() % 2 == 1
    np.testing.assert_array_equal(run(method, params, x, weights, ids), y)


@pytest.mark.parametrize("algo", GENERAL)
def test_graphs_and_streams(rng, monkeypatch, algo):
    """A graph that is replayed with other tokens, and calls beside each other."""
    method = layer_of(monkeypatch, KERNEL, algo, 8, 256, 128, top_k=2)
    layers = [prepared(method, random_stacks(rng, algo, 8, 256, 128)) for _ in range(2)]
    calls = []
    for params, tokens in zip(layers, (7, 130), strict=True):
        x = random_x(rng, (tokens, 256), "bfloat16")
        calls.append(moved_inputs(method, x, params, *random_routing(rng, tokens, 2, 8)))
    check_on_two_streams(method, calls, 20)
    x, params, weights, ids = calls[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = method(x, params, weights, ids)
    x.copy_(x.flip(0))
    ids.copy_(ids.flip(0))
    y.fill_(float("nan"))
    graph.replay()
    np.testing.assert_array_equal(to_numpy(y), to_numpy(method(x, params, weights, ids)))
