"""Experts of few tokens on Hopper: every way, every format, and routing that spreads chunks strangely."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod

from ..linear_cases import random_x
from ..moe_calls import as_values, check, layer_of, moved_inputs, prepared, run
from ..moe_cases import ROUTINGS, random_expert_map, random_routing, random_stacks
from .cases import torch

pytestmark = pytest.mark.gpu

NVFP4, FP8 = "cuda:sm90_nvfp4_decode", "cuda:sm90_fp8_decode"
FORMATS = [
    ("NVFP4", "exact", NVFP4),
    ("W4A16_NVFP4", "exact", NVFP4),
    ("FP8", "exact", FP8),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact", FP8),
    ("FP8_PB_WO", "exact", FP8),
    ("MXFP4", "exact", NVFP4),
]
CONFIGS = 5
"""Variants beside the own choice: slices of K, clusters of the second kernel, strips."""

STRIPS = 5
"""The variant of strips, which NVFP4 has, and FP8 where a scale of g is known or that of 128 columns."""

SLICED = (2, STRIPS)
"""Variants of slices in both kernels, and of strips."""


def random_call(
    rng: Any, method: MoEMethod, params: Any, tokens: int, kind: str, ids_dtype: str = "int32"
) -> tuple[Any, ...]:
    """x, router weights and ids, and y of them."""
    x = random_x(rng, (tokens, method.hidden_size), method.dtype)
    experts = method.global_num_experts
    weights, ids = random_routing(rng, tokens, method.top_k, experts, kind, ids_dtype)
    return x, weights, ids, run(method, params, x, weights, ids)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_tokens_and_routing(rng, monkeypatch, algo, compute, kernel, dtype):
    """One slot, a warp's lanes of them and more; experts with a chunk of slots, several, and none."""
    method = layer_of(monkeypatch, kernel, algo, 12, 256, 192, top_k=4, dtype=dtype, compute=compute)
    stacks = random_stacks(rng, algo, 12, 256, 192, bias="float32")
    params = prepared(method, stacks)
    for tokens in (1, 2, 8, 9, 31, 64, 256):
        for kind in ROUTINGS:
            x, weights, ids, y = random_call(rng, method, params, tokens, kind, "int64")
            check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_every_way(rng, monkeypatch, algo, compute, kernel):
    """Items spread over warps, blocks without any, slabs and clusters that do not come out even."""
    method = layer_of(monkeypatch, kernel, algo, 20, 320, 448, top_k=3, compute=compute)
    stacks = random_stacks(rng, algo, 20, 320, 448)
    params = prepared(method, stacks)
    for tokens in (1, 24):
        for config in range(CONFIGS + 1):
            method._plan.keep(tokens, kernel, config)
            x, weights, ids, y = random_call(rng, method, params, tokens, "random")
            check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("hidden, inner", [(2048, 768), (2880, 384), (4096, 1536), (1024, 1152), (1920, 320)])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_slices_of_every_length(rng, monkeypatch, algo, compute, kernel, hidden, inner):
    """Slices of one block of K to eight, that come out even and overlap."""
    method = layer_of(monkeypatch, kernel, algo, 3, hidden, inner, top_k=2, compute=compute)
    stacks = random_stacks(rng, algo, 3, hidden, inner)
    params = prepared(method, stacks)
    for tokens in (1, 7):
        for config in SLICED:
            method._plan.keep(tokens, kernel, config)
            x, weights, ids, y = random_call(rng, method, params, tokens, "random")
            check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("top_k", [1, 4, 10])
@pytest.mark.parametrize(
    "algo, kernel, inner", [("NVFP4", NVFP4, 192), ("FP8", FP8, 192), ("FP8_PB_WO", FP8, 384)]
)
def test_strips(rng, monkeypatch, algo, kernel, inner, top_k, gated, dtype):
    """A block for each strip of one token, blocks with none, with several of one chunk and of many; sums of
    many parts by slots, and of a few by columns; weights on the input, shares of experts."""
    options = {"top_k": top_k, "gated": gated, "dtype": dtype, "global_num_experts": 64}
    method = layer_of(monkeypatch, kernel, algo, 48, 1152, inner, **options)
    stacks = random_stacks(rng, algo, 48, 1152, inner, gated=gated, bias="float32")
    params = prepared(method, stacks)
    expert_map = random_expert_map(rng, 64, 48)
    most = 96 if top_k == 10 else 102
    for tokens in (1, 2, 5, 40, most) if kernel == NVFP4 else (1, 2, 5, 13):
        method._plan.keep(tokens, kernel, STRIPS)
        for kind in ROUTINGS:
            x, before = (random_x(rng, (tokens, 1152), dtype) for _ in range(2))
            weights, ids = random_routing(rng, tokens, top_k, 64, kind, "int64")
            given = {"expert_map": expert_map, "out": before.copy(), "accumulate": True}
            options = {"expert_map": expert_map, "global_num_experts": 64, "out": as_values(before, dtype)}
            if top_k == 1:
                given["apply_router_weight_on_input"] = options["apply_router_weight_on_input"] = True
            y = run(method, params, x, weights, ids, **given)
            check(y, method, stacks, x, weights, ids, **options)
            again = run(method, params, x, weights, ids, **{**given, "out": before.copy()})
            np.testing.assert_array_equal(again, y)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS[1:3])
