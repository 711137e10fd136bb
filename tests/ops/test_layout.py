"""Swizzled block scales, fp4 packing and requantization to the largest scale."""

import numpy as np
import pytest

from moqext import ops, reference

from ..quantize_cases import swizzled
from ..work import each

SHAPES = [(1, 1), (128, 4), (129, 5), (31, 3), (200, 17), (2, 128, 4), (3, 130, 9), (0, 4), (5, 0), (0, 7, 7)]


@each("shape", SHAPES)
def test_swizzle_and_back(rng, shape):
    scale = rng.integers(0, 256, shape, np.uint8)
    expected = swizzled(scale)
    np.testing.assert_array_equal(ops.swizzle_block_scales(scale), expected)

    out = np.full(expected.shape, 0xA5, np.uint8)
    assert ops.swizzle_block_scales(scale, out=out) is out
    np.testing.assert_array_equal(out, expected)  # padding is zeroed too

    dirty = swizzled(
        np.pad(
            scale,
            [(0, 0)] * (scale.ndim - 2) + [(0, -shape[-2] % 128), (0, -shape[-1] % 4)],
            constant_values=0xA5,
        )
    )
    back = np.full(shape, 0x5A, np.uint8)
    assert ops.unswizzle_block_scales(dirty, shape, out=back) is back
    np.testing.assert_array_equal(back, scale)
    np.testing.assert_array_equal(ops.unswizzle_block_scales(expected, list(shape)), scale)


def test_swizzle_puts_a_byte_where_the_formula_says(rng):
    scale = rng.integers(0, 256, (300, 10), np.uint8)
    flat = ops.swizzle_block_scales(scale).reshape(-1)
    for m, k in zip(rng.integers(0, 300, 200), rng.integers(0, 10, 200), strict=True):
        at = ((m // 128) * (12 // 4) + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
        assert flat[at] == scale[m, k]


def test_swizzle_reads_any_strides(rng):
    base = rng.integers(0, 256, (3, 140, 24), np.uint8)
    for view in (base[:, ::-1, ::2], base.transpose(2, 1, 0), base[1].T):
        np.testing.assert_array_equal(ops.swizzle_block_scales(view), swizzled(np.ascontiguousarray(view)))


def test_swizzle_keeps_the_dtype(rng):
    torch = pytest.importorskip("torch")
    scale = torch.from_numpy(rng.integers(0, 127, (40, 6), np.uint8)).view(torch.float8_e4m3fn)
    result = ops.swizzle_block_scales(scale)
    assert result.dtype == torch.float8_e4m3fn
    np.testing.assert_array_equal(result.view(torch.uint8), swizzled(scale.view(torch.uint8).numpy()))
    back = ops.unswizzle_block_scales(result, tuple(scale.shape))
    assert back.dtype == torch.float8_e4m3fn
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("shape", [(6,), (3, 16), (2, 3, 4), (0, 8), (3, 0)], ids=str)
def test_pack_and_unpack(rng, shape):
    codes = rng.integers(0, 16, shape, np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    np.testing.assert_array_equal(ops.pack_fp4(codes), packed)
    np.testing.assert_array_equal(ops.unpack_fp4(packed), codes)
    out = np.full(packed.shape, 0xA5, np.uint8)
    assert ops.pack_fp4(codes | 0xC0, out=out) is out  # only the low nibbles count
    np.testing.assert_array_equal(out, packed)
    back = np.full(shape, 0xA5, np.uint8)
    assert ops.unpack_fp4(packed, out=back) is back
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(ops.pack_fp4(codes[..., ::-1]), codes[..., ::-2] | codes[..., -2::-2] << 4)


def requantized(weight, scales, partitions):
    """The definition, in NumPy: through float16 to the reciprocal of the largest scale."""
    largest = np.float32(max(scales))
    parts, row = [], 0
    for scale, rows in zip(scales, partitions, strict=True):
        codes = weight[row : row + rows]
        row += rows
        with np.errstate(over="ignore", invalid="ignore"):
            half = (reference.decode(codes, "e4m3") * np.float32(scale)).astype(np.float16)
            moved = reference.encode(half.astype(np.float32) * (np.float32(1) / largest), "e4m3")
        parts.append(np.zeros_like(codes) if scale == 0 else moved)
    return np.concatenate(parts), largest


@pytest.mark.parametrize("exponent", [(-12, -6), (-30, -20), (4, 12)], ids=str)
def test_requantize_to_max(rng, exponent):
    """Usual scales, scales that make float16 subnormal, and scales that make it infinite."""
    partitions = [5, 0, 1, 64, 2]
    scales = np.exp2(rng.uniform(*exponent, len(partitions))).astype(np.float32)
    weight = rng.integers(0, 256, (sum(partitions), 40), np.uint8)
    weight[weight & 0x7F == 0x7F] = 0
    expected, largest = requantized(weight, scales, partitions)
    codes, scale = ops.requantize_to_max(weight, scales, partitions)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), expected)
    assert scale.shape == ()
    assert scale == largest
    out = np.full(weight.shape, 0xA5, np.uint8)
    assert ops.requantize_to_max(weight[:, ::-1], scales, partitions, out=out)[0] is out
    np.testing.assert_array_equal(out[:, ::-1], expected)


def test_requantize_equals_torch(rng):
    torch = pytest.importorskip("torch")
    partitions, scales = [8, 3, 5], np.exp2(rng.uniform(-14, -4, 3)).astype(np.float32)
    codes = rng.integers(0, 256, (16, 32), np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    largest = torch.from_numpy(scales).max()
    expected = [
        ((part.to(torch.float16) * scale).float() * largest.reciprocal()).clamp(-448, 448).to(weight.dtype)
        for part, scale in zip(weight.split(partitions), torch.from_numpy(scales), strict=True)
    ]
    result, scale = ops.requantize_to_max(weight, torch.from_numpy(scales), partitions)
    assert result.dtype == torch.float8_e4m3fn
    assert torch.equal(result.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in expected]))
    assert torch.equal(scale, largest)


