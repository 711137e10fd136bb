"""Every CPU kernel of the plan table that this machine can run, against the float64 reference."""

import numpy as np
import pytest

from moqext import LinearMethod, reference, set_num_threads

from .linear_cases import (
    ALGOS,
    COMPUTES,
    assert_close,
    assert_within_rounding,
    poisoned,
    random_case,
    random_x,
)
from .work import each


def run(case, x, dtype, compute="exact"):
    method = case.method(dtype=dtype, compute=compute)
    out = poisoned((*x.shape[:-1], method.out_features), dtype)
    return method(x, method.prepare(case.listed()), out=out)


KERNELS = [name for name, reason in LinearMethod("NVFP4", 32, [8])._plan.explain() if reason is None]


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_every_kernel_this_cpu_can_run(rng, monkeypatch, algo, compute):
    """Shapes around every tile size, few and many rows of x, K that leaves a part of every step.

    Most of the time is the reference's: all kernels are compared with one of its outputs."""
    columns = 1232 if algo.endswith("NVFP4") else 1205
    case = random_case(rng, algo, columns, [130, 31])
    expected = []
    for tokens in (1, 3, 5, 9, 16, 22, 33, 262):
        x = random_x(rng, (tokens, columns), "bfloat16")
        values = reference.as_float32(x)
        expected.append((x, case.expected(values, compute), case.magnitude(values, compute)))

    @each("kernel", KERNELS)
    def compare(kernel):
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        for x, product, magnitude in expected:
            y = run(case, x, "bfloat16", compute)
            assert_within_rounding(y, product, magnitude, "bfloat16")
            assert_close(y, product, "bfloat16")

    compare()


@pytest.mark.parametrize(
    "algo, tokens",
    [(algo, 11) for algo in ALGOS]
    + [(algo, tokens) for algo in ("FP8", "NVFP4") for tokens in (1, 2, 3, 4, 6, 16, 27)],
)
def test_few_and_some_rows_of_x(rng, monkeypatch, algo, tokens):
    """Any K, below and around what a kernel takes at a time; x with gaps between its rows and values.

    23 outputs are too few for the limits of a row: each sum may cancel to a small part of what was summed."""
    nvfp4 = algo.endswith("NVFP4")
    cases = []
    for columns in (16, 48, 272, 2000, 4144) if nvfp4 else (1, 31, 65, 129, 1001, 4159):
        groups = [16, 32] if nvfp4 and columns % 32 == 0 else [None]
        for group_size in groups:
            case = random_case(rng, algo, columns, [1, 13, 9], group_size)
            for dtype in ("float32", "bfloat16"):
                x = random_x(rng, (2 * tokens, 3 * columns), dtype)[::2, ::3]
                values = reference.as_float32(x)
                cases.append((case, x, dtype, case.expected(values), case.magnitude(values)))

    @each("kernel", KERNELS)
    def compare(kernel):
        monkeypatch.setenv("MOQEXT_KERNEL", kernel)
        own = "bfloat16" if kernel in ("cpu:avx512bf16", "cpu:amx") else "float32"
        for case, x, dtype, expected, magnitude in cases:
            if dtype == own:
                y = run(case, x, dtype)
                assert_within_rounding(y, expected, magnitude, dtype, sums=1e-6)

    compare()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("tokens", [1, 4, 9, 21])
def test_infinities_and_nan_in_x(rng, monkeypatch, algo, tokens, kernel):
    """Infinities and NaN give what float64 gives, zero weights included, and leave other rows alone."""
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    case = random_case(rng, algo, 304, [40, 7])
    for part in case.parts:
        part["weight_scale"][::3, ::2] = 0
    x = random_x(rng, (tokens, 304), "bfloat16")
    x[0, rng.integers(304)] = 0x7F80  # infinity
    x[tokens // 2, rng.integers(304)] = 0xFF80
    x[-1, rng.integers(304, size=tokens // 4)] = 0x7FC0  # NaN
    with np.errstate(invalid="ignore"):
        expected = case.expected(reference.as_float32(x))
    y = reference.as_float32(run(case, x, "bfloat16"))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(y[~finite], expected[~finite])
    assert np.isfinite(y[finite]).all()
    rows = finite.all(axis=-1)
    assert_close(y[rows], expected[rows], "bfloat16")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "algo, tokens", [(algo, 14) for algo in ALGOS] + [("NVFP4", tokens) for tokens in (1, 4, 28, 40)]
)
def test_the_number_of_threads_changes_nothing(rng, monkeypatch, algo, tokens, kernel):
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    case = random_case(rng, algo, 256, [200, 300])
    x = random_x(rng, (tokens, 256), "bfloat16")
    try:
        outputs = []
        for threads in (1, 2, 3, 7, 16):
            set_num_threads(threads)
            outputs.append(run(case, x, "bfloat16"))
    finally:
        set_num_threads(0)
    for y in outputs[1:]:
        np.testing.assert_array_equal(y, outputs[0])


def test_bfloat16_kernels_leave_other_activations_alone():
    """float32 and float16 values do not fit bfloat16; quantized ones do."""
    kernels = dict(LinearMethod("NVFP4", 32, [8], dtype="float16")._plan.explain())
    for name in ("cpu:avx512bf16", "cpu:amx"):
        assert kernels[name] is not None


@pytest.mark.skipif("cpu:avx512" not in KERNELS, reason="needs a processor with AVX-512")
def test_few_rows_of_float32_go_where_they_need_no_tiles():
    plan = LinearMethod("NVFP4", 32, [8], dtype="float32")._plan
    assert [plan.backend(tokens) for tokens in (1, 4, 5, 300)] == 2 * ["cpu:avx2"] + 2 * ["cpu:avx512"]
    assert LinearMethod("NVFP4", 32, [8], dtype="float32", compute="fp4")._plan.backend(1) != "cpu:avx2"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("algo", ["FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"])
@each("value", [np.inf, -np.inf, np.nan])
def test_a_row_with_an_infinity_is_nan_under_scales_found_from_it(rng, monkeypatch, algo, value, kernel):
    """The infinite value's own code is NaN; its neighbours' are 0. Other rows keep their values."""
    monkeypatch.setenv("MOQEXT_KERNEL", kernel)
    case = random_case(rng, algo, 384, [20, 13])
    for tokens in (2, 4, 40):
        x = random_x(rng, (tokens, 384), "bfloat16")
        x[1, rng.integers(384)] = reference.encode(np.float32([value]), "bfloat16")[0]
        y = reference.as_float32(run(case, x, "bfloat16"))
        assert np.isnan(y[1]).all()
        others = np.arange(tokens) != 1
        assert_close(y[others], case.expected(reference.as_float32(x[others])), "bfloat16")
