"""LinearMethod on the CPU against the float64 reference, and everything it refuses."""

import copy
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moqext import _C, LinearMethod, UnsupportedQuantization, ops, reference

from .linear_cases import (
    ALGOS,
    COMPUTES,
    assert_close,
    assert_within_rounding,
    poisoned,
    random_case,
    random_part,
    random_x,
    with_a_lost_scale,
    with_a_zero_part,
)
from .work import each


def run(case, x, dtype, compute="exact", bias=None, fused=False):
    method = case.method(dtype=dtype, compute=compute)
    params = method.prepare(case.fused() if fused else case.listed())
    out = poisoned((*x.shape[:-1], method.out_features), dtype)
    assert method(x, params, bias, out) is out
    return out


@each("dtype", ["bfloat16", "float16", "float32"])
@each("algo, compute", COMPUTES)
def test_matches_reference(rng, algo, compute, dtype):
    case = random_case(rng, algo, 288, [33, 130, 7])
    x = random_x(rng, (37, 288), dtype)  # more rows than one panel
    y = run(case, x, dtype, compute)
    assert_close(y, case.expected(reference.as_float32(x), compute), dtype)


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_unequal_scales_of_partitions_are_exact_fused_on_disk(rng, algo, compute):
    rows = [128, 256, 128]  # whole blocks: what a fused FP8_PB_WO parameter can express
    case = random_case(rng, algo, 160, rows)
    x = random_x(rng, (5, 160), "float32")
    y = run(case, x, "float32", compute, fused=True)
    assert_close(y, case.expected(x, compute), "float32")
    np.testing.assert_array_equal(y, run(case, x, "float32", compute))


@settings(max_examples=60)
@given(
    st.sampled_from(COMPUTES),
    st.integers(1, 40),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(0, 40),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(0, 2**32),
)
def test_any_shape(kind, sixteens, rows, tokens, dtype, seed):
    algo, compute = kind
    rng = np.random.default_rng(seed)
    columns = 16 * sixteens if algo.endswith("NVFP4") else 16 * sixteens - seed % 16
    case = random_case(rng, algo, columns, rows)
    x = random_x(rng, (tokens, columns), dtype)
    values = reference.as_float32(x)
    y = run(case, x, dtype, compute)
    assert_within_rounding(y, case.expected(values, compute), case.magnitude(values, compute), dtype)


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("compute", ["exact", "fp8"])
def test_group_size_32(rng, algo, compute):
    case = random_case(rng, algo, 128, [24, 8], group_size=32)
    x = random_x(rng, (3, 128), "float32")
    assert_close(run(case, x, "float32", compute), case.expected(x, compute), "float32")


@pytest.mark.parametrize("algo, compute", [("FP8", "exact"), ("NVFP4", "fp4")])
def test_missing_input_scale_is_dynamic_per_tensor(rng, algo, compute):
    case = random_case(rng, algo, 96, [20], input_scale=False)
    method = case.method(dtype="float32", compute=compute)
    assert "input_scale" not in method.prepare(case.listed())
    x = random_x(rng, (6, 96), "float32")
    assert_close(run(case, x, "float32", compute), case.expected(x, compute), "float32")


@pytest.mark.parametrize("algo", ALGOS)
def test_zero_activations_give_the_bias(rng, algo):
    case = random_case(rng, algo, 128, [9], input_scale=False)
    bias = rng.standard_normal(9).astype(np.float32)
    y = run(case, np.zeros((4, 128), np.float32), "float32", bias=bias)
    np.testing.assert_array_equal(y, np.tile(bias, (4, 1)))


@each("algo", ALGOS)
@each("dtype", ["bfloat16", "float32"])
def test_bias_is_added_before_the_rounding(rng, algo, dtype):
    case = random_case(rng, algo, 64, [16, 8])
    x = random_x(rng, (5, 64), dtype)
    bias = random_x(rng, (24,), dtype)
    y = run(case, x, dtype, bias=bias)
    assert_close(y, case.expected(reference.as_float32(x), bias=reference.as_float32(bias)), dtype)


