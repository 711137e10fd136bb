"""Linears on CUDA: every kernel of the plan table that runs here, against the reference and the CPU."""

import numpy as np
import pytest

from moqext import LinearMethod, UnsupportedQuantization, reference

from ..linear_cases import (
    COMPUTES,
    assert_close,
    assert_right,
    assert_within_core_sums,
    assert_within_rounding,
    random_case,
    random_x,
)

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from .cases import OnDevice, on_host, poisoned, to_cuda, to_numpy  # noqa: E402

SIMT = "cuda:simt"
EXACT_SUMS = (SIMT, "cuda:sm80_fp8")


@pytest.fixture
def simt(monkeypatch):
    monkeypatch.setenv("MOQEXT_KERNEL", SIMT)


def bits(tensor):
    """Gives the bytes of an array, so that NaN compare too."""
    return to_numpy(tensor).tobytes()


def check(case, layer, x, dtype, compute="exact", bias=None):
    values = reference.as_float32(x)
    given = None if bias is None else to_cuda(bias)
    y = to_numpy(layer(x, bias=given))
    expected = case.expected(values, compute, bias)
    assert_right(y, expected, case.magnitude(values, compute), dtype)


# ------------------------------------------------------------------------------ the kernel of all


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_simt_runs_every_layer(rng, simt, algo, compute, dtype):
    """Shapes around a block, partitions that end within one, K that leaves a part of a step."""
    for columns in (1232, 16) if algo.endswith("NVFP4") else (1205, 1216, 1):
        case = random_case(rng, algo, columns, [130, 31, 1])
        layer = OnDevice(case, dtype, compute)
        for tokens in (1, 3, 8, 9, 260):
            check(case, layer, random_x(rng, (tokens, columns), dtype), dtype, compute)


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_simt_takes_groups_of_32(rng, simt, algo):
    case = random_case(rng, algo, 1056, [77], group_size=32)
    check(case, OnDevice(case, "bfloat16"), random_x(rng, (5, 1056), "bfloat16"), "bfloat16")


@pytest.mark.parametrize("algo, compute", [("FP8", "exact"), ("NVFP4", "fp4")])
def test_simt_finds_the_scale_of_x_itself(rng, simt, algo, compute):
    """Without an input_scale; more rows than parts of the amax."""
    case = random_case(rng, algo, 256, [40, 50], input_scale=False)
    layer = OnDevice(case, "bfloat16", compute)
    for tokens in (1, 7, 300):
        check(case, layer, random_x(rng, (tokens, 256), "bfloat16"), "bfloat16", compute)


def test_simt_adds_a_bias_in_float32(rng, simt):
    case = random_case(rng, "FP8", 128, [50])
    x, bias = random_x(rng, (9, 128), "float16"), rng.standard_normal(50).astype(np.float32)
    layer = OnDevice(case, "float16")
    check(case, layer, x, "float16", bias=bias)
    check(case, layer, x, "float16", bias=bias.astype(np.float16))


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_simt_and_the_cpu_agree_on_hostile_values(rng, simt, algo, compute):
    """NaN, infinities, zeros and tiny values: the same outputs are NaN, the others close."""
    columns = 256
    case = random_case(rng, algo, columns, [40])
    x = random_x(rng, (8, columns), "float32")
    x[0], x[1, 5], x[2, 7], x[3, :9] = 0, np.nan, np.inf, -np.inf
    x[4] *= np.float32(1e-30)
    x[5, ::2] = 0
    x[6] *= np.float32(1e30)
    host = on_host(case, compute=compute, dtype="float32")
    with np.errstate(all="ignore"):
        expected = host(x, host.prepare(case.listed()))
    y = to_numpy(OnDevice(case, "float32", compute)(x))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
    tops = np.abs(np.where(np.isfinite(expected), expected, 0)).max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        far = np.abs(y - expected) > 1e-5 * tops + 1e-37
    assert not (far & np.isfinite(expected)).any()


