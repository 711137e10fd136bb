"""`silu_and_mul_quantize` and `rms_norm_quantize` against the reference, bit for bit."""

import numpy as np
import pytest

from moqext import ops, reference

from ..quantize_cases import (
    KINDS,
    as_dtype,
    carrier,
    hostile,
    same_codes,
    same_scales,
    shapes_and_kinds,
    swizzled,
)
from ..work import each

SHAPES = [(1, 16), (3, 128), (2, 3, 272), (5, 1040), (17, 48), (2, 36112), (0, 32)]
SCHEMES = ["fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled"]
NVFP4 = ("nvfp4", "nvfp4_swizzled")


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    return request.param


def quantized(values, scheme, scale=None):
    """(codes, scales...) of the reference."""
    if scheme in NVFP4:
        wanted = reference.quantize_nvfp4(values, scale)
        blocks = wanted.block_scale
        if scheme == "nvfp4_swizzled":
            blocks = swizzled(blocks.reshape(int(np.prod(blocks.shape[:-1])), blocks.shape[-1]))
        return wanted.codes, blocks, wanted.input_scale
    if scheme == "fp8_token":
        codes, scales = reference.quantize_fp8_token(values)
        return codes, scales[..., None]
    if scheme == "fp8_group":
        return reference.quantize_fp8_group(values)
    if scale is not None:
        return reference.quantize_fp8_static(values, scale), scale
    return reference.quantize_fp8_tensor(values)


def same(actual, expected, scheme):
    if scheme in NVFP4:
        np.testing.assert_array_equal(carrier(actual[0]), expected[0])
        np.testing.assert_array_equal(carrier(actual[1]), expected[1])
        same_scales(actual[2], expected[2])
    else:
        same_codes(actual[0], expected[0])
        same_scales(actual[1], expected[1])


def raw_as(values, dtype):
    """float32 values of a dtype as the arrays that are passed."""
    return as_dtype(np.asarray(values, np.float32), dtype)[0]


def same_values(actual, expected, dtype):
    """Equal, NaN with NaN, and zeros with their signs."""
    actual = reference.as_float32(reference.decode(actual, "bf16") if dtype == "bfloat16" else actual)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[actual == 0]), np.signbit(expected[actual == 0]))


@pytest.mark.parametrize("shape, kind", shapes_and_kinds([*SHAPES, (257, 48)], (2, 3, 272)), ids=str)
def test_silu_and_mul(rng, shape, kind, dtype):
    x, values = as_dtype(hostile(rng, (*shape[:-1], 2 * shape[-1]), kind) * 3, dtype)
    v = reference.silu_and_mul(values, dtype)
    assert v.shape == shape
    scale = np.float32(np.exp2(rng.uniform(-10, 4)))
    for scheme in SCHEMES:
        same(ops.silu_and_mul_quantize(x, scheme), quantized(v, scheme), scheme)
        if scheme == "fp8_tensor" or scheme in NVFP4:
            actual = ops.silu_and_mul_quantize(x, scheme, scale=float(scale))
            same(actual, quantized(v, scheme, scale), scheme)


@pytest.mark.parametrize("shape, kind", shapes_and_kinds(SHAPES, (2, 3, 272)), ids=str)
def test_rms_norm(rng, shape, kind, dtype):
    x, values = as_dtype(hostile(rng, shape, kind), dtype)
    residual, other = as_dtype(hostile(rng, shape, "normal"), dtype)
    eps = float(rng.choice([0.0, 1e-6, 1e-5]))
    for wide in (False, True):
        weight, gains = as_dtype(
            rng.standard_normal(shape[-1]).astype(np.float32), "float32" if wide else dtype
        )
        v, _ = reference.rms_norm(values, gains, eps, None, dtype)
        w, z = reference.rms_norm(values, gains, eps, other, dtype)
        for scheme in SCHEMES:
            same(ops.rms_norm_quantize(x, weight, eps, scheme), quantized(v, scheme), scheme)
            *results, out = ops.rms_norm_quantize(x, weight, eps, scheme, residual=residual)
            same(results, quantized(w, scheme), scheme)
            same_values(out, z, dtype)


