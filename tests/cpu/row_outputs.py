"""Everything the row kernels compute on one set of inputs, as the level of MOQEXT_ISA has it.

    python row_outputs.py outputs SEED FILE.json    digests of codes, values and scales of hostile inputs
    python row_outputs.py every FORMAT              CRC-32 of the codes of each 2^24 float32 patterns

The first line printed is the level in use.
"""

import hashlib
import json
import sys
import zlib
from pathlib import Path

import numpy as np

import moqext
from moqext import _C, ops

FORMATS = ("e4m3", "e5m2", "e2m1", "e8m0", "bf16", "fp16")
SCHEMES = (
    ("fp8_tensor", {"scale": 0.37}),
    ("fp8_tensor", {"scale": 2.0e-38}),
    ("fp8_tensor", {"scale": 3.0e38}),
    ("fp8_tensor", {}),
    ("fp8_token", {}),
    ("fp8_group", {}),
    ("fp8_group", {"group_size": 48}),
    ("fp8_group", {"group_size": 7}),
    ("nvfp4", {"scale": 0.0031}),
    ("nvfp4", {"scale": 1.0e-40}),
    ("nvfp4", {"scale": 3.0e38}),
    ("nvfp4", {}),
)

SCALES = (1e-38, 1e-36, 1e-30, 1e-3, 3e3, 2e4, 1e30, 2e37)
"""Tensor scales of NVFP4 that lead out of the reach of 16-bit floats, and to their ends."""


def digest(array):
    """A digest of the bytes, so that NaN compare by their bits."""
    return hashlib.blake2b(np.ascontiguousarray(array), digest_size=16).hexdigest()


def patterns(rng):
    """float32: every bf16 and fp16 number, the middles between codes with both neighbours, random bits."""
    every = np.arange(1 << 16, dtype=np.uint32)
    bf16 = (every << 16).view(np.float32)
    fp16 = every.astype(np.uint16).view(np.float16).astype(np.float32)
    middles = [bf16, fp16]
    for name, dtype in (("e4m3", np.uint8), ("e2m1", np.uint8), ("fp16", np.uint16), ("bf16", np.uint16)):
        values = ops.decode(np.arange(np.iinfo(dtype).max + 1, dtype=dtype), name)
        values = np.unique(values[np.isfinite(values)].astype(np.float64))
        middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
        middles += [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)] + [middle]
    random = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    return np.concatenate([*middles, random, (rng.standard_normal(1 << 14) * 100).astype(np.float32)])


def inputs(rng, shape):
    """float32 tensors of several tempers; where there are zeros, whole groups of them."""
    normal = rng.standard_normal(shape).astype(np.float32)
    yield "normal", normal
    yield "wide", normal * np.exp2(rng.integers(-140, 120, shape)).astype(np.float32)
    yield "tiny", normal * np.float32(2.0**-133)
    yield "huge", normal * np.float32(2.0**125)
    yield "ties", (rng.integers(-1024, 1024, shape) / 64).astype(np.float32)
    sparse = normal * (rng.random(shape) < 0.02)
    yield "sparse", sparse * (rng.random((*shape[:-1], 1)) < 0.7)
    yield "minus zero", np.copysign(np.zeros(shape, np.float32), normal)
    for name, value in (("nan", np.nan), ("inf", np.inf)):
        special = normal.copy()
        special[rng.random(shape) < 0.003] = value
        yield name, np.copysign(special, rng.standard_normal(shape).astype(np.float32))


def as_dtypes(x):
    """The numbers of x in the three input types."""
    yield "f32", x
    yield "bf16", (x.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        yield "f16", x.astype(np.float16)


def near_middles(rng, dtype, scale):
    """Groups of NVFP4 of 16-bit values: the largest makes a block scale, the others lie next to the least
    value of a code under it; ties where the scale is a power of two."""
    block_scales = ops.decode(rng.choice([56, 48, *range(1, 127)], 1024).astype(np.uint8), "e4m3")  # 1, 0.5
    steps = (block_scales * np.float32(scale))[:, None]
    middles = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (1024, 1)).astype(np.float32)
    format = {"bf16": "bf16", "f16": "fp16"}[dtype]
    largest = ops.encode(np.float32(6) * steps, format).astype(np.int32)
    near = ops.encode(middles * steps, format).astype(np.int32)
    words = np.clip(near + np.arange(-8, 8), 0, largest)
    words[:, 0] = largest[:, 0]
    words = (words | rng.integers(0, 2, words.shape) << 15).astype(np.uint16).reshape(-1)
    return words if dtype == "bf16" else words.view(np.float16)


