"""MXFP4 and W4A8_MXFP4_FP8: rows whose powers of two E4M3 holds run as NVFP4 in groups of 32."""

import json

import numpy as np
import pytest

from moqext import Checkpoint, LinearMethod, MoEMethod, UnsupportedQuantization, reference
from moqext.__main__ import main

from .expert_files import single_experts, write_checkpoint
from .linear_cases import assert_close, assert_within_rounding, exponents, mx_part, random_case, random_x
from .moe_cases import random_stacks
from .work import each

ALGOS = ("MXFP4", "W4A8_MXFP4_FP8")
COMPUTES = [(algo, compute) for algo in ALGOS for compute in ("exact", "fp8")]
KERNELS = ["portable", "avx2", "avx512", "avx512bf16", "amx"]


def check(case, x, dtype, compute):
    method = case.method(dtype=dtype, compute=compute)
    y = method(x, method.prepare(case.listed()))
    expected = case.expected(x, compute)
    assert_within_rounding(y, expected, case.magnitude(reference.as_float32(x), compute) + 1e-30, dtype)
    assert_close(y, expected, dtype)


def meaning(prepared):
    """The weight that prepared tensors stand for, in float64."""
    values = reference.decode(prepared["weight"], "e2m1").astype(np.float64)
    scales = np.repeat(reference.decode(prepared["weight_scale"], "e4m3"), 32, axis=-1)
    return values * scales * prepared["output_scale"].astype(np.float64)[..., None]


def row_of(*groups, zeros=()):
    """A layer of one row with these exponents; groups of `zeros` have codes of zero."""
    codes = np.full((1, 16 * len(groups)), 0x71, np.uint8)
    for group in zeros:
        codes[0, 16 * group : 16 * group + 16] = 0x88
    return {"weight": codes, "weight_scale": np.array([groups], np.uint8)}


def prepare(part, **options):
    rows, columns = part["weight"].shape
    return LinearMethod("MXFP4", 2 * columns, [rows], dtype="float32", **options).prepare(part)


@each("dtype", ["bfloat16", "float16", "float32"])
@each("algo, compute", COMPUTES)
def test_matches_the_reference(rng, algo, compute, dtype):
    case = random_case(rng, algo, 288, [33, 70, 7])
    for tokens in (1, 3, 300):
        check(case, random_x(rng, (tokens, 288), dtype), dtype, compute)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_takes_them(rng, monkeypatch, kernel):
    for algo, compute in COMPUTES:
        case = random_case(rng, algo, 544, [70])
        if dict(case.method()._plan.explain())[f"cpu:{kernel}"]:
            pytest.skip(f"this CPU does not run {kernel}")
        monkeypatch.setenv("MOQEXT_KERNEL", f"cpu:{kernel}")
        for tokens in (1, 4, 5, 33):
            check(case, random_x(rng, (tokens, 544), "bfloat16"), "bfloat16", compute)
        monkeypatch.delenv("MOQEXT_KERNEL")


@pytest.mark.parametrize("compute", ["exact", "fp8", "auto"])
def test_rows_of_x_have_scales_of_their_own_where_there_is_no_input_scale(rng, compute):
    case = random_case(rng, "W4A8_MXFP4_FP8", 96, [40, 8], input_scale=False)
    x = random_x(rng, (5, 96), "bfloat16")
    check(case, x, "bfloat16", "fp8" if compute == "fp8" else "exact")
    method = case.method(dtype="float32", compute=compute)
    params = method.prepare(case.listed())
    x = random_x(rng, (4, 96), "float32") * np.float32([[1e-20], [1], [1e20], [0]])
    y = method(x, params)
    for row in range(4):
        np.testing.assert_array_equal(y[row : row + 1], method(x[row : row + 1], params))
    given = random_case(rng, "W4A8_MXFP4_FP8", 96, [40, 8])
    x = random_x(rng, (3, 96), "bfloat16")
    check(given, x, "bfloat16", "fp8" if compute == "fp8" else "exact")


@pytest.mark.parametrize("span", [0, 14, 17])
def test_the_prepared_weight_is_the_stored_one_to_the_bit(rng, span):
    """From the least exponents to the largest, whatever a row has."""
    part = mx_part(rng, 300, 640, span)
    part["weight_scale"] = (
        rng.integers(0, 255 - span, (300, 1)) + rng.integers(0, span + 1, (300, 20))
    ).astype(np.uint8)
    np.testing.assert_array_equal(meaning(prepare(part)), reference.weights.weight64(part, "MXFP4"))


@pytest.mark.parametrize("least", [0, 7, 8, 9, 100, 254 - 17])
def test_seventeen_is_the_most_that_exponents_of_a_row_span(least):
    part = row_of(least, least + 17)
    np.testing.assert_array_equal(meaning(prepare(part)), reference.weights.weight64(part, "MXFP4"))
    if least:
        message = (
            f"^weight_scale: the exponents of row 0 span 18, from {least - 128} to {least - 110}, and 17 is "
            "the most that kernels hold; `moqext convert --to bf16` reads it$"
        )
        with pytest.raises(UnsupportedQuantization, match=message):
            prepare(row_of(least - 1, least + 17))


