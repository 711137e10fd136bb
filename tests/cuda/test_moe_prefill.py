"""Experts of many tokens on Hopper: both shapes of tiles, every format, rows that end anywhere in a tile."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod
from moqext.tools.expert_slack import sums_in_cores

from .. import moe_calls
from ..linear_cases import random_x
from ..moe_calls import as_values, check, check_on_two_streams, moved_inputs, prepared, run
from ..moe_cases import (
    ROUTINGS,
    make_sums_exact,
    random_expert_map,
    random_routing,
    random_stacks,
    x_of_exact_sums,
)
from .cases import to_numpy, torch

pytestmark = pytest.mark.gpu

NVFP4, FP8, FOLDED = "cuda:sm90_nvfp4_prefill", "cuda:sm90_fp8_prefill", "cuda:sm90_nvfp4_fp8_prefill"
FORMATS = [
    ("NVFP4", NVFP4),
    ("NVFP4_AWQ", NVFP4),
    ("W4A16_NVFP4", NVFP4),
    ("FP8", FP8),
    ("FP8_PER_CHANNEL_PER_TOKEN", FP8),
    ("FP8_PB_WO", FP8),
    ("NVFP4", FOLDED),
    ("NVFP4_AWQ", FOLDED),
    ("MXFP4", FOLDED),
    ("MXFP4", NVFP4),
]
SMALL, LARGE, LARGEST, DEEP, DEEPEST = 1, 2, 3, 4, 5
"""Variants: tiles of up to 64 rows, of 136 (in blocks and of NVFP4 128), and of NVFP4 288; of 64 and of 32 by
fewer rows of W; folded 96 and 288."""


def configs_of(kernel: str) -> tuple[int, ...]:
    return (SMALL, DEEP, DEEPEST, LARGE, LARGEST) if kernel == NVFP4 else (SMALL, LARGE)


CONFIGS = [(algo, kernel, config) for algo, kernel in FORMATS for config in configs_of(kernel)]


def layer_of(monkeypatch: pytest.MonkeyPatch, kernel: str, *sizes: Any, **options: Any) -> MoEMethod:
    """A layer that the kernel runs, of FP8 products where it folds weights."""
    compute = "fp8" if kernel == FOLDED else "exact"
    return moe_calls.layer_of(monkeypatch, kernel, *sizes, compute=compute, **options)


def deciding_stacks(rng: Any, kernel: str, algo: str, *sizes: int, **options: Any) -> dict[str, np.ndarray]:
    """Stacks, for FP8 products of a first one without a rounding: g is what it has to be, code by code."""
    stacks = random_stacks(rng, algo, *sizes, **options)
    return make_sums_exact(rng, algo, stacks) if sums_in_cores(kernel) else stacks


def deciding_x(rng: Any, kernel: str, shape: tuple[int, int], dtype: str = "bfloat16") -> np.ndarray:
    """x for them."""
    return x_of_exact_sums(rng, *shape, dtype) if sums_in_cores(kernel) else random_x(rng, shape, dtype)


def check_exactly(y: Any, *call: Any, **options: Any) -> None:
    """`check` without what FP8 cores cut of first products, of which there is nothing."""
    check(y, *call, in_cores=False, **options)


def sizes_of(algo: str) -> tuple[int, int]:
    """Hidden and intermediate size, each of which ends within a block of K."""
    return (352, 224) if algo == "MXFP4" else (336, 208)


def ids_of_counts(rng: Any, counts: list[int], top_k: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Routing in which expert e has counts[e] slots."""
    ids = rng.permutation(np.repeat(np.arange(len(counts)), counts)).reshape(-1, top_k).astype(np.int32)
    return rng.random(ids.shape).astype(np.float32), ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo, kernel, config", CONFIGS)