def test_simt_gives_a_row_the_same_bits_alone_and_among_many(rng, simt):
    """Few and many rows take different shares of the weight; the order of the sums is one."""
    for algo in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"):
        case = random_case(rng, algo, 1040, [700])
        layer = OnDevice(case, "bfloat16")
        x = to_cuda(random_x(rng, (500, 1040), "bfloat16"), "bfloat16")
        y = layer(x)
        assert bits(y) == bits(layer(x))
        for row in (0, 8, 499):
            assert bits(layer(x[row : row + 1])) == bits(y[row : row + 1])


@pytest.mark.slow
def test_more_than_65535_rows_and_4_gib_of_x(simt):
    rng = np.random.default_rng(1)
    columns, tokens = 32768, 66001
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", columns, [8])
    layer = OnDevice(case, "bfloat16")
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    assert x.numel() * 2 > 2**32
    y = layer(x)
    assert not y.isnan().any()
    for row in (0, 65535, 65536, tokens - 1):
        assert bits(y[row : row + 1]) == bits(layer(x[row : row + 1].clone()))


@pytest.mark.slow
def test_more_than_4_gib_of_weight(simt):
    rng = np.random.default_rng(2)
    columns, rows = 32768, 140_000
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", columns, [8])
    small = OnDevice(case, "bfloat16")
    big = OnDevice.__new__(OnDevice)
    big.dtype = "bfloat16"
    big.method = LinearMethod("FP8_PER_CHANNEL_PER_TOKEN", columns, [rows], device="cuda:0")
    big.params = {
        "weight": small.params["weight"].repeat(rows // 8, 1),
        "output_scale": small.params["output_scale"].repeat(rows // 8),
    }
    x = torch.randn(3, columns, device="cuda").bfloat16()
    y = big(x)
    assert bool((y.view(3, rows // 8, 8) == small(x)[:, None]).all())


# ------------------------------------------------------------------------------------ x and out


def views_of(x):
    """One matrix of rows in many layouts, by name; all are [2, 3, K]."""
    columns = x.shape[1]
    wide = torch.empty(2, 3, columns + 24, dtype=x.dtype, device="cuda")
    padded = torch.empty(2, 5, columns + 8, dtype=x.dtype, device="cuda")
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
    views = {
        "contiguous": x.view(2, 3, columns).clone(),
        "columns of a wider one": wide[:, :, 8 : 8 + columns],
        "rows of a longer one": padded[:, 1:4, :columns],
        "an odd address": flat[1:].view(2, 3, columns),
        "odd strides": torch.empty(2, 3, columns + 1, dtype=x.dtype, device="cuda")[:, :, :columns],
        "the other order": torch.empty(3, 2, columns, dtype=x.dtype, device="cuda").transpose(0, 1),
        "columns apart": torch.empty(2, 3, columns, 2, dtype=x.dtype, device="cuda")[..., 1],
        "transposed": torch.empty(2, columns, 3, dtype=x.dtype, device="cuda").transpose(1, 2),
    }
    for view in views.values():
        view.copy_(x.view(2, 3, columns))
    return views


@pytest.mark.parametrize("kernel", [None, SIMT])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_x_may_have_any_strides(rng, monkeypatch, kernel, dtype):
    if kernel:
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    case = random_case(rng, "FP8", 384, [200])
    layer = OnDevice(case, dtype)
    x = to_cuda(random_x(rng, (6, 384), dtype), dtype)
    y = layer(x)
    for name, view in views_of(x).items():
        out = layer(view)
        assert out.shape == (2, 3, 200), name
        assert bits(out.view(6, 200)) == bits(y), name
    for shape in ((1, 6, 384), (6, 1, 384), (1, 1, 6, 384)):
        assert bits(layer(x.view(shape)).view(6, 200)) == bits(y)
    one = layer(x[0])
    assert one.shape == (200,)
    assert bits(one) == bits(y[0])
    same = layer(x[:1].expand(4, 384))
    assert bits(same) == bits(torch.stack([y[0]] * 4))


def test_out_may_have_any_leading_strides(rng):
    case = random_case(rng, "FP8", 256, [129])
    layer = OnDevice(case, "bfloat16")
    x = to_cuda(random_x(rng, (2, 3, 256), "bfloat16"), "bfloat16")
    y = layer(x)
    memory = poisoned(3, 4, 131, dtype="bfloat16")
    for out in (memory[:, :2, :129].transpose(0, 1), memory[:2, :3, 2:], memory[:2, 1:, 1:130]):
        memory.fill_(float("nan"))
        assert layer(x, out=out) is out
        assert bits(out) == bits(y)
        assert int((~memory.isnan()).sum()) == y.numel()  # nothing around it was written


def test_nothing_to_do(rng):
    case = random_case(rng, "NVFP4", 64, [24])
    layer = OnDevice(case, "bfloat16")
    assert layer(torch.empty(0, 64, dtype=torch.bfloat16, device="cuda")).shape == (0, 24)
    assert layer(torch.empty(2, 0, 64, dtype=torch.bfloat16, device="cuda")).shape == (2, 0, 24)


def test_a_weight_at_an_odd_address_is_refused_by_name(rng):
    case = random_case(rng, "FP8", 64, [24])
    layer = OnDevice(case, "bfloat16")
    memory = torch.empty(64 * 24 + 1, dtype=torch.uint8, device="cuda")
    layer.params["weight"] = memory[1:].view(24, 64)
    with pytest.raises(BufferError, match=r'params\["weight"\]: expected an address .* multiple of 16'):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16, device="cuda"))


def test_tensors_elsewhere_are_refused_by_name(rng):
    case = random_case(rng, "FP8", 64, [24])
    layer = OnDevice(case, "bfloat16")
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x: expected a tensor on cuda:0, got one on cpu"):
        layer(x)
    with pytest.raises(ValueError, match="out: expected a tensor on cuda:0, got one on cpu"):
        layer(x.cuda(), out=torch.zeros(2, 24, dtype=torch.bfloat16))


# ---------------------------------------------------------------------------- the kernels of chips


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_every_kernel_that_can_run_here(rng, monkeypatch, algo, compute):
    """Each forced, as many rows as it takes; the plan's own choice as well."""
    columns, rows = 1024, [384, 128, 136]
    case = random_case(rng, algo, columns, rows)
    names = [
        name for name, reason in OnDevice(case, "bfloat16", compute).method._plan.explain() if reason is None
    ]
    assert SIMT in names
    for name in [*names, ""]:
        monkeypatch.setenv("MOQEXT_KERNEL", name)
        layer = OnDevice(case, "bfloat16", compute)
        for tokens in (1, 2, 7, 16, 17, 64, 100, 129):
            x = random_x(rng, (tokens, columns), "bfloat16")
            try:
                y = to_numpy(layer(x))
            except UnsupportedQuantization:  # forced, and not for so many rows
                assert name not in ("", SIMT)
                continue
            values = reference.as_float32(x)
            expected = case.expected(values, compute)
            within = assert_within_rounding if name in EXACT_SUMS else assert_within_core_sums
            within(y, expected, case.magnitude(values, compute), "bfloat16")
            assert_close(y, expected, "bfloat16")


@pytest.mark.parametrize("algo", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
@pytest.mark.parametrize("tokens", [1, 12, 40, 200])
def test_a_bias_made_by_the_kernel_before(rng, algo, tokens):
    """A kernel lets the next one begin before it has ended; a bias is not read ahead of time."""
    first = OnDevice(random_case(rng, algo, 4096, [1024]), "bfloat16")
    second = OnDevice(random_case(rng, algo, 1024, [1024]), "bfloat16")
    rows = [to_cuda(random_x(rng, (1, 4096), "bfloat16"), "bfloat16") for _ in range(2)]
    x = to_cuda(random_x(rng, (tokens, 1024), "bfloat16"), "bfloat16")
    expected = []
    for row in rows:
        bias = first(row)[0]
        torch.cuda.synchronize()
        expected.append(bits(second(x, bias=bias)))
    bias, out = poisoned(1, 1024, dtype="bfloat16"), poisoned(tokens, 1024, dtype="bfloat16")
    for turn in range(50):
        first(rows[turn % 2], out=bias)
        second(x, bias=bias[0], out=out)
        assert bits(out) == expected[turn % 2], turn
