"""Experts whose x is codes already, on every CUDA kernel that takes them."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod, UnsupportedQuantization, ops

from ..linear_cases import random_x
from ..moe_calls import moved, prepared
from ..moe_cases import random_routing, random_stacks
from ..moe_code_cases import CODED, quantized, scheme_of
from ..test_moe_quantized_input import (  # noqa: F401
    both,
    stacks_of,
    test_a_map_and_sums_that_go_on,
    test_a_nan_stays_in_its_row,
    test_codes_give_the_bits_of_what_they_were_made_from,
    test_every_code_is_taken_for_its_value,
    test_rows_of_any_length,
    test_rows_of_pairs_of_any_length,
    test_scales_of_others,
)

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

ANY_CHIP = ("cuda:simt", "cuda:sm89_fp8", "cuda:sm80_fp8", "cuda:sm80_nvfp4", "cuda:sm80_nvfp4_fp8")
DECODE, PREFILL, FOLDED = "cuda:sm90_fp8_decode", "cuda:sm90_fp8_prefill", "cuda:sm90_nvfp4_fp8_prefill"
KERNELS = (*ANY_CHIP, DECODE, PREFILL, FOLDED)
FORCED = "test_codes_give_the_bits_of_what_they_were_made_from"


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the layers that the CPU's tests make in this module."""
    return "cuda:0"


@pytest.fixture(autouse=True, params=[*KERNELS, None])
def kernel(request: Any, monkeypatch: Any) -> None:
    """Forces a kernel where the layer quantizes by itself, too; skips what it cannot run."""
    if request.param is None:
        return
    if request.node.originalname != FORCED:
        pytest.skip("whichever is chosen")
    given = request.node.callspec.params
    monkeypatch.setenv("MOQEXT_KERNEL", request.param)
    options = {name: given[name] for name in ("compute", "dtype")}
    try:
        MoEMethod(given["algo"], 4, 160, 64, top_k=3, device="cuda:0", quantized_input=True, **options)
    except UnsupportedQuantization as error:
        pytest.skip(str(error))


def test_kernels_that_quantize_x_are_told_apart():
    method = MoEMethod("FP8", 4, 256, 128, top_k=2, device="cuda:0", quantized_input=True)
    assert "quantizes x itself, the layer gets codes" in method.explain()


@pytest.mark.parametrize("algo, compute", CODED)
def test_what_ops_quantize_goes_in(rng, algo, compute):
    """Codes and scales that never leave the device, as torch's own dtypes, in a graph that is replayed."""
    coded, plain = both(algo, compute, 8, 256, 128, top_k=2, device="cuda:0")
    stacks = stacks_of(rng, algo, compute, 8, 256, 128)
    params, own = prepared(coded, stacks), prepared(plain, stacks)
    weights, ids = (moved(coded, t) for t in random_routing(rng, 33, 2, 8))
    x = moved(coded, random_x(rng, (33, 256), "bfloat16"), "bfloat16")
    scheme = scheme_of(coded)
    options = {}
    if scheme in ("fp8_tensor", "nvfp4"):
        options["scale"] = params["w13_input_scale"].flatten()[:1].clone()

    def step() -> Any:
        made = ops.quantize(x, scheme, **options)
        scale = None if scheme == "fp8_tensor" else made[1]
        return coded(made[0], params, weights, ids, x_scale=scale)

    eager = step()
    assert eager.dtype == torch.bfloat16
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.copy_(moved(coded, random_x(rng, (33, 256), "bfloat16"), "bfloat16"))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, step())
    expected = plain(x, own, weights, ids)
    error = (y.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) <= 1e-2  # another kernel sums in another order; codes of g may differ


@pytest.mark.parametrize("algo, compute", CODED)
def test_strides_and_addresses(rng, algo, compute):
    """Rows that begin anywhere, and scales by column as grouped products like them."""
    coded, _ = both(algo, compute, 4, 288, 64, top_k=2, device="cuda:0")
    stacks = stacks_of(rng, algo, compute, 4, 288, 64)
    params = prepared(coded, stacks)
    codes, scale = quantized(coded, stacks, random_x(rng, (6, 288), "float32"))
    codes, scale = moved(coded, codes), moved(coded, scale)
    weights, ids = (moved(coded, t) for t in random_routing(rng, 6, 2, 4))
    expected = coded(codes, params, weights, ids, x_scale=scale)
    columns = None if scale is None else scale.t().contiguous().t()
    room = torch.full((6, 3 * codes.shape[1] + 1), 0x38, dtype=torch.uint8, device="cuda")
    for apart in (room[:, 1 : 1 + codes.shape[1]], room[:, 1::3]):
        apart.copy_(codes)
        assert torch.equal(coded(apart, params, weights, ids, x_scale=columns), expected)
    folded = [None if t is None else t.view(2, 3, -1) for t in (codes, weights, ids, scale)]
    y = coded(folded[0], params, folded[1], folded[2], x_scale=folded[3])
    assert torch.equal(y, expected.view(2, 3, 288))


def test_tuning_measures_codes(rng):
    for algo, compute in CODED:
        coded, _ = both(algo, compute, 4, 256, 128, top_k=2, device="cuda:0")
        params = prepared(coded, random_stacks(rng, algo, 4, 256, 128))
        timings = coded.tune([24], params)
        assert timings
        assert all(np.isfinite(timing.seconds) for timing in timings)
