"""Experts on the device: all that holds on the CPU, every kernel, graphs, streams and repetition."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod, UnsupportedQuantization
from moqext.tools.expert_slack import rounds_d

from ..linear_cases import random_x
from ..moe_calls import as_values, call, check, check_on_two_streams, moved_inputs, prepared, run
from ..moe_cases import ALGOS, COMPUTES, ROUTINGS, random_expert_map, random_routing, random_stacks
from ..test_moe import (  # noqa: F401
    test_a_nan_in_x_stays_in_its_row,
    test_activations,
    test_an_expert_map,
    test_many_experts_and_slots,
    test_matches_reference,
    test_more_slots_than_a_panel,
    test_no_tokens_and_no_slots_that_count,
    test_results_are_added_to_out,
    test_router_weights_on_the_input,
    test_routing,
    test_shapes,
    test_shares_of_experts_add_up_to_the_whole,
    test_sizes_that_are_no_multiple_of_anything,
)
from .cases import DTYPES, poisoned, to_cuda, to_numpy, torch

pytestmark = pytest.mark.gpu

KERNELS = (
    "cuda:simt",
    "cuda:sm89_fp8",
    "cuda:sm80_fp8",
    "cuda:sm80_nvfp4",
    "cuda:sm80_nvfp4_fp8",
    "cuda:sm90_fp8_prefill",
    "cuda:sm90_nvfp4_prefill",
    "cuda:sm90_nvfp4_fp8_prefill",
)


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the layers that the CPU's tests make in this module."""
    return "cuda:0"


def layer_of(algo: str, *sizes: int, **options: Any) -> MoEMethod:
    """A layer of the kernel that is forced; skips the test where the kernel cannot run it."""
    try:
        return MoEMethod(algo, *sizes, device="cuda:0", **options)
    except UnsupportedQuantization as error:
        pytest.skip(str(error))


