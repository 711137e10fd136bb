"""The NVFP4 kernel for few tokens on Hopper, forced, over shapes that do not fit its stages, with warps and
blocks that share K in every way it has."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_within_rounding, random_case, random_x
from .cases import (
    OnDevice,
    assert_calls_follow_each_other,
    assert_writes_only_its_result,
    force,
    on_host,
    to_cuda,
    to_numpy,
)

pytestmark = pytest.mark.gpu

NAME = "cuda:sm90_nvfp4_decode"
TOKENS = range(17)


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch, NAME, "NVFP4")


def check(case, layer, x, dtype="bfloat16", bias=None):
    """Products are exact: only float32 sums and the output are rounded."""
    given = None if bias is None else to_cuda(bias)
    y, values = to_numpy(layer(x, bias=given)), reference.as_float32(x)
    expected, magnitude = case.expected(values, "exact", bias), case.magnitude(values)
    assert_within_rounding(y, expected, magnitude, dtype)
    assert to_numpy(layer(x, bias=given)).tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo, columns", [("NVFP4", 1040), ("W4A16_NVFP4", 1040), ("MXFP4", 1056)])
def test_every_number_of_tokens(rng, algo, columns, dtype):
    """Partitions that end within a slab and have scales of their own, K that ends within a block."""
    case = random_case(rng, algo, columns, [130, 31, 1])
    layer = OnDevice(case, dtype)
    assert layer.method.backend == NAME
    for tokens in TOKENS:
        check(case, layer, random_x(rng, (tokens, columns), dtype), dtype)


def test_columns_of_all_lengths(rng):
    """From less than a block, by one that some warps have nothing of, to x that two blocks share."""
    shapes = (16, [72]), (48, [1]), (80, [40]), (528, [2]), (2064, [17]), (4096, [700]), (7168, [120, 8])
    for columns, rows in (*shapes, (14336, [540]), (28672, [300])):
        case = random_case(rng, "NVFP4", columns, rows)
        layer = OnDevice(case, "bfloat16")
        for tokens in (1, 2, 7, 9, 16):
            check(case, layer, random_x(rng, (tokens, columns), "bfloat16"))


@pytest.mark.parametrize("tokens", [1, 4, 6, 8, 13])
@pytest.mark.parametrize("shape", [(1040, [700]), (4096, [2200]), (7168, [300]), (512, [9001])])
def test_every_way(rng, shape, tokens):
    """Ways that are not the choice are right, too; for a way that does not suit the call, the choice runs."""
    columns, rows = shape
    case = random_case(rng, "NVFP4", columns, rows)
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (tokens, columns), "bfloat16")
    values = reference.as_float32(x)
    expected, magnitude = case.expected(values), case.magnitude(values)
    for variant in range(8):
        layer.method._plan.keep(tokens, NAME, variant)
        y = to_numpy(layer(x))
        assert_within_rounding(y, expected, magnitude, "bfloat16")
        assert to_numpy(layer(x)).tobytes() == y.tobytes()


@pytest.mark.slow
def test_many_rounds_of_slabs(rng):
    """More rows than warps take at once, so that stages, parked sums and boxes are used again."""
    for columns, rows in (512, [17000, 300]), (1536, [9001]), (4096, [12000, 300]), (8192, [6000]):
        case = random_case(rng, "NVFP4", columns, rows)
        layer = OnDevice(case, "bfloat16")
        for tokens in (1, 5, 16):
            check(case, layer, random_x(rng, (tokens, columns), "bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_and_scales_come_through_as_they_are(rng, dtype):
    """One column of x is one, the others zero: outputs are weights, of every code under every scale."""
    columns = 256
    case = random_case(rng, "NVFP4", columns, [512])
    part = case.parts[0]
    part["weight_scale"][:] = np.arange(512)[:, None] // 4 % 0x7F  # zero and subnormal scales first
    part["weight"][:] = np.arange(256)[None, : columns // 2] * 2 + np.arange(512)[:, None] % 2
    part["weight_scale_2"] = np.array(np.float32(1))
    layer = OnDevice(case, dtype)
    for begin in range(0, columns, 16):
        x = np.zeros((16, columns), np.float32)
        x[np.arange(16), begin + np.arange(16)] = 1
        x = reference.encode(x, "bfloat16") if dtype == "bfloat16" else x.astype(np.float16)
        expected = reference.round_to(case.expected(reference.as_float32(x)), dtype)
        np.testing.assert_array_equal(reference.as_float32(to_numpy(layer(x))), expected)


@pytest.mark.parametrize("group_size", [16, 32])
def test_groups_and_zero_scales(rng, group_size):
    case = random_case(rng, "W4A16_NVFP4", 2048, [96], group_size=group_size)
    case.parts[0]["weight_scale"][rng.random(case.parts[0]["weight_scale"].shape) < 0.5] = 0
    case.parts[0]["weight_scale"][5] = 0
    layer = OnDevice(case, "bfloat16")
    for tokens in (1, 16):
        check(case, layer, random_x(rng, (tokens, 2048), "bfloat16"))


def test_activations_near_the_ends_of_their_range(rng):
    """Neither huge nor tiny activations are lost on the way."""
    case = random_case(rng, "NVFP4", 4096, [160])
    for power in (-100, 100):
        x = np.exp2(rng.uniform(power - 4, power + 4, (9, 4096))).astype(np.float32)
        check(case, OnDevice(case, "bfloat16"), reference.encode(x, "bfloat16"))


def test_as_on_the_host(rng):
    case = random_case(rng, "NVFP4", 1536, [300, 77])
    layer, host = OnDevice(case, "bfloat16"), on_host(case, dtype="bfloat16")
    params = host.prepare(case.listed())
    for tokens in (1, 4, 16):
        x = random_x(rng, (tokens, 1536), "bfloat16")
        y, z = (reference.as_float32(v) for v in (to_numpy(layer(x)), host(x, params)))
        assert np.linalg.norm(y - z) <= 2.5e-3 * np.linalg.norm(z)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_and_rows_apart(rng, dtype):
    """Rows of x and of the result with a distance, a bias of float32 and of the layer's type."""
    case = random_case(rng, "NVFP4", 4096, [201])
    layer = OnDevice(case, dtype)
    x = to_cuda(random_x(rng, (13, 4096 + 64), dtype), dtype)[:, :4096]
    bias = to_cuda(rng.standard_normal(201).astype(np.float32))
    for given in (bias, bias.to(x.dtype)):
        y = to_numpy(layer(x, bias=given))
        rounded = reference.as_float32(to_numpy(given))
        check_against = case.expected(reference.as_float32(to_numpy(x.contiguous())), "exact", rounded)
        magnitude = case.magnitude(reference.as_float32(to_numpy(x.contiguous())))
        assert_within_rounding(y, check_against, magnitude + np.abs(rounded), dtype)


def test_nothing_around_the_result_is_written(rng):
    case = random_case(rng, "NVFP4", 4096, [129])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (11, 4096), "bfloat16"), "bfloat16")
    assert_writes_only_its_result(layer, x)


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_calls_that_follow_each_other_in_a_graph(rng, tokens):
    case = random_case(rng, "NVFP4", 4096, [4096])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (tokens, 4096), "bfloat16"), "bfloat16")
    x /= x.float().norm(dim=-1, keepdim=True)
    assert_calls_follow_each_other(layer, x, bias=True)
