"""Number formats: native code, reference and ml_dtypes agree on every code and on every kind of value."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqext import ops, reference

from ..work import each

TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
SIGNED = ["e4m3", "e5m2", "e2m1", "bf16", "fp16"]
IMPLEMENTATIONS = {"native": ops, "reference": reference}


@pytest.fixture(params=IMPLEMENTATIONS)
def code(request):
    """Module under test: the native operations or the reference."""
    return IMPLEMENTATIONS[request.param]


def carrier(name):
    return np.uint16 if name in ("bf16", "fp16") else np.uint8


def all_codes(name):
    """Every code, one to an element (E2M1: to a nibble)."""
    count = 16 if name == "e2m1" else 1 << (8 * carrier(name)().itemsize)
    return np.arange(count).astype(carrier(name))


def decode(code, codes, name):
    """Decodes codes that lie one to an element."""
    packed = codes | (codes << 4) if name == "e2m1" else codes
    values = np.asarray(code.decode(packed, name))
    return values[0::2] if name == "e2m1" else values


def encode(code, x, name):
    """Encodes to codes that lie one to an element."""
    x = np.asarray(x, np.float32)
    if name != "e2m1":
        return np.asarray(code.encode(x, name)).view(carrier(name))
    packed = np.asarray(code.encode(np.stack([x, -x], -1), name)).reshape(-1)
    return packed & 15


def expected_codes(x, name):
    """Encodes with ml_dtypes, formats that saturate being clipped first; x has no NaN."""
    clipped = np.clip(x, -LARGEST[name], LARGEST[name]) if name in LARGEST else x
    with np.errstate(over="ignore"):
        return clipped.astype(TYPES[name]).view(carrier(name))


def assert_same_bits(actual, expected):
    width = {2: np.uint16, 4: np.uint32}.get(actual.dtype.itemsize, np.uint8)
    np.testing.assert_array_equal(actual.view(width), expected.view(width))


def half_precision_values(kind):
    """Every value of a 16-bit format that is not NaN, as float32."""
    values = np.arange(65536).astype(np.uint16).view(TYPES[kind]).astype(np.float32)
    return values[~np.isnan(values)]


@pytest.mark.parametrize("name", TYPES)
def test_every_code_decodes_as_ml_dtypes_does(code, name):
    codes = all_codes(name)
    values = decode(code, codes, name)
    expected = codes.view(TYPES[name]).astype(np.float32)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert_same_bits(values[numbers], expected[numbers])
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


@pytest.mark.parametrize("name", TYPES)
def test_every_value_encodes_to_its_own_code(code, name):
    codes = all_codes(name)
    values = decode(code, codes, name)
    numbers = np.isfinite(values) if name in LARGEST else ~np.isnan(values)
    np.testing.assert_array_equal(encode(code, values[numbers], name), codes[numbers])


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SIGNED)
def test_every_16_bit_value_encodes_as_ml_dtypes_does(code, name, kind):
    values = half_precision_values(kind)
    np.testing.assert_array_equal(encode(code, values, name), expected_codes(values, name))


@each("kind", ["bf16", "fp16"])
@each("name", SIGNED)
def test_16_bit_inputs_encode_like_the_same_values_in_float32(name, kind):
    values = half_precision_values(kind)[: 2 * 30000]
    typed = values.astype(TYPES[kind])
    raw = typed.view(np.uint16) if kind == "bf16" else typed
    assert_same_bits(ops.encode(raw, name), ops.encode(values, name))
    assert_same_bits(reference.encode(typed, name), reference.encode(values, name))


@pytest.mark.parametrize("name", SIGNED)
def test_random_float32_encode_as_ml_dtypes_does(code, name, rng):
    values = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values[~np.isnan(values)], rng.normal(size=4096).astype(np.float32)])
    np.testing.assert_array_equal(encode(code, values, name), expected_codes(values, name))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", SIGNED)
def test_ties_go_to_the_even_code_and_neighbours_to_the_nearer(code, name, sign):
    codes = all_codes(name)
    values = decode(code, codes, name)
    positive = np.isfinite(values) & ~np.signbit(values)
    codes, values = codes[positive], values[positive].astype(np.float64)  # ascending, from 0
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    kept = middle.astype(np.float64) * 2 == values[:-1] + values[1:]  # not below float32's own subnormals
    assert kept.all() or name == "bf16"
    low, high, middle = codes[:-1][kept], codes[1:][kept], middle[kept]
    flip = 0 if sign > 0 else {"e2m1": 8, "e4m3": 0x80, "e5m2": 0x80}.get(name, 0x8000)
    even = np.where(low % 2 == 0, low, high)
    np.testing.assert_array_equal(encode(code, sign * middle, name), even | flip)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    np.testing.assert_array_equal(encode(code, sign * below, name), low | flip)
    np.testing.assert_array_equal(encode(code, sign * above, name), high | flip)


@pytest.mark.parametrize(
    ("name", "largest", "nan"), [("e4m3", 0x7E, 0x7F), ("e5m2", 0x7B, 0x7F), ("e2m1", 0x7, None)]
)
def test_storage_formats_saturate_and_keep_nan(code, name, largest, nan):
    sign = 8 if name == "e2m1" else 0x80
    limit = LARGEST[name]
    over = [limit * 1.01, limit * 2, 3e38, np.inf]
    assert set(encode(code, over, name)) == {largest}
    assert set(encode(code, np.negative(over), name)) == {largest | sign}
    nans = encode(code, np.array([np.nan, -np.nan], np.float32), name)
    assert list(nans) == ([largest, largest] if nan is None else [nan, nan | sign])
    assert list(encode(code, [0.0, -0.0, 1e-40, -1e-40], name)) == [0, sign, 0, sign]


@pytest.mark.parametrize(("name", "infinity"), [("bf16", 0x7F80), ("fp16", 0x7C00)])
def test_16_bit_formats_overflow_to_infinity(code, name, infinity):
    largest = np.float32(decode(code, np.array([infinity - 1], np.uint16), name)[0])
    step = largest - np.float32(decode(code, np.array([infinity - 2], np.uint16), name)[0])
    tie = largest + step / np.float32(2)
    assert list(encode(code, [largest, np.nextafter(tie, np.float32(0))], name)) == [infinity - 1] * 2
    assert list(encode(code, [tie, np.inf, -np.inf], name)) == [
        infinity,
        infinity,
        infinity | 0x8000,
    ]


@pytest.mark.parametrize(("name", "infinity", "dropped"), [("bf16", 0x7F80, 16), ("fp16", 0x7C00, 13)])
def test_native_nan_stays_nan_with_sign_and_upper_payload(name, infinity, dropped, rng):
    payload = rng.integers(1, 1 << 23, 1000, dtype=np.uint32)
    sign = rng.integers(0, 2, 1000, dtype=np.uint32) << 31
    codes = encode(ops, (sign | 0x7F800000 | payload).view(np.float32), name)
    quiet = (0x7FFF ^ infinity) + 1 >> 1
    np.testing.assert_array_equal(codes, sign >> 16 | infinity | quiet | payload >> dropped)
    assert set(reference.encode(np.array([np.nan, -np.nan]), name)) == {
        infinity | quiet,
        0x8000 | infinity | quiet,
    }


def test_e8m0_takes_the_nearest_power_of_two(code, rng):
    exponents = rng.integers(-126, 127, 4096)
    values = np.ldexp(1 + rng.random(4096), exponents).astype(np.float32)
    codes = encode(code, values, "e8m0").astype(int)
    assert_same_bits(codes.astype(np.uint8), values.astype(TYPES["e8m0"]).view(np.uint8))
    distance = [np.abs(np.ldexp(1.0, codes - 127 + step) - values) for step in (-1, 0, 1)]
    assert (distance[1] <= np.minimum(distance[0], distance[2])).all()
    np.testing.assert_array_equal(encode(code, np.ldexp(np.float32(1.5), exponents), "e8m0"), exponents + 128)


def test_e8m0_at_its_ends(code):
    smallest = np.float32(2.0**-127)
    assert list(encode(code, [0.0, -1.0, -np.inf, 1e-45, smallest, smallest * 1.49], "e8m0")) == [0] * 6
    assert list(encode(code, [smallest * np.float32(1.5), smallest * 2], "e8m0")) == [1, 1]
    assert list(encode(code, [3.4e38, np.inf, np.nan, -np.nan], "e8m0")) == [254, 254, 255, 255]


def test_e2m1_packs_the_even_column_low(code):
    x = np.array([[0.0, 0.5, 1.0, 1.5], [-6.0, -4.0, -3.0, -2.0]], np.float32)
    packed = code.encode(x, "e2m1")
    np.testing.assert_array_equal(packed, np.array([[0x10, 0x32], [0xEF, 0xCD]], np.uint8))
    np.testing.assert_array_equal(code.decode(packed, "e2m1"), x)


@pytest.mark.parametrize("name", TYPES)
def test_subnormals_survive_flush_to_zero(name):
    """Frameworks set the processor to flush subnormal floats, which must not reach the codes."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        values = decode(ops, all_codes(name), name)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(values, decode(ops, all_codes(name), name))
    smooth = values[np.abs(values) >= 2.0**-126]
    try:
        torch.set_flush_denormal(True)
        codes = encode(ops, smooth, name)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(codes, encode(ops, smooth, name))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16"])