# ---- every kernel ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("algo, compute", COMPUTES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(rng, monkeypatch, kernel, algo, compute, dtype):
    """Tiles of all sizes, from one token to hundreds of rows an expert, and sizes that end within tiles."""
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    method = layer_of(algo, 5, 288, 160, top_k=2, dtype=dtype, compute=compute)
    assert method.backend == kernel
    stacks = random_stacks(rng, algo, 5, 288, 160, bias="float32")
    params = prepared(method, stacks)
    for tokens, kind in ((1, "random"), (9, "hostile"), (40, "skewed"), (150, "random"), (500, "one")):
        x = random_x(rng, (tokens, 288), dtype)
        weights, ids = random_routing(rng, tokens, 2, 5, kind)
        y = run(method, params, x, weights, ids)
        check(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo", ALGOS)
def test_agrees_with_the_cpu(rng, algo):
    """Rounding apart: quantized activations have the same codes on both."""
    options = {"top_k": 3, "dtype": "float32"}
    stacks = random_stacks(rng, algo, 7, 256, 128, bias="float32")
    x = random_x(rng, (33, 256), "float32")
    weights, ids = random_routing(rng, 33, 3, 7, "hostile")
    here = call(MoEMethod(algo, 7, 256, 128, **options), stacks, x, weights, ids)
    there = call(MoEMethod(algo, 7, 256, 128, device="cuda:0", **options), stacks, x, weights, ids)
    rows = np.abs(here - there).max(axis=1) / np.maximum(np.abs(here).max(axis=1), 1e-30)
    # A code of g that goes to the other side of a boundary is an eighth of one value of many.
    assert np.quantile(rows, 0.5) <= 1e-2
    assert rows.max() <= 0.1


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(
    "tokens, top_k, experts",
    [
        *[(60, 8, 128), (600, 1, 5), (190, 8, 128), (511, 8, 257), (2001, 8, 512), (129, 32, 1024)],
        *[(3000, 4, 16), (1100, 8, 128), (700, 32, 1024), (9000, 1, 3), (17000, 1, 3)],
    ],
)
def test_slots_of_several_blocks(rng, kind, tokens, top_k, experts):
    """Slots for 1, 2, 4 and 8 blocks of a cluster, and more; the output of experts tells their order."""
    method = MoEMethod("FP8", experts, 16, 16, top_k=top_k, dtype="float32", device="cuda:0")
    stacks = random_stacks(rng, "FP8", experts, 16, 16)
    x = random_x(rng, (tokens, 16), "float32")
    weights, ids = random_routing(rng, tokens, top_k, experts, kind, "int64")
    y = run(method, prepared(method, stacks), x, weights, ids)
    some = rng.choice(tokens, min(tokens, 100), replace=False)
    check(y[some], method, stacks, x[some], weights[some], ids[some])


def test_chunks_of_tokens_are_as_one(rng):
    """Thousands of tokens, whose rows go in chunks: each token has the bits that it has among few."""
    method = MoEMethod("NVFP4", 2, 4096, 8192, top_k=2, device="cuda:0", activation="relu2", gated=False)
    stacks = random_stacks(rng, "NVFP4", 2, 4096, 8192, gated=False)
    params = prepared(method, stacks)
    tokens = 12_000  # of 100 kB and more a slot
    x = random_x(rng, (tokens, 4096), "bfloat16")
    weights, ids = random_routing(rng, tokens, 2, 2)
    y = run(method, params, x, weights, ids)
    some = rng.choice(tokens, 8, replace=False)
    rounded = rounds_d(method.backend_for(tokens), method.dtype)
    check(y[some], method, stacks, x[some], weights[some], ids[some], rounded=rounded)


# ---- the boundary ----


def test_strides(rng):
    method = MoEMethod("NVFP4", 4, 64, 32, top_k=2, device="cuda:0")
    params = prepared(method, random_stacks(rng, "NVFP4", 4, 64, 32))
    x = random_x(rng, (6, 64), "bfloat16")
    weights, ids = random_routing(rng, 6, 2, 4, ids_dtype="int64")
    x, _, weights, ids = moved_inputs(method, x, params, weights, ids)
    expected = to_numpy(method(x, params, weights, ids))
    folded = method(x.view(2, 3, 64), params, weights.view(2, 3, 2), ids.view(2, 3, 2))
    assert folded.shape == (2, 3, 64)
    np.testing.assert_array_equal(to_numpy(folded).reshape(6, 64), expected)
    turned = (
        x.view(2, 3, 64).transpose(0, 1),
        weights.view(2, 3, 2).transpose(0, 1),
        ids.view(2, 3, 2).transpose(0, 1),
    )
    y = method(turned[0], params, turned[1], turned[2])
    np.testing.assert_array_equal(to_numpy(y.transpose(0, 1).contiguous()).reshape(6, 64), expected)
    wide = torch.zeros(6, 131, dtype=torch.bfloat16, device="cuda")
    wide[:, 1:129:2] = x
    columns, apart = ids.t().contiguous().t(), torch.zeros(6, 5, device="cuda")
    apart[:, 0:4:2] = weights
    strided = method(wide[:, 1:129:2], params, apart[:, 0:4:2], columns)
    np.testing.assert_array_equal(to_numpy(strided), expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_writes_only_its_result(rng, accumulate):
    """Into a part of a larger tensor, at an address that suits no vector, in rows and in strange steps."""
    method = MoEMethod("FP8", 4, 64, 32, top_k=2, device="cuda:0")
    params = prepared(method, random_stacks(rng, "FP8", 4, 64, 32))
    x, _, weights, ids = moved_inputs(
        method, random_x(rng, (6, 64), "bfloat16"), params, *random_routing(rng, 6, 2, 4)
    )
    before = to_cuda(random_x(rng, (6, 64), "bfloat16"), "bfloat16")
    expected = method(x, params, weights, ids, out=before.clone(), accumulate=accumulate)
    memory = poisoned(8, 75, dtype="bfloat16")
    memory[1:-1, 3:67] = before
    method(x, params, weights, ids, out=memory[1:-1, 3:67], accumulate=accumulate)
    assert torch.equal(memory[1:-1, 3:67], expected)
    assert int((~memory.isnan()).sum()) == 6 * 64
    memory = poisoned(3, 2, 64, dtype="bfloat16")
    memory[...] = before.view(2, 3, 64).transpose(0, 1)
    out = memory.transpose(0, 1)
    method(x.view(2, 3, 64), params, weights.view(2, 3, 2), ids.view(2, 3, 2), out=out, accumulate=accumulate)
    assert torch.equal(out, expected.view(2, 3, 64))


def test_calls_are_refused_before_anything_is_written(rng):
    method = MoEMethod("FP8", 4, 64, 32, top_k=2, device="cuda:0")
    params = prepared(method, random_stacks(rng, "FP8", 4, 64, 32))
    x, _, weights, ids = moved_inputs(
        method, random_x(rng, (3, 64), "bfloat16"), params, *random_routing(rng, 3, 2, 4)
    )
    good = {"x": x, "params": params, "topk_weights": weights, "topk_ids": ids}
    unaligned = torch.empty(params["w2_weight"].numel() + 1, dtype=torch.uint8, device="cuda")[1:]
    unaligned = unaligned.view(params["w2_weight"].dtype).view(params["w2_weight"].shape)
    cases = [
        ({"topk_ids": ids.cpu()}, ValueError, "topk_ids"),
        ({"topk_weights": weights.cpu()}, ValueError, "topk_weights"),
        ({"x": x.cpu()}, ValueError, "x"),
        ({"expert_map": torch.zeros(4, dtype=torch.int32)}, ValueError, "expert_map"),
        (
            {"expert_map": torch.zeros(3, dtype=torch.int32, device="cuda")},
            ValueError,
            r"expected shape \[4\]",
        ),
        ({"topk_ids": ids.float()}, TypeError, "topk_ids: expected int32 or int64"),
        ({"apply_router_weight_on_input": True}, ValueError, "expected top_k = 1"),
        ({"params": params | {"w2_weight": unaligned}}, BufferError, "w2_weight.*multiple of 16"),
        ({"out": x}, BufferError, "out"),
    ]
    for change, error, message in cases:
        out = poisoned(3, 64, dtype="bfloat16")
        with pytest.raises(error, match=message):
            method(**(good | {"out": out} | change))
        assert bool(out.isnan().all())


def test_numbers_of_a_map_beyond_the_experts_count_for_nothing(rng):
    """The host cannot look at a map on the device; a number too large is as one that is elsewhere."""
    method = MoEMethod("FP8", 4, 64, 32, top_k=2, device="cuda:0", global_num_experts=6)
    params = prepared(method, random_stacks(rng, "FP8", 4, 64, 32))
    x = random_x(rng, (20, 64), "bfloat16")
    weights, ids = random_routing(rng, 20, 2, 6)
    good = np.array([2, -1, 0, 3, -1, 1], np.int32)
    bad = np.where(good < 0, np.int32(4), good)
    bad[1] = np.iinfo(np.int32).max
    expected = run(method, params, x, weights, ids, expert_map=good)
    np.testing.assert_array_equal(run(method, params, x, weights, ids, expert_map=bad), expected)


# ---- graphs, streams, repetition ----


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_a_graph_follows_its_inputs(rng, algo, compute):
    """Counts, tiles and order are found on the device: a replay with another routing is its call."""
    method = MoEMethod(algo, 9, 128, 96, top_k=3, device="cuda:0", compute=compute)
    stacks = random_stacks(rng, algo, 9, 128, 96)
    params = prepared(method, stacks)
    x, weights, ids = random_x(rng, (50, 128), "bfloat16"), *random_routing(rng, 50, 3, 9, "hostile")
    x, _, weights, ids = moved_inputs(method, x, params, weights, ids)
    y = torch.empty_like(x)
    method(x, params, weights, ids, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method(x, params, weights, ids, out=y)
    for kind in ROUTINGS:
        others = random_routing(rng, 50, 3, 9, kind)
        x.copy_(to_cuda(random_x(rng, (50, 128), "bfloat16"), "bfloat16"))
        weights.copy_(to_cuda(others[0]))
        ids.copy_(to_cuda(others[1]))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, method(x, params, weights, ids))


@pytest.mark.parametrize("algo", ALGOS)
def test_repeats_bit_by_bit(rng, algo):
    method = MoEMethod(algo, 16, 256, 128, top_k=4, device="cuda:0")
    params = prepared(method, random_stacks(rng, algo, 16, 256, 128))
    for tokens in (1, 200, 3000):
        x = random_x(rng, (tokens, 256), "bfloat16")
        inputs = moved_inputs(method, x, params, *random_routing(rng, tokens, 4, 16, "skewed"))
        first = method(*inputs)
        for _ in range(10):
            assert torch.equal(method(*inputs), first)


def test_two_streams(rng):
    method = MoEMethod("NVFP4", 16, 256, 128, top_k=4, device="cuda:0")
    params = prepared(method, random_stacks(rng, "NVFP4", 16, 256, 128))
    calls = []
    for tokens in (300, 70):
        x = random_x(rng, (tokens, 256), "bfloat16")
        calls.append(moved_inputs(method, x, params, *random_routing(rng, tokens, 4, 16)))
    check_on_two_streams(method, calls, 20)


def test_nothing_is_read_back(rng):
    """A call behind work that takes long returns at once: nothing waits for the device."""
    method = MoEMethod("NVFP4", 8, 128, 64, top_k=2, device="cuda:0")
    params = prepared(method, random_stacks(rng, "NVFP4", 8, 128, 64))
    inputs = moved_inputs(
        method, random_x(rng, (40, 128), "bfloat16"), params, *random_routing(rng, 40, 2, 8)
    )
    method(*inputs)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    y = method(*inputs)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert bool(y.isfinite().all())


def test_tuning(rng):
    method = MoEMethod("NVFP4", 16, 256, 128, top_k=4, device="cuda:0")
    params = prepared(method, random_stacks(rng, "NVFP4", 16, 256, 128))
    timings = method.tune([3, 64], params)
    assert {timing.kernel for timing in timings} >= {"cuda:simt", "cuda:sm80_nvfp4"}
    assert all(0 < timing.seconds < 1 for timing in timings)
    assert sum(timing.chosen for timing in timings) == 2


# ---- maps and dtypes together ----


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_share_of_experts_with_everything(rng, monkeypatch, kernel, dtype):
    """A map, biases, unequal scales, hostile ids and sums that go on, of each kernel."""
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    for algo in ALGOS:
        try:
            method = MoEMethod(
                algo, 5, 128, 64, top_k=3, dtype=dtype, device="cuda:0", global_num_experts=16,
                activation="swigluoai",
            )  # fmt: skip
        except UnsupportedQuantization:
            continue
        stacks = random_stacks(rng, algo, 5, 128, 64, bias="bfloat16")
        expert_map = random_expert_map(rng, 16, 5)
        x, before = random_x(rng, (40, 128), dtype), random_x(rng, (40, 128), dtype)
        weights, ids = random_routing(rng, 40, 3, 16, "hostile", "int64")
        out = before.copy()
        call(method, stacks, x, weights, ids, expert_map=expert_map, out=out, accumulate=True)
        check(
            out, method, stacks, x, weights, ids, expert_map=expert_map, global_num_experts=16,
            out=as_values(before, dtype),
        )  # fmt: skip
