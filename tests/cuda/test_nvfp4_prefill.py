"""How the exact NVFP4 kernel of Hopper for many tokens divides its work, way by way."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_close, random_case, random_x
from .cases import (
    OnDevice,
    assert_calls_follow_each_other,
    assert_streams_do_not_wait,
    assert_writes_only_its_result,
    force,
    of_unit_gain,
    poisoned,
    to_cuda,
    to_numpy,
    torch,
)

pytestmark = pytest.mark.gpu

NAME = "cuda:sm90_nvfp4_prefill"
VARIANTS = 4


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch, NAME, "NVFP4")


@pytest.fixture(params=range(1, VARIANTS + 1))
def variant(request):
    """A shape of tiles, and whether they are whole or shared evenly."""
    return request.param


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "columns, rows", [(1296, [330, 70, 24]), (272, [65]), (16, [200]), (4112, [1100]), (7168, [2112])]
)
def test_parts_of_all_lengths(rng, variant, columns, rows, dtype):
    """Blocks with parts of two tiles and of one; fewer steps than blocks."""
    case = random_case(rng, "NVFP4", columns, rows)
    layer = OnDevice(case, dtype)
    for tokens in (31, 100, 260):
        x = random_x(rng, (tokens, columns), dtype)
        layer.method._plan.keep(tokens, NAME, variant)
        y = to_numpy(layer(x))
        assert_close(y, case.expected(reference.as_float32(x)), dtype)
        for _ in range(3):
            assert to_numpy(layer(x)).tobytes() == y.tobytes()


def test_many_tiles(rng, variant):
    """Whole rounds before the shares; some tokens are compared."""
    case = random_case(rng, "NVFP4", 256, [6000, 2700, 260])
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (1900, 256), "bfloat16")
    some = np.r_[0:30, 1000:1060, 1880:1900]
    layer.method._plan.keep(len(x), NAME, variant)
    y = layer(x)
    assert not y.isnan().any()
    assert_close(to_numpy(y)[some], case.expected(reference.as_float32(x[some])), "bfloat16")


def test_a_way_that_is_kept_after_calls_brings_its_workspace(rng):
    """Whole tiles take none; tiles that are shared evenly have a sum for each block."""
    case = random_case(rng, "NVFP4", 1296, [424])
    layer = OnDevice(case, "bfloat16")
    rows = random_x(rng, (300, 1296), "bfloat16")
    x, out = to_cuda(rows, "bfloat16"), poisoned(300, 424, dtype="bfloat16")
    expected = case.expected(reference.as_float32(rows))
    sum_of_a_block = 256 * 128 * 4
    for whole, variant in ((True, 1), (False, 3), (True, 1), (False, 3)):
        layer.method._plan.keep(300, NAME, variant)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer.method(x, layer.params, out=out.fill_(float("nan")))
        assert_close(to_numpy(out), expected, "bfloat16")
        taken = torch.cuda.max_memory_allocated() - before
        assert (taken < sum_of_a_block) if whole else (taken >= 100 * sum_of_a_block)


def test_nothing_around_the_result_is_written(rng, variant):
    case = random_case(rng, "NVFP4", 1088, [129])
    layer = OnDevice(case, "bfloat16")
    for tokens in (33, 90, 300):
        x = to_cuda(random_x(rng, (tokens, 1088), "bfloat16"), "bfloat16")
        layer.method._plan.keep(tokens, NAME, variant)
        assert_writes_only_its_result(layer, x)


def test_calls_that_follow_each_other_in_a_graph(rng, variant):
    """Each call reads what the call before wrote, and begins before that ends; calls share a workspace."""
    layer = OnDevice(of_unit_gain(random_case(rng, "NVFP4", 2048, [2048])), "bfloat16")
    for tokens in (64, 300):
        layer.method._plan.keep(tokens, NAME, variant)
        x = to_cuda(random_x(rng, (tokens, 2048), "bfloat16"), "bfloat16")
        assert_calls_follow_each_other(layer, x)


def test_calls_on_three_streams(rng):
    layer = OnDevice(random_case(rng, "NVFP4", 4096, [10240]), "bfloat16")
    x = to_cuda(random_x(rng, (256, 4096), "bfloat16"), "bfloat16")
    for variant in (3, 4):
        layer.method._plan.keep(256, NAME, variant)
        assert_streams_do_not_wait(layer, x)
