"""Stacks of experts as engines keep them, each operation against its definition in NumPy."""

import ml_dtypes
import numpy as np
import pytest

from moqext import ops, reference

from ..expert_cases import apart
from ..moe_cases import random_stacks
from ..quantize_cases import carrier, swizzled
from ..work import each

NOT_NAN = np.uint8([code for code in range(256) if code & 0x7F != 0x7F])


def moved_to_max(weight, scales, is_gated):
    """vLLM's loop over experts and halves: float16 values, then codes under the larger scale of the two."""
    if not is_gated:
        return weight.copy(), scales.reshape(-1).copy()
    codes, largest = np.zeros_like(weight), scales.max(axis=1)
    half = weight.shape[1] // 2
    for expert, (pair, most) in enumerate(zip(scales, largest, strict=True)):
        for part, scale in enumerate(pair):
            rows = slice(part * half, (part + 1) * half)
            values = weight[expert, rows].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            with np.errstate(over="ignore"):
                half_precision = (values * scale).astype(np.float16).astype(np.float32)
            quotient = np.clip(half_precision * (np.float32(1) / most), -448, 448)
            codes[expert, rows] = quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, largest


@each("exponent", [(-12, -6), (-26, -18), (3, 12)])
@each("shape", [(1, 2, 1), (5, 32, 24), (3, 14, 65)])
def test_weights_of_experts_move_to_the_larger_scale(shape, exponent, rng):
    """Usual scales, scales that make float16 subnormal, and scales that make it infinite."""
    experts, rows, _ = shape
    weight = rng.choice(NOT_NAN, shape)
    scales = np.exp2(rng.uniform(*exponent, (experts, 2))).astype(np.float32)
    scales[0, 1] = scales[0, 0]
    expected, largest = moved_to_max(weight, scales, is_gated=True)
    for given, of in ((weight, scales), (apart(rng, weight), apart(rng, scales)), (weight, scales.copy("F"))):
        codes, most = ops.requantize_to_max(given, of, [rows // 2, rows // 2])
        np.testing.assert_array_equal(carrier(codes), expected)
        np.testing.assert_array_equal(most, largest)
    out = np.full(shape, 0xA5, np.uint8)
    codes, _ = ops.requantize_to_max(weight[:, ::-1, ::-1], scales[:, ::-1], [rows // 2] * 2, out=out)
    assert codes is out
    np.testing.assert_array_equal(out[:, ::-1, ::-1], expected)


def test_experts_of_equal_scales_pass_through_float16_as_well(rng):
    """A matrix of equal scales stays as it is; vLLM's loop over experts has no such exception."""
    weight = np.arange(0, 0x7F, dtype=np.uint8)[None].repeat(2, axis=0)
    for scale, stays in ((0.01, True), (2.0**-18, False), (500.0, False)):
        scales = np.full(2, scale, np.float32)
        alone, _ = ops.requantize_to_max(weight, scales, [1, 1])
        np.testing.assert_array_equal(carrier(alone), weight)
        codes, _ = ops.requantize_to_max(weight[None], scales[None], [1, 1])
        expected, _ = moved_to_max(weight[None], scales[None], is_gated=True)
        np.testing.assert_array_equal(carrier(codes), expected)
        assert np.array_equal(carrier(codes)[0], weight) == stays


@pytest.mark.parametrize("axes", [1, 2])
def test_experts_that_are_not_gated_stay(axes, rng):
    weight = rng.integers(0, 256, (4, 6, 10), np.uint8)
    scales = np.exp2(rng.uniform(-30, 9, 4)).astype(np.float32)
    codes, largest = ops.requantize_to_max(weight, scales if axes == 1 else scales[:, None], [6])
    expected, same = moved_to_max(weight, scales, is_gated=False)
    np.testing.assert_array_equal(carrier(codes), expected)
    np.testing.assert_array_equal(largest, same)


def test_experts_with_parts_of_zeros(rng):
    """A scale of 0 with NaN codes is how exporters write an all-zero linear."""
    weight = np.full((3, 4, 8), 0x38, np.uint8)
    weight[0, :2] = weight[1] = 0xFF
    scales = np.float32([[0, 0.5], [0, 0], [0.25, 0.5]])
    codes, largest = ops.requantize_to_max(weight, scales, [2, 2])
    assert largest.tolist() == [0.5, 0, 0.5]
    assert np.unique(carrier(codes)[0, :2]).tolist() == [0]
    assert np.unique(carrier(codes)[0, 2:]).tolist() == [0x38]
    assert not carrier(codes)[1].any()
    assert reference.decode(carrier(codes)[2, 0], "e4m3").tolist() == [0.5] * 8


def test_stacks_without_experts_or_columns():
    codes, largest = ops.requantize_to_max(
        np.zeros((0, 4, 8), np.uint8), np.zeros((0, 2), np.float32), [2, 2]
    )
    assert codes.shape == (0, 4, 8)
    assert largest.shape == (0,)
    codes, largest = ops.requantize_to_max(np.zeros((2, 4, 0), np.uint8), np.ones((2, 2), np.float32), [2, 2])
    assert codes.shape == (2, 4, 0)
    assert largest.tolist() == [1, 1]
    assert ops.swap_gate_up(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert ops.swap_gate_up(np.zeros((3, 0, 4), np.float32)).shape == (3, 0, 4)


@each("dtype", ["uint8", "uint16", "float16", "float32", "float64"])
@each("shape", [(3, 2), (4, 6, 5), (2, 8, 64), (2, 4, 3, 5)])
def test_gate_and_up_change_places(shape, dtype, rng):
    size = np.dtype(dtype).itemsize
    stack = rng.integers(0, 256, (*shape, size), np.uint8).view(dtype)[..., 0]
    half = shape[1] // 2

    def expected(a):
        return np.concatenate([a[:, half:], a[:, :half]], axis=1)

    def same(a, b):
        np.testing.assert_array_equal(carrier(a), carrier(b))

    wide = np.repeat(stack, 2, axis=-1)
    for given in (stack, apart(rng, stack), stack[:, ::-1], wide[..., ::2], stack.copy("F")):
        out = np.full(shape, 0, dtype)
        carrier(out)[...] = 0xA5
        assert ops.swap_gate_up(given, out=out) is out
        same(out, expected(given))
        same(ops.swap_gate_up(given), expected(given))
    same(ops.swap_gate_up(out), given)


def test_every_tensor_of_a_layer_changes_places(rng):
    stacks = random_stacks(rng, "NVFP4", 4, 32, 48, bias="bfloat16")
    moved = {
        name: ops.swap_gate_up(value) if name.startswith("w13") else value for name, value in stacks.items()
    }
    for name in ("w13_weight", "w13_weight_scale", "w13_weight_scale_2", "w13_input_scale", "w13_bias"):
        half = stacks[name].shape[1] // 2
        np.testing.assert_array_equal(moved[name][:, :half], stacks[name][:, half:])
        np.testing.assert_array_equal(moved[name][:, half:], stacks[name][:, :half])


def test_dtypes_of_torch_are_kept(rng):
    torch = pytest.importorskip("torch")
    codes = torch.from_numpy(rng.choice(NOT_NAN, (3, 4, 8))).view(torch.float8_e4m3fn)
    moved = ops.swap_gate_up(codes)
    assert moved.dtype == torch.float8_e4m3fn
    assert torch.equal(moved.view(torch.uint8), codes.view(torch.uint8).roll(2, dims=1))
    scales = torch.from_numpy(np.exp2(rng.uniform(-9, -4, (3, 2))).astype(np.float32))
    codes, largest = ops.requantize_to_max(codes, scales, [2, 2])
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(largest, scales.amax(dim=1))
    assert torch.equal(ops.expert_input_scale(scales), scales.amax(dim=1))
    shared = ops.shared_input_scale(scales, (5,))
    assert torch.equal(shared, scales.max().repeat(5))
    assert shared.is_contiguous()


def test_swizzled_scales_of_a_stack_are_those_of_each_expert(rng):
    stacks = random_stacks(rng, "NVFP4", 3, 80, 96)
    for name in ("w13_weight_scale", "w2_weight_scale"):
        result = ops.swizzle_block_scales(stacks[name])
        np.testing.assert_array_equal(result, swizzled(stacks[name]))
        for expert, scale in enumerate(stacks[name]):
            np.testing.assert_array_equal(result[expert], ops.swizzle_block_scales(scale))
        np.testing.assert_array_equal(ops.unswizzle_block_scales(result, stacks[name].shape), stacks[name])


def test_input_scales_of_each_expert_and_of_all(rng):
    scales = np.exp2(rng.uniform(-9, 9, (7, 2))).astype(np.float32)
    for given in (scales, apart(rng, scales), scales.copy("F"), scales[:, 0], scales[:, :1], scales[::2]):
        each = given if given.ndim == 1 else given.max(axis=1)
        np.testing.assert_array_equal(ops.expert_input_scale(given), each)
        for shape in ((), (1,), (7,), (3, 2), [2, 2, 2], (0,)):
            shared = ops.shared_input_scale(given, shape)
            assert shared.flags.c_contiguous
            np.testing.assert_array_equal(shared, np.full(shape, given.max()))
        assert ops.shared_input_scale(given).shape == ()
    out = np.full(7, np.nan, np.float32)
    assert ops.expert_input_scale(scales, out=out) is out
    np.testing.assert_array_equal(out, scales.max(axis=1))
    assert ops.shared_input_scale(scales, (7,), out=out) is out
    assert (out == scales.max()).all()


def test_one_scale_of_all_ranks(rng):
    """Each rank knows its own experts; the maxima exchanged, all prepare with the scale of the layer."""
    scales = np.exp2(rng.uniform(-9, 9, (12, 2))).astype(np.float32)
    ranks = np.split(scales, 3)
    exchanged = np.stack([ops.shared_input_scale(rank) for rank in ranks])
    for rank in ranks:
        mine = ops.shared_input_scale(exchanged, rank.shape)
        np.testing.assert_array_equal(mine, np.full(rank.shape, scales.max()))
        assert mine.strides == (8, 4)


def test_alphas(rng):
    scale, second = (np.exp2(rng.uniform(-20, 9, s)).astype(np.float32) for s in ((9,), (9, 2)))
    for given, of in ((scale, second), (apart(rng, scale), second.copy("F")), (scale, second[:, 0])):
        alpha, reciprocal = ops.expert_alphas(given, of)
        np.testing.assert_array_equal(alpha, scale * second[:, 0])
        np.testing.assert_array_equal(reciprocal, np.float32(1) / scale)
    out, scale_out = np.full((2, 9), np.nan, np.float32)
    results = ops.expert_alphas(scale, second, out=out, scale_out=scale_out)
    assert results[0] is out
    assert results[1] is scale_out
    np.testing.assert_array_equal(out, alpha)
    np.testing.assert_array_equal(scale_out, reciprocal)
    tiny = np.float32([2.0**-127, 2.0**-100])
    assert ops.expert_alphas(tiny, tiny)[0].tolist() == [0, 0]
    assert ops.expert_alphas(tiny, np.ones(2, np.float32))[0].tolist() == tiny.tolist()
    assert ops.expert_alphas(tiny, tiny)[1].tolist() == [2.0**127, 2.0**100]


W = np.zeros((3, 4, 8), np.uint8)
S = np.ones((3, 2), np.float32)
V = S[:, 0]


def with_value(value):
    scales = np.ones((3, 2), np.float32)
    scales[2, 1] = value
    return scales


REFUSED = {
    "requantize rank": (
        ValueError,
        r"weight: expected 2 or 3 dimensions, got shape \[1, 3, 4, 8\]",
        lambda: ops.requantize_to_max(W[None], S, [2, 2]),
    ),
    "requantize partitions": (
        ValueError,
        "partitions: expected a sum of 4 rows, got 3",
        lambda: ops.requantize_to_max(W, S, [2, 1]),
    ),
    "requantize scales of the experts": (
        ValueError,
        r"weight_scale: expected shape \[3, 2\], got \[3\]",
        lambda: ops.requantize_to_max(W, V, [2, 2]),
    ),
    "requantize scales of others": (
        ValueError,
        r"weight_scale: expected shape \[3, 2\], got \[2, 2\]",
        lambda: ops.requantize_to_max(W, S[:2], [2, 2]),
    ),
    "requantize one element": (
        ValueError,
        r"weight_scale: expected shape \[3, 2\], got \[1\]",
        lambda: ops.requantize_to_max(W, [1.0], [2, 2]),
    ),
    "requantize NaN": (
        ValueError,
        "experts.2: weight_scale: expected finite numbers of at least 0, got nan",
        lambda: ops.requantize_to_max(W, with_value(np.nan), [2, 2]),
    ),
    "requantize tiny": (
        ValueError,
        "experts.1: weight_scale: expected the largest above",
        lambda: ops.requantize_to_max(W, S * np.float32([[1], [1e-40], [1]]), [2, 2]),
    ),
    "requantize out": (
        ValueError,
        r"out: expected shape \[3, 4, 8\], got \[12, 8\]",
        lambda: ops.requantize_to_max(W, S, [2, 2], out=np.zeros((12, 8), np.uint8)),
    ),
    "requantize in place": (BufferError, "out", lambda: ops.requantize_to_max(W, S, [2, 2], out=W)),
    "swap odd": (
        ValueError,
        r"stack: expected 2 to 7 dimensions, the second one even, got shape \[3, 3, 8\]",
        lambda: ops.swap_gate_up(W[:, :3]),
    ),
    "swap rank": (ValueError, r"got shape \[3\]", lambda: ops.swap_gate_up(V)),
    "swap high rank": (
        ValueError,
        r"got shape \[2, 2, 1, 1, 1, 1, 1, 1\]",
        lambda: ops.swap_gate_up(np.zeros((2, 2, 1, 1, 1, 1, 1, 1), np.uint8)),
    ),
    "swap out": (
        ValueError,
        r"out: expected shape \[3, 4, 8\], got \[3, 4, 4\]",
        lambda: ops.swap_gate_up(W, out=np.zeros((3, 4, 4), np.uint8)),
    ),
    "swap dtype": (TypeError, "out: expected", lambda: ops.swap_gate_up(S, out=np.zeros((3, 2)))),
    "swap bool": (TypeError, "stack: expected codes", lambda: ops.swap_gate_up(np.zeros((3, 2), bool))),
    "swap in place": (BufferError, "out", lambda: ops.swap_gate_up(W, out=W)),
    "scale NaN": (
        ValueError,
        "input_scale: expected finite numbers of at least 0, got nan of expert 2",
        lambda: ops.expert_input_scale(with_value(np.nan)),
    ),
    "scale infinite": (
        ValueError,
        "input_scale: .* got inf of expert 2",
        lambda: ops.shared_input_scale(with_value(np.inf)),
    ),
    "scale negative": (ValueError, "got -1 of expert 2", lambda: ops.expert_input_scale(with_value(-1))),
    "scale rank": (
        ValueError,
        r"input_scale: expected one value or more of each expert, got shape \[3, 2, 1\]",
        lambda: ops.expert_input_scale(S[..., None]),
    ),
    "scale none": (ValueError, r"got shape \[0, 2\]", lambda: ops.shared_input_scale(S[:0])),
    "scale dtype": (
        TypeError,
        "input_scale: expected float32",
        lambda: ops.shared_input_scale(S.astype(np.float64)),
    ),
    "shared shape": (
        TypeError,
        "shape: expected a sequence of at most 3 ints",
        lambda: ops.shared_input_scale(S, (1, 1, 1, 1)),
    ),
    "shared out": (
        ValueError,
        r"out: expected shape \[3\], got \[2\]",
        lambda: ops.shared_input_scale(S, (3,), out=np.zeros(2, np.float32)),
    ),
    "shared in place": (BufferError, "out", lambda: ops.shared_input_scale(V, (3,), out=S[:, 0].base)),
    "alphas of parts": (
        ValueError,
        r"input_scale: expected one value an expert, got \[3, 2\]",
        lambda: ops.expert_alphas(S, S),
    ),
    "alphas of others": (
        ValueError,
        r"weight_scale_2: expected 3 experts, got shape \[2, 2\]",
        lambda: ops.expert_alphas(V, S[:2]),
    ),
    "alphas tiny": (
        ValueError,
        "input_scale: its reciprocal must be a float32, got 0 of expert 0",
        lambda: ops.expert_alphas(V * np.float32(0), S),
    ),
    "alphas NaN": (
        ValueError,
        "weight_scale_2: .* got nan of expert 2",
        lambda: ops.expert_alphas(V, with_value(np.nan)),
    ),
    "alphas both": (
        BufferError,
        "scale_out",
        lambda: (lambda out: ops.expert_alphas(V, S, out=out, scale_out=out))(np.zeros(3, np.float32)),
    ),
}


@each("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_written_before_all_scales_are_right():
    out = np.full(W.shape, 0xA5, np.uint8)
    with pytest.raises(ValueError, match=r"experts\.2"):
        ops.requantize_to_max(W, with_value(-1), [2, 2], out=out)
    assert (out == 0xA5).all()
