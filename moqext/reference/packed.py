"""The packed layout of NVFP4 weights: see docs/formats.md."""

import numpy as np
from numpy.typing import ArrayLike

from moqext.reference.numbers import Array, raw

ROWS, COLUMNS, GROUP = 16, 64, 16  # of a slab and a block, and columns of a word
UNIT = 576
MAGNITUDE = (6, 3, 0, 9)  # lowest bit of the magnitude of each pair of columns, in both halves of a word
SIGN = (15, 12, 14, 13)
VECTORS = np.array([[4 * g + (t ^ g >> 1) for t in range(4)] for g in range(8)])


def pack_nvfp4(weight: ArrayLike, weight_scale: ArrayLike) -> Array:
    """NVFP4 codes and block scales in the order in which CUDA kernels read them.

    Args:
        weight: uint8 (N, K / 2), the even column in the low nibble.
        weight_scale: e4m3 (N, K / 16) or (N, K / 32), also as uint8.

    Returns:
        uint8 (slabs, blocks, 576), with zeros beyond the layer. A scale of minus zero (0x80) becomes zero.
    """
    packed, scales = raw(weight), raw(weight_scale)
    scales = np.where(scales == 0x80, np.uint8(0), scales)
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    slabs, blocks = -(-rows // (4 * ROWS)) * 4, -(-columns // COLUMNS)
    codes = np.zeros((slabs * ROWS, blocks * COLUMNS), np.uint32)
    codes[:rows, :columns] = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, columns)
    group_scales = np.zeros((slabs * ROWS, blocks * COLUMNS // GROUP), np.uint8)
    group_scales[:rows, : columns // GROUP] = scales.repeat(columns // GROUP // scales.shape[1], axis=1)
    by_place = codes.reshape(slabs, 2, 8, blocks, 4, 2, 4, 2)  # slab, h, g, block, s, half, t, odd
    split = by_place.transpose(0, 3, 2, 6, 4, 5, 1, 7)
    words = np.zeros(split.shape[:5], np.uint32)  # slab, block, g, t, s
    for half, h, odd in np.ndindex(2, 2, 2):
        code, pair = split[..., half, h, odd], 2 * half + h
        bits = (code & 7) << np.uint32(MAGNITUDE[pair]) | (code >> 3) << np.uint32(SIGN[pair])
        words |= bits << np.uint32(16 * odd)
    units = np.zeros((slabs, blocks, UNIT), np.uint8)
    vectors = np.zeros((slabs, blocks, 32, 4), "<u4")
    vectors[:, :, VECTORS] = words
    units[:, :, :512] = vectors.view(np.uint8).reshape(slabs, blocks, 512)
    of_units = group_scales.reshape(slabs, 2, 8, blocks, 4).transpose(0, 3, 2, 4, 1)  # slab, block, g, s, h
    units[:, :, 512:] = of_units.reshape(slabs, blocks, 64)
    return units


def unpack_nvfp4(packed: ArrayLike, rows: int, columns: int, group_size: int = GROUP) -> tuple[Array, Array]:
    """The inverse, minus zeros apart: weight (N, K / 2) and weight_scale (N, K / group_size) of a layer."""
    units = raw(packed)
    slabs, blocks, _ = units.shape
    vectors = np.ascontiguousarray(units[:, :, :512]).view("<u4").reshape(slabs, blocks, 32, 4)
    words = vectors[:, :, VECTORS]
    split = np.zeros((slabs, blocks, 8, 4, 4, 2, 2, 2), np.uint8)
    for half, h, odd in np.ndindex(2, 2, 2):
        pair, bits = 2 * half + h, words >> np.uint32(16 * odd)
        code = bits >> np.uint32(MAGNITUDE[pair]) & 7 | (bits >> np.uint32(SIGN[pair]) & 1) << 3
        split[..., half, h, odd] = code
    codes = split.transpose(0, 6, 2, 1, 4, 5, 3, 7).reshape(slabs * ROWS, blocks * COLUMNS)
    codes = codes[:rows, :columns]
    of_units = units[:, :, 512:].reshape(slabs, blocks, 8, 4, 2).transpose(0, 4, 2, 1, 3)
    scales = of_units.reshape(slabs * ROWS, -1)[:rows, : columns // GROUP : group_size // GROUP]
    return codes[:, ::2] | codes[:, 1::2] << 4, np.ascontiguousarray(scales)
