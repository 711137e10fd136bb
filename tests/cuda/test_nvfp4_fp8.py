"""NVFP4 linears with FP8 products on Hopper: codes against the CPU, outputs against the reference."""

import numpy as np
import pytest

from moqext import LinearMethod, reference

from ..linear_cases import assert_close, assert_close_but_for_core_sums, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import DTYPES, OnDevice, assert_a_graph_replays, force, on_host, to_cuda, to_numpy  # noqa: E402

VARIANTS = {"cuda:sm90_nvfp4_fp8_prefill": 7, "cuda:sm90_nvfp4_fp8_medium": 14, "cuda:cublaslt": 1}
"""Kernels and their ways to do a call; cuBLASLt's own are tuning's."""


@pytest.fixture(autouse=True, params=VARIANTS)
def kernel(request, monkeypatch):
    force(monkeypatch, request.param, "NVFP4", "fp8")
    return request.param


def fitted(rows, kernel):
    """Partitions, the last with some rows more where cuBLASLt asks for sixteens."""
    return [*rows[:-1], rows[-1] + (-sum(rows) % 16 if kernel == "cuda:cublaslt" else 0)]


def check(case, layer, x, bias=None):
    y = layer(x, bias=None if bias is None else to_cuda(bias))
    values = reference.as_float32(x)
    expected, magnitude = case.expected(values, "fp8", bias), case.magnitude(values, "fp8")
    assert_close_but_for_core_sums(to_numpy(y), expected, magnitude, layer.dtype)
    assert to_numpy(layer(x, bias=None if bias is None else to_cuda(bias))).tobytes() == to_numpy(y).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "columns, rows", [(1296, [130, 31, 1]), (16, [129]), (272, [7, 64, 300]), (4160, [65])]
)
def test_shapes_around_tiles(rng, kernel, columns, rows, dtype):
    """Partitions within a tile, rows that end within a slab and at odd addresses, K within a step."""
    case = random_case(rng, "NVFP4", columns, fitted(rows, kernel))
    layer = OnDevice(case, dtype, "fp8")
    assert layer.method.backend == kernel
    for tokens in (1, 17, 128, 129, 300, 513):
        check(case, layer, random_x(rng, (tokens, columns), dtype))


@pytest.mark.parametrize("tokens", [100, 257, 600])
def test_every_shape_of_tiles(rng, kernel, tokens):
    case = random_case(rng, "NVFP4", 1296, fitted([330, 70, 24], kernel))
    layer = OnDevice(case, "bfloat16", "fp8")
    x = random_x(rng, (tokens, 1296), "bfloat16")
    bias = rng.standard_normal(layer.method.out_features).astype(np.float32)
    for variant in range(VARIANTS[kernel]):
        layer.method._plan.keep(tokens, kernel, variant)
        check(case, layer, x, bias)


def test_sums_of_the_tensor_cores(rng, kernel):
    """fast_accum: within the 14 bits that they keep, of K columns."""
    case = random_case(rng, "NVFP4", 2064, fitted([200], kernel))
    method = case.method(dtype="bfloat16", device="cuda:0", compute="fp8", fast_accum=True)
    layer = OnDevice(case, "bfloat16", "fp8")
    layer.method = method
    for tokens in (64, 700):
        x = random_x(rng, (tokens, 2064), "bfloat16")
        expected = case.expected(reference.as_float32(x), "fp8")
        y = reference.as_float32(to_numpy(layer(x)))
        assert np.linalg.norm(y - expected) < 5e-3 * np.linalg.norm(expected)


def test_groups_of_32(rng, kernel):
    case = random_case(rng, "W4A16_NVFP4", 608, fitted([70, 40], kernel), group_size=32)
    check(case, OnDevice(case, "bfloat16", "fp8"), random_x(rng, (130, 608), "bfloat16"))


@pytest.mark.parametrize("spread", [0, 6, 100])
def test_codes_are_those_of_the_cpu(rng, spread):
    """x of one row of the identity at a time shows W: e4m3 codes times a power of two, to the bit, with
    scales of a row as far apart as they can be, and rows of the smallest ones."""
    columns, rows = 272, 304
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


def test_more_codes_than_are_made_at_once(rng, kernel, monkeypatch):
    """cuBLASLt has 128 MB of codes at a time; all kernels multiply the same ones."""
    rows, columns = 4112, 32768
    torch.manual_seed(int(rng.integers(1 << 31)))
    params = {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda"),
        "weight_scale": torch.randint(0x20, 0x50, (rows, columns // 16), dtype=torch.uint8, device="cuda"),
        "weight_scale_2": torch.rand((), device="cuda"),
    }
    params["weight_scale"] = params["weight_scale"].view(torch.float8_e4m3fn)
    x = torch.randn(40, columns, dtype=torch.bfloat16, device="cuda")
    y = []
    for name in (kernel, "cuda:simt"):
        monkeypatch.setenv("MOQEXT_KERNEL", name)
        method = LinearMethod("NVFP4", columns, [rows], device="cuda:0", compute="fp8")
        y.append(method(x, method.prepare(params)).double())
    assert torch.linalg.norm(y[0] - y[1]) < 2e-3 * torch.linalg.norm(y[1])


def test_hostile_values(rng, kernel):
    """NaN and infinities stay in their rows; a row of zeros gives zeros."""
    case = random_case(rng, "NVFP4", 272, fitted([40], kernel))
    layer = OnDevice(case, "bfloat16", "fp8")
    x = reference.as_float32(random_x(rng, (200, 272), "bfloat16")).copy()
    x[0], x[1, 5], x[2, 7] = 0, np.nan, np.inf
    y = reference.as_float32(to_numpy(layer(reference.encode(x, "bfloat16"))))
    assert (y[0] == 0).all()
    assert np.isnan(y[1]).any()
    assert not np.isfinite(y[2]).all()
    expected = case.expected(x[3:], "fp8")
    assert_close(reference.encode(y[3:], "bfloat16"), expected, "bfloat16")


def test_rows_apart_and_results_at_any_address(rng, kernel):
    rows = fitted([33, 18], kernel)
    case, end = random_case(rng, "NVFP4", 192, rows), 5 + sum(rows)
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (3, 170):
        wide = torch.randn(tokens, 320, dtype=torch.bfloat16, device="cuda")
        whole = layer(wide[:, 64:256].contiguous())
        room = torch.full((tokens, 80), float("nan"), dtype=torch.bfloat16, device="cuda")
        layer(wide[:, 64:256], out=room[:, 5:end])
        assert torch.equal(room[:, 5:end], whole)
        assert room[:, :5].isnan().all()
        assert room[:, end:].isnan().all()


def test_graphs(rng):
    case = random_case(rng, "NVFP4", 4096, [320])
    layer = OnDevice(case, "bfloat16", "fp8")
    for tokens in (12, 1100):
        assert_a_graph_replays(layer, torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda"))
