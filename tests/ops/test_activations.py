"""`silu_and_mul`, `rms_norm` and `rotary_embedding` against the reference, bit for bit."""

import numpy as np
import pytest

from moqext import ops, reference

from ..quantize_cases import KINDS, as_dtype, hostile, shapes_and_kinds
from ..work import each

SHAPES = [(1, 16), (3, 128), (2, 3, 271), (5, 1040), (17, 48), (2, 36112), (0, 32), (7, 1)]
HEADS = [
    (1, 1, 1, 2),
    (1, 5, 3, 64),
    (2, 3, 4, 128),
    (3, 1, 40, 18),
    (0, 3, 2, 8),
    (2, 0, 2, 8),
    (2, 3, 0, 8),
]


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    return request.param


def values_of(array, dtype):
    return reference.as_float32(reference.decode(array, "bf16") if dtype == "bfloat16" else array)


def same(actual, expected, dtype):
    """Equal, NaN with NaN, and zeros with their signs."""
    actual = values_of(actual, dtype)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[actual == 0]), np.signbit(expected[actual == 0]))


def poison(x, shape):
    return np.full(shape, 0xA5A5 if x.dtype == np.uint16 else -7.0, x.dtype)


@pytest.mark.parametrize("shape, kind", shapes_and_kinds(SHAPES, (2, 3, 271)), ids=str)
def test_silu_and_mul(rng, shape, kind, dtype):
    x, values = as_dtype(hostile(rng, (*shape[:-1], 2 * shape[-1]), kind) * 3, dtype)
    expected = reference.silu_and_mul(values, dtype)
    same(ops.silu_and_mul(x), expected, dtype)
    out = poison(x, shape)
    assert ops.silu_and_mul(x, out=out) is out
    same(out, expected, dtype)


@pytest.mark.parametrize("shape, kind", shapes_and_kinds(SHAPES, (2, 3, 271)), ids=str)
def test_rms_norm(rng, shape, kind, dtype):
    x, values = as_dtype(hostile(rng, shape, kind), dtype)
    residual, other = as_dtype(hostile(rng, shape, "normal"), dtype)
    eps = float(rng.choice([0.0, 1e-6, 1e-5]))
    for wide in (False, True):
        weight, gains = as_dtype(
            rng.standard_normal(shape[-1]).astype(np.float32), "float32" if wide else dtype
        )
        v, _ = reference.rms_norm(values, gains, eps, None, dtype)
        same(ops.rms_norm(x, weight, eps), v, dtype)
        v, z = reference.rms_norm(values, gains, eps, other, dtype)
        out, residual_out = poison(x, shape), poison(x, shape)
        results = ops.rms_norm(x, weight, eps, residual=residual, out=out, residual_out=residual_out)
        assert results[0] is out
        assert results[1] is residual_out
        same(out, v, dtype)
        same(residual_out, z, dtype)


@pytest.mark.parametrize("shape, kind", shapes_and_kinds(HEADS, (3, 1, 40, 18)), ids=str)
def test_rotary_embedding(rng, shape, kind, dtype):
    batch, tokens, _, columns = shape
    x, values = as_dtype(hostile(rng, shape, kind), dtype)
    for of_all in (1, batch):
        turns = rng.uniform(-np.pi, np.pi, (of_all, tokens, columns)).astype(np.float32)
        (cos, of_cos), (sin, of_sin) = as_dtype(np.cos(turns), dtype), as_dtype(np.sin(turns), dtype)
        expected = reference.rotary_embedding(values, of_cos, of_sin, dtype)
        same(ops.rotary_embedding(x, cos, sin), expected, dtype)
        out = poison(x, shape)
        assert ops.rotary_embedding(x, cos, sin, out=out) is out
        same(out, expected, dtype)


@pytest.mark.slow
def test_every_kind_at_every_shape(rng, dtype):
    for kind in KINDS:
        for shape in SHAPES:
            test_silu_and_mul(rng, shape, kind, dtype)
            test_rms_norm(rng, shape, kind, dtype)
        for shape in HEADS:
            test_rotary_embedding(rng, shape, kind, dtype)