@pytest.mark.parametrize("scales", [[0.25, 0.25], [0.25]], ids=str)
def test_requantize_leaves_equal_scales_alone(rng, scales):
    weight = rng.integers(0, 256, (6, 9), np.uint8)
    codes, scale = ops.requantize_to_max(weight, np.array(scales, np.float32), [4, 2])
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), weight)
    assert scale == 0.25


def test_requantize_a_part_of_zeros():
    """A scale of 0 with NaN codes is how exporters write a linear of zeros."""
    weight = np.full((4, 3), 0xFF, np.uint8)
    weight[2:] = 0x38
    codes, scale = ops.requantize_to_max(weight, np.array([0.0, 0.5], np.float32), [2, 2])
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), [[0] * 3] * 2 + [[0x38] * 3] * 2)
    assert scale == 0.5


U8 = np.zeros((4, 6), np.uint8)
F2 = np.ones(2, np.float32)
REFUSED = {
    "swizzle dtype": (
        TypeError,
        "scale: expected a dtype of one byte, got float32",
        lambda: ops.swizzle_block_scales(np.ones((4, 4), np.float32)),
    ),
    "swizzle rank": (
        ValueError,
        r"scale: expected 2 or 3 dimensions, got shape \[6\]",
        lambda: ops.swizzle_block_scales(U8[0]),
    ),
    "swizzle out": (
        ValueError,
        r"out: expected shape \[128, 8\], got \[128, 4\]",
        lambda: ops.swizzle_block_scales(U8, out=np.zeros((128, 4), np.uint8)),
    ),
    "unswizzle padding": (
        ValueError,
        r"swizzled: expected shape \[128, 8\], got \[4, 6\]",
        lambda: ops.unswizzle_block_scales(U8, (4, 6)),
    ),
    "unswizzle strides": (
        ValueError,
        "swizzled: expected a row-major tensor",
        lambda: ops.unswizzle_block_scales(np.zeros((4, 128), np.uint8).T, (128, 4)),
    ),
    "unswizzle rank": (
        ValueError,
        r"shape: expected 2 or 3 dimensions, got shape \[4\]",
        lambda: ops.unswizzle_block_scales(U8, (4,)),
    ),
    "unswizzle shape": (
        TypeError,
        "shape: expected a sequence of at most 3 ints",
        lambda: ops.unswizzle_block_scales(U8, 4),
    ),
    "unswizzle negative": (
        ValueError,
        "shape: expected an int from 0",
        lambda: ops.unswizzle_block_scales(U8, (4, -6)),
    ),
    "unswizzle float": (
        TypeError,
        "shape: expected an int",
        lambda: ops.unswizzle_block_scales(U8, (4, 6.0)),
    ),
    "pack odd": (
        ValueError,
        r"codes: expected an even last extent, got shape \[4, 5\]",
        lambda: ops.pack_fp4(U8[:, :5]),
    ),
    "pack scalar": (
        ValueError,
        "codes: expected at least one dimension",
        lambda: ops.pack_fp4(np.zeros((), np.uint8)),
    ),
    "unpack dtype": (
        TypeError,
        "packed: expected a dtype of one byte",
        lambda: ops.unpack_fp4(U8.astype(np.int32)),
    ),
    "requantize sum": (
        ValueError,
        "partitions: expected a sum of 4 rows, got 3",
        lambda: ops.requantize_to_max(U8, F2, [1, 2]),
    ),
    "requantize excess": (
        ValueError,
        "partitions: expected row counts that sum to 4, got 4 at index 1",
        lambda: ops.requantize_to_max(U8, F2, [1, 4]),
    ),
    "requantize none": (
        ValueError,
        "partitions: expected at least one",
        lambda: ops.requantize_to_max(U8[:0], F2[:0], []),
    ),
    "requantize scales": (
        ValueError,
        r"weight_scale: expected one element or shape \[3\], got shape \[2\]",
        lambda: ops.requantize_to_max(U8, F2, [1, 2, 1]),
    ),
    "requantize dtype": (
        TypeError,
        "weight: expected float8_e4m3fn",
        lambda: ops.requantize_to_max(U8.astype(np.float32), F2, [2, 2]),
    ),
    "requantize negative": (
        ValueError,
        "weight_scale: .* at least 0, got -1",
        lambda: ops.requantize_to_max(U8, -F2, [2, 2]),
    ),
    "requantize NaN": (
        ValueError,
        "weight_scale: .* got nan",
        lambda: ops.requantize_to_max(U8, F2 * np.float32("nan"), [2, 2]),
    ),
    "requantize in place": (BufferError, "out", lambda: ops.requantize_to_max(U8, F2, [2, 2], out=U8)),
}


@each("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
