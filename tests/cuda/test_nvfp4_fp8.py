"""NVFP4 linears with FP8 products on Hopper: codes against the CPU, outputs against the reference."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_close, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import DTYPES, OnDevice, force, on_host, to_cuda, to_numpy  # noqa: E402

NAME = "cuda:sm90_nvfp4_fp8"
VARIANTS = 6


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch, NAME, "NVFP4", "fp8")


def check(case, layer, x, bias=None):
    y = layer(x, bias=None if bias is None else to_cuda(bias))
    assert_close(to_numpy(y), case.expected(reference.as_float32(x), "fp8", bias), layer.dtype)
    assert to_numpy(layer(x, bias=None if bias is None else to_cuda(bias))).tobytes() == to_numpy(y).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shapes_around_tiles(rng, dtype):
    """Partitions within a tile, rows that end within a slab and at odd addresses, K within a step."""
    for columns, rows in ((1296, [130, 31, 1]), (16, [129]), (272, [7, 64, 300]), (4160, [65])):
        case = random_case(rng, "NVFP4", columns, rows)
        layer = OnDevice(case, dtype, "fp8")
        assert layer.method.backend == NAME
        for tokens in (1, 17, 128, 129, 300, 513):
            check(case, layer, random_x(rng, (tokens, columns), dtype))


def test_every_shape_of_tiles(rng):
    case = random_case(rng, "NVFP4", 1296, [330, 70, 24])
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (100, 257, 600):
        x = random_x(rng, (tokens, 1296), "bfloat16")
        bias = rng.standard_normal(424).astype(np.float32)
        for variant in range(VARIANTS):
            layer.method._plan.keep(tokens, NAME, variant)
            check(case, layer, x, bias)


def test_sums_of_the_tensor_cores(rng):
    """fast_accum: within the 14 bits that they keep, of K columns."""
    case = random_case(rng, "NVFP4", 2064, [200])
    method = case.method(dtype="bfloat16", device="cuda:0", compute="fp8", fast_accum=True)
    layer = OnDevice(case, "bfloat16", "fp8")
    layer.method = method
    for tokens in (64, 700):
        x = random_x(rng, (tokens, 2064), "bfloat16")
        expected = case.expected(reference.as_float32(x), "fp8")
        y = reference.as_float32(to_numpy(layer(x)))
        assert np.linalg.norm(y - expected) < 5e-3 * np.linalg.norm(expected)


def test_groups_of_32(rng):
    case = random_case(rng, "W4A16_NVFP4", 608, [70, 40], group_size=32)
    check(case, OnDevice(case, "bfloat16", "fp8"), random_x(rng, (130, 608), "bfloat16"))


@pytest.mark.parametrize("spread", [0, 6, 100])
def test_codes_are_those_of_the_cpu(rng, spread):
    """x of one row of the identity at a time shows W: e4m3 codes times a power of two, to the bit, with
    scales of a row as far apart as they can be, and rows of the smallest ones."""
    columns, rows = 272, 300
    case = random_case(rng, "NVFP4", columns, [rows])
    part = case.parts[0]
    part["weight_scale_2"] = np.array(np.float32(1))
    top = rng.integers(0, 0x7F, (rows, 1))
    part["weight_scale"][:] = np.clip(top - rng.integers(0, spread + 1, (rows, columns // 16)), 0, 0x7E)
    part["weight_scale"][:40] = rng.integers(0, 8, (40, columns // 16))  # subnormal, or none
    part["weight"][40:60, :8] = 0  # a large scale above zeros, small ones above all others
    part["weight_scale"][40:60] = 1
    part["weight_scale"][40:60, 0] = 0x7E
    host = on_host(case, dtype="bfloat16", compute="fp8")
    prepared = {name: np.asarray(value) for name, value in host.prepare(case.listed()).items()}
    codes = reference.decode(prepared["weight"].view(np.uint8), "e4m3")
    wanted = codes * prepared["output_scale"][:, None]
    layer = OnDevice(case, "bfloat16", "fp8")
    y = layer(torch.eye(columns, dtype=DTYPES["bfloat16"], device="cuda"))
    np.testing.assert_array_equal(reference.as_float32(to_numpy(y)), wanted.T)


def test_hostile_values(rng):
    """NaN and infinities stay in their rows; a row of zeros gives zeros."""
    case = random_case(rng, "NVFP4", 272, [40])
    layer = OnDevice(case, "bfloat16", "fp8")
    x = reference.as_float32(random_x(rng, (200, 272), "bfloat16")).copy()
    x[0], x[1, 5], x[2, 7] = 0, np.nan, np.inf
    y = reference.as_float32(to_numpy(layer(reference.encode(x, "bfloat16"))))
    assert (y[0] == 0).all()
    assert np.isnan(y[1]).any()
    assert not np.isfinite(y[2]).all()
    expected = case.expected(x[3:], "fp8")
    assert_close(reference.encode(y[3:], "bfloat16"), expected, "bfloat16")


def test_rows_apart_and_results_at_any_address(rng):
    case = random_case(rng, "NVFP4", 192, [33, 18])
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (3, 170):
        wide = torch.randn(tokens, 320, dtype=torch.bfloat16, device="cuda")
        whole = layer(wide[:, 64:256].contiguous())
        room = torch.full((tokens, 60), float("nan"), dtype=torch.bfloat16, device="cuda")
        layer(wide[:, 64:256], out=room[:, 5:56])
        assert torch.equal(room[:, 5:56], whole)
        assert room[:, :5].isnan().all()
        assert room[:, 56:].isnan().all()


def test_graphs(rng):
    case = random_case(rng, "NVFP4", 4096, [320])
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (12, 1100):
        x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda")
        first = layer(x)
        graph = torch.cuda.CUDAGraph()
        results = [torch.empty_like(first) for _ in range(4)]
        with torch.cuda.graph(graph):
            for y in results:
                layer(x, out=y)
        graph.replay()
        for y in results:
            assert torch.equal(y, first)