def test_tokens_and_routing(rng, monkeypatch, algo, kernel, config, dtype):
    """From one slot to several tiles an expert; rows of W that end within a tile and within a warpgroup's."""
    sizes = sizes_of(algo)
    method = layer_of(monkeypatch, kernel, algo, 7, *sizes, top_k=3, dtype=dtype)
    stacks = deciding_stacks(rng, kernel, algo, 7, *sizes, bias="float32")
    params = prepared(method, stacks)
    for tokens in (1, 30, 200, 700):
        method._plan.keep(tokens, kernel, config)
        for kind in ROUTINGS if tokens == 200 else ("random", "hostile"):
            x = deciding_x(rng, kernel, (tokens, sizes[0]), dtype)
            weights, ids = random_routing(rng, tokens, 3, 7, kind, "int64")
            y = run(method, params, x, weights, ids)
            check_exactly(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("config", [SMALL, LARGE])
@pytest.mark.parametrize("algo, kernel", FORMATS[3:-1])
def test_sums_that_fp8_cores_cut(rng, monkeypatch, algo, kernel, config):
    """Codes of every size, within what cut sums and the scales that follow from them may move."""
    sizes = sizes_of(algo)
    method = layer_of(monkeypatch, kernel, algo, 7, *sizes, top_k=3)
    stacks = random_stacks(rng, algo, 7, *sizes, bias="float32")
    params = prepared(method, stacks)
    for tokens in (200, 500):
        method._plan.keep(tokens, kernel, config)
        x = random_x(rng, (tokens, sizes[0]), "bfloat16")
        weights, ids = random_routing(rng, tokens, 3, 7)
        check(run(method, params, x, weights, ids), method, stacks, x, weights, ids)


@pytest.mark.parametrize("activation, gated", [("silu", True), ("swigluoai", True), ("relu2", False)])
@pytest.mark.parametrize("algo, kernel, config", CONFIGS)
def test_rows_of_every_width(rng, monkeypatch, algo, kernel, config, activation, gated):
    """Experts with every number of rows around the widths of products, and around one and two tiles."""
    edges = (8, 16, 32, 48, 64, 72, 80, 96, 112, 128, 136, 160, 192, 256, 272, 288, 576)
    counts = sorted({count for edge in edges for count in (edge - 1, edge, edge + 1)} | {0, 1, 300})
    options = {"top_k": 1, "activation": activation, "gated": gated}
    method = layer_of(monkeypatch, kernel, algo, len(counts), 128, 64, **options)
    stacks = deciding_stacks(rng, kernel, algo, len(counts), 128, 64, gated=gated)
    weights, ids = ids_of_counts(rng, counts)
    x = deciding_x(rng, kernel, (len(ids), 128))
    method._plan.keep(len(ids), kernel, config)
    y = run(method, prepared(method, stacks), x, weights, ids)
    check_exactly(y, method, stacks, x, weights, ids)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_activations(rng, monkeypatch, algo, kernel, activation, gated):
    if activation == "swigluoai" and not gated:
        pytest.skip("it has a gate")
    method = layer_of(monkeypatch, kernel, algo, 3, 256, 192, top_k=2, activation=activation, gated=gated)
    stacks = deciding_stacks(rng, kernel, algo, 3, 256, 192, gated=gated, bias="float32")
    params = prepared(method, stacks)
    for config in configs_of(kernel):
        method._plan.keep(150, kernel, config)
        x = deciding_x(rng, kernel, (150, 256), "bfloat16")
        weights, ids = random_routing(rng, 150, 2, 3)
        check_exactly(run(method, params, x, weights, ids), method, stacks, x, weights, ids)


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_router_weights_on_the_input(rng, monkeypatch, algo, kernel):
    method = layer_of(monkeypatch, kernel, algo, 4, 192, 128, top_k=1)
    stacks = deciding_stacks(rng, kernel, algo, 4, 192, 128)
    x = deciding_x(rng, kernel, (170, 192), "bfloat16")
    weights, ids = random_routing(rng, 170, 1, 4, "hostile")
    powers = rng.choice(np.float32([-0.5, 0.5, 1, 2]), weights.shape)  # whole numbers stay such
    weights = np.where(np.isfinite(weights), powers, weights)
    y = run(method, prepared(method, stacks), x, weights, ids, apply_router_weight_on_input=True)
    check_exactly(y, method, stacks, x, weights, ids, apply_router_weight_on_input=True)


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_a_share_of_experts_adds_to_its_output(rng, monkeypatch, algo, kernel):
    method = layer_of(monkeypatch, kernel, algo, 6, 128, 128, top_k=4, global_num_experts=20)
    stacks = deciding_stacks(rng, kernel, algo, 6, 128, 128, bias="float32")
    expert_map = random_expert_map(rng, 20, 6)
    x, before = (deciding_x(rng, kernel, (300, 128), "bfloat16") for _ in range(2))
    weights, ids = random_routing(rng, 300, 4, 20, "hostile")
    given = {"expert_map": expert_map, "out": before.copy(), "accumulate": True}
    y = run(method, prepared(method, stacks), x, weights, ids, **given)
    given = {"expert_map": expert_map, "global_num_experts": 20, "out": as_values(before, "bfloat16")}
    check_exactly(y, method, stacks, x, weights, ids, **given)


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_rows_of_x_and_y_that_are_apart(rng, monkeypatch, algo, kernel):
    """x and y in wider matrices, y at addresses that suit no vector."""
    method = layer_of(monkeypatch, kernel, algo, 5, 128, 96, top_k=2)
    params = prepared(method, random_stacks(rng, algo, 5, 128, 96))
    x, _, weights, ids = moved_inputs(
        method, random_x(rng, (90, 128), "bfloat16"), params, *random_routing(rng, 90, 2, 5)
    )
    expected = method(x, params, weights, ids)
    wide = torch.full((90, 264), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 8:136] = x
    assert torch.equal(method(wide[:, 8:136], params, weights, ids), expected)
    for begin in (0, 1, 2, 4, 8):
        out = torch.full((90, 150), float("nan"), dtype=torch.bfloat16, device="cuda")
        method(x, params, weights, ids, out=out[:, begin : begin + 128])
        assert torch.equal(out[:, begin : begin + 128], expected)
        assert int((~out.isnan()).sum()) == 90 * 128


@pytest.mark.parametrize("algo, kernel", [FORMATS[0], FORMATS[3], FORMATS[5], FORMATS[6]])
def test_chunks_of_tokens_are_as_one(rng, monkeypatch, algo, kernel):
    """More rows than the workspace is made for: each token has the bits that it has among few."""
    method = layer_of(monkeypatch, kernel, algo, 2, 4096, 128, top_k=8)
    stacks = deciding_stacks(rng, kernel, algo, 2, 4096, 128)
    params = prepared(method, stacks)
    tokens = 18000  # of 8 kB and more for each of eight slots
    method._plan.keep(tokens, kernel, configs_of(kernel)[-1])
    x = deciding_x(rng, kernel, (tokens, 4096), "bfloat16")
    weights, ids = random_routing(rng, tokens, 8, 2, "duplicates")
    y = run(method, params, x, weights, ids)
    some = np.append(rng.choice(tokens, 6, replace=False), [0, tokens - 1])
    check_exactly(y[some], method, stacks, x[some], weights[some], ids[some])


@pytest.mark.parametrize("config", [SMALL, DEEP, DEEPEST])
def test_more_tiles_than_a_block_notes(rng, monkeypatch, config):
    """Warps that claim tiles then look at the list of them."""
    method = layer_of(monkeypatch, NVFP4, "NVFP4", 3, 64, 64, top_k=8)
    stacks = deciding_stacks(rng, NVFP4, "NVFP4", 3, 64, 64)
    tokens = 18000  # 2250 tiles and more, of which 1536 are noted
    method._plan.keep(tokens, NVFP4, config)
    x = deciding_x(rng, NVFP4, (tokens, 64), "bfloat16")
    weights, ids = random_routing(rng, tokens, 8, 3, "duplicates")
    y = run(method, prepared(method, stacks), x, weights, ids)
    some = np.append(rng.choice(tokens, 30, replace=False), [0, tokens - 1])
    check_exactly(y[some], method, stacks, x[some], weights[some], ids[some])


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_calls_follow_each_other(rng, monkeypatch, algo, kernel):
    """A call begins while the one before ends: in a graph every y is that of a call by itself."""
    method = layer_of(monkeypatch, kernel, algo, 16, 256, 128, top_k=4)
    layers = [prepared(method, random_stacks(rng, algo, 16, 256, 128)) for _ in range(2)]
    for tokens in (40, 2500):
        first = random_x(rng, (tokens, 256), "bfloat16")
        routings = [random_routing(rng, tokens, 4, 16) for _ in range(4)]
        x, _, weights, ids = moved_inputs(method, first, layers[0], *routings[0])
        given = [moved_inputs(method, first, layers[0], *routing)[2:] for routing in routings]
        alone = []
        for i, (weight, chosen) in enumerate(given):
            alone.append(method(alone[-1] if i % 2 else x, layers[i % 2], weight, chosen))
            torch.cuda.synchronize()
        assert all(y.isfinite().all() and y.count_nonzero() > y.numel() / 2 for y in alone)
        chain = [torch.empty_like(x) for _ in given]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i, (weight, chosen) in enumerate(given):
                weights.copy_(weight)
                ids.copy_(chosen)
                method(chain[i - 1] if i % 2 else x, layers[i % 2], weights, ids, out=chain[i])
        for _ in range(5):
            for y in chain:
                y.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(y, expected) for y, expected in zip(chain, alone, strict=True))