def test_groups_of_zeros_have_no_say():
    """Exporters give them the exponent 0; both zeros are zeros."""
    part = row_of(0, 120, 137, 254, zeros=(0, 3))
    prepared = prepare(part)
    np.testing.assert_array_equal(meaning(prepared), reference.weights.weight64(part, "MXFP4"))
    assert reference.decode(prepared["weight_scale"], "e4m3").tolist() == [[0, 2.0**-9, 2.0**8, 0]]
    with pytest.raises(UnsupportedQuantization, match="row 0 span 18"):
        prepare(row_of(0, 120, 138, 254, zeros=(0, 3)))


def test_a_row_of_zeros_has_a_factor_like_others():
    """One near 2^-127, as its exponents say, had the rows beside it computed in float64: which ones differed
    from call to call, and with them last bits of float32 outputs."""
    for exponents_of_zeros in ((0, 0), (0, 254)):
        nothing = prepare(row_of(*exponents_of_zeros, zeros=(0, 1)))
        assert (meaning(nothing) == 0).all()
        assert nothing["output_scale"].tolist() == [2.0**-8]


def test_rows_that_span_at_most_14_lose_nothing_as_fp8(rng):
    part = mx_part(rng, 64, 320, 14)
    codes = prepare(part, compute="fp8")
    weight = reference.decode(codes["weight"], "e4m3").astype(np.float64) * codes["output_scale"][:, None]
    np.testing.assert_array_equal(weight, reference.weights.weight64(part, "MXFP4"))


def test_a_nan_scale_is_refused_whatever_its_codes_are(rng):
    for zeros in ((), (1,)):
        with pytest.raises(ValueError, match=r"^weight_scale: a block scale that is NaN at row 0, column 1$"):
            prepare(row_of(100, 255, zeros=zeros))
    case = random_case(rng, "MXFP4", 96, [24, 8])
    case.parts[1]["weight_scale"][5, 2] = 255
    with pytest.raises(ValueError, match=r"NaN at row 29, column 2$"):
        case.method().prepare(case.listed())


@each("algo, compute", COMPUTES)
def test_partitions_are_one_tensor_or_one_each_with_any_strides(rng, algo, compute):
    case = random_case(rng, algo, 128, [24, 40])
    method = case.method(dtype="float32", compute=compute)
    expected = method.prepare(case.listed())

    def spread(tensor):
        wide = np.zeros((2 * len(tensor), tensor.shape[1] + 3), np.uint8)
        wide[::2, :-3] = tensor
        return wide[::2, :-3]

    rows = {role: [spread(part[role]) for part in case.parts] for role in ("weight", "weight_scale")}
    for params in (case.fused(), case.listed() | rows):
        again = method.prepare(params)
        for name, value in expected.items():
            np.testing.assert_array_equal(again[name], value, name)


@each("algo, compute", COMPUTES)
def test_a_reload_goes_to_the_same_tensors_or_leaves_them(rng, algo, compute):
    case, other, bad = (random_case(rng, algo, 128, [24, 40]) for _ in range(3))
    method = case.method(compute=compute)
    params = method.prepare(case.listed())
    before = {name: value.copy() for name, value in params.items()}
    for wrong in (255, 1):
        bad.parts[1]["weight"][...] = 0x11
        bad.parts[1]["weight_scale"][...] = 100
        bad.parts[1]["weight_scale"][39, 3] = wrong
        with pytest.raises(ValueError, match="row 63"):
            method.prepare(bad.listed(), params)
        for name, value in before.items():
            np.testing.assert_array_equal(params[name], value, name)
    assert method.prepare(other.listed(), params) is params
    for name, value in method.prepare(other.listed()).items():
        np.testing.assert_array_equal(params[name], value, name)


def test_codes_may_stay_where_they_are_and_scales_may_not(rng):
    """Scales that were written over the checkpoint's would be read as powers of two by the next `prepare`."""
    part = mx_part(rng, 24, 128)
    method = LinearMethod("MXFP4", 128, [24])
    assert method.keeps("weight")
    assert not method.keeps("weight_scale")
    expected = method.prepare(part)
    out = {name: np.empty_like(value) for name, value in expected.items()}
    with pytest.raises(BufferError, match=r'out\["weight_scale"\]: shares memory'):
        method.prepare(part, out | {"weight_scale": part["weight_scale"]})
    for _ in range(2):
        again = method.prepare(part, out | {"weight": part["weight"]})
        for name, value in expected.items():
            np.testing.assert_array_equal(again[name], value, name)


