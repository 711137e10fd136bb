"""The FP8 kernel for many tokens on Hopper, forced, over shapes that do not fit its tiles."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import Case, assert_close, assert_close_but_for_core_sums, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import (  # noqa: E402
    OnDevice,
    assert_a_graph_replays,
    assert_writes_only_its_result,
    force,
    on_host,
    poisoned,
    to_cuda,
    to_numpy,
)

NAME = "cuda:sm90_fp8_prefill"
VARIANTS = 18
ALGOS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"]


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch, NAME)


def partitions(algo, rows):
    """Several, but for layers whose partitions may have input scales of their own."""
    return [sum(rows)] if algo == "FP8" else rows


def check(case, layer, x, dtype, bias=None):
    """A single output may outweigh all others, and a step of its type be beyond a norm's limit."""
    y, values = layer(x, bias=None if bias is None else to_cuda(bias)), reference.as_float32(x)
    expected = case.expected(values, "exact", bias)
    if expected.size > 2000:
        assert_close(to_numpy(y), expected, dtype)
    else:
        assert_close_but_for_core_sums(to_numpy(y), expected, case.magnitude(values), dtype)
    assert to_numpy(layer(x, bias=None if bias is None else to_cuda(bias))).tobytes() == to_numpy(y).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo", ALGOS)
def test_tokens_around_the_tiles(rng, algo, dtype):
    """Rows that end within a tile and at odd addresses, K that ends within a step."""
    case = random_case(rng, algo, 1040, partitions(algo, [130, 31, 1]))
    layer = OnDevice(case, dtype)
    assert layer.method.backend == NAME
    for tokens in (1, 17, 32, 33, 64, 65, 127, 128, 129, 257, 300):
        check(case, layer, random_x(rng, (tokens, 1040), dtype), dtype)


@pytest.mark.parametrize("tokens", [31, 64, 100, 260, 600])
@pytest.mark.parametrize("algo", ALGOS)
def test_every_shape_of_tiles(rng, algo, tokens):
    """Each is a variant; a part of K may have one step more than another, a pair of blocks one tile."""
    case = random_case(rng, algo, 1296, partitions(algo, [330, 70, 24]))
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (tokens, 1296), "bfloat16")
    expected = case.expected(reference.as_float32(x))
    for variant in range(VARIANTS):
        layer.method._plan.keep(tokens, NAME, variant)
        y = to_numpy(layer(x))
        assert_close(y, expected, "bfloat16")
        assert to_numpy(layer(x)).tobytes() == y.tobytes()


@pytest.mark.parametrize("algo", ALGOS)
def test_columns_of_all_lengths(rng, algo):
    for columns in (16, 112, 128, 144, 512, 4112):
        case = random_case(rng, algo, columns, [136])
        check(case, OnDevice(case, "bfloat16"), random_x(rng, (50, columns), "bfloat16"), "bfloat16")


def identity(algo, columns, input_scale):
    """A layer whose outputs are the codes of x times their scale."""
    blocks = (-(-columns // 128),) * 2
    shape = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (columns,), "FP8_PB_WO": blocks}[algo]
    part = {"weight": np.eye(columns, dtype=np.uint8) * 0x38, "weight_scale": np.ones(shape, np.float32)}
    if algo == "FP8":
        part["input_scale"] = np.array(input_scale, np.float32)
    return Case(algo, columns, [columns], [part])


def hostile_x(rng, tokens, columns, dtype):
    """Rows of all magnitudes, and some that are zero, subnormal, at the limits, infinite or NaN."""
    spread = np.exp2(rng.uniform(-20, 6, (tokens, 1)) + rng.uniform(-6, 6, (1, columns)))
    x = (rng.standard_normal((tokens, columns)) * spread).astype(np.float32)
    x[1], x[2] = 0.0, 1e-7 * rng.standard_normal(columns)
    x[3, ::7], x[4, 5], x[5, -1] = 65000.0, np.inf, np.nan
    x[6, 128:256] = -0.0
    return reference.encode(x, "bfloat16") if dtype == "bfloat16" else x.astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo", ALGOS)
def test_codes_are_those_of_the_reference(rng, algo, dtype):
    """In every variant, wherever it quantizes x."""
    columns, scale = 656, np.float32(np.exp2(rng.uniform(-10, 0)))
    layer = OnDevice(identity(algo, columns, scale), dtype)
    for tokens in (18, 32, 61):
        x = hostile_x(rng, tokens, columns, dtype)
        values = reference.as_float32(x)
        if algo == "FP8":
            codes, scales = reference.quantize_fp8_static(values, scale), scale
        elif algo == "FP8_PB_WO":
            codes, scales = reference.quantize_fp8_group(values)
            scales = scales.repeat(128, axis=-1)[:, :columns]
        else:
            codes, scales = reference.quantize_fp8_token(values)
            scales = scales[:, None]
        with np.errstate(invalid="ignore"):
            expected = reference.decode(codes, "e4m3") * scales
        expected[np.isnan(expected).any(axis=1)] = np.nan  # a product with zero is one too
        expected = reference.as_float32(reference.round_to(expected.astype(np.float64), dtype))
        for variant in range(VARIANTS):
            layer.method._plan.keep(tokens, NAME, variant)
            np.testing.assert_array_equal(reference.as_float32(to_numpy(layer(x))), expected)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_many_tiles(rng, algo):
    """More tiles than multiprocessors, of all shapes that may have so many; some tokens are compared."""
    case = random_case(rng, algo, 256, partitions(algo, [3000, 700, 260]))
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (2900, 256), "bfloat16")
    some = np.r_[0:30, 1000:1060, 2880:2900]
    expected = case.expected(reference.as_float32(x[some]))
    for variant in range(VARIANTS):
        layer.method._plan.keep(len(x), NAME, variant)
        y = layer(x)
        assert not y.isnan().any()
        assert_close(to_numpy(y)[some], expected, "bfloat16")


