"""`pack_nvfp4` and `unpack_nvfp4`: a permutation, the one of the reference, and the inverse."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import ops, reference

from ..work import each

layers = st.tuples(
    st.integers(1, 150), st.integers(1, 20), st.sampled_from([16, 32]), st.integers(0, 2**32 - 1)
)


def random_layer(rows, groups, group_size, seed):
    """Codes and scales of any bits: zeros, subnormals, minus zero and NaN among them."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (rows, groups * group_size // 2), dtype=np.uint8)
    scale = rng.integers(0, 256, (rows, groups), dtype=np.uint8)
    scale[rng.random(scale.shape) < 0.2] = rng.choice([0, 1, 7, 0x80, 0x7F, 0xFF])
    weight[rng.random(rows) < 0.1] = 0
    return weight, scale


@settings(max_examples=int(os.environ.get("MOQEXT_EXAMPLES", "150")))
@given(layers)
def test_the_bits_of_the_reference_and_back(layer):
    weight, scale = random_layer(*layer)
    (rows, groups), group_size = scale.shape, layer[2]
    packed = ops.pack_nvfp4(weight, scale)
    np.testing.assert_array_equal(packed, reference.pack_nvfp4(weight, scale))
    scale = np.where(scale == 0x80, 0, scale)
    for back in (
        ops.unpack_nvfp4(packed, (rows, groups * group_size), group_size),
        reference.unpack_nvfp4(packed, rows, groups * group_size, group_size),
    ):
        np.testing.assert_array_equal(back[0], weight)
        np.testing.assert_array_equal(back[1].view(np.uint8), scale)


def test_every_code_in_every_place():
    """A code at a time: no two places share a bit."""
    rows, columns = 16, 64
    scale = np.zeros((rows, 4), np.uint8)
    seen = np.zeros(576 * 8, int)
    for place in range(rows * columns):
        codes = np.zeros(rows * columns, np.uint8)
        codes[place] = 15
        packed = ops.pack_nvfp4(ops.pack_fp4(codes.reshape(rows, columns)), scale)
        bits = np.unpackbits(packed[0, 0])
        assert bits.sum() == 4
        assert not packed[1:].any()
        seen += bits
    assert (seen[: 512 * 8] == 1).all()
    assert not seen[512 * 8 :].any()
    scales = np.arange(1, 65, dtype=np.uint8).reshape(rows, 4)
    packed = ops.pack_nvfp4(np.zeros((rows, columns // 2), np.uint8), scales)[0, 0]
    assert not packed[:512].any()
    assert sorted(packed[512:]) == list(range(1, 65))
    every = np.resize(np.arange(256, dtype=np.uint8), (64, 4))
    _, back = ops.unpack_nvfp4(ops.pack_nvfp4(np.zeros((64, columns // 2), np.uint8), every), (64, columns))
    np.testing.assert_array_equal(back.view(np.uint8), np.where(every == 0x80, 0, every))


def test_where_a_code_goes_as_the_page_says():
    """docs/formats.md, section 6, spelled out for one code and one scale."""
    weight, scale = np.zeros((80, 160 // 2), np.uint8), np.zeros((80, 10), np.uint8)
    row, column = 64 + 8 + 5, 64 + 2 * 16 + 8 + 2 * 3 + 1  # slab 4, g 5, h 1; block 1, s 2, t 3, odd
    weight[row, column // 2] = 0b1101 << 4
    scale[row, column // 16] = 0x42
    packed = ops.pack_nvfp4(weight, scale)
    assert packed.shape == (8, 3, 576)
    unit = packed[4, 1]
    assert unit[512 + 8 * 5 + 2 * 2 + 1] == 0x42
    at = 16 * (4 * 5 + (3 ^ (5 >> 1))) + 4 * 2
    assert int.from_bytes(unit[at : at + 4].tobytes(), "little") == (1 << 13 | 0b101 << 9) << 16
    unit[512 + 8 * 5 + 2 * 2 + 1] = 0
    unit[at : at + 4] = 0
    assert not packed.any()


def test_rows_of_wider_tensors_and_outs(rng):
    weight, scale = random_layer(77, 9, 16, rng.integers(2**32))
    scale[scale == 0x80] = 0
    wide = rng.integers(0, 256, (2 * 77, 100), dtype=np.uint8)
    wide[::2, 3 : 3 + 72] = weight
    scales = np.full((77, 13), 0xEE, np.uint8)
    scales[:, 1:10] = scale
    out = np.full((8, 3, 576), 0xA5, np.uint8)
    assert ops.pack_nvfp4(wide[::2, 3 : 3 + 72], scales[:, 1:10], out=out) is out
    np.testing.assert_array_equal(out, reference.pack_nvfp4(weight, scale))
    back, back_scale = np.full((77, 72), 0xA5, np.uint8), np.full((77, 9), 0xA5, np.uint8)
    result = ops.unpack_nvfp4(out, (77, 144), out=back, scale_out=back_scale)
    assert result[0] is back
    assert result[1] is back_scale
    np.testing.assert_array_equal(back, weight)
    np.testing.assert_array_equal(back_scale, scale)


W, S, P = np.zeros((3, 16), np.uint8), np.zeros((3, 2), np.uint8), np.zeros((4, 1, 576), np.uint8)
MISTAKES = {
    r"weight: expected float4": lambda: ops.pack_nvfp4(W.astype(np.float32), S),
    r"weight: expected rows and columns, got shape \[48\]": lambda: ops.pack_nvfp4(W.reshape(-1), S),
    r"weight: expected rows and columns, got shape \[0, 16\]": lambda: ops.pack_nvfp4(W[:0], S[:0]),
    r"weight: expected contiguous rows, got stride 2": lambda: ops.pack_nvfp4(W[:, ::2], S),
    r"weight: expected codes for a multiple of 16 columns": lambda: ops.pack_nvfp4(W[:, :12], S),
    r"weight_scale: expected float8": lambda: ops.pack_nvfp4(W, S.astype(np.float32)),
    r"weight_scale: expected one scale per row and 16 or 32 of 32 columns, got shape \[3, 4\]": lambda: (
        ops.pack_nvfp4(W, np.zeros((3, 4), np.uint8))
    ),
    r"weight_scale: expected one scale per row .* got shape \[2, 2\]": lambda: ops.pack_nvfp4(W, S[:2]),
    r"out: expected shape \[4, 1, 576\]": lambda: ops.pack_nvfp4(W, S, out=P[:3]),
    r"out: shares memory with weight": lambda: ops.pack_nvfp4(P.reshape(4, 576)[:3, :16], S, out=P),
    r"packed: expected shape \[4, 1, 576\], got \[4, 576\]": lambda: ops.unpack_nvfp4(P[:, 0], (3, 32)),
    r"packed: expected a row-major tensor": lambda: ops.unpack_nvfp4(P[::-1], (3, 32)),
    r"shape: expected rows and columns": lambda: ops.unpack_nvfp4(P, (3,)),
    r"shape: expected rows and a multiple of 32 columns": lambda: ops.unpack_nvfp4(P, (3, 48), 32),
    r"shape: expected rows and a multiple of 16 columns": lambda: ops.unpack_nvfp4(P, (0, 48)),
    r"group_size: expected 16 or 32, got 64": lambda: ops.unpack_nvfp4(P, (3, 64), 64),
    r"scale_out: expected shape \[3, 2\]": lambda: ops.unpack_nvfp4(P, (3, 32), scale_out=S[:2]),
}


@each("message", MISTAKES)
def test_mistakes_are_named(message):
    with pytest.raises((TypeError, ValueError, BufferError), match=f"^{message}"):
        MISTAKES[message]()