def test_leading_dimensions_and_strides_of_x(rng):
    case = random_case(rng, "NVFP4", 64, [24])
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    wide = random_x(rng, (4, 3, 2, 128), "float32")
    for x in (wide[..., 32:96], wide[..., ::2], wide.transpose(2, 0, 1, 3)[..., :64], wide[::-1, :, :, :64]):
        plain = np.ascontiguousarray(x)
        np.testing.assert_array_equal(method(x, params), method(plain, params))
        assert_close(method(x, params), case.expected(plain), "float32")
    np.testing.assert_array_equal(
        method(plain[0, 0, 0], params), method(plain[0, 0, :1], params)[0]
    )  # a vector is one token


def test_strided_rows_of_out(rng):
    case = random_case(rng, "FP8", 32, [8])
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    x = random_x(rng, (5, 32), "float32")
    wide = poisoned((5, 20), "float32")
    method(x, params, out=wide[:, 4:12])
    np.testing.assert_array_equal(wide[:, 4:12], method(x, params))
    assert np.isnan(wide[:, :4]).all()
    assert np.isnan(wide[:, 12:]).all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_empty_x(rng, shape):
    case = random_case(rng, "FP8", 64, [5])
    method = case.method(dtype="float32")
    y = method(np.zeros(shape, np.float32), method.prepare(case.listed()))
    assert y.shape == (*shape[:-1], 5)


def test_nan_in_x_stays_in_its_row(rng):
    for algo in ALGOS:
        case = random_case(rng, algo, 128, [16])
        x = random_x(rng, (3, 128), "float32")
        x[1, 5] = np.nan
        y = run(case, x, "float32")
        assert np.isnan(y[1]).any(), algo
        assert np.isfinite(y[[0, 2]]).all(), algo


@each("algo, compute", COMPUTES)
@each("value", [np.inf, -np.inf, np.nan])
@each("input_scale", [True, False])
def test_infinite_activations_give_what_the_reference_gives(rng, algo, compute, value, input_scale):
    """An infinity under a scale found at run time has a NaN code beside codes of zero; its row is NaN."""
    case = random_case(rng, algo, 256, [20, 12], input_scale=input_scale)
    x = random_x(rng, (5, 256), "float32")
    x[1, 77] = value
    x[3] = value
    with np.errstate(all="ignore"):
        y = run(case, x, "float32", compute)
        expected = case.expected(x, compute)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
    finite = np.isfinite(expected).all(axis=1)
    assert_close(y[finite], expected[finite], "float32")


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_a_scale_of_zero_over_codes_is_lost(rng, algo, compute):
    """Zeros where the checkpoint has a weight would be a wrong answer that nobody hears of."""
    case, name, row, column = with_a_lost_scale(rng, random_case(rng, algo, 384, [128, 40]))
    method = case.method(compute=compute)
    out = method.prepare(random_case(rng, algo, 384, [128, 40]).listed())
    before = {name: np.array(value) for name, value in out.items()}
    for params in (case.listed(), case.fused()):
        for place in (None, out):
            with pytest.raises(ValueError, match=f"^{name}: zero over .* row {row}, column {column} of"):
                method.prepare(params, place)
    for name, value in before.items():
        np.testing.assert_array_equal(out[name], value)


@pytest.mark.parametrize(
    "algo, compute",
    [("FP8", "exact"), ("NVFP4", "exact"), ("NVFP4", "fp8"), ("NVFP4", "fp4"), ("W4A16_NVFP4", "exact")],
)
def test_scale_of_zero_means_a_zero_weight(rng, algo, compute):
    """Producers give an all-zero layer the scale 0, beside codes or block scales that are NaN."""
    case = random_case(rng, algo, 64, [8, 12])
    zero = case.parts[1]
    zero["weight"][:] = 0xFF if algo == "FP8" else 0x77
    if algo == "FP8":
        zero["weight_scale"] = np.zeros((), np.float32)
    else:
        zero["weight_scale"][:] = 0x7F
        zero["weight_scale_2"] = np.zeros((), np.float32)
    x = random_x(rng, (2, 64), "float32")
    y = run(case, x, "float32", compute)
    np.testing.assert_array_equal(y[:, 8:], 0)
    assert_close(y, case.expected(x, compute), "float32")


