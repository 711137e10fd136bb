"""The int8 kernel on Hopper, forced, over shapes that do not fit its tiles."""

from typing import Any

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_close, random_case, random_x
from .cases import (
    OnDevice,
    assert_a_graph_replays,
    assert_writes_only_its_result,
    force,
    to_cuda,
    to_numpy,
)

pytestmark = pytest.mark.gpu

NAME = "cuda:sm90_int8_prefill"
ALGO = "W8A8_SQ_PER_CHANNEL"
SHAPES = 14  # of tiles; those that quantize x as they multiply are of e4m3


@pytest.fixture(autouse=True)
def forced(monkeypatch: Any) -> None:
    force(monkeypatch, NAME)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("input_scale", [True, False])
def test_tokens_around_the_tiles(rng: Any, dtype: str, input_scale: bool) -> None:
    """Rows that end within a tile and at odd addresses, K that ends within a step."""
    rows = [162] if input_scale else [130, 31, 1]
    case = random_case(rng, ALGO, 1040, rows, input_scale=input_scale)
    layer = OnDevice(case, dtype)
    bias = rng.standard_normal(162).astype(np.float32)
    assert layer.method.backend == NAME
    for tokens in (1, 17, 32, 33, 64, 65, 127, 128, 129, 257, 300):
        x = random_x(rng, (tokens, 1040), dtype)
        y = layer(x, bias=to_cuda(bias))
        assert_close(to_numpy(y), case.expected(reference.as_float32(x), bias=bias, x_dtype=dtype), dtype)


@pytest.mark.parametrize("tokens", [1, 31, 64, 100, 260, 600])
def test_every_shape_of_tiles(rng: Any, tokens: int) -> None:
    """A part of K may have one step more than another, a pair of blocks one tile."""
    case = random_case(rng, ALGO, 1296, [330, 70, 24], input_scale=False)
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (tokens, 1296), "bfloat16")
    expected = case.expected(reference.as_float32(x))
    for shape in range(SHAPES):
        layer.method._plan.keep(tokens, NAME, shape)
        y = to_numpy(layer(x))
        assert_close(y, expected, "bfloat16")
        assert to_numpy(layer(x)).tobytes() == y.tobytes()


@pytest.mark.parametrize("columns", [16, 112, 128, 144, 4112])
def test_columns_of_all_lengths(rng: Any, columns: int) -> None:
    case = random_case(rng, ALGO, columns, [136], input_scale=False)
    layer = OnDevice(case, "bfloat16")
    for tokens in (3, 300):
        x = random_x(rng, (tokens, columns), "bfloat16")
        assert_close(to_numpy(layer(x)), case.expected(reference.as_float32(x)), "bfloat16")


def test_sums_are_exact(rng: Any) -> None:
    """Sums beyond 2^24, where float32 has no odd numbers: whole tiles round them once."""
    case = random_case(rng, ALGO, 8192, [256], input_scale=False)
    case.parts[0]["weight"] = rng.integers(100, 128, (256, 8192)).astype(np.int8)
    layer = OnDevice(case, "bfloat16")
    for tokens in (64, 512):
        x = to_cuda(rng.integers(96, 128, (tokens, 8192)).astype(np.float32), "bfloat16")
        assert_close(to_numpy(layer(x)), case.expected(x.float().cpu().numpy()), "bfloat16")


def test_writes_only_its_result(rng: Any) -> None:
    layer = OnDevice(random_case(rng, ALGO, 192, [48], input_scale=False), "bfloat16")
    for tokens in (21, 300):
        assert_writes_only_its_result(layer, random_x(rng, (tokens, 192), "bfloat16"))


def test_graph_replays(rng: Any) -> None:
    layer = OnDevice(random_case(rng, ALGO, 640, [200], input_scale=False), "bfloat16")
    for tokens in (5, 200):
        assert_a_graph_replays(layer, random_x(rng, (tokens, 640), "bfloat16"))