@pytest.mark.parametrize("tokens", [40, 300])
@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO"])
def test_products_that_are_linked_on_two_streams(rng, monkeypatch, algo, tokens):
    """The second one waits for tiles of the first one of its own call, whoever else has multiprocessors."""
    method = layer_of(monkeypatch, FP8, algo, 48, 512, 256, top_k=4)
    params = prepared(method, random_stacks(rng, algo, 48, 512, 256))
    method._plan.keep(tokens, FP8, SMALL)
    calls = []
    for _ in range(2):
        x = random_x(rng, (tokens, 512), "bfloat16")
        calls.append(moved_inputs(method, x, params, *random_routing(rng, tokens, 4, 48)))
    check_on_two_streams(method, calls, 40)


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_tokens_do_not_see_each_other(rng, monkeypatch, algo, kernel):
    """A NaN stays in its row, also among the rows of one tile."""
    method = layer_of(monkeypatch, kernel, algo, 3, 128, 128, top_k=2)
    params = prepared(method, random_stacks(rng, algo, 3, 128, 128))
    x, _, weights, ids = moved_inputs(
        method, random_x(rng, (100, 128), "bfloat16"), params, *random_routing(rng, 100, 2, 3)
    )
    expected = to_numpy(method(x, params, weights, ids))
    x[41, 7] = float("nan")
    y = method(x, params, weights, ids)
    assert bool(y[41].isnan().all())
    rows = np.arange(100) != 41
    np.testing.assert_array_equal(to_numpy(y)[rows], expected[rows])