def test_block_scale_shapes(rng):
    rows, columns = 200, 300
    part = random_part(rng, "FP8_PB_WO", rows, columns)
    method = LinearMethod("FP8_PB_WO", columns, [rows], dtype="float32")
    scale = part["weight_scale"]
    x = random_x(rng, (2, columns), "float32")
    plain = method(x, method.prepare(part))
    spread = method(x, method.prepare(part | {"weight_scale": scale.reshape(2, 1, 3, 1)}))
    np.testing.assert_array_equal(plain, spread)
    bits = reference.encode(scale, "bfloat16")
    rounded = method(x, method.prepare(part | {"weight_scale": reference.decode(bits, "bfloat16")}))
    np.testing.assert_array_equal(method(x, method.prepare(part | {"weight_scale": bits})), rounded)
    one = LinearMethod("FP8_PB_WO", 100, [50], dtype="float32")
    small = random_part(rng, "FP8_PB_WO", 50, 100)
    scalar = small | {"weight_scale": small["weight_scale"].reshape(())}
    np.testing.assert_array_equal(one.prepare(scalar)["weight_scale"], one.prepare(small)["weight_scale"])


def test_scalars_may_have_any_rank_and_serve_all_partitions(rng):
    case = random_case(rng, "NVFP4", 32, [4, 4])
    method = case.method(dtype="float32")
    params = case.listed()
    for shape in ((), (1,), (1, 1)):
        params["weight_scale_2"] = np.full(shape, 0.5, np.float32)
        np.testing.assert_array_equal(method.prepare(params)["output_scale"], np.full(8, 0.5, np.float32))


def test_fp8_noise_of_nvfp4_is_bounded(rng):
    """Folding block scales into e4m3: the products 1.5, 3 and 6 times a block scale are rounded."""
    weight = rng.standard_normal((256, 1024)).astype(np.float32)
    part = reference.quantize_weight(weight, "NVFP4")
    method = LinearMethod("NVFP4", 1024, [256], dtype="float32", compute="fp8")
    prepared = method.prepare(part)
    folded = (
        reference.decode(np.asarray(prepared["weight"]).view(np.uint8), "e4m3")
        * prepared["output_scale"][:, None]
    )
    exact = reference.dequantize(part, "NVFP4")
    noise = np.linalg.norm(folded - exact) / np.linalg.norm(exact)
    assert 0.005 < noise < 0.025, noise


def test_result_does_not_depend_on_the_other_rows(rng):
    """A row with a scale of its own keeps its result to the bit when the other rows, as many, change."""
    case = random_case(rng, "FP8_PER_CHANNEL_PER_TOKEN", 1100, [40])
    method = case.method(dtype="bfloat16")
    params = method.prepare(case.listed())
    for tokens in (3, 70):
        x = random_x(rng, (tokens, 1100), "bfloat16")
        whole = method(x, params)
        np.testing.assert_array_equal(whole, method(x, params))
        for row in (0, tokens - 1):
            other = random_x(rng, (tokens, 1100), "bfloat16")
            other[row] = x[row]
            np.testing.assert_array_equal(method(other, params)[row], whole[row])


@pytest.mark.parametrize("algo", ALGOS)
def test_prepared_codes_may_take_the_place_of_the_checkpoints(rng, algo):
    case = with_a_zero_part(random_case(rng, algo, 128, [128, 40]), algo)
    method = case.method()
    expected, params = method.prepare(case.fused()), case.fused()
    out = {name: np.full_like(value, 7) for name, value in expected.items()}
    out |= {name: params[name] for name in ("weight", "weight_scale") if name in out}
    assert method.prepare(params, out) is out
    for name, value in expected.items():
        np.testing.assert_array_equal(out[name], value, name)


