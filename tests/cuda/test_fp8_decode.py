"""The FP8 kernel for few tokens on Hopper, forced, over shapes that do not fit its tiles, with blocks
that share K, and in passes over it."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_within_core_sums, random_case, random_x
from .cases import (
    OnDevice,
    assert_calls_follow_each_other,
    assert_writes_only_its_result,
    force,
    to_cuda,
    to_numpy,
)

pytestmark = pytest.mark.gpu

NAME = "cuda:sm90_fp8_decode"
ALGOS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"]


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch, NAME)


def check(case, layer, x, dtype="bfloat16", bias=None):
    given = None if bias is None else to_cuda(bias)
    y, values = to_numpy(layer(x, bias=given)), reference.as_float32(x)
    expected, magnitude = case.expected(values, "exact", bias), case.magnitude(values)
    assert_within_core_sums(y, expected, magnitude, dtype)
    assert to_numpy(layer(x, bias=given)).tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo", ALGOS)
def test_every_number_of_tokens(rng, algo, dtype):
    """Partitions that end within a tile and have scales of their own, K that ends within a step."""
    case = random_case(rng, algo, 1152, [130, 31, 1])
    layer = OnDevice(case, dtype)
    assert layer.method.backend == NAME
    for tokens in range(1, 17):
        check(case, layer, random_x(rng, (tokens, 1152), dtype), dtype)


@pytest.mark.parametrize(
    "columns, rows",
    [(128, [72]), (384, [40]), (4096, [700]), (7168, [120, 8]), (28672, [300]), (14336, [1540])],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("algo", ALGOS)
def test_columns_of_all_lengths(rng, algo, columns, rows):
    """One block for all of K, two that share it, and passes, where x does not fit beside the ring; small
    layers, two calls of which are on a multiprocessor, and one that is not."""
    case = random_case(rng, algo, columns, rows)
    layer = OnDevice(case, "bfloat16")
    for tokens in (1, 7, 16):
        check(case, layer, random_x(rng, (tokens, columns), "bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_many_rounds_of_tiles(rng, algo):
    """More rows than the blocks take at once, so that boxes and parked sums are used again."""
    for columns, rows, tokens in ((128, [17000, 300], 3), (4096, [4500, 300], 16)):
        case = random_case(rng, algo, columns, rows)
        check(case, OnDevice(case, "bfloat16"), random_x(rng, (tokens, columns), "bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("columns", [384, 8192, 28672])
def test_a_scale_found_at_run_time_and_a_bias(rng, columns, dtype):
    case = random_case(rng, "FP8", columns, [200], input_scale=False)
    bias = rng.standard_normal(200).astype(np.float32)
    layer = OnDevice(case, dtype)
    for tokens in (2, 16):
        check(case, layer, random_x(rng, (tokens, columns), dtype), dtype, bias)


def test_nothing_around_the_result_is_written(rng):
    case = random_case(rng, "FP8_PB_WO", 4096, [129])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (11, 4096), "bfloat16"), "bfloat16")
    assert_writes_only_its_result(layer, x)


def test_calls_that_follow_each_other_in_a_graph(rng):
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", 4096, [4096])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (16, 4096), "bfloat16"), "bfloat16")
    assert_calls_follow_each_other(layer, x)
