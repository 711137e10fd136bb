"""FP8 linears by products of warps (cuda:sm80_fp8, cuda:sm89_fp8), against the reference and the CPU."""

import numpy as np
import pytest

from moqext import reference

from ..linear_cases import assert_close, assert_right, random_case, random_x

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import OnDevice, force, on_host, to_cuda, to_numpy  # noqa: E402

AS_F16, AS_E4M3 = "cuda:sm80_fp8", "cuda:sm89_fp8"
ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


@pytest.fixture(params=[AS_F16, AS_E4M3])
def kernel(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


def dtypes_of(kernel):
    return ("bfloat16", "float16", "float32") if kernel == AS_F16 else ("bfloat16", "float16")


def check(case, layer, tokens, rng, bias=None):
    x = random_x(rng, (tokens, layer.method.in_features), layer.dtype)
    values = reference.as_float32(x)
    y = to_numpy(layer(x, bias=None if bias is None else to_cuda(bias)))
    expected = case.expected(values, bias=bias)
    assert_right(y, expected, case.magnitude(values), layer.dtype)


@pytest.mark.parametrize("algo", ALGOS)
def test_shapes_around_tiles(rng, kernel, algo):
    """Rows of x and W around tiles of 16, 32, 64 and 128; partitions within a tile; parts of a step of K."""
    for columns, rows in ((1296, [130, 31, 1]), (128, [1]), (16, [129]), (272, [7, 64, 300]), (2048, [96])):
        case = random_case(rng, algo, columns, rows)
        layer = OnDevice(case, "bfloat16")
        for tokens in (1, 16, 17, 64, 65, 200):
            check(case, layer, tokens, rng)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_random_shapes(rng, kernel, algo):
    for dtype in dtypes_of(kernel):
        for _ in range(4):
            columns = 16 * int(rng.integers(1, 200))
            rows = [int(rng.integers(1, 400)) for _ in range(int(rng.integers(1, 4)))]
            case = random_case(rng, algo, columns, rows)
            layer = OnDevice(case, dtype)
            for tokens in rng.integers(1, 400, 3):
                check(case, layer, int(tokens), rng, rng.standard_normal(sum(rows)).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("algo", ALGOS)
def test_large_tiles(rng, kernel, algo):
    """More tiles than the chip has multiprocessors, so that tiles of 128 x 128 are taken."""
    case = random_case(rng, algo, 528, [1000, 130, 2300])
    check(case, OnDevice(case, dtypes_of(kernel)[-1]), 1100, rng)


def test_the_scale_of_x_is_found(rng, kernel):
    case = random_case(rng, "FP8", 400, [40, 50], input_scale=False)
    for tokens in (1, 70, 500):
        check(case, OnDevice(case, "bfloat16"), tokens, rng)


@pytest.mark.parametrize("algo", ALGOS)
def test_hostile_values_as_on_the_cpu(rng, kernel, algo):
    """NaN, infinities, zeros, tiny and huge values: the same outputs are NaN, the others close."""
    dtype = dtypes_of(kernel)[-1]
    far = 1e-5 if dtype == "float32" else 2e-3
    case = random_case(rng, algo, 272, [40])
    for tokens in (8, 80, 20):
        x = random_x(rng, (tokens, 272), "float32")
        x[0], x[1, 5], x[2, 7], x[3, :9] = 0, np.nan, np.inf, -np.inf
        x[4] *= np.float32(1e-30 if dtype == "float32" else 1e-6)
        x[5, ::2] = 0
        x[6] *= np.float32(1e30 if dtype == "float32" else 1e3)
        with np.errstate(all="ignore"):
            x = x.astype(dtype)
            host = on_host(case, dtype=dtype)
            expected = host(x, host.prepare(case.listed())).astype(np.float64)
        y = to_numpy(OnDevice(case, dtype)(x)).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
        tops = np.abs(np.where(np.isfinite(expected), expected, 0)).max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            apart = np.abs(y - expected) > far * tops + 1e-37
        assert not (apart & np.isfinite(expected)).any()


@pytest.mark.slow
def test_every_code_of_both_operands(rng, kernel):
    """x and W hold each of the 256 codes in turn; NaN reaches its own row and column alone."""
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", 256, [256])
    layer = OnDevice(case, "bfloat16")
    layer.params["output_scale"].fill_(1.0)
    for tokens in (1, 40, 256):
        layer.params["weight"].copy_(torch.diag(torch.from_numpy(codes)).to("cuda"))
        x = torch.full((tokens, 256), 448.0, dtype=torch.bfloat16, device="cuda")
        y = layer(x)
        finite = ~values.isnan()
        assert y[:, ~finite].isnan().all()
        assert bool((y[:, finite].cpu().float() == values[finite] * 448).all())
        layer.params["weight"].copy_(torch.diag(torch.full((256,), 0x7E, dtype=torch.uint8)).to("cuda"))
        x = values.nan_to_num(0.0).to("cuda").bfloat16().repeat(tokens, 1)
        x[:, 0] = 448.0  # so that the scale of every row is 1
        y = layer(x)[:, 1:].cpu().float()
        assert bool((y == x[:, 1:].cpu().float() * 448).all())


@pytest.mark.parametrize("algo", ALGOS)
def test_a_long_row_is_summed_in_float32(rng, monkeypatch, algo):
    """Sums that grow: where the tensor cores round, it shows."""
    monkeypatch.setenv("MOQEXT_KERNEL", AS_F16)
    case = random_case(rng, algo, 16384, [64])
    layer = OnDevice(case, "float32")
    for tokens in (3, 40, 130):
        x = np.abs(random_x(rng, (tokens, 16384), "float32"))
        expected = case.expected(x)
        y = to_numpy(layer(x)).astype(np.float64)
        assert (np.abs(y - expected) <= 2e-6 * case.magnitude(x)).all()
        assert_close(y.astype(np.float32), expected, "float32")


def test_the_same_bits_every_time(rng, kernel):
    case = random_case(rng, "FP8_PB_WO", 2064, [700])
    layer = OnDevice(case, "bfloat16")
    for tokens in (5, 60, 700):
        x = to_cuda(random_x(rng, (tokens, 2064), "bfloat16"), "bfloat16")
        y = layer(x)
        assert all(torch.equal(layer(x), y) for _ in range(5))