def test_prepared_codes_elsewhere_in_the_checkpoints_are_refused(rng):
    case = random_case(rng, "FP8", 128, [64])
    memory = np.zeros((65, 128), np.uint8)
    params = case.fused() | {"weight": memory[:64]}
    method = case.method()
    out = method.prepare(params)
    for other in (memory[1:], memory.reshape(-1)[16 : 16 + 64 * 128].reshape(64, 128)):
        with pytest.raises(BufferError, match=r'^out\["weight"\]: shares memory with weight'):
            method.prepare(params, dict(out) | {"weight": other})
    folded = random_case(rng, "NVFP4", 64, [64])
    method, params = folded.method(compute="fp8"), folded.fused()
    out = dict(method.prepare(params))
    out["weight"] = np.zeros((64, 64), np.uint8)
    params["weight"] = out["weight"][:32].reshape(64, 32)
    with pytest.raises(BufferError, match=r'^out\["weight"\]: shares memory with weight'):
        method.prepare(params, out)


def test_reload_in_place(rng):
    first, second = (random_case(rng, "NVFP4", 64, [8, 8]) for _ in range(2))
    method = first.method(dtype="float32")
    params = method.prepare(first.listed())
    addresses = {name: array.__array_interface__["data"] for name, array in params.items()}
    again = method.prepare(second.listed(), out=params)
    assert again is params
    assert addresses == {name: array.__array_interface__["data"] for name, array in params.items()}
    x = random_x(rng, (3, 64), "float32")
    assert_close(method(x, params), second.expected(x), "float32")


@pytest.mark.parametrize("algo, compute", COMPUTES)
def test_params_match_their_specs(rng, algo, compute):
    case = random_case(rng, algo, 128, [128, 256])
    method = case.method(compute=compute)
    assert {name for name, spec in method.checkpoint_params.items() if spec.required} <= set(case.parts[0])
    for name, value in case.fused().items():
        assert value.shape == method.checkpoint_params[name].shape, name
    prepared = method.prepare(case.listed())
    required = {name for name, spec in method.prepared_params.items() if spec.required}
    assert required <= set(prepared) <= set(method.prepared_params)
    for name, value in prepared.items():
        assert value.shape == method.prepared_params[name].shape, name


def test_bad_scales_are_refused_before_anything_is_written(rng):
    for algo, role in (
        ("FP8", "weight_scale"),
        ("FP8", "input_scale"),
        ("NVFP4", "weight_scale_2"),
        ("FP8_PB_WO", "weight_scale"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "weight_scale"),
    ):
        for value in (np.nan, np.inf, -1.0) + ((0.0,) if role == "input_scale" else ()):
            case = random_case(rng, algo, 256, [200])
            method = case.method()
            kept = method.prepare(case.listed())
            before = {name: array.copy() for name, array in kept.items()}
            broken = case.parts[0] | {role: np.full_like(case.parts[0][role], value)}
            with pytest.raises(ValueError, match=f"{role}: expected a .* finite value"):
                method.prepare(broken, out=kept)
            for name, array in kept.items():
                np.testing.assert_array_equal(array, before[name])


def test_bad_codes_are_refused(rng):
    part = random_part(rng, "FP8", 4, 32)
    part["weight"][2, 7] = 0xFF
    with pytest.raises(ValueError, match=r"weight: a NaN code at row 2, column 7"):
        LinearMethod("FP8", 32, [4]).prepare(part)
    part = random_part(rng, "NVFP4", 4, 32)
    for code in (0x7F, 0xFF, 0x81):
        part["weight_scale"][3, 1] = code
        with pytest.raises(ValueError, match=r"weight_scale: .* NaN or negative at row 3, column 1"):
            LinearMethod("NVFP4", 32, [4]).prepare(part)


