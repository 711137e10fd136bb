"""Shared by tests of quantization: hostile data, and how codes and scales compare."""

import numpy as np

from moqext import reference

SHAPES = [(1, 16), (3, 128), (5, 144), (2, 3, 272), (4, 1, 2, 16), (0, 32), (3, 0), (16,), (257, 48)]


def carrier(array):
    """Raw bytes of an array, one axis more for elements of several."""
    array = np.asarray(array)
    return array[..., None].view(np.uint8) if array.itemsize > 1 else array.view(np.uint8)


def swizzled(scale):
    """Swizzled block scales as a reshape: tiles of 128 x 4, the four groups of 32 rows side by side."""
    *batch, rows, columns = scale.shape
    padded = np.pad(scale, [(0, 0)] * len(batch) + [(0, -rows % 128), (0, -columns % 4)])
    count = int(np.prod(batch))
    tiles = padded.reshape(count, padded.shape[-2] // 128, 4, 32, padded.shape[-1] // 4, 4)
    return tiles.transpose(0, 1, 4, 3, 2, 5).reshape(padded.shape)


def same_codes(actual, expected):
    """Equal E4M3 codes; the sign of a NaN is left open."""
    actual, expected = carrier(actual), carrier(expected)
    assert actual.shape == expected.shape
    nan = (actual & 0x7F == 0x7F) & (expected & 0x7F == 0x7F)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])


def same_scales(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected, np.float32)
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)  # NaN equals NaN here


def hostile(rng, shape, kind):
    """Random float32 data of one temper."""
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-140, 120, shape)).astype(np.float32)
    if kind == "tiny":
        x *= np.float32(2.0**-133)  # subnormals, and scales below the smallest normal number
    if kind == "zeros":
        x *= rng.random(shape) < 0.02
        x[..., : x.shape[-1] // 2] = 0.0
    if kind == "signed zeros":
        x = np.copysign(np.zeros(shape, np.float32), x)
    if kind == "ties":
        x = (rng.integers(-1024, 1024, shape) / 64).astype(np.float32)
    if kind in ("nan", "inf") and x.size:
        at = rng.random(shape) < 0.02
        at.reshape(-1)[rng.integers(x.size)] = True
        x[at] = np.copysign(np.float32(kind), x[at])
    return x


KINDS = ["normal", "wide", "tiny", "zeros", "signed zeros", "ties", "nan", "inf"]


def shapes_and_kinds(shapes, ragged):
    """Pairs for tests: every shape with normal values, and one ragged shape with every other kind."""
    return [(shape, "normal") for shape in shapes] + [(ragged, kind) for kind in KINDS[1:]]


def as_dtype(x, dtype):
    """x in an input dtype: the array to pass, and the float32 values it holds."""
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):
            raw = reference.encode(x, "bf16")
        return raw, reference.decode(raw, "bf16")
    with np.errstate(over="ignore"):
        array = x.astype(dtype)
    return array, array.astype(np.float32)