def test_scales_of_the_type_of_powers_of_two(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    part = mx_part(rng, 24, 128)
    typed = part | {"weight_scale": part["weight_scale"].view(ml_dtypes.float8_e8m0fnu)}
    for one, other in zip(prepare(part).values(), prepare(typed).values(), strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    with pytest.raises(TypeError, match="weight_scale: expected float8_e8m0fnu"):
        prepare(part | {"weight_scale": part["weight_scale"].view(ml_dtypes.float8_e4m3fn)})


def test_what_the_checkpoint_has():
    specs = LinearMethod("W4A8_MXFP4_FP8", 64, [8]).checkpoint_params
    assert {name: (spec.shape, spec.dtype, spec.required) for name, spec in specs.items()} == {
        "weight": ((8, 32), "float4_e2m1fn_x2", True),
        "weight_scale": ((8, 2), "float8_e8m0fnu", True),
        "input_scale": ((1,), "float32", False),
    }
    method = LinearMethod("MXFP4", 64, [8])
    assert [*method.checkpoint_params] == ["weight", "weight_scale"]
    assert method.prepared_params["weight_scale"].dtype == "float8_e4m3fn"
    with pytest.raises(ValueError, match="'weight_scale_2' does not belong to a linear of MXFP4"):
        method.prepare(row_of(100, 100) | {"weight_scale_2": np.ones(1, np.float32)})
    for algo in ALGOS:
        with pytest.raises(
            UnsupportedQuantization, match=f'"fp4" needs NVFP4 with groups of 16; {algo} with'
        ):
            LinearMethod(algo, 64, [8], compute="fp4")
        with pytest.raises(ValueError, match="group_size: expected 32"):
            LinearMethod(algo, 64, [8], group_size=16)
        with pytest.raises(ValueError, match="expected a multiple of the group size 32"):
            LinearMethod(algo, 48, [8])


@each("interleaved", [False, True])
@each("wrong, error", [(255, "NaN at row"), (1, "span")])
def test_what_is_wrong_in_one_expert_is_named(rng, interleaved, wrong, error):
    stacks = random_stacks(rng, "MXFP4", 3, 64, 32, interleaved=interleaved)
    stacks["w13_weight"][1, 9] = 0x11
    stacks["w13_weight_scale"][1, 9] = [100, wrong]
    row = 32 * (9 % 2) + 4 if interleaved else 9
    method = MoEMethod("MXFP4", 3, 64, 32, top_k=2, interleaved=interleaved)
    with pytest.raises(ValueError, match=rf"^w13_weight_scale: experts\.1: .* row {row}\b") as caught:
        method.prepare(stacks)
    assert error in str(caught.value)


def test_a_genuine_export_loads_and_is_what_dequantize_reads(data):
    for case in ("exports/mxfp4", "checkpoints/llama_w4a8_mxfp4_fp8"):
        with Checkpoint(data / case) as checkpoint:
            for record in checkpoint.layers():
                layer = checkpoint.load(record, dtype="float32")
                np.testing.assert_array_equal(
                    meaning(layer.params).astype(np.float32), checkpoint.dequantize(record)
                )


def test_random_exponents_are_no_wider_than_asked(rng):
    for span in (0, 5, 17):
        found = exponents(rng, 50, 40, span).astype(int)
        assert (found.max(axis=1) - found.min(axis=1)).max() <= span


def test_a_checkpoint_with_a_row_that_kernels_do_not_hold_is_read(rng, tmp_path, capsys):
    """Nothing is wrong with it: `load` names the layer, and `verify` reads what cannot run."""
    experts = random_stacks(rng, "MXFP4", 3, 64, 64)
    experts["w2_weight"][1, 5] = 0x11
    experts["w2_weight_scale"][1, 5] = [100, 118]
    part = mx_part(rng, 40, 64)
    part["weight"][7], part["weight_scale"][7] = 0x11, [100, 118]
    linear = {f"model.layers.0.mlp.up_proj.{role}": ("U8", value) for role, value in part.items()}
    tensors = {"experts": single_experts(experts, "MXFP4"), "linear": linear}
    where = {"experts": "model.layers.0.mlp.experts: ", "linear": "model.layers.0.mlp.up_proj: "}
    row = {
        "experts": "w2_weight_scale: experts.1: the exponents of row 5",
        "linear": "the exponents of row 7",
    }
    for kind in tensors:
        config = {"hidden_act": "silu", "num_experts_per_tok": 2}
        directory = write_checkpoint(tmp_path / kind, tensors[kind], "MXFP4", **config)
        with Checkpoint(directory) as checkpoint:
            (record,) = checkpoint.layers()
            with pytest.raises(UnsupportedQuantization, match=f"^{where[kind]}.*{row[kind]} span 18"):
                checkpoint.load(record)
        assert main(["verify", str(directory), "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["rows"]
        assert (found["status"], "span 18" in found["message"]) == ("read", True)