def test_rotary_embedding_keeps_lengths(rng):
    """A turn: what belongs together keeps its norm, and angle 0 changes nothing."""
    x = rng.standard_normal((2, 3, 4, 16)).astype(np.float32)
    angles = np.tile(rng.uniform(-3, 3, (1, 3, 8)).astype(np.float32), 2)
    y = ops.rotary_embedding(x, np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(np.hypot(*np.split(y, 2, -1)), np.hypot(*np.split(x, 2, -1)), rtol=1e-5)
    np.testing.assert_array_equal(ops.rotary_embedding(x, np.ones_like(angles), np.zeros_like(angles)), x)


def test_strides(rng):
    base = rng.standard_normal((6, 10, 64)).astype(np.float32)
    weight = rng.standard_normal(128).astype(np.float32)
    for view in (base[::2], base[:, ::-1], base.transpose(1, 0, 2), base.swapaxes(0, 2)):
        np.testing.assert_array_equal(ops.silu_and_mul(view), ops.silu_and_mul(view.copy()))
        gains = weight[: 2 * view.shape[-1] : 2]
        for actual, expected in zip(
            ops.rms_norm(view, gains, 0.0, residual=view),
            ops.rms_norm(view.copy(), gains.copy(), 0.0, residual=view.copy()),
            strict=True,
        ):
            np.testing.assert_array_equal(actual, expected)
    qkv, cos = rng.standard_normal((2, 3, 6, 16)), rng.standard_normal((2, 3, 16))
    qkv, cos = qkv.astype(np.float32), cos.astype(np.float32)
    for x, angle in ((qkv[:, :, :4], cos), (qkv[..., ::-2], cos[..., ::2]), (qkv[::-1, :, 1:3], cos[:1])):
        expected = ops.rotary_embedding(x.copy(), angle.copy(), angle.copy())
        np.testing.assert_array_equal(ops.rotary_embedding(x, angle, angle), expected)


X, ONES = np.ones((2, 32), np.float32), np.ones(32, np.float32)
HEAD, ANGLE = np.ones((2, 3, 4, 8), np.float32), np.ones((1, 3, 8), np.float32)
REFUSED = {
    "odd": (ValueError, "x: expected an even last extent", lambda: ops.silu_and_mul(X[:, :31])),
    "scalar": (ValueError, "x: expected at least one", lambda: ops.silu_and_mul(np.ones((), np.float32))),
    "integers": (TypeError, "x: .* got int64", lambda: ops.silu_and_mul(X.astype(int))),
    "out shape": (ValueError, "out: expected", lambda: ops.silu_and_mul(X, out=X.copy())),
    "out over x": (BufferError, "out: its memory overlaps", lambda: ops.rms_norm(X, ONES, 0.0, out=X)),
    "weight": (ValueError, r"weight: expected shape \[32\]", lambda: ops.rms_norm(X, ONES[:31], 1e-6)),
    "eps": (ValueError, "eps: .* got -1", lambda: ops.rms_norm(X, ONES, -1.0)),
    "no residual": (
        ValueError,
        "residual_out: expected None without",
        lambda: ops.rms_norm(X, ONES, 0.0, residual_out=X.copy()),
    ),
    "rank": (ValueError, r"x: expected shape \[batch", lambda: ops.rotary_embedding(X, ANGLE, ANGLE)),
    "odd heads": (
        ValueError,
        "an even number",
        lambda: ops.rotary_embedding(HEAD[..., :7], ANGLE[..., :7], ANGLE[..., :7]),
    ),
    "angles of fewer tokens": (
        ValueError,
        r"sin: expected shape \[1, 3, 8\] or \[2, \.\.\.\], got \[1, 2, 8\]",
        lambda: ops.rotary_embedding(HEAD, ANGLE, ANGLE[:, :2]),
    ),
    "part of a head": (
        ValueError,
        "cos: expected shape",
        lambda: ops.rotary_embedding(HEAD, ANGLE[..., :4], ANGLE),
    ),
    "angles of another dtype": (
        TypeError,
        "cos: expected float32 as x, got float16",
        lambda: ops.rotary_embedding(HEAD, ANGLE.astype(np.float16), ANGLE),
    ),
    "angles as out": (
        BufferError,
        "out: its memory overlaps",
        lambda: ops.rotary_embedding(HEAD[:1, :, :1], ANGLE, ANGLE, out=ANGLE.reshape(1, 3, 1, 8)),
    ),
}


@each("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_routers_run_on_devices_only(rng):
    x = np.zeros((3, 64), np.uint16)
    with pytest.raises(ValueError, match="CUDA devices only"):
        ops.router_logits(x, x)


def test_heads_are_turned_on_devices_only(rng):
    """Refused by name before anything is written."""
    x = rng.standard_normal((3, 96)).astype(np.float32).view(np.uint16)[:, :96]
    table = np.zeros((4, 32), np.uint16)
    with pytest.raises(ValueError, match="CUDA devices only"):
        ops.qk_norm_rope(x, np.zeros(3, np.int64), table, 2, 1)
    with (
        pytest.raises(ValueError, match="CUDA devices only"),
        pytest.warns(DeprecationWarning, match="called qk_norm_rope"),
    ):
        ops.turn_heads(x, np.zeros(3, np.int64), table, 2, 1)
