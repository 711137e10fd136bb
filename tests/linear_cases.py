"""Random quantized linears as a checkpoint stores them, and the check of an output against the reference."""

from dataclasses import dataclass, replace

import numpy as np

from moqext import LinearMethod, reference

from .quantize_cases import swizzled

GENERAL = ("MXFP8", "W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL")
ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4")
COMPUTES = [(algo, "exact") for algo in ALGOS] + [
    ("NVFP4", "fp8"),
    ("NVFP4", "fp4"),
    ("W4A16_NVFP4", "fp8"),
]
# design: relative Frobenius error, and no element further from its value than this part of the row's largest.
LIMITS = {"bfloat16": (2.5e-3, 1e-2), "float16": (2.5e-3, 1e-2), "float32": (1e-5, 1e-5)}


@dataclass
class Case:
    """One layer of several partitions, each with its own tensors."""

    algo: str
    in_features: int
    out_partitions: list[int]
    parts: list[dict[str, np.ndarray]]
    group_size: int | None = None
    rank: int | None = None

    def method(self, **options: str) -> LinearMethod:
        about = {"group_size": self.group_size, "rank": self.rank, **options}
        return LinearMethod(self.algo, self.in_features, self.out_partitions, **about)

    def listed(self) -> dict[str, list[np.ndarray]]:
        """The tensors as lists, one of each role a partition."""
        return {role: [part[role] for part in self.parts] for role in self.parts[0]}

    def fused(self) -> dict[str, np.ndarray]:
        """The tensors fused as a framework's parameter is: rows stacked, scalars as a vector."""
        fused = {
            role: np.concatenate([np.atleast_1d(value) for value in values])
            for role, values in self.listed().items()
        }
        return fused | {role: self.parts[0][role] for role in fused if role == "pre_quant_scale"}

    def magnitude(self, x, compute="exact"):
        """The sums of magnitudes |X| |W| behind each output: what rounding errors are proportional to."""
        mask = 0x77 if "FP4" in self.algo else 0x7F
        parts = [part | {"weight": part["weight"] & np.uint8(mask)} for part in self.parts]
        return replace(self, parts=parts).expected(np.abs(x), compute)

    def expected(self, x, compute="exact", bias=None, out_dtype="float64", x_dtype=None):
        """The reference, partition by partition, so that it knows nothing of fusing."""
        options = {"compute": compute, "group_size": self.group_size, "x_dtype": x_dtype}
        outputs = [
            reference.linear(x, part, self.algo, **options, out_dtype="float64") for part in self.parts
        ]
        y = np.concatenate(outputs, axis=-1)
        return reference.round_to(y if bias is None else y + bias.astype(np.float64), out_dtype)


def random_scale(rng, low=-12, high=-4):
    return np.float32(np.exp2(rng.uniform(low, high)))


def e4m3_codes(rng, *shape):
    """Every code but the two NaNs, zeros and subnormals included."""
    codes = rng.integers(0, 0x7F, shape, dtype=np.uint8)
    return codes | rng.integers(0, 2, shape, dtype=np.uint8) << 7


def block_scales(rng, *shape):
    """Every one that a checkpoint may hold; more zeros than by chance, also negative ones, over any codes."""
    codes = rng.integers(0, 0x7F, shape, dtype=np.uint8)
    return np.where(rng.random(shape) < 0.06, rng.choice(np.uint8([0, 0x80]), shape), codes)