@pytest.mark.parametrize("algo", ALGOS)
def test_tiles_that_follow_each_other(rng, algo):
    """A few tiles more than blocks or pairs, of many steps, in all shapes; some tokens are compared."""
    case = random_case(rng, algo, 2608, partitions(algo, [1500, 900]))
    layer = OnDevice(case, "bfloat16")
    x = random_x(rng, (1900, 2608), "bfloat16")
    some = np.r_[0:40, 900:940, 1880:1900]
    expected = case.expected(reference.as_float32(x[some]))
    for variant in range(VARIANTS):
        layer.method._plan.keep(len(x), NAME, variant)
        y = layer(x)
        assert not y.isnan().any()
        assert_close(to_numpy(y)[some], expected, "bfloat16")
        for _ in range(3):
            assert torch.equal(layer(x), y)


def test_partitions_that_share_an_input_scale(rng):
    case = random_case(rng, "FP8", 512, [120, 80])
    case.parts[1]["input_scale"] = case.parts[0]["input_scale"]
    method = case.method(dtype="bfloat16", device="cuda:0", one_input_scale=True)
    assert method.backend == NAME
    host = on_host(case, dtype="bfloat16").prepare(case.listed())
    params = {name: to_cuda(value) for name, value in host.items()}
    x = random_x(rng, (70, 512), "bfloat16")
    y = method(to_cuda(x, "bfloat16"), params, out=poisoned(70, 200, dtype="bfloat16"))
    assert_close(to_numpy(y), case.expected(reference.as_float32(x)), "bfloat16")


def test_a_scale_found_at_run_time_and_a_bias(rng):
    case = random_case(rng, "FP8", 384, [200], input_scale=False)
    bias = rng.standard_normal(200).astype(np.float32)
    for dtype in ("bfloat16", "float16"):
        check(case, OnDevice(case, dtype), random_x(rng, (70, 384), dtype), dtype, bias)


def test_nothing_around_the_result_is_written(rng):
    case = random_case(rng, "FP8_PB_WO", 256, [129])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (40, 256), "bfloat16"), "bfloat16")
    assert_writes_only_its_result(layer, x)


@pytest.mark.slow
def test_more_than_65535_tokens():
    rng = np.random.default_rng(3)
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", 128, [24])
    layer = OnDevice(case, "bfloat16")
    x = torch.randn(66001, 128, device="cuda").bfloat16()
    y = layer(x)
    assert not y.isnan().any()
    for row in (0, 65535, 65536, 66000):
        assert to_numpy(y[row : row + 1]).tobytes() == to_numpy(layer(x[row : row + 1].clone())).tobytes()


def test_a_graph_gives_the_same_bits(rng):
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", 512, [640])
    layer = OnDevice(case, "bfloat16")
    assert_a_graph_replays(layer, to_cuda(random_x(rng, (48, 512), "bfloat16"), "bfloat16"))