def test_wrong_tensors_are_refused_by_name(rng):
    part = random_part(rng, "NVFP4", 8, 32)
    method = LinearMethod("NVFP4", 32, [8])

    def refuse(message, error=ValueError, **changes):
        params = {name: value for name, value in (part | changes).items() if value is not None}
        with pytest.raises(error, match=message):
            method.prepare(params)

    refuse("weight.*missing", weight=None)
    refuse("weight_scale: missing", weight_scale=None)
    refuse("weight_scale_2: missing", weight_scale_2=None)
    refuse(r"weight: expected shape \[8, 16\], got \[8, 32\]", weight=np.zeros((8, 32), np.uint8))
    refuse(r"weight_scale: expected shape \[8, 2\], got \[8, 1\]", weight_scale=np.zeros((8, 1), np.uint8))
    refuse("weight: expected float4_e2m1fn_x2.*got float32", TypeError, weight=np.zeros((8, 16), np.float32))
    refuse("weight_scale_2: expected 1 values", weight_scale_2=np.ones(2, np.float32))
    refuse("weight_scale_2: expected float32.*got int64", TypeError, weight_scale_2=np.ones(1, np.int64))
    refuse("'pre_quant_scale' does not belong", pre_quant_scale=np.ones(32, np.float32))
    refuse("weight: expected 1 tensors", weight=[part["weight"]] * 2)
    with pytest.raises(ValueError, match=r"'weight_scale_2' does not belong to a linear of FP8"):
        LinearMethod("FP8", 32, [8]).prepare(
            random_part(rng, "FP8", 8, 32) | {"weight_scale_2": np.ones(1, "f4")}
        )
    with pytest.raises(TypeError, match=r"params: expected a mapping"):
        method.prepare(None)


def test_wrong_calls_are_refused_by_name(rng):
    case = random_case(rng, "FP8", 32, [8])
    method = case.method(dtype="float32")
    params = method.prepare(case.listed())
    x = random_x(rng, (3, 32), "float32")
    with pytest.raises(ValueError, match=r"x: expected shape \[\.\.\., 32\], got \[3, 31\]"):
        method(x[:, :31], params)
    with pytest.raises(ValueError, match=r"x: expected shape"):
        method(np.zeros((), np.float32), params)
    with pytest.raises(TypeError, match=r"x: expected float32.*got float16"):
        method(x.astype(np.float16), params)
    with pytest.raises(ValueError, match=r'params\["output_scale"\]: missing'):
        method(x, {"weight": params["weight"]})
    with pytest.raises(ValueError, match=r'params\["weight"\]: expected .* \[8, 32\], got .* \[4, 32\]'):
        method(x, params | {"weight": params["weight"][:4]})
    with pytest.raises(ValueError, match=r"bias: expected shape \[8\], got \[7\]"):
        method(x, params, np.zeros(7, np.float32))
    with pytest.raises(ValueError, match=r"out: expected shape \[3, 8\], got \[3, 9\]"):
        method(x, params, out=np.zeros((3, 9), np.float32))
    with pytest.raises(TypeError, match=r"out: expected float32.*got float64"):
        method(x, params, out=np.zeros((3, 8)))
    with pytest.raises(BufferError, match=r"out: expected contiguous rows"):
        method(x, params, out=np.zeros((3, 16), np.float32)[:, ::2])
    with pytest.raises(BufferError, match=r"shares memory with x"):
        method(x, params, out=x[:, :8])
    readonly = np.zeros((3, 8), np.float32)
    readonly.flags.writeable = False
    with pytest.raises(BufferError, match=r"out"):
        method(x, params, out=readonly)
    with pytest.raises(ValueError, match=r"stream"):
        method(x, params, stream=1)


