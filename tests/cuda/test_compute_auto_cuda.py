"""compute="auto" on the device: to the bit what a method of the compute that it takes would give."""

import numpy as np
import pytest

from ..linear_cases import random_case, random_x
from ..test_nvfp4_variants import smoothed

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import OnDevice, poisoned, to_cuda, to_numpy  # noqa: E402

COMPUTES = ("exact", "fp8")
TOKENS = (1, 5, 16, 33, 64, 130, 257, 1024, 1500, 4100)


def layers(case, dtype="bfloat16"):
    """The layer with each compute, all on the tensors that one `prepare` of "auto" made."""
    auto = OnDevice(case, dtype, "auto")
    of = {compute: OnDevice(case, dtype, compute) for compute in COMPUTES}
    for layer in of.values():
        layer.params = {name: auto.params[name] for name in layer.params}
    return auto, of


def assert_both(taken):
    """Checks what calls took: both computes, where there are kernels of both."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert set(taken) == (set(COMPUTES) if hopper else {"exact"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_call_has_the_bits_of_the_compute_that_it_takes(rng, dtype):
    case = random_case(rng, "NVFP4", 2064, [2310, 250])
    auto, of = layers(case, dtype)
    bias = to_cuda(rng.standard_normal(2560).astype(np.float32))
    taken = [auto.method.compute_for(tokens) for tokens in TOKENS]
    for tokens, compute in zip(TOKENS, taken, strict=True):
        x = to_cuda(random_x(rng, (tokens, 2064), dtype), dtype)
        assert to_numpy(auto(x, bias=bias)).tobytes() == to_numpy(of[compute](x, bias=bias)).tobytes()
    if dtype == "float32":
        assert set(taken) == {"exact"}
    else:
        assert_both(taken)


def test_it_is_smoothed_first(rng):
    case = smoothed(rng, random_case(rng, "NVFP4_AWQ", 1056, [4096]))
    auto, of = layers(case)
    assert_both(auto.method.compute_for(tokens) for tokens in (3, 40, 1024))
    for tokens in (3, 40, 1024):
        x = random_x(rng, (tokens, 1056), "bfloat16")
        assert torch.equal(auto(x), of[auto.method.compute_for(tokens)](x))


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4", "MXFP4"])
def test_one_copy_is_prepared_for_both(rng, algo):
    """Tensors prepared for "fp8" are those for "auto"; those for "exact" have no fold_scale."""
    case = random_case(rng, algo, 1056, [70, 300])
    auto = OnDevice(case, "bfloat16", "auto").params
    for compute in COMPUTES:
        of = OnDevice(case, "bfloat16", compute).params
        assert set(auto) - set(of) == ({"fold_scale"} if compute == "exact" else set())
        for name in of:
            assert to_numpy(auto[name]).tobytes() == to_numpy(of[name]).tobytes(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_mxfp8_is_fp8(rng, dtype):
    case = random_case(rng, "MXFP8", 1056, [70, 300])
    auto, fp8 = OnDevice(case, dtype, "auto"), OnDevice(case, dtype, "fp8")
    for tokens in (1, 40, 300):
        x = random_x(rng, (tokens, 1056), dtype)
        assert auto.method.compute_for(tokens) == "fp8"
        assert torch.equal(auto(x), fp8(x))


def test_graphs_of_both_replay(rng):
    case = random_case(rng, "NVFP4", 2048, [4096])
    auto, of = layers(case)
    assert_both(auto.method.compute_for(tokens) for tokens in (4, 1024))
    for tokens in (4, 1024):
        x = to_cuda(random_x(rng, (tokens, 2048), "bfloat16"), "bfloat16")
        out, graph = poisoned(tokens, 4096, dtype="bfloat16"), torch.cuda.CUDAGraph()
        auto(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            auto(x, out=out)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, of[auto.method.compute_for(tokens)](x))


def test_tuning_measures_both(rng):
    case = random_case(rng, "NVFP4", 2048, [1024])
    auto, of = layers(case)
    timings = auto.method.tune([256], auto.params)
    names = {timing.kernel for timing in timings}
    exact, fp8 = (
        {name for name, reason in of[compute].method._plan.explain() if reason is None}
        for compute in COMPUTES
    )
    assert names & (exact - fp8)
    assert bool(names & (fp8 - exact)) == bool(fp8 - exact)
    x = random_x(rng, (256, 2048), "bfloat16")
    taken = of[auto.method.compute_for(256)]
    fastest = timings[0]
    taken.method._plan.keep(256, fastest.kernel, fastest.variant)
    assert torch.equal(auto(x), taken(x))