def test_activations(rng, monkeypatch, algo, compute, kernel, activation, gated):
    if activation == "swigluoai" and not gated:
        pytest.skip("it has a gate")
    options = {"top_k": 2, "activation": activation, "gated": gated, "compute": compute}
    method = layer_of(monkeypatch, kernel, algo, 6, 128, 64, **options)
    stacks = random_stacks(rng, algo, 6, 128, 64, gated=gated, bias="float32")
    x, weights, ids, y = random_call(rng, method, prepared(method, stacks), 11, "skewed")
    check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_router_weights_on_the_input(rng, monkeypatch, algo, compute, kernel):
    method = layer_of(monkeypatch, kernel, algo, 8, 192, 128, top_k=1, compute=compute)
    stacks = random_stacks(rng, algo, 8, 192, 128)
    params = prepared(method, stacks)
    for tokens in (1, 70):
        x = random_x(rng, (tokens, 192), "bfloat16")
        weights, ids = random_routing(rng, tokens, 1, 8, "hostile")
        y = run(method, params, x, weights, ids, apply_router_weight_on_input=True)
        check(y, method, stacks, x, weights, ids, apply_router_weight_on_input=True)


@pytest.mark.parametrize("tokens", [5, 60])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_a_share_of_experts_adds_to_its_output(rng, monkeypatch, algo, compute, kernel, tokens):
    options = {"top_k": 4, "global_num_experts": 40, "compute": compute}
    method = layer_of(monkeypatch, kernel, algo, 10, 128, 128, **options)
    stacks = random_stacks(rng, algo, 10, 128, 128, bias="float32")
    expert_map = random_expert_map(rng, 40, 10)
    x, before = (random_x(rng, (tokens, 128), "bfloat16") for _ in range(2))
    weights, ids = random_routing(rng, tokens, 4, 40, "hostile")
    given = {"expert_map": expert_map, "out": before.copy(), "accumulate": True}
    y = run(method, prepared(method, stacks), x, weights, ids, **given)
    given = {"expert_map": expert_map, "global_num_experts": 40, "out": as_values(before, "bfloat16")}
    check(y, method, stacks, x, weights, ids, **given)


@pytest.mark.parametrize("algo, compute, kernel", [FORMATS[0], FORMATS[2]])
def test_the_shape_of_a_model(rng, monkeypatch, algo, compute, kernel):
    """Experts with more rows than there are blocks, and 32 slots a token."""
    method = layer_of(monkeypatch, kernel, algo, 32, 2048, 768, top_k=8, compute=compute)
    stacks = random_stacks(rng, algo, 32, 2048, 768)
    params = prepared(method, stacks)
    for tokens in (1, 33):
        x, weights, ids, y = random_call(rng, method, params, tokens, "skewed")
        check(y, method, stacks, x, weights, ids)
    method = layer_of(monkeypatch, kernel, algo, 48, 64, 64, top_k=32, compute=compute)
    stacks = random_stacks(rng, algo, 48, 64, 64)
    x, weights, ids, y = random_call(rng, method, prepared(method, stacks), 32, "random")
    check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_calls_follow_each_other(rng, monkeypatch, algo, compute, kernel):
    """A call begins while the one before ends, and reads ids that were written just before: in a graph of
    layers that hand y on in pairs, with ids that each writes anew, every y is that of a call by itself.
    Longer chains end in zeros or infinities, since an activation is about a square.
    """
    method = layer_of(monkeypatch, kernel, algo, 16, 256, 128, top_k=4, compute=compute)
    layers = [prepared(method, random_stacks(rng, algo, 16, 256, 128)) for _ in range(3)]
    for tokens in (1, 24):
        routings = [random_routing(rng, tokens, 4, 16) for _ in range(12)]
        first = random_x(rng, (tokens, 256), "bfloat16")
        x, params, weights, ids = moved_inputs(method, first, layers[0], *routings[0])
        given = [moved_inputs(method, first, params, *routing)[2:] for routing in routings]
        alone: list[Any] = []
        for i, (weight, chosen) in enumerate(given):
            alone.append(method(alone[-1] if i % 2 else x, layers[i % 3], weight, chosen))
            torch.cuda.synchronize()
        assert all(y.isfinite().all() and y.count_nonzero() > y.numel() / 2 for y in alone)
        chain = [torch.empty_like(x) for _ in given]

        def call_all(chain=chain, x=x, weights=weights, ids=ids, given=given):
            for i, (weight, chosen) in enumerate(given):
                weights.copy_(weight)
                ids.copy_(chosen)
                method(chain[i - 1] if i % 2 else x, layers[i % 3], weights, ids, out=chain[i])

        call_all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call_all()
        for _ in range(5):
            for y in chain:
                y.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(y, expected) for y, expected in zip(chain, alone, strict=True))


@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_tokens_do_not_see_each_other(rng, monkeypatch, algo, compute, kernel):
    """A NaN stays in its row, also among the slots of one chunk."""
    method = layer_of(monkeypatch, kernel, algo, 4, 128, 128, top_k=2, compute=compute)
    params = prepared(method, random_stacks(rng, algo, 4, 128, 128))
    x, weights, ids, y = random_call(rng, method, params, 20, "few")
    values = as_values(x, "bfloat16").copy()
    values[7, 3] = np.nan
    spoiled = run(method, params, (values.view(np.uint32) >> 16).astype(np.uint16), weights, ids)
    rows = np.arange(20) != 7
    assert np.isnan(as_values(spoiled, "bfloat16")[7]).all()
    np.testing.assert_array_equal(spoiled[rows], y[rows])
