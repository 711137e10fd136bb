"""MXFP8, INT8 and INT4 weights, which general kernels run, against the float64 reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import _C, Checkpoint, LinearMethod, MoEMethod, UnsupportedQuantization, reference

from .linear_cases import (
    GENERAL,
    assert_close,
    assert_within_rounding,
    poisoned,
    random_case,
    random_x,
    smoothed,
)
from .moe_calls import call, check
from .moe_cases import assert_experts_close, random_routing, random_stacks
from .work import each

COMPUTES = [(algo, "exact") for algo in GENERAL] + [("MXFP8", "fp8")]
ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")


HERE = ISAS.index(_C.cpu_isa())


def fits_bfloat16(algo, compute, dtype):
    """Whether bfloat16 holds both factors of every product."""
    return "AWQ" not in algo and ("A8" in algo or compute == "fp8" or dtype == "bfloat16")


def run(case, x, dtype, compute="exact", bias=None, fused=False):
    method = case.method(dtype=dtype, compute=compute)
    params = method.prepare(case.fused() if fused else case.listed())
    out = poisoned((*x.shape[:-1], method.out_features), dtype)
    method(x, params, bias, out)
    return out


@each("dtype", ["bfloat16", "float16", "float32"])
@each("algo, compute", COMPUTES)
@each("isa", ISAS)
def test_matches_reference_on_every_instruction_set(rng, monkeypatch, isa, algo, compute, dtype):
    monkeypatch.setenv("MOQEXT_KERNEL", f"cpu:{isa}")
    case = random_case(rng, algo, 384, [34, 130, 8])
    if (isa in ISAS[3:] and not fits_bfloat16(algo, compute, dtype)) or ISAS.index(isa) > HERE:
        with pytest.raises(UnsupportedQuantization, match=r"multiplies bfloat16|this CPU"):
            case.method(dtype=dtype, compute=compute)
        return
    for tokens in (1, 37):
        x = random_x(rng, (tokens, 384), dtype)
        y = run(case, x, dtype, compute)
        assert_close(y, case.expected(reference.as_float32(x), compute, x_dtype=dtype), dtype)


@settings(max_examples=40)
@given(
    st.sampled_from(COMPUTES),
    st.integers(1, 9),
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.integers(0, 40),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_shape(kind, groups, rows, tokens, input_scale, seed):
    algo, compute = kind
    rng = np.random.default_rng(seed)
    columns = 128 * groups if "AWQ" in algo else 32 * groups if algo == "MXFP8" else 32 * groups - seed % 32
    rows = [2 * n for n in rows] if "AWQ" in algo else rows
    case = random_case(rng, algo, columns, rows, input_scale=input_scale)
    x = random_x(rng, (tokens, columns), "float32")
    magnitude = case.expected(np.abs(x), compute) if tokens else np.zeros((0, sum(rows)))
    expected = case.expected(x, compute)
    bound = np.abs(magnitude) + np.abs(expected).max(initial=0)
    assert_within_rounding(run(case, x, "float32", compute), expected, bound, "float32")


@pytest.mark.parametrize("algo", GENERAL)
def test_fused_on_disk_is_the_list_of_partitions(rng, algo):
    case = random_case(rng, algo, 256, [48, 16])
    x = random_x(rng, (5, 256), "float32")
    np.testing.assert_array_equal(run(case, x, "float32", fused=True), run(case, x, "float32"))


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_pre_quant_scale_multiplies_x(rng, algo):
    case = smoothed(rng, random_case(rng, algo, 128, [24]))
    x = random_x(rng, (6, 128), "bfloat16")
    y = run(case, x, "bfloat16")
    assert_close(y, case.expected(reference.as_float32(x), x_dtype="bfloat16"), "bfloat16")


def test_rows_of_x_have_int8_scales_of_their_own_without_an_input_scale(rng):
    case = random_case(rng, "W8A8_SQ_PER_CHANNEL", 128, [20], input_scale=False)
    x = random_x(rng, (4, 128), "float32") * np.float32([[1e-30], [1], [1e20], [0]])
    y = run(case, x, "float32")
    for row in range(4):
        np.testing.assert_array_equal(y[row : row + 1], run(case, x[row : row + 1], "float32"))
    expected = case.expected(x)
    assert (np.abs(y - expected) <= 1e-5 * np.abs(expected).max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize("algo", GENERAL)
def test_nan_in_x_stays_in_its_row(rng, algo):
    case = random_case(rng, algo, 128, [16])
    x = random_x(rng, (3, 128), "float32")
    x[1, 5] = np.nan
    y = run(case, x, "float32")
    assert np.isnan(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


def test_mxfp8_folds_as_the_reference_does(rng):
    case = random_case(rng, "MXFP8", 256, [40])
    case.parts[0]["weight"][3] = 0
    prepared = case.method(compute="fp8").prepare(case.listed())
    codes, factor = reference.fold_mxfp8(case.parts[0])
    np.testing.assert_array_equal(np.asarray(prepared["weight"]).view(np.uint8), codes)
    np.testing.assert_array_equal(prepared["output_scale"], factor)


def test_folding_loses_nothing_where_codes_stay_normal(rng):
    case = random_case(rng, "MXFP8", 128, [16])
    part = case.parts[0]
    part["weight"] = np.uint8(0x40) | part["weight"] & 0xF7  # exponents of 8 and more, none all ones
    part["weight_scale"][:] = rng.integers(118, 121, part["weight_scale"].shape)
    codes, factor = reference.fold_mxfp8(part)
    folded = reference.decode(codes, "e4m3").astype(np.float64) * factor[:, None]
    np.testing.assert_array_equal(folded, reference.dequantize(part, "MXFP8"))


@pytest.mark.parametrize(
    "algo, role, place, value, message",
    [
        ("MXFP8", "weight", (3, 5), 0x7F, r"weight: a NaN code at row 3, column 5"),
        ("MXFP8", "weight_scale", (3, 1), 0xFF, r"weight_scale: a NaN block scale at row 3, column 1"),
        ("W8A16", "weight_scale", (2,), np.nan, r"weight_scale"),
        ("W8A16", "weight_scale", (2,), 0.0, r"zero over a code .*row 2, column .* the scale is lost"),
        ("W4A16_AWQ", "weight_scale", (7, 1), 0.0, r"zero over a code .*row 7, column .* the scale is lost"),
        ("W4A16_AWQ", "weight_scale", (7, 1), -1.0, r"weight_scale"),
    ],
)
def test_damaged_tensors_are_refused_by_place(rng, algo, role, place, value, message):
    case = random_case(rng, algo, 256, [16])
    case.parts[0][role][place] = value
    with pytest.raises(ValueError, match=message):
        case.method().prepare(case.listed())


def test_rows_of_zeros_under_a_scale_of_zero_are_zero(rng):
    case = random_case(rng, "W8A16", 64, [4])
    case.parts[0]["weight"][1] = 0
    case.parts[0]["weight_scale"][1] = 0
    assert (run(case, random_x(rng, (3, 64), "float32"), "float32")[:, 1] == 0).all()


@pytest.mark.parametrize(
    "algo, columns, rows, options, message",
    [
        ("W4A16_AWQ", 256, [3], {}, r"out_partitions\[0\]: expected an even size .* got 3"),
        ("W4A16_AWQ", 200, [4], {}, r"in_features: expected a multiple of the group size 128"),
        ("MXFP8", 40, [4], {}, r"in_features: expected a multiple of the group size 32"),
        ("MXFP8", 64, [4], {"compute": "fp4"}, r"MXFP8 runs with compute \"exact\" or \"fp8\""),
        ("W8A16", 64, [4], {"compute": "fp8"}, r"W8A16 runs with compute \"exact\""),
    ],
)
def test_what_cannot_be_is_refused_by_name(algo, columns, rows, options, message):
    with pytest.raises((ValueError, UnsupportedQuantization), match=message):
        LinearMethod(algo, columns, rows, **options)


@each("dtype", ["bfloat16", "float32"])
@each("algo", GENERAL)
def test_experts_match_the_reference(rng, algo, dtype):
    method = MoEMethod(algo, 6, 256, 128, top_k=3, dtype=dtype)
    stacks = random_stacks(rng, algo, 6, 256, 128)
    x = random_x(rng, (23, 256), dtype)
    weights, ids = random_routing(rng, 23, 3, 6)
    check(call(method, stacks, x, weights, ids), method, stacks, x, weights, ids)


def test_pairs_of_rows_cannot_alternate():
    with pytest.raises(ValueError, match="rows of gate and up cannot take turns in pairs of rows"):
        MoEMethod("W4A16_AWQ", 2, 128, 128, top_k=1, interleaved=True)


@pytest.mark.parametrize("name", ["llama_mxfp8", "llama_int4_awq", "llama_w4a8_awq", "llama_int8_sq"])
def test_layers_of_genuine_checkpoints_run(rng, data, name):
    with Checkpoint(data / "checkpoints" / name) as checkpoint:
        for record in checkpoint.layers()[:3]:
            layer = checkpoint.load(record, dtype="float32")
            x = random_x(rng, (5, layer.method.in_features), "float32")
            params = {role: checkpoint.tensor(tensor) for role, tensor in record.tensors.items()}
            expected = reference.linear(x, params, record.quant_algo, out_dtype="float64")
            assert_close(layer(x), expected, "float32")


@each("isa", ISAS)
@each("algo, group_size", [("W4A16_AWQ", 48), ("W4A16_AWQ", 720), ("MXFP8", 32)])
def test_groups_may_end_within_a_tile(rng, monkeypatch, isa, algo, group_size):
    """Columns are decoded by 512, which groups of 48 and of 720 do not divide."""
    if ISAS.index(isa) > HERE or isa in ISAS[3:]:
        return
    monkeypatch.setenv("MOQEXT_KERNEL", f"cpu:{isa}")
    params = reference.quantize_weight(
        rng.standard_normal((34, 1440)).astype(np.float32), algo, group_size=group_size
    )
    method = LinearMethod(algo, 1440, [34], dtype="float32", group_size=group_size)
    x = rng.standard_normal((5, 1440)).astype(np.float32)
    expected = reference.linear(x, params, algo, group_size=group_size, out_dtype="float64")
    assert_close(method(x, method.prepare(params)), expected, "float32")


@each("dtype", ["bfloat16", "float32"])
@each(
    "algo, compute",
    [("W4A8_MXFP4_FP8", "exact"), ("W4A8_MXFP4_FP8", "fp8"), ("W8A8_SQ_PER_CHANNEL", "exact")],
)
@each("kept", [(), ("w13_input_scale",), ("w2_input_scale",)])
def test_experts_quantize_by_token_where_there_is_no_input_scale(rng, kept, algo, compute, dtype):
    """Each projection by itself: its input has a scale of the layer, or one of each row."""
    stacks = random_stacks(rng, algo, 4, 128, 128, input_scales=True)
    lost = {"w13_input_scale", "w2_input_scale"} - set(kept)
    stacks = {name: value for name, value in stacks.items() if name not in lost}
    method = MoEMethod(algo, 4, 128, 128, top_k=2, dtype=dtype, compute=compute)
    params = method.prepare(stacks)
    assert not lost & set(params)
    x = random_x(rng, (9, 128), dtype)
    weights, ids = random_routing(rng, 9, 2, 4)
    y = method(x, params, weights, ids)
    options = {"quant_algo": algo, "compute": compute, "dtype": dtype}
    assert_experts_close(y, reference.as_float32(x), stacks, weights, ids, **options)
    other = x.copy()
    other[4:] = 0  # of whatever size the other tokens are
    np.testing.assert_array_equal(np.asarray(method(other, params, weights, ids))[:4], np.asarray(y)[:4])