def random_general_part(rng, algo, rows, columns, group_size=None):
    """Codes that only general kernels read, with their scales."""
    floats = lambda *shape: np.exp2(rng.uniform(-12, -4, shape)).astype(np.float32)  # noqa: E731
    if algo == "MXFP8":
        powers = rng.integers(100, 120, (rows, columns // 32), dtype=np.uint8)
        return {"weight": e4m3_codes(rng, rows, columns), "weight_scale": powers}
    if "AWQ" in algo:
        codes = rng.integers(0, 256, (rows // 2, columns), dtype=np.uint8)
        part = {"weight": codes, "weight_scale": floats(rows, columns // (group_size or 128))}
        return part | ({"weight_scale_2": floats()} if algo == "W4A8_AWQ" else {})
    return {"weight": rng.integers(-128, 128, (rows, columns), dtype=np.int8), "weight_scale": floats(rows)}


def exponents(rng, rows, groups, span=None):
    """E8M0 scales of rows, those of a row no further apart than `span`, by chance up to the most."""
    top = rng.integers(127 - 12, 127 - 4, (rows, 1))
    width = rng.choice([0, 3, 17], (rows, 1)) if span is None else np.full((rows, 1), span)
    return (top - rng.integers(0, width + 1, (rows, groups))).astype(np.uint8)


def mx_part(rng, rows, columns, span=None):
    """Codes and scales of MXFP4, some groups of zeros with a scale of 0, as exporters write them."""
    part = {
        "weight": rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
        "weight_scale": exponents(rng, rows, columns // 32, span),
    }
    for row, group in np.argwhere(rng.random(part["weight_scale"].shape) < 0.06):
        part["weight"][row, group * 16 : group * 16 + 16] = rng.choice(np.uint8([0x88, 0x00, 0x80]), 16)
        part["weight_scale"][row, group] = 0
    return part


def random_part(rng, algo, rows, columns, group_size=None, input_scale=True):
    scalar = lambda: np.array(random_scale(rng))  # noqa: E731
    if "NVFP4" in algo:
        group = group_size or (32 if algo == "W4A8_NVFP4_FP8" else 16)
        part = {
            "weight": rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
            "weight_scale": block_scales(rng, rows, columns // group),
            "weight_scale_2": scalar(),
        }
    elif "MXFP4" in algo:
        part = mx_part(rng, rows, columns)
    elif algo == "FP8_PB_WO":
        blocks = (-(-rows // 128), -(-columns // 128))
        part = {
            "weight": e4m3_codes(rng, rows, columns),
            "weight_scale": np.exp2(rng.uniform(-12, -4, blocks)).astype(np.float32),
        }
    elif algo in GENERAL:
        part = random_general_part(rng, algo, rows, columns, group_size)
    else:
        per_row = algo == "FP8_PER_CHANNEL_PER_TOKEN"
        scale = np.exp2(rng.uniform(-12, -4, rows)).astype(np.float32) if per_row else scalar()
        part = {"weight": e4m3_codes(rng, rows, columns), "weight_scale": scale}
    static = (
        "FP8",
        "NVFP4",
        "NVFP4_AWQ",
        "NVFP4_SVD",
        "W4A8_NVFP4_FP8",
        "W4A8_MXFP4_FP8",
        "W4A8_AWQ",
        "W8A8_SQ_PER_CHANNEL",
    )
    if algo in static and input_scale:
        part["input_scale"] = scalar()
    return part


def random_case(rng, algo, columns, rows, group_size=None, input_scale=True):
    parts = [random_part(rng, algo, n, columns, group_size, input_scale) for n in rows]
    return Case(algo, columns, list(rows), parts, group_size)


def smoothed(rng, case):
    """The case with one pre_quant_scale of all partitions, in bfloat16 as uint16 bits, as files have it."""
    values = np.exp2(rng.uniform(-3, 3, case.in_features)).astype(np.float32)
    scale = reference.encode(values, "bfloat16")
    return replace(case, parts=[part | {"pre_quant_scale": scale} for part in case.parts])


def with_pairs(rng, case, rank):
    """The case with a low-rank pair of each partition, in bfloat16 as uint16 bits, as files have them."""

    def values(*shape):
        return reference.encode((rng.standard_normal(shape) * 0.3).astype(np.float32), "bfloat16")

    pairs = [
        {"lora_a": values(rank, case.in_features), "lora_b": values(n, rank)} for n in case.out_partitions
    ]
    parts = [part | pair for part, pair in zip(case.parts, pairs, strict=True)]
    return replace(case, parts=parts, rank=rank)


def random_x(rng, shape, dtype):
    """Activations as the boundary takes them: bfloat16 as uint16 bits, else a NumPy float array."""
    values = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.uniform(-4, 4, shape[-1:]))
    if dtype == "bfloat16":
        return reference.encode(values.astype(np.float32), "bfloat16")
    return values.astype(dtype)


def poisoned(shape, dtype):
    """An output that shows every element that was not written."""
    bits = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}[dtype]
    array = np.full(shape, np.iinfo(bits).max, bits)  # all ones: a NaN in every format
    return array if dtype == "bfloat16" else array.view(dtype)


def assert_close(y, expected, dtype):
    """The contract of a linear's output against the float64 reference rounded once to `dtype`."""
    y = reference.as_float32(y).astype(np.float64)
    expected = reference.round_to(expected, dtype).astype(np.float64)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    limit, limit_max = LIMITS[dtype]
    difference = np.abs(y - expected)
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(difference) <= limit * norm, np.linalg.norm(difference) / norm
    tops = np.abs(expected).max(axis=-1, keepdims=True, initial=0)
    assert (difference <= limit_max * tops).all(), (difference / tops).max()


HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


FLOAT32_SUMS = 1e-5
FP8_CORE_SUMS = 2.0**-11
FP8_CORE_WORST = 2.0**-7
"""Bound on the error of sums, as a part of the magnitudes summed.

The FP8 tensor cores of Hopper drop of each of 32 products, and of the sum before, what is below 2^-13 of the
largest: half of that on average, 2^-11 of all magnitudes where the largest is eight times the mean, and 2^-7
at the worst, where one outweighs all others. The float32 sums that they are added to lose nothing
of that size.
"""


def rounding_bound(expected, magnitude, dtype, sums):
    """One rounding, and sums of `magnitude`."""
    tiny = 2.0**-25 if dtype == "float16" else 0  # half the spacing of fp16's subnormals
    return HALF_ULP[dtype] * (1 + 1e-4) * np.abs(expected) + sums * magnitude + tiny


def assert_within_rounding(y, expected, magnitude, dtype, sums=FLOAT32_SUMS):
    """Element by element, for outputs too few for a norm."""
    y = reference.as_float32(y).astype(np.float64)
    assert y.shape == expected.shape
    bound = rounding_bound(expected, magnitude, dtype, sums)
    assert (np.abs(y - expected) <= bound).all(), (np.abs(y - expected) / bound).max()


def assert_right(y, expected, magnitude, dtype):
    """Element by element, and the contract where rows have a largest output to measure by: of a few, all may
    be sums that cancel."""
    assert_within_rounding(y, expected, magnitude + 1e-30, dtype)
    if y.shape[-1] > 16:
        assert_close(y, expected, dtype)


def assert_within_core_sums(y, expected, magnitude, dtype):
    """Outputs of FP8 tensor cores are within the worst sums, all but one in a thousand within the usual."""
    assert_within_rounding(y, expected, magnitude, dtype, FP8_CORE_WORST)
    difference = np.abs(reference.as_float32(y).astype(np.float64) - expected)
    beyond = difference > rounding_bound(expected, magnitude, dtype, FP8_CORE_SUMS)
    assert beyond.sum() <= max(1, y.size // 1000), (int(beyond.sum()), y.size)


def assert_close_but_for_core_sums(y, expected, magnitude, dtype):
    """The contract, but for one output in a thousand where sums cancel: what the cores drop may be more than
    a hundredth of a row's largest there. A few outputs have no norm: one rounding of the largest would be
    more than its limit."""
    assert_within_core_sums(y, expected, magnitude, dtype)
    y, rounded = reference.as_float32(y), reference.round_to(expected, dtype)
    tops = np.abs(rounded).max(axis=-1, keepdims=True, initial=0)
    beyond = np.abs(y.astype(np.float64) - rounded) > LIMITS[dtype][1] * tops
    assert beyond.sum() <= y.size // 1000, int(beyond.sum())
    if y.size > 2000:
        assert_close(np.where(beyond, rounded, y).astype(np.float32), expected, dtype)


def with_a_zero_part(case, algo):
    """The first partition means zero by its scale, and its codes are NaN, as an exporter writes it; with
    blocks of 128x128 its first 128 columns do."""
    e2m1, part = "NVFP4" in algo, case.parts[0]
    if algo == "FP8_PB_WO":
        part["weight_scale"][:, 0] = 0
        part["weight"][:, :128] = 0xFF
        return case
    scale = "weight_scale_2" if e2m1 else "weight_scale"
    part[scale] = part[scale] * np.float32(0)
    part["weight_scale" if e2m1 else "weight"][:] = 0xFF
    return case


def with_a_lost_scale(rng, case):
    """A scale of the second partition is zero, over codes of which one is neither zero nor NaN: (case, what
    the message names, the row in the layer and the column of that code)."""
    e2m1, part = "NVFP4" in case.algo, case.parts[1]
    rows, columns = case.out_partitions[1], case.in_features
    row, column = int(rng.integers(rows)), int(rng.integers(columns))
    part["weight"][...] = 0
    if e2m1:
        part["weight"][row, column // 2] = 0x30 if column % 2 else 0x03
        part["weight_scale"][...] = 0x38
        part["weight_scale_2"] = np.zeros((), np.float32)
    else:
        part["weight"][row, column] = 0x38
        part["weight_scale"] = np.zeros_like(part["weight_scale"])
    return case, "weight_scale_2" if e2m1 else "weight_scale", case.out_partitions[0] + row, column


def prepared_for_cuda(case, compute="exact"):
    """Makes what `prepare` returns on a CUDA device, from the CPU's copy and the reference."""
    if "FP4" not in case.algo:
        return case.method(compute=compute).prepare(case.listed())
    if compute == "fp4":
        rows = case.method(compute=compute).prepare(case.listed())
        parts = np.split(rows["weight_scale"], np.cumsum(case.out_partitions)[:-1])
        return rows | {"weight_scale": np.concatenate([swizzled(part) for part in parts])}
    rows = case.method().prepare(case.listed())
    prepared = {name: rows[name] for name in rows if name not in ("weight", "weight_scale")}
    prepared["weight"] = reference.pack_nvfp4(rows["weight"], rows["weight_scale"])
    if compute == "fp8":
        prepared["fold_scale"] = 1 / reference.fold_nvfp4(rows)[1]
    return prepared