def weights(rng):
    """(algorithm, tensors) of each kind of codes and scales, zero scales and NaN codes among them."""
    n, k = 38, 1040
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    floats = np.exp2(rng.uniform(-40, 40, (n, k // 16))).astype(np.float32)
    floats[rng.random(floats.shape) < 0.1] = 0
    small = rng.integers(0, 128, (n, k // 16), dtype=np.uint8)
    second = np.float32(2.0**-9 / 3).reshape(())
    yield "FP8", {"weight": codes, "weight_scale": second}
    yield "FP8_PER_CHANNEL_PER_TOKEN", {"weight": codes, "weight_scale": floats[:, 0].copy()}
    yield "FP8_PB_WO", {"weight": codes, "weight_scale": floats[:1, :9].copy()}
    yield "W8A16", {"weight": codes, "weight_scale": floats[:, 0].copy()}
    yield "NVFP4", {"weight": codes[:, : k // 2], "weight_scale": small, "weight_scale_2": second}
    halves = codes.reshape(2, n // 2, k)
    stacked = {"weight": halves[:, :16], "weight_scale": halves[:, :2] & 127, "weight_scale_2": second}
    yield "NVFP4", stacked
    yield "W4A16_AWQ", {"weight": codes[:, :1024], "weight_scale": floats[:, :8].repeat(2, 0)}


def outputs(seed):
    """Digests of arrays by what the arrays are."""
    rng = np.random.default_rng(seed)
    found = {}
    values = patterns(rng)
    for format in FORMATS:
        found[f"encode {format}"] = digest(ops.encode(values[: len(values) // 2 * 2], format))
        dtype = np.uint16 if format in ("bf16", "fp16") else np.uint8
        codes = np.arange(np.iinfo(dtype).max + 1, dtype=dtype)
        found[f"decode {format}"] = digest(ops.decode(codes, format))
        for length in rng.integers(0, 300, 8):
            start = int(rng.integers(0, 50))
            some = np.ascontiguousarray(values[start : start + 2 * length])
            found[f"encode {format} {start} {length}"] = digest(ops.encode(some, format))
            some = rng.integers(0, 1 << 16, length).astype(dtype)
            found[f"decode {format} {start} {length}"] = digest(ops.decode(some, format))
    # Steps under which a middle is next to a number of 8 bits, on either side.
    edges = np.divide.outer(np.arange(192, 256), np.array([0.75, 1.25, 1.75], np.float32)).astype(np.float32)
    edges = edges.reshape(-1) * np.float32(2.0**-16)
    scales = [2.0**-10, 2.0**-7 * 1.5, *np.exp2(rng.uniform(-20, 5, 20)), *edges, *SCALES]
    scales += [*np.nextafter(edges, np.float32(0)), *np.nextafter(edges, np.float32(1))]
    for dtype in ("bf16", "f16"):
        for scale in map(float, map(np.float32, scales)):
            for i, result in enumerate(ops.quantize(near_middles(rng, dtype, scale), "nvfp4", scale=scale)):
                found[f"middles {dtype} {scale} [{i}]"] = digest(result)
    for number, (algo, tensors) in enumerate(weights(rng)):
        for dtype in ("float32", "bfloat16", "float16"):
            values = ops.dequantize(**tensors, quant_algo=algo, dtype=dtype)
            found[f"dequantize {number} {algo} {dtype}"] = digest(values)
    for shape in ((3, 1024), (5, 48), (2, 3, 4112), (70, 16), (1, 1), (2, 203), (9, 2064)):
        for kind, x in inputs(rng, shape):
            for dtype, typed in as_dtypes(x):
                for view, tensor in (("", typed), ("reversed", typed[..., ::-1]), ("transposed", typed.T)):
                    for scheme, options in SCHEMES:
                        if scheme == "nvfp4" and tensor.shape[-1] % 16:
                            continue
                        name = f"{scheme} {options} {shape} {kind} {dtype} {view}"
                        for i, result in enumerate(ops.quantize(tensor, scheme, **options)):
                            found[f"{name} [{i}]"] = digest(result)
    return found


def every(format):
    """CRC-32 of the codes of float32 patterns, 2^24 at a time."""
    for high in range(256):
        bits = np.arange(high << 24, (high + 1) << 24, dtype=np.uint32)
        yield zlib.crc32(ops.encode(bits.view(np.float32), format))


if __name__ == "__main__":
    print(_C.cpu_isa())
    if sys.argv[1] == "outputs":
        moqext.set_num_threads(1)
        Path(sys.argv[3]).write_text(json.dumps(outputs(int(sys.argv[2]))))
    else:
        print(*every(sys.argv[2]), sep="\n")