def test_every_gate_of_16_bits():
    """silu itself: up is 1 and the scale a power of two that keeps every bit that E4M3 has."""
    gates = np.arange(65536, dtype=np.uint16)
    for dtype, values in (
        ("bfloat16", reference.decode(gates, "bf16")),
        ("float16", gates.view(np.float16).astype(np.float32)),
    ):
        v = reference.silu_and_mul(np.stack([values, np.ones_like(values)], axis=-1), dtype)[:, 0]
        x, _ = as_dtype(np.stack([values, np.ones_like(values)], axis=-1), dtype)
        for scale in (1.0, 2.0**-20, 2.0**20):
            codes, _ = ops.silu_and_mul_quantize(x, "fp8_tensor", scale=scale)
            same_codes(codes[:, 0], reference.quantize_fp8_static(v, np.float32(scale)))


def test_silu_is_silu(rng):
    """The reference against float64."""
    gate = rng.uniform(-80, 80, 100000).astype(np.float32)
    v = reference.silu_and_mul(np.stack([gate, np.ones_like(gate)], axis=-1), "float32")[:, 0]
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    assert np.max(np.abs(v / exact - 1)) < 2.0**-19
    assert np.max(np.abs(v / exact - 1)[np.abs(gate) < 8]) < 2.0**-21
    edge = np.array([[-np.inf, 1], [-1e30, 1], [np.inf, 1], [np.nan, 1], [-0.0, 1]], np.float32)
    v = reference.silu_and_mul(edge, "float32")[:, 0]
    assert -2e-33 < v[0] == v[1] < 0
    assert v[2] == np.inf
    assert np.isnan(v[3])
    assert v[4] == 0
    assert np.signbit(v[4])


def test_rms_norm_is_rms_norm(rng):
    x, weight = rng.standard_normal((7, 3001)).astype(np.float32), rng.standard_normal(3001)
    v, _ = reference.rms_norm(x, weight.astype(np.float32), 1e-6, None, "float32")
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(v, exact, rtol=1e-6)