def test_methods_that_cannot_be_made():
    with pytest.raises(
        UnsupportedQuantization, match=r"MIXED_PRECISION has no linear method; supported are FP8"
    ):
        LinearMethod("mixed_precision", 32, [8])
    with pytest.raises(ValueError, match=r"quant_algo: expected one of FP8, .*, got .FP9."):
        LinearMethod("FP9", 32, [8])
    with pytest.raises(UnsupportedQuantization, match='compute "fp4" needs NVFP4 with groups of 16'):
        LinearMethod("W4A16_NVFP4", 32, [8], compute="fp4")
    with pytest.raises(UnsupportedQuantization, match='compute "fp8" is for NVFP4'):
        LinearMethod("FP8", 32, [8], compute="fp8")
    with pytest.raises(ValueError, match=r"in_features: expected a multiple of the group size 16"):
        LinearMethod("NVFP4", 24, [8])
    with pytest.raises(ValueError, match=r"group_size: expected 16 or 32"):
        LinearMethod("NVFP4", 128, [8], group_size=64)
    with pytest.raises(ValueError, match=r"out_partitions"):
        LinearMethod("FP8", 32, [])
    with pytest.raises(ValueError, match=r"out_partitions"):
        LinearMethod("FP8", 32, [8, 0])
    with pytest.raises(ValueError, match=r"in_features"):
        LinearMethod("FP8", 0, [8])
    with pytest.raises(ValueError, match=r"dtype: expected"):
        LinearMethod("FP8", 32, [8], dtype="float64")
    with pytest.raises(ValueError, match=r"compute: expected"):
        LinearMethod("FP8", 32, [8], compute="int8")
    with pytest.raises(ValueError, match=r"device: expected"):
        LinearMethod("FP8", 32, [8], device="tpu")


def test_any_spelling_of_an_algorithm():
    assert LinearMethod("fp8_pb_real", 32, [8]).quant_algo == "FP8_PB_WO"
    assert LinearMethod("nvfp4", 32, [8]).quant_algo == "NVFP4"


def test_kernel_choice_is_explained(monkeypatch):
    method = LinearMethod("NVFP4", 32, [8])
    lines = dict(line.split(maxsplit=1) for line in method.explain().splitlines())
    assert lines[method.backend] == "chosen"
    assert list(lines) == _C.kernels()
    with pytest.raises(UnsupportedQuantization, match=r"no kernel can run NVFP4 8x32, .* on cuda:63"):
        LinearMethod("NVFP4", 32, [8], device="cuda:63")
    monkeypatch.setenv("MOQEXT_KERNEL", "cpu:portable")
    assert LinearMethod("NVFP4", 32, [8]).backend == "cpu:portable"
    monkeypatch.setenv("MOQEXT_KERNEL", "cpu:imaginary")
    with pytest.raises(ValueError, match=r"MOQEXT_KERNEL: no kernel named"):
        LinearMethod("NVFP4", 32, [8])


def test_the_choice_for_a_number_of_tokens_is_explained():
    method = LinearMethod("NVFP4", 32, [8], dtype="float32")
    assert method.backend == method.backend_for(1) == method.backend_for(0)
    for tokens in (0, 1, 4, 5, 300):
        lines = dict(line.split(maxsplit=1) for line in method.explain(tokens).splitlines())
        assert [name for name, verdict in lines.items() if verdict == "chosen"] == [
            method.backend_for(tokens)
        ]
    for ask in (method.backend_for, method.compute_for, method.explain):
        with pytest.raises(ValueError, match="tokens"):
            ask(-1)


def test_plans_are_made_by_their_function_alone():
    """One without a problem would have none to choose for."""

    class Derived(_C.Plan):
        pass

    for kind in (_C.Plan, _C.LinearPlan, Derived):
        for make in (kind, lambda kind=kind: object.__new__(kind)):
            with pytest.raises(TypeError, match=r"cannot create|is not safe"):
                make()
    assert isinstance(LinearMethod("FP8", 16, [16])._plan, _C.Plan)