def test_torch_tensors_come_back_as_torch_tensors_of_the_format(name, rng):
    torch = pytest.importorskip("torch")
    dtypes = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    x = torch.from_numpy(rng.normal(scale=20, size=(3, 64)).astype(np.float32)).to(torch.bfloat16)
    codes = ops.encode(x, name)
    assert codes.dtype == dtypes[name]
    assert torch.equal(codes.float(), x.to(dtypes[name]).float())
    values = ops.decode(codes, name)
    assert values.dtype == torch.float32
    assert torch.equal(values, codes.float())


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(list(TYPES)))
def test_any_shape(shape, name):
    if name == "e2m1":
        shape = [*shape, 4]
    x = np.linspace(-7, 7, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    codes = ops.encode(x, name)
    assert_same_bits(codes, reference.encode(x, name))
    assert codes.shape == ((*shape[:-1], 2) if name == "e2m1" else tuple(shape))
    assert ops.decode(codes, name).shape == tuple(shape)


@each("size", [2, 1022, 1024, 1026, 2048, 3000])
@each("name", TYPES)
def test_sizes_around_the_internal_piece(name, size, rng):
    x = rng.normal(size=size).astype(np.float32)
    codes = ops.encode(x, name)
    assert_same_bits(codes, reference.encode(x, name))
    assert_same_bits(ops.decode(codes, name), reference.decode(codes, name))


@pytest.mark.parametrize("name", TYPES)
def test_out_is_written_whole_and_returned(name, rng):
    x = rng.normal(size=(6, 10)).astype(np.float32)
    expected = reference.encode(x, name)
    guarded = np.full((8, *expected.shape[1:]), 0xAA, expected.dtype)
    out = guarded[1:7]
    assert ops.encode(x, name, out) is out
    np.testing.assert_array_equal(out, expected)
    assert (guarded[[0, 7]] == 0xAA).all()
    values = np.full((8, 10), np.nan, np.float32)
    inner = values[1:7]
    assert ops.decode(expected, name, out=inner) is inner
    assert_same_bits(inner, reference.decode(expected, name))
    assert np.isnan(values[[0, 7]]).all()


@pytest.mark.parametrize("name", TYPES)
def test_strided_inputs(name, rng):
    x = rng.normal(size=(6, 4, 2100)).astype(np.float32)
    for view in (x[:, ::2, ::3], x[::-1, :, 1:2097:2], x.transpose(1, 0, 2), x[..., :2], x.T, x[0, 0, ::-1]):
        assert_same_bits(ops.encode(view, name), reference.encode(view, name))
    codes = np.asarray(reference.encode(x, name))
    for view in (codes[:, ::2, ::3], codes[::-1, :, 1:], codes.T, codes[:, :1, 5:6]):
        assert_same_bits(ops.decode(view, name), reference.decode(view, name))


def test_full_names_and_declared_dtypes_are_accepted():
    x = np.arange(8, dtype=np.float32)
    for short, full in reference.numbers.SHORT.items():
        np.testing.assert_array_equal(ops.encode(x, full), ops.encode(x, short))
        np.testing.assert_array_equal(reference.encode(x, full), reference.encode(x, short))


BAD_INPUTS = {
    "unknown format": (ValueError, r"format: expected e4m3.*got 'fp7'", lambda x: (x, "fp7")),
    "float32 is no code": (ValueError, r"format: .*got 'float32'", lambda x: (x, "float32")),
    "integers": (TypeError, r"x: expected float32, .*got int32", lambda x: (x.astype("i4"), "e4m3")),
    "float64": (TypeError, r"x: expected float32, .*got float64", lambda x: (x.astype("f8"), "e4m3")),
    "odd": (ValueError, r"x: .*even, got shape \[2, 5\]", lambda x: (x[:, :5].copy(), "e2m1")),
    "no axis": (ValueError, r"x: .*got shape \[\]", lambda x: (np.array(1, "f4"), "e2m1")),
}
BAD_OUTPUTS = {
    "shape": (ValueError, r"expected shape \[2, 6\], got \[6, 2\]", lambda x: np.zeros((6, 2), "u1")),
    "dtype": (TypeError, r"expected float8_e4m3fn.*got int32", lambda x: np.zeros((2, 6), "i4")),
    "strided": (ValueError, "without gaps", lambda x: np.zeros((2, 12), "u1")[:, ::2]),
    "overlap": (BufferError, "shares memory with x", lambda x: x.view("u1").reshape(-1)[9:21].reshape(2, 6)),
    "read-only": (BufferError, "read-only", lambda x: np.frombuffer(bytes(12), "u1").reshape(2, 6)),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_of_encode_are_named(case):
    error, message, arguments = BAD_INPUTS[case]
    with pytest.raises(error, match=message):
        ops.encode(*arguments(np.ones((2, 6), np.float32)))


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_bad_outputs_of_encode_are_named_and_left_alone(case):
    error, message, make = BAD_OUTPUTS[case]
    x = np.ones((2, 6), np.float32)
    out = make(x)
    before = out.copy()
    with pytest.raises(error, match="out: .*" + message):
        ops.encode(x, "e4m3", out)
    np.testing.assert_array_equal(out, before)


def test_bad_arguments_of_decode_are_named():
    codes = np.ones((2, 6), np.uint8)
    with pytest.raises(TypeError, match="codes: expected bfloat16 or a raw carrier of its width, got uint8"):
        ops.decode(codes, "bf16")
    with pytest.raises(TypeError, match=r"out: expected float32.*got float16"):
        ops.decode(codes, "e4m3", np.zeros((2, 6), np.float16))
    with pytest.raises(ValueError, match=r"out: expected shape \[2, 12\], got \[2, 6\]"):
        ops.decode(codes, "e2m1", np.zeros((2, 6), np.float32))


def test_bad_arguments_of_the_reference_are_named():
    with pytest.raises(TypeError, match="codes: float4_e2m1fn_x2 does not have the width of uint16"):
        reference.decode(np.ones(4, np.uint16), "e2m1")
    with pytest.raises(ValueError, match=r"format: expected .*got 'fp7'"):
        reference.encode(np.ones(4), "fp7")
    with pytest.raises(ValueError, match="e2m1: the last axis must be even"):
        reference.encode(np.ones(3), "e2m1")
