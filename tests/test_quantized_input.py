"""Linears whose x is FP8 codes already: what an activation or a norm has quantized before."""

import copy
import pickle

import numpy as np
import pytest

from moqext import LinearMethod, UnsupportedQuantization, ops, reference

from .linear_cases import random_case, random_x
from .work import each

DTYPES = ("bfloat16", "float16", "float32")


def quantized(x, case):
    """The codes of x for the case's one scale."""
    scale = case.parts[0]["input_scale"]
    return reference.quantize_fp8_static(reference.as_float32(x), scale)


@each("dtype", DTYPES)
@each("algo", ["FP8", "W4A8_NVFP4_FP8"])
@each("tokens", [1, 3, 17, 70])
def test_codes_give_the_bits_of_what_they_were_made_from(rng, algo, dtype, tokens):
    case = random_case(rng, algo, 320, [40, 24])
    case.parts[1]["input_scale"] = case.parts[0]["input_scale"]
    plain = case.method(dtype=dtype, one_input_scale=True)
    coded = case.method(dtype=dtype, one_input_scale=True, quantized_input=True)
    params = plain.prepare(case.listed())
    x = random_x(rng, (tokens, 320), dtype)
    codes = quantized(x, case)
    bias = rng.standard_normal(64).astype(np.float32)
    expected = plain(x, params, bias)
    y = coded(codes, coded.prepare(case.listed()), bias)
    assert y.tobytes() == expected.tobytes()
    strided = np.full((tokens, 2, 320), 0x38, np.uint8)
    strided[:, 1] = codes
    assert coded(strided[:, 1], params, bias).tobytes() == expected.tobytes()


def test_every_code_is_taken_for_its_value(rng):
    case = random_case(rng, "FP8", 256, [8])
    case.parts[0]["weight"] = np.full((8, 256), 0x38, np.uint8)
    case.parts[0]["weight_scale"] = np.array(np.float32(1))
    method = case.method(dtype="float32", quantized_input=True)
    params = method.prepare(case.fused())
    codes = np.zeros((256, 256), np.uint8)
    np.fill_diagonal(codes, np.arange(256))
    y = method(codes, params)[:, 0]
    values = reference.decode(np.arange(256, dtype=np.uint8), "e4m3") * case.parts[0]["input_scale"]
    np.testing.assert_array_equal(y, values)


def test_what_fused_steps_quantize_goes_in(rng):
    case = random_case(rng, "FP8", 128, [24])
    scale = float(case.parts[0]["input_scale"])
    method = case.method(dtype="float32", quantized_input=True)
    plain = case.method(dtype="float32")
    params = method.prepare(case.fused())
    gates = random_x(rng, (5, 256), "float32")
    codes, _ = ops.silu_and_mul_quantize(gates, "fp8_tensor", scale=scale)
    np.testing.assert_array_equal(method(codes, params), plain(ops.silu_and_mul(gates), params))


def test_the_scale_has_to_be_there(rng):
    case = random_case(rng, "FP8", 32, [8], input_scale=False)
    method = case.method(dtype="float32", quantized_input=True)
    assert method.checkpoint_params["input_scale"].required
    assert method.prepared_params["input_scale"].required
    params = case.method(dtype="float32").prepare(case.fused())
    with pytest.raises(ValueError, match=r'params\["input_scale"\]: missing'):
        method(np.zeros((2, 32), np.uint8), params)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_values_are_refused(rng, dtype):
    case = random_case(rng, "FP8", 32, [8])
    method = case.method(dtype="float32", quantized_input=True)
    params = method.prepare(case.fused())
    with pytest.raises(TypeError, match=r"x: expected codes of float8_e4m3fn, got float.* input_scale"):
        method(np.zeros((2, 32), dtype), params)


@pytest.mark.parametrize(
    ("algo", "options", "text"),
    [
        ("FP8_PER_CHANNEL_PER_TOKEN", {}, "quantized_input: is for activations in FP8 with an input_scale"),
        ("FP8_PB_WO", {}, "quantized_input: is for activations in FP8 with an input_scale"),
        ("NVFP4", {}, 'NVFP4 with compute "exact" has none'),
        ("NVFP4", {"compute": "fp8"}, 'NVFP4 with compute "fp8" has none'),
        ("FP8", {}, "2 partitions may have as many input scales"),
    ],
)
def test_layers_without_one_scale_are_refused(algo, options, text):
    with pytest.raises(UnsupportedQuantization, match=text):
        LinearMethod(algo, 128, [128, 128], quantized_input=True, **options)


def test_the_option_is_kept_by_copies():
    method = LinearMethod("FP8", 16, [16], quantized_input=True)
    for again in (copy.copy(method), pickle.loads(pickle.dumps(method))):
        assert again.quantized_input
    assert not LinearMethod("FP8", 16, [16]).quantized_input


def test_an_output_is_written_in_place(rng):
    case = random_case(rng, "FP8", 64, [8])
    method = case.method(dtype="float32", quantized_input=True)
    params = method.prepare(case.fused())
    codes = quantized(random_x(rng, (4, 64), "float32"), case)
    out = np.full((4, 8), np.nan, np.float32)
    assert method(codes, params, out=out) is out
    np.testing.assert_array_equal(out, method(codes, params))