def test_tokens_that_a_forced_kernel_does_not_run_are_explained(monkeypatch):
    """No line says "chosen", where backend_for raises."""
    method = LinearMethod("NVFP4", 32, [8])
    monkeypatch.setenv("MOQEXT_KERNEL", "cuda:sm90_nvfp4_decode")
    method._plan = _C.linear_plan("NVFP4", 32, [8], None, "bfloat16", "cuda:0", "exact", capability="9.0")
    assert "cuda:sm90_nvfp4_decode chosen" in " ".join(method.explain(16).split())
    refusal = "cuda:sm90_nvfp4_decode no: needs at most 16 tokens, got 17"
    assert refusal in " ".join(method.explain(17).split())
    assert "chosen" not in method.explain(17)
    with pytest.raises(UnsupportedQuantization, match="got 17"):
        method.backend_for(17)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_operation_equals_the_method(rng, dtype):
    case = random_case(rng, "NVFP4", 64, [24, 8])
    method = case.method(dtype=dtype)
    params = method.prepare(case.listed())
    x = random_x(rng, (3, 64), dtype)
    bias = rng.standard_normal(32).astype(np.float32)
    y = ops.linear(x, params, "NVFP4", [24, 8], bias=bias)
    np.testing.assert_array_equal(y, method(x, params, bias))
    with pytest.raises(ValueError, match="x: expected at least one dimension"):
        ops.linear(np.zeros((), np.float32), params, "NVFP4", [24, 8])
    with pytest.raises(ValueError, match="in_features: expected a multiple"):
        ops.linear(x[:, :60], params, "NVFP4", [24, 8])


@pytest.mark.parametrize("number", [0.25, np.float32(0.25), np.float64(0.25), np.float16(0.25)])
def test_scales_as_numbers(rng, number):
    case = random_case(rng, "FP8", 32, [8, 4])
    method = case.method(dtype="float32")
    weight = case.listed()["weight"]
    one = {"weight": weight, "weight_scale": number, "input_scale": np.float32(0.5)}
    each = {"weight": weight, "weight_scale": [number, 2 * number], "input_scale": (0.5, 1)}
    np.testing.assert_array_equal(method.prepare(one)["output_scale"], np.full(12, 0.25, "f4"))
    np.testing.assert_array_equal(
        method.prepare(each)["output_scale"], np.repeat(np.float32([0.25, 0.5]), [8, 4])
    )
    with pytest.raises(ValueError, match="weight_scale: expected a non-negative finite value, got inf"):
        method.prepare(one | {"weight_scale": 1e300})
    with pytest.raises(TypeError, match="weight_scale: expected a tensor"):
        method.prepare(one | {"weight_scale": True})
    with pytest.raises(TypeError, match="weight: expected float8_e4m3fn"):
        method.prepare(one | {"weight": 1.0})


def test_sizes_may_be_numpy_integers():
    method = LinearMethod("NVFP4", np.int64(64), np.array([24, 8]), group_size=np.int32(32))
    assert (method.in_features, method.out_partitions, method.group_size) == (64, (24, 8), 32)
    assert {type(size) for size in (method.in_features, *method.out_partitions)} == {int}
    with pytest.raises(TypeError, match="in_features: expected an int, got <class 'float'>"):
        LinearMethod("FP8", 64.0, [8])
    with pytest.raises(TypeError, match="in_features: expected an int, got <class 'bool'>"):
        LinearMethod("FP8", True, [8])


def test_attributes_are_canonical():
    method = LinearMethod("nvfp4", 32, [8], dtype="bf16")
    assert (method.quant_algo, method.dtype, method.device, method.group_size) == (
        "NVFP4",
        "bfloat16",
        "cpu",
        16,
    )
    assert LinearMethod("FP8", 32, [8]).group_size is None


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(rng, remake):
    case = random_case(rng, "NVFP4", 64, [24, 8], group_size=32)
    method = case.method(dtype="float32", compute="fp8")
    again = remake(method)
    assert repr(again) == repr(method)
    assert again.group_size == 32
    x = random_x(rng, (3, 64), "float32")
    np.testing.assert_array_equal(
        again(x, again.prepare(case.listed())), method(x, method.prepare(case.listed()))
    )


