"""The exact NVFP4 kernel of Hopper for 17 to 256 tokens, forced, over shapes that do not fit its tiles."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import Case, assert_close, random_case, random_x, with_a_zero_part
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

NAME = "cuda:sm90_nvfp4_medium"
SHARED = (23, 27, 32, 33, 37, 38, 39)
"""Variants whose blocks share the steps of tiles, of 16, 32, 64 and 128 tokens."""
VARIANTS = (*range(22), *SHARED)


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch, NAME, "NVFP4")


def check(case, layer, x, dtype, bias=None):
    y = layer(x, bias=None if bias is None else to_cuda(bias))
    assert_close(to_numpy(y), case.expected(reference.as_float32(x), "exact", bias), dtype)
    assert to_numpy(layer(x, bias=None if bias is None else to_cuda(bias))).tobytes() == to_numpy(y).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "algo, group", [("NVFP4", 16), ("W4A16_NVFP4", 16), ("W4A16_NVFP4", 32), ("MXFP4", 32)]
)
def test_tokens_around_the_tiles(rng, algo, group, dtype):
    """Rows that end within a tile and at odd addresses, K that ends within a step, three partitions."""
    case = random_case(rng, algo, 1056, [130, 31, 1], group_size=group)
    layer = OnDevice(case, dtype)
    assert layer.method.backend == NAME
    for tokens in (1, 7, 16, 17, 32, 33, 64, 65, 127, 128, 129, 257, 300, 1030):
        check(case, layer, random_x(rng, (tokens, 1056), dtype), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [31, 64, 100, 260])
@pytest.mark.parametrize("columns, rows", [(1296, [330, 70, 24]), (272, [65]), (16, [200])])
def test_every_shape_of_tiles(rng, columns, rows, tokens, dtype):
    """Each is a variant; a part of K may have one step more than another, a warpgroup none."""
    case = random_case(rng, "NVFP4", columns, rows)
    layer = OnDevice(case, dtype)
    x = random_x(rng, (tokens, columns), dtype)
    expected = case.expected(reference.as_float32(x))
    for variant in VARIANTS:
        layer.method._plan.keep(tokens, NAME, variant)
        y = to_numpy(layer(x))
        assert_close(y, expected, dtype)
        assert to_numpy(layer(x)).tobytes() == y.tobytes()


@pytest.mark.parametrize("columns", [16, 48, 64, 80, 128, 144, 512, 4112])
def test_columns_of_all_lengths(rng, columns):
    for rows in (1, 15, 136):
        case = random_case(rng, "NVFP4", columns, [rows])
        check(case, OnDevice(case, "bfloat16"), random_x(rng, (50, columns), "bfloat16"), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_exact(rng, dtype):
    """Rows of an identity give every code under every block scale, subnormal and zero ones included."""
    columns = 1024
    scale = np.arange(128 * 64, dtype=np.uint8).reshape(128, 64) & 0x7F
    part = {
        "weight": rng.integers(0, 256, (128, columns // 2), dtype=np.uint8),
        "weight_scale": np.where(scale == 0x7F, 0, scale).astype(np.uint8),
        "weight_scale_2": np.array(0.5, np.float32),
    }
    case = Case("NVFP4", columns, [128], [part])
    layer = OnDevice(case, dtype)
    for first in range(0, columns, 256):
        x = np.zeros((256, columns), np.float32)
        x[np.arange(256), first + np.arange(256)] = 1
        x = reference.encode(x, "bfloat16") if dtype == "bfloat16" else x.astype(np.float16)
        expected = reference.round_to(case.expected(reference.as_float32(x)), dtype)
        np.testing.assert_array_equal(
            reference.as_float32(to_numpy(layer(x))), reference.as_float32(expected)
        )


def test_a_partition_of_zeros(rng):
    case = with_a_zero_part(random_case(rng, "NVFP4", 256, [40, 56]), "NVFP4")
    check(case, OnDevice(case, "bfloat16"), random_x(rng, (33, 256), "bfloat16"), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_and_rows_of_x_that_are_apart(rng, dtype):
    case = random_case(rng, "NVFP4", 400, [200])
    layer = OnDevice(case, dtype)
    bias = rng.standard_normal(200).astype(np.float32)
    wide = random_x(rng, (70, 512), dtype)
    y = layer(to_cuda(wide, dtype)[:, 40:440], bias=to_cuda(bias))
    x = np.ascontiguousarray(wide[:, 40:440])
    assert_close(to_numpy(y), case.expected(reference.as_float32(x), "exact", bias), dtype)
    check(case, layer, x, dtype, bias)


def test_nothing_around_the_result_is_written(rng):
    case = random_case(rng, "NVFP4", 256, [129])
    layer = OnDevice(case, "bfloat16")
    for tokens in (33, 90, 200):
        x = to_cuda(random_x(rng, (tokens, 256), "bfloat16"), "bfloat16")
        for variant in VARIANTS:
            layer.method._plan.keep(tokens, NAME, variant)
            assert_writes_only_its_result(layer, x)


def test_what_is_not_a_number_stays_in_its_row(rng):
    case = random_case(rng, "NVFP4", 512, [150])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (60, 512), "bfloat16"), "bfloat16")
    y = layer(x)
    x[7, 100], x[50, 3] = float("nan"), float("inf")
    again = layer(x)
    assert bool(again[7].isnan().all())
    others = [row for row in range(60) if row not in (7, 50)]
    assert to_numpy(again[others]).tobytes() == to_numpy(y[others]).tobytes()


@pytest.mark.slow
def test_many_tiles(rng):
    """More tiles than multiprocessors, of all shapes that may have so many; some tokens are compared."""
    case = random_case(rng, "NVFP4", 256, [6000, 2700, 260])
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (1900, 256), "bfloat16")
    some = np.r_[0:30, 1000:1060, 1880:1900]
    expected = case.expected(reference.as_float32(x[some]))
    for variant in VARIANTS:
        layer.method._plan.keep(len(x), NAME, variant)
        y = layer(x)
        assert not y.isnan().any()
        assert_close(to_numpy(y)[some], expected, "bfloat16")


def test_calls_that_follow_each_other_in_a_graph(rng):
    layer = OnDevice(of_unit_gain(random_case(rng, "NVFP4", 2048, [2048])), "bfloat16")
    for tokens in (20, 64, 200):
        x = to_cuda(random_x(rng, (tokens, 2048), "bfloat16"), "bfloat16")
        assert_calls_follow_each_other(layer, x)


@pytest.mark.parametrize("variant", SHARED)
def test_shares_that_follow_each_other_in_a_graph(rng, variant):
    """Shares leave sums in one workspace, which all calls of the graph use."""
    layer = OnDevice(of_unit_gain(random_case(rng, "NVFP4", 2048, [2048])), "bfloat16")
    for tokens in (11, 64, 128):
        layer.method._plan.keep(tokens, NAME, variant)
        x = to_cuda(random_x(rng, (tokens, 2048), "bfloat16"), "bfloat16")
        assert_calls_follow_each_other(layer, x)


@pytest.mark.parametrize("variant", SHARED)
def test_shares_of_all_lengths(rng, variant):
    """A block has less than a step of a tile, some tiles and parts of two, whole ones and then shares; a tile
    has blocks of its own, some with a step more than others."""
    for columns, rows in ((4096, [256]), (640, [9000]), (128, [40000]), (8192, [70]), (1664, [2048])):
        case = random_case(rng, "NVFP4", columns, rows)
        layer = OnDevice(case, "bfloat16")
        for tokens in (16, 50, 140):
            layer.method._plan.keep(tokens, NAME, variant)
            check(case, layer, random_x(rng, (tokens, columns), "bfloat16"), "bfloat16")


def test_shares_on_three_streams(rng):
    layer = OnDevice(random_case(rng, "NVFP4", 4096, [10240]), "bfloat16")
    x = to_cuda(random_x(rng, (40, 4096), "bfloat16"), "bfloat16")
    for variant in SHARED[1:]:
        layer.method._plan.keep(40, NAME, variant)
        assert_streams_do_not_wait(layer, x)
