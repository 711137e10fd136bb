"""How the NVFP4 kernels of Hopper with FP8 products share their last tiles, shape by shape."""

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
    to_cuda,
    to_numpy,
)

pytestmark = pytest.mark.gpu

MANY = "cuda:sm90_nvfp4_fp8_prefill"
FEW = "cuda:sm90_nvfp4_fp8_medium"
SHARED = [
    *((MANY, variant) for variant in range(4, 7)),
    *((FEW, variant) for variant in (14, 15, 19, 20, 24, 25)),
]
"""Kernels, and their variants whose blocks share the steps of tiles evenly."""


@pytest.fixture(params=SHARED, ids=lambda config: f"{config[0].removeprefix('cuda:sm90_nvfp4_')}-{config[1]}")
def config(request, monkeypatch):
    """A kernel and a shape of tiles."""
    force(monkeypatch, request.param[0], "NVFP4", "fp8")
    return request.param


@pytest.mark.parametrize(
    "columns, rows",
    [(1296, [330, 70, 24]), (272, [65]), (16, [200]), (4160, [1100]), (7168, [2112]), (1664, [2048])],
)
def test_shares_of_all_lengths(rng, config, columns, rows):
    """Blocks with parts of two tiles and of one; fewer steps than blocks; odd numbers of units; tiles with
    blocks of their own."""
    case = random_case(rng, "NVFP4", columns, rows)
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (31, 130, 530):
        x = random_x(rng, (tokens, columns), "bfloat16")
        layer.method._plan.keep(tokens, *config)
        y = to_numpy(layer(x))
        assert_close(y, case.expected(reference.as_float32(x), "fp8"), "bfloat16")
        for _ in range(3):
            assert to_numpy(layer(x)).tobytes() == y.tobytes()


def test_many_tiles(rng, config):
    """Whole rounds before the shares; some tokens are compared."""
    case = random_case(rng, "NVFP4", 256, [6000, 2700, 260])
    layer = OnDevice(case, "bfloat16", "fp8")
    x = random_x(rng, (1900, 256), "bfloat16")
    some = np.r_[0:30, 1000:1060, 1880:1900]
    layer.method._plan.keep(len(x), *config)
    y = layer(x)
    assert not y.isnan().any()
    assert_close(to_numpy(y)[some], case.expected(reference.as_float32(x[some]), "fp8"), "bfloat16")


def test_sums_of_the_tensor_cores(rng, config):
    case = random_case(rng, "NVFP4", 2064, [400])
    layer = OnDevice(case, "bfloat16", "fp8")
    layer.method = case.method(dtype="bfloat16", device="cuda:0", compute="fp8", fast_accum=True)
    x = random_x(rng, (300, 2064), "bfloat16")
    layer.method._plan.keep(300, *config)
    expected = case.expected(reference.as_float32(x), "fp8")
    y = reference.as_float32(to_numpy(layer(x)))
    assert np.linalg.norm(y - expected) < 5e-3 * np.linalg.norm(expected)


def test_nothing_around_the_result_is_written(rng, config):
    case = random_case(rng, "NVFP4", 1088, [129])
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (33, 300):
        x = to_cuda(random_x(rng, (tokens, 1088), "bfloat16"), "bfloat16")
        layer.method._plan.keep(tokens, *config)
        assert_writes_only_its_result(layer, x)


def test_calls_that_follow_each_other_in_a_graph(rng, config):
    """Each call reads what the call before wrote, and begins before that ends; calls share a workspace."""
    layer = OnDevice(of_unit_gain(random_case(rng, "NVFP4", 2048, [2048])), "bfloat16", "fp8")
    layer.method._plan.keep(300, *config)
    x = to_cuda(random_x(rng, (300, 2048), "bfloat16"), "bfloat16")
    assert_calls_follow_each_other(layer, x)


def test_calls_on_three_streams(rng, config):
    layer = OnDevice(random_case(rng, "NVFP4", 4096, [10240]), "bfloat16", "fp8")
    x = to_cuda(random_x(rng, (256, 4096), "bfloat16"), "bfloat16")
    layer.method._plan.keep(256, *config)
    assert_streams_do_not_wait(layer, x)