class MadeOnDemand(Mapping):
    """A mapping that keeps none of its values: whoever asks has to keep them alive."""

    def __init__(self, values):
        self.values_ = values

    def __getitem__(self, name):
        return self.values_[name].copy()

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)


def test_mappings_that_make_their_tensors_when_asked(rng):
    case = random_case(rng, "NVFP4", 512, [256])
    method = case.method(dtype="float32")
    params = method.prepare(case.fused())
    x = random_x(rng, (3, 512), "float32")
    again = method.prepare(MadeOnDemand(case.fused()))
    assert again.keys() == params.keys()
    for name in params:
        np.testing.assert_array_equal(again[name], params[name])
    np.testing.assert_array_equal(method(x, MadeOnDemand(params)), method(x, params))


@pytest.mark.parametrize("wrong", [None, [1], "weight", 3, np.zeros(3)])
def test_what_is_no_mapping_is_refused_by_name(rng, wrong):
    case = random_case(rng, "FP8", 32, [8])
    method = case.method(dtype="float32")
    x = random_x(rng, (3, 32), "float32")
    with pytest.raises(TypeError, match="params: expected a mapping of names to tensors, got"):
        method.prepare(wrong)
    with pytest.raises(TypeError, match="params: expected a mapping of names to tensors, got"):
        method(x, wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match="out: expected a mapping of names to tensors, got"):
            method.prepare(case.fused(), out=wrong)


def test_an_output_that_is_missing_is_named(rng):
    case = random_case(rng, "FP8", 32, [8])
    method = case.method(dtype="float32")
    params = method.prepare(case.fused())
    with pytest.raises(ValueError, match=r'out\["output_scale"\]: missing'):
        method.prepare(case.fused(), out={"weight": params["weight"]})


def test_the_operation_refuses_by_the_names_of_its_arguments(rng):
    case = random_case(rng, "FP8", 32, [8])
    params = case.method(dtype="float32").prepare(case.fused())
    with pytest.raises(TypeError, match="x: expected bfloat16, float16 or float32, got float64"):
        ops.linear(np.zeros((3, 32)), params, "FP8", [8])
    alone = r"out_partitions: expected a sequence of 1 to 64 sizes, got 8: a layer alone has one size, \[N\]$"
    with pytest.raises(ValueError, match=alone):
        ops.linear(np.zeros((3, 32), np.float32), params, "FP8", 8)


def test_one_input_scale_is_checked(rng):
    case = random_case(rng, "FP8", 64, [16, 8])
    method = case.method(dtype="float32", one_input_scale=True)
    with pytest.raises(ValueError, match="input_scale: expected the same for all partitions"):
        method.prepare(case.listed())
    case.parts[1]["input_scale"] = case.parts[0]["input_scale"]
    x = random_x(rng, (3, 64), "float32")
    plain = case.method(dtype="float32")
    np.testing.assert_array_equal(
        method(x, method.prepare(case.listed())), plain(x, plain.prepare(case.listed()))
    )


@pytest.mark.parametrize(
    ("algo", "option", "text"),
    [
        ("FP8_PB_WO", "one_input_scale", "one_input_scale: FP8_PB_WO has no input_scale"),
        ("NVFP4", "fast_accum", "fast_accum: is for FP8 products"),
    ],
)
def test_options_that_mean_nothing_are_refused(algo, option, text):
    with pytest.raises(UnsupportedQuantization, match=text):
        LinearMethod(algo, 128, [128], **{option: True})


def test_options_are_kept_by_copies():
    method = LinearMethod("FP8", 16, [16, 16], fast_accum=True, one_input_scale=True)
    for again in (copy.copy(method), pickle.loads(pickle.dumps(method))):
        assert (again.fast_accum, again.one_input_scale) == (True, True)
    assert not LinearMethod("FP8", 16, [16]).fast_accum