def test_strides(rng):
    base = rng.standard_normal((6, 10, 64)).astype(np.float32)
    weight = rng.standard_normal(128).astype(np.float32)
    for view in (base[::2], base[:, ::-1], base.transpose(1, 0, 2), base.swapaxes(0, 2)):
        k = view.shape[-1]
        for actual, expected in zip(
            ops.silu_and_mul_quantize(view, "fp8_token"),
            ops.silu_and_mul_quantize(view.copy(), "fp8_token"),
            strict=True,
        ):
            np.testing.assert_array_equal(carrier(actual), carrier(expected))
        for actual, expected in zip(
            ops.rms_norm_quantize(view, weight[: 2 * k : 2], 0.0, "fp8_token", residual=view),
            ops.rms_norm_quantize(
                view.copy(), weight[: 2 * k : 2].copy(), 0.0, "fp8_token", residual=view.copy()
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(carrier(actual), carrier(expected))


def test_outputs_in_place_and_in_full(rng):
    x, residual = rng.standard_normal((2, 5, 160)).astype(np.float32)
    weight = rng.standard_normal(160).astype(np.float32)
    expected = ops.rms_norm_quantize(x, weight, 1e-6, "fp8_token", residual=residual.copy())
    out, scale_out = np.full((5, 160), 0xA5, np.uint8), np.full((5, 1), -7.0, np.float32)
    codes, scale, z = ops.rms_norm_quantize(
        x,
        weight,
        1e-6,
        "fp8_token",
        residual=residual,
        out=out,
        scale_out=scale_out,
        residual_out=residual,
    )
    assert codes is out
    assert scale is scale_out
    assert z is residual
    for actual, wanted in zip((codes, scale, z), expected, strict=True):
        np.testing.assert_array_equal(carrier(actual), carrier(wanted))


@pytest.mark.parametrize("shape, kind", shapes_and_kinds(SHAPES, (2, 3, 272)), ids=str)
def test_values_beside_codes(rng, shape, kind, dtype):
    """Values are those of rms_norm; codes, scales and z stay what they are without value_out."""
    x, _ = as_dtype(hostile(rng, shape, kind), dtype)
    residual = raw_as(rng.standard_normal(shape), dtype)
    weight = raw_as(rng.standard_normal(shape[-1]), dtype)
    for other in (None, residual):
        v = ops.rms_norm(x, weight, 1e-6, residual=other)
        v = v if other is None else v[0]
        for scheme in SCHEMES:
            if scheme in NVFP4 and shape[-1] % 16:
                continue
            out = np.full(v.shape, 0xA5, np.uint8).repeat(v.dtype.itemsize, axis=-1).view(v.dtype)
            found = ops.rms_norm_quantize(x, weight, 1e-6, scheme, residual=other, value_out=out)
            assert out.tobytes() == np.asarray(v).tobytes()
            expected = ops.rms_norm_quantize(x, weight, 1e-6, scheme, residual=other)
            for got, wanted in zip(found, expected, strict=True):
                assert np.asarray(carrier(got)).tobytes() == np.asarray(carrier(wanted)).tobytes()


@pytest.mark.slow
def test_every_kind_at_every_shape(rng, dtype):
    for kind in KINDS:
        for shape in SHAPES:
            for function in (test_silu_and_mul, test_rms_norm, test_values_beside_codes):
                function(rng, shape, kind, dtype)


X = np.ones((2, 32), np.float32)
ONES = np.ones(32, np.float32)
REFUSED = {
    "odd": (
        ValueError,
        "x: expected an even last extent",
        lambda: ops.silu_and_mul_quantize(X[:, :31], "fp8_token"),
    ),
    "scalar": (
        ValueError,
        "x: expected at least one dimension",
        lambda: ops.silu_and_mul_quantize(np.ones((), np.float32), "fp8_tensor"),
    ),
    "integers": (TypeError, "x: .* got int64", lambda: ops.silu_and_mul_quantize(X.astype(int), "fp8_token")),
    "weight shape": (
        ValueError,
        r"weight: expected shape \[32\], got \[31\]",
        lambda: ops.rms_norm_quantize(X, ONES[:31], 1e-6, "fp8_token"),
    ),
    "weight dtype": (
        TypeError,
        "weight: expected float32",
        lambda: ops.rms_norm_quantize(X, ONES.astype(np.float64), 1e-6, "fp8_token"),
    ),
    "residual shape": (
        ValueError,
        r"residual: expected shape \[2, 32\], got \[1, 32\]",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", residual=X[:1]),
    ),
    "residual dtype": (
        TypeError,
        "residual: expected float32",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", residual=X.astype(np.float16)),
    ),
    "residual_out alone": (
        ValueError,
        "residual_out: expected None without a residual",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", residual_out=X.copy()),
    ),
    "value_out shape": (
        ValueError,
        "value_out: expected shape",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", value_out=X[:1].copy()),
    ),
    "value_out over x": (
        BufferError,
        "value_out: its memory overlaps",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", value_out=X),
    ),
    "residual_out over x": (
        BufferError,
        "residual_out: its memory overlaps",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", residual=X.copy(), residual_out=X),
    ),
    "negative eps": (ValueError, "eps: .* got -1", lambda: ops.rms_norm_quantize(X, ONES, -1.0, "fp8_token")),
    "NaN eps": (ValueError, "eps: .* got -?nan", lambda: ops.rms_norm_quantize(X, ONES, np.nan, "fp8_token")),
    "eps a str": (
        TypeError,
        "eps: expected a number",
        lambda: ops.rms_norm_quantize(X, ONES, "1", "fp8_token"),
    ),
    "scale by token": (
        ValueError,
        "scale: fp8_token computes",
        lambda: ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", scale=1.0),
    ),
}


@each("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_residual_out_that_is_a_shifted_residual_is_refused():
    memory = np.zeros(2 * 32 + 4, np.float32)
    residual, shifted = memory[:64].reshape(2, 32), memory[4:].reshape(2, 32)
    with pytest.raises(BufferError, match="residual_out: its memory overlaps"):
        ops.rms_norm_quantize(X, ONES, 1e-6, "fp8_token", residual=residual, residual_out=shifted)
