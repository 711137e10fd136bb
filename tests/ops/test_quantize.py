"""`moqext.ops.quantize` against the reference, bit for bit."""

import numpy as np
import pytest

from moqext import ops, reference

from ..quantize_cases import (
    KINDS,
    SHAPES,
    as_dtype,
    carrier,
    hostile,
    same_codes,
    same_scales,
    shapes_and_kinds,
    swizzled,
)
from ..work import each

F32_TINY = np.finfo(np.float32).tiny


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("shape, kind", shapes_and_kinds(SHAPES, (2, 3, 272)), ids=str)
def test_every_scheme_equals_the_reference(rng, shape, kind, dtype):
    x, values = as_dtype(hostile(rng, shape, kind), dtype)
    before = x.copy()

    scale = np.float32(np.exp2(rng.uniform(-10, 4)))
    codes, given = ops.quantize(x, "fp8_tensor", scale=float(scale))
    same_codes(codes, reference.quantize_fp8_static(values, scale))
    same_scales(given, scale)

    codes, found = ops.quantize(x, "fp8_tensor")
    expected, expected_scale = reference.quantize_fp8_tensor(values)
    same_codes(codes, expected)
    same_scales(found, expected_scale)

    codes, found = ops.quantize(x, "fp8_token")
    expected, expected_scale = reference.quantize_fp8_token(values)
    same_codes(codes, expected)
    same_scales(found, expected_scale[..., None])

    for group in (128, 32, 7):
        codes, found = ops.quantize(x, "fp8_group", group_size=group)
        expected, expected_scale = reference.quantize_fp8_group(values, group)
        same_codes(codes, expected)
        same_scales(found, expected_scale)

    for second in (None, scale):
        packed, block_scale, scale_2 = ops.quantize(x, "nvfp4", scale=second and float(second))
        wanted = reference.quantize_nvfp4(values, second)
        np.testing.assert_array_equal(carrier(packed), wanted.codes)
        np.testing.assert_array_equal(carrier(block_scale), wanted.block_scale)
        same_scales(scale_2, wanted.input_scale)
        packed, block_scale, scale_2 = ops.quantize(x, "nvfp4_swizzled", scale=second and float(second))
        rows = wanted.block_scale.reshape(int(np.prod(shape[:-1])), shape[-1] // 16)
        np.testing.assert_array_equal(carrier(packed), wanted.codes)
        np.testing.assert_array_equal(carrier(block_scale), swizzled(rows))
        same_scales(scale_2, wanted.input_scale)

    np.testing.assert_array_equal(x, before)  # the input is left alone


@pytest.mark.slow
def test_every_kind_at_every_shape(rng, dtype):
    for kind in KINDS:
        for shape in SHAPES:
            test_every_scheme_equals_the_reference(rng, shape, kind, dtype)


def test_nvfp4_block_scales_reach_into_the_subnormals(rng):
    """A large given scale, as an exporter with headroom writes, pushes block scales below 2^-6."""
    x = (rng.standard_normal((64, 256)) / 8).astype(np.float32)
    packed, block_scale, _ = ops.quantize(x, "nvfp4", scale=13.7)
    wanted = reference.quantize_nvfp4(x, np.float32(13.7))
    assert (wanted.block_scale < 8).all()
    assert (wanted.block_scale > 0).any()
    np.testing.assert_array_equal(carrier(block_scale), wanted.block_scale)
    np.testing.assert_array_equal(packed, wanted.codes)


def test_every_code_and_tie_of_e2m1():
    """One group whose block scale is 1 holds every threshold, its neighbours and both zeros."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    up, down = np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(0))
    for row in (ties, up, down, -ties, -up, -down):
        x = np.zeros((1, 16), np.float32)
        x[0, : len(row)], x[0, -1] = row, 6.0
        packed, block_scale, _ = ops.quantize(x, "nvfp4", scale=1.0)
        assert carrier(block_scale).tolist() == [[0x38]]
        np.testing.assert_array_equal(packed, reference.quantize_nvfp4(x, np.float32(1)).codes)
    x[0, :2] = [-0.0, 0.0]
    assert ops.quantize(x, "nvfp4", scale=1.0)[0][0, 0] == 0x08


@pytest.mark.parametrize("scheme", ["fp8_tensor", "nvfp4"])
def test_zeros_get_the_scale_one_and_codes_of_zero(scheme):
    codes, *scales = ops.quantize(np.zeros((4, 64), np.float32), scheme)
    assert not carrier(codes).any()
    assert scales[-1] == 1.0


def test_values_near_the_smallest_float_do_not_turn_into_nan():
    x = np.array([[np.finfo(np.float32).smallest_subnormal] + [0.0] * 15], np.float32)
    for scheme in ("fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled"):
        codes, *_ = ops.quantize(x, scheme)
        assert not carrier(codes).any()


def test_strided_inputs_give_the_codes_of_a_copy(rng):
    base = rng.standard_normal((6, 10, 64)).astype(np.float32)
    views = [base[::2], base[:, ::-1], base[:, 3:4, ::2], base.transpose(1, 0, 2), base.swapaxes(0, 2)]
    views.append(np.broadcast_to(base[:1, :1], (3, 2, 64)))
    for view in views:
        schemes = ["fp8_tensor", "fp8_token", "fp8_group"] + (["nvfp4"] if view.shape[-1] % 16 == 0 else [])
        for scheme in schemes:
            for actual, expected in zip(
                ops.quantize(view, scheme), ops.quantize(view.copy(), scheme), strict=True
            ):
                np.testing.assert_array_equal(carrier(actual), carrier(expected))


def test_a_scalar_is_a_tensor_too():
    codes, scale = ops.quantize(np.array(-3.5, np.float32), "fp8_tensor")
    assert codes.shape == () == scale.shape
    assert carrier(codes) == 0xFE


def test_raw_halves_are_read_as_format_says(rng):
    x = rng.standard_normal((3, 32)).astype(np.float16)
    for actual, expected in zip(
        ops.quantize(x.view(np.uint16), "fp8_token", format="float16"),
        ops.quantize(x, "fp8_token"),
        strict=True,
    ):
        np.testing.assert_array_equal(carrier(actual), carrier(expected))
    with pytest.raises(TypeError, match="x: expected float16 or a raw carrier"):
        ops.quantize(x.astype(np.float32), "fp8_token", format="float16")
    with pytest.raises(ValueError, match="format: unknown dtype 'half'"):
        ops.quantize(x, "fp8_token", format="half")


def test_declared_bfloat16(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = rng.standard_normal((3, 32)).astype(ml_dtypes.bfloat16)
    for scheme in ("fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled"):
        results = ops.quantize(x.view(np.uint16), scheme)
        for actual, expected in zip(ops.quantize(x, scheme), results, strict=True):
            np.testing.assert_array_equal(carrier(actual), carrier(expected))


def test_outputs_are_written_in_place_and_in_full(rng):
    x = rng.standard_normal((5, 160)).astype(np.float32)
    for scheme, rows in (("fp8_tensor", ()), ("fp8_token", (5, 1)), ("fp8_group", (5, 2))):
        out, scale_out = np.full(x.shape, 0xA5, np.uint8), np.full(rows, -7.0, np.float32)
        codes, scale = ops.quantize(x, scheme, out=out, scale_out=scale_out)
        assert codes is out
        assert scale is scale_out
        for actual, expected in zip((codes, scale), ops.quantize(x, scheme), strict=True):
            np.testing.assert_array_equal(carrier(actual), carrier(expected))
    out, scale_out = np.full((5, 80), 0xA5, np.uint8), np.full((5, 10), 0xA5, np.uint8)
    packed, block_scale, _ = ops.quantize(x, "nvfp4", out=out, scale_out=scale_out)
    assert packed is out
    assert block_scale is scale_out
    np.testing.assert_array_equal(out, reference.quantize_nvfp4(x).codes)
    np.testing.assert_array_equal(scale_out, reference.quantize_nvfp4(x).block_scale)
    scale_out = np.full((128, 12), 0xA5, np.uint8)
    assert ops.quantize(x, "nvfp4_swizzled", scale_out=scale_out)[1] is scale_out
    np.testing.assert_array_equal(scale_out, swizzled(reference.quantize_nvfp4(x).block_scale))


def test_a_given_scale_tensor_is_handed_back():
    scale = np.full((1, 1), 0.5, np.float32)
    x = np.ones((2, 16), np.float32)
    assert ops.quantize(x, "fp8_tensor", scale=scale)[1] is scale
    assert ops.quantize(x, "nvfp4", scale=scale)[2] is scale


X = np.ones((2, 24), np.float32)
REFUSED = {
    "unknown scheme": (ValueError, "scheme: expected .*, got 'fp8'", X, "fp8", {}),
    "scheme not a str": (TypeError, "scheme: expected a str", X, 8, {}),
    "integers": (
        TypeError,
        "x: expected float32, bfloat16 or float16, got int64",
        X.astype(int),
        "fp8_token",
        {},
    ),
    "doubles": (TypeError, "x: .* got float64", X.astype(float), "fp8_token", {}),
    "K of nvfp4": (ValueError, r"x: expected a last extent divisible by 16 .*\[2, 24\]", X, "nvfp4", {}),
    "scalar by token": (
        ValueError,
        "x: expected at least one dimension",
        np.ones((), np.float32),
        "fp8_token",
        {},
    ),
    "scale by token": (ValueError, "scale: fp8_token computes its own", X, "fp8_token", {"scale": 1.0}),
    "scale by group": (ValueError, "scale: fp8_group computes its own", X, "fp8_group", {"scale": 1.0}),
    "zero scale": (
        ValueError,
        "scale: expected a positive finite number, got 0",
        X,
        "fp8_tensor",
        {"scale": 0.0},
    ),
    "negative scale": (ValueError, "scale: .* got -1", X, "fp8_tensor", {"scale": -1.0}),
    "NaN scale": (ValueError, "scale: .* got -?nan", X, "fp8_tensor", {"scale": float("nan")}),
    "infinite scale": (ValueError, "scale: .* got inf", X, "fp8_tensor", {"scale": float("inf")}),
    "no reciprocal": (ValueError, "scale: .* reciprocal", X, "fp8_tensor", {"scale": 1e-39}),
    "two scales": (
        ValueError,
        r"scale: expected one element, got shape \[2\]",
        X,
        "fp8_tensor",
        {"scale": np.ones(2, np.float32)},
    ),
    "double scale": (
        TypeError,
        "scale: expected float32, got float64",
        X,
        "fp8_tensor",
        {"scale": np.ones(1)},
    ),
    "group of tensor": (
        ValueError,
        "group_size: fp8_tensor has no groups, got 64",
        X,
        "fp8_tensor",
        {"group_size": 64},
    ),
    "group of nvfp4": (
        ValueError,
        "group_size: nvfp4 has groups of 16, got 32",
        X[:, :16],
        "nvfp4",
        {"group_size": 32},
    ),
    "group of none": (ValueError, "group_size: expected an int from 1", X, "fp8_group", {"group_size": 0}),
    "out shape": (
        ValueError,
        r"out: expected shape \[2, 24\], got \[2, 23\]",
        X,
        "fp8_token",
        {"out": np.zeros((2, 23), np.uint8)},
    ),
    "out dtype": (
        TypeError,
        "out: expected float8_e4m3fn .* got float32",
        X,
        "fp8_token",
        {"out": np.zeros((2, 24), np.float32)},
    ),
    "out strides": (
        ValueError,
        "out: expected a row-major tensor",
        X,
        "fp8_token",
        {"out": np.zeros((24, 2), np.uint8).T},
    ),
    "scale_out shape": (
        ValueError,
        r"scale_out: expected shape \[2, 1\], got \[2\]",
        X,
        "fp8_token",
        {"scale_out": np.zeros(2, np.float32)},
    ),
    "scale_out unused": (
        ValueError,
        "scale_out: expected None where scale is given",
        X,
        "fp8_tensor",
        {"scale": 1.0, "scale_out": np.zeros((), np.float32)},
    ),
}


@each("case", REFUSED)
def test_bad_arguments_are_refused_by_name_and_nothing_is_written(case):
    error, message, x, scheme, options = REFUSED[case]
    poisoned = {name: value.copy("A") for name, value in options.items() if isinstance(value, np.ndarray)}
    with pytest.raises(error, match=message):
        ops.quantize(x, scheme, **options)
    for name, value in poisoned.items():
        np.testing.assert_array_equal(options[name], value)


def test_overlapping_and_read_only_outputs_are_refused():
    memory = np.zeros(4 * 2 * 32, np.uint8)
    x = memory.view(np.float32).reshape(2, 32)
    with pytest.raises(BufferError, match="out: its memory overlaps"):
        ops.quantize(x, "fp8_token", out=memory[:64].reshape(2, 32))
    scales = np.zeros(64, np.uint8)
    with pytest.raises(BufferError, match="scale_out: its memory overlaps"):
        ops.quantize(
            x.copy(),
            "fp8_token",
            out=scales.reshape(2, 32),
            scale_out=scales[:8].view(np.float32).reshape(2, 1),
        )
    out = np.zeros((2, 32), np.uint8)
    out.flags.writeable = False
    with pytest.raises(BufferError, match="out"):
        ops.quantize(x, "fp8_token", out=out)


def test_torch_tensors_get_torch_results(rng):
    torch = pytest.importorskip("torch")
    values = rng.standard_normal((3, 64)).astype(np.float32)
    x = torch.from_numpy(values).to(torch.bfloat16)
    for scheme in ("fp8_tensor", "fp8_token", "fp8_group", "nvfp4", "nvfp4_swizzled"):
        codes, *scales = ops.quantize(x, scheme)
        expected, *expected_scales = ops.quantize(x.float().numpy(), scheme)
        assert codes.dtype == (torch.uint8 if scheme.startswith("nvfp4") else torch.float8_e4m3fn)
        np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), carrier(expected))
        for actual, wanted in zip(scales, expected_scales, strict=True):
            assert isinstance(actual, torch.Tensor)
            raw = actual.view(torch.uint8) if actual.element_size() == 1 else actual
            np.testing.assert_array_equal(carrier(raw.numpy()), carrier(wanted))
    scale = torch.tensor(0.25)
    assert ops.quantize(x, "fp8_tensor", scale=scale)[1] is scale


def test_jax_arrays_get_jax_results(rng):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    values = rng.standard_normal((3, 64)).astype(np.float32)
    on_host = jax.device_put(values, jax.devices("cpu")[0])
    for scheme in ("fp8_tensor", "fp8_token", "nvfp4"):
        results = ops.quantize(on_host, scheme)
        for actual, expected in zip(results, ops.quantize(values, scheme), strict=True):
            assert isinstance(actual, jnp.ndarray)
            np.testing.assert_array_equal(carrier(actual), carrier(expected))
