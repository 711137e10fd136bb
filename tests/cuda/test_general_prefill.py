"""How the kernel of Hopper for many tokens of MXFP8, int8 and int4 weights divides its work, way by way."""

from typing import Any

import numpy as np
import pytest

from moqext import reference

from ..extreme_cases import assert_as_reference
from ..linear_cases import assert_close, random_case, random_x
from .cases import (
    OnDevice,
    assert_a_graph_replays,
    assert_streams_do_not_wait,
    assert_writes_only_its_result,
    force,
    to_cuda,
    to_numpy,
    torch,
)

pytestmark = pytest.mark.gpu

NAME = "cuda:sm90_general_prefill"
VARIANTS = 4
FORMATS = [
    ("MXFP8", "bfloat16"),
    *((algo, dtype) for algo in ("W8A16", "W4A16_AWQ") for dtype in ("bfloat16", "float16")),
]


@pytest.fixture(autouse=True)
def forced(monkeypatch: Any) -> None:
    force(monkeypatch, NAME, "W8A16")


@pytest.fixture(params=range(1, VARIANTS + 1))
def variant(request: Any) -> int:
    """A shape of tiles, and whether they are whole or shared evenly."""
    return int(request.param)


@pytest.mark.parametrize(("algo", "dtype"), FORMATS)
@pytest.mark.parametrize(
    ("columns", "rows"), [(1152, [330, 70, 24]), (128, [66]), (4224, [1100]), (7168, [2112])]
)
def test_parts_of_all_lengths(
    rng: Any, variant: int, algo: str, dtype: str, columns: int, rows: list[int]
) -> None:
    """Blocks with parts of two tiles and of one; fewer steps than blocks."""
    case = random_case(rng, algo, columns, rows)
    layer = OnDevice(case, dtype)
    bias = rng.standard_normal(sum(rows)).astype(np.float32)
    for tokens in (1, 31, 260):
        x = random_x(rng, (tokens, columns), dtype)
        layer.method._plan.keep(tokens, NAME, variant)
        assert layer.method.backend_for(tokens) == NAME
        y = to_numpy(layer(x, bias=to_cuda(bias)))
        assert_close(y, case.expected(reference.as_float32(x), bias=bias, x_dtype=dtype), dtype)
        for _ in range(2):
            assert to_numpy(layer(x, bias=to_cuda(bias))).tobytes() == y.tobytes()


@pytest.mark.parametrize("algo", ["MXFP8", "W8A16", "W4A16_AWQ"])
def test_many_tiles(rng: Any, variant: int, algo: str) -> None:
    """Whole rounds before the shares; some tokens are compared."""
    case = random_case(rng, algo, 256, [6000, 2700, 260])
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (1900, 256), "bfloat16")
    some = np.r_[0:30, 1000:1060, 1880:1900]
    layer.method._plan.keep(len(x), NAME, variant)
    y = layer(x)
    assert not y.isnan().any()
    expected = case.expected(reference.as_float32(x[some]), x_dtype="bfloat16")
    assert_close(to_numpy(y)[some], expected, "bfloat16")


@pytest.mark.parametrize("columns", [16, 48, 80, 144, 1040])
def test_columns_that_fill_no_step(rng: Any, variant: int, columns: int) -> None:
    case = random_case(rng, "W8A16", columns, [24])
    layer = OnDevice(case, "bfloat16")
    for tokens in (3, 300):
        x = random_x(rng, (tokens, columns), "bfloat16")
        layer.method._plan.keep(tokens, NAME, variant)
        assert_close(to_numpy(layer(x)), case.expected(reference.as_float32(x)), "bfloat16")


@pytest.mark.parametrize("algo", ["MXFP8", "W4A16_AWQ"])
def test_nothing_around_the_result_is_written(rng: Any, variant: int, algo: str) -> None:
    """Rows of x have gaps, and outputs suit no vector."""
    case = random_case(rng, algo, 1152, [130])
    layer = OnDevice(case, "bfloat16")
    for tokens in (33, 300):
        wide = to_cuda(random_x(rng, (tokens, 1152 + 64), "bfloat16"), "bfloat16")
        layer.method._plan.keep(tokens, NAME, variant)
        assert_writes_only_its_result(layer, wide[:, 32 : 32 + 1152])
        x = to_numpy(wide[:, 32 : 32 + 1152].contiguous())
        expected = case.expected(reference.as_float32(x), x_dtype="bfloat16")
        assert_close(to_numpy(layer(wide[:, 32 : 32 + 1152])), expected, "bfloat16")


def test_a_graph_replays_calls_that_share_a_workspace(rng: Any, variant: int) -> None:
    layer = OnDevice(random_case(rng, "W4A16_AWQ", 2048, [2048]), "bfloat16")
    for tokens in (64, 300):
        layer.method._plan.keep(tokens, NAME, variant)
        assert_a_graph_replays(layer, to_cuda(random_x(rng, (tokens, 2048), "bfloat16"), "bfloat16"))


def test_calls_on_three_streams(rng: Any) -> None:
    layer = OnDevice(random_case(rng, "MXFP8", 4096, [10240]), "bfloat16")
    x = to_cuda(random_x(rng, (256, 4096), "bfloat16"), "bfloat16")
    for variant in (3, 4):
        layer.method._plan.keep(256, NAME, variant)
        assert_streams_do_not_wait(layer, x)


SCALES = {
    "zeros": lambda rng, shape: rng.choice(np.float32([0, 2e-3, 1e-2]), shape),
    "zeros at first": lambda rng, shape: np.where(np.arange(shape[1]) < 5, 0, 3e-3) * np.ones(shape),
    "far apart": lambda rng, shape: np.exp2(rng.integers(-60, 60, shape)),
    "falling": lambda rng, shape: np.exp2(40.0 - 6 * np.arange(shape[1])) * np.ones(shape),
    "rising": lambda rng, shape: np.exp2(-40.0 + 6 * np.arange(shape[1])) * np.ones(shape),
    "at the ends": lambda rng, shape: rng.choice(np.float32([1e-44, 3e-39, 1e-37, 1e25, 1e30]), shape),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SCALES)
def test_groups_of_any_scales(rng: Any, variant: int, name: str, dtype: str) -> None:
    """Sums change units from group to group: of scales that are zero, or too far apart, they are put by."""
    case = random_case(rng, "W4A16_AWQ", 14 * 128, [140])
    case.parts[0]["weight_scale"] = SCALES[name](rng, (140, 14)).astype(np.float32)
    without = np.repeat(case.parts[0]["weight_scale"] == 0, 128, axis=1)  # its codes have to be zeros
    case.parts[0]["weight"] &= ~(without[::2] * np.uint8(0x0F) | without[1::2] * np.uint8(0xF0))
    layer = OnDevice(case, dtype)
    x = torch.from_numpy(random_x(rng, (300, 14 * 128), "float32")).to(getattr(torch, dtype))
    x[::3, 256:] = 0  # what comes first is all that there is
    layer.method._plan.keep(300, NAME, variant)
    y = to_numpy(layer(x.cuda()))
    values = x.float().numpy().astype(np.float64)
    weight = reference.dequantize(case.parts[0], "W4A16_AWQ").astype(np.float64)
    assert_as_reference(y, values @ weight.T, np.abs(values) @ np.abs(weight).T, dtype)
