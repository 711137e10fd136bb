"""Exact NVFP4 linears by tensor cores, kernel by kernel, against the reference and the CPU."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_right, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import DTYPES, OnDevice, assert_a_graph_replays, force, on_host, to_cuda, to_numpy  # noqa: E402

TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 200)


@pytest.fixture(autouse=True, params=["cuda:sm80_nvfp4", "cuda:sm90_nvfp4_prefill"])
def kernel(request, monkeypatch):
    force(monkeypatch, request.param, "NVFP4")
    return request.param


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request):
    return request.param


def check(case, layer, tokens, rng, bias=None):
    x = random_x(rng, (tokens, layer.method.in_features), layer.dtype)
    values = reference.as_float32(x)
    y = to_numpy(layer(x, bias=None if bias is None else to_cuda(bias)))
    expected = case.expected(values, bias=bias)
    assert_right(y, expected, case.magnitude(values), layer.dtype)


@pytest.mark.parametrize(
    "columns, rows", [(1296, [130, 31, 1]), (16, [129]), (272, [7, 64, 300]), (4160, [65])]
)
def test_shapes_around_tiles(rng, kernel, dtype, columns, rows):
    """Partitions within a tile, parts of a block of K, K split over blocks and not."""
    case = random_case(rng, "NVFP4", columns, rows)
    layer = OnDevice(case, dtype)
    assert layer.method.backend == kernel
    for tokens in TOKENS:
        check(case, layer, tokens, rng)


@pytest.mark.parametrize("algo", ["W4A16_NVFP4", "MXFP4"])
def test_groups_of_32(rng, algo, dtype):
    case = random_case(rng, algo, 608, [70, 40], group_size=32)
    for tokens in (3, 40, 130):
        check(case, OnDevice(case, dtype), tokens, rng)


def test_every_shape_of_tiles(rng, kernel, dtype):
    """Each is a variant; pairs of blocks may have one tile, and tiles end within tokens and rows."""
    if kernel == "cuda:sm80_nvfp4":
        pytest.skip("has one")
    case = random_case(rng, "NVFP4", 1296, [330, 70, 24])
    layer = OnDevice(case, dtype)
    for tokens in (100, 257, 600):
        for variant in range(13):
            layer.method._plan.keep(tokens, kernel, variant)
            check(case, layer, tokens, rng)


@pytest.mark.slow
def test_random_shapes(rng, dtype):
    for _ in range(6):
        columns = 16 * int(rng.integers(1, 300))
        rows = [int(rng.integers(1, 400)) for _ in range(int(rng.integers(1, 4)))]
        case = random_case(rng, "NVFP4", columns, rows)
        layer = OnDevice(case, dtype)
        for tokens in rng.integers(1, 400, 3):
            check(case, layer, int(tokens), rng, rng.standard_normal(sum(rows)).astype(np.float32))


def test_many_tiles(rng, dtype):
    case = random_case(rng, "NVFP4", 528, [1000, 130, 2300])
    check(case, OnDevice(case, dtype), 1100, rng)


def test_every_code_under_every_scale(dtype):
    """Each output is one product, which 16 bits hold: y is W itself, to the bit."""
    scales = np.arange(0x7F, dtype=np.uint8)
    codes = np.arange(16, dtype=np.uint8)
    case = random_case(np.random.default_rng(0), "NVFP4", 16, [scales.size])
    part = case.parts[0]
    part["weight"][:] = codes[::2] | codes[1::2] << 4
    part["weight_scale"][:] = scales[:, None]
    part["weight_scale_2"] = np.array(np.float32(1))
    layer = OnDevice(case, dtype)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    wanted = np.concatenate([values, -values])[:, None] * reference.decode(scales, "e4m3")
    for tokens in (16, 80, 160):
        x = torch.eye(16, dtype=DTYPES[dtype], device="cuda").repeat(tokens // 16, 1)
        y = layer(x).float().cpu().numpy()
        np.testing.assert_array_equal(y, np.tile(wanted, (tokens // 16, 1)))


def test_a_scale_of_minus_zero_is_zero(rng, dtype):
    case = random_case(rng, "NVFP4", 128, [48])
    case.parts[0]["weight_scale"][:, ::3] = 0x80
    zeros = case.parts[0]["weight_scale"] == 0x80
    layer = OnDevice(case, dtype)
    case.parts[0]["weight_scale"][zeros] = 0
    for tokens in (4, 100):
        check(case, layer, tokens, rng)


def test_hostile_values_as_on_the_cpu(rng, dtype):
    """NaN, infinities, zeros, tiny and huge values: the same outputs are NaN, the others close."""
    case = random_case(rng, "NVFP4", 272, [40])
    for tokens in (8, 80, 20):
        x = rng.standard_normal((tokens, 272)).astype(np.float32)
        x[0], x[1, 5], x[2, 7], x[3, :9] = 0, np.nan, np.inf, -np.inf
        x[4] *= np.float32(1e-6)
        x[6] *= np.float32(1e3)
        x = reference.encode(x, "bfloat16") if dtype == "bfloat16" else x.astype(dtype)
        with np.errstate(all="ignore"):
            host = on_host(case, dtype=dtype)
            expected = reference.as_float32(host(x, host.prepare(case.listed())))
        y = reference.as_float32(to_numpy(OnDevice(case, dtype)(x)))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
        tops = np.abs(np.where(np.isfinite(expected), expected, 0)).max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            apart = np.abs(y - expected) > 1e-2 * tops + 1e-37
        assert not (apart & np.isfinite(expected)).any()


def test_rows_apart_and_results_at_any_address(rng, dtype):
    case = random_case(rng, "NVFP4", 192, [33, 18])
    layer = OnDevice(case, dtype)
    for tokens in (3, 70):
        wide = torch.randn(tokens, 320, dtype=DTYPES[dtype], device="cuda")
        whole = layer(wide[:, 64:256].contiguous())
        room = torch.full((tokens, 60), float("nan"), dtype=DTYPES[dtype], device="cuda")
        layer(wide[:, 64:256], out=room[:, 5:56])
        assert torch.equal(room[:, 5:56], whole)
        assert room[:, :5].isnan().all()
        assert room[:, 56:].isnan().all()


def test_results_repeat_to_the_bit_and_in_graphs(rng, dtype):
    case = random_case(rng, "NVFP4", 4096, [320])
    layer = OnDevice(case, dtype)
    for tokens in (1, 12, 30, 60, 300):
        assert_a_graph_replays(layer, torch.randn(tokens, 4096, dtype=DTYPES[dtype], device="cuda"))
