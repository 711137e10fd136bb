"""Scales of the key/value cache: every combination a checkpoint holds, and those that are refused."""

import numpy as np
import pytest

from moqext import KVCacheMethod, UnsupportedQuantization

from .work import each


def scalar(value, shape=()):
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_stored_scales_are_used_as_they_are(algo, shape):
    scales = KVCacheMethod(algo).prepare({"k_scale": scalar(0.25, shape), "v_scale": scalar(0.5, shape)})
    assert (scales.k_scale, scales.v_scale, scales.q_scale) == (0.25, 0.5, 1.0)
    assert scales.calibrated
    assert scales.notes == ("no q_scale: it is 1.0",)


def test_no_scales_at_all_are_one():
    scales = KVCacheMethod("FP8").prepare({})
    assert scales[:4] == (1.0, 1.0, 1.0, False)
    assert any("both are 1.0" in note for note in scales.notes)


@pytest.mark.parametrize("present, missing", [("k_scale", "v_scale"), ("v_scale", "k_scale")])
def test_one_of_the_two_serves_both(present, missing):
    scales = KVCacheMethod("FP8").prepare({present: scalar(0.125), missing: None})
    assert scales.k_scale == scales.v_scale == 0.125
    assert scales.calibrated
    assert f"no {missing}: {present} serves both" in scales.notes


def test_query_scale():
    scales = KVCacheMethod("FP8").prepare({name: scalar(0.5) for name in ("k_scale", "v_scale", "q_scale")})
    assert scales == (0.5, 0.5, 0.5, True, ())


def test_exact_ones_are_told_as_a_clamp():
    scales = KVCacheMethod("FP8").prepare({"k_scale": 1.0, "v_scale": 1.0, "q_scale": 1.0})
    assert scales.calibrated
    assert "clamped" in scales.notes[0]


def test_a_cache_that_is_not_quantized_has_no_scale():
    assert KVCacheMethod(None).prepare({"k_scale": 0.5, "v_scale": 0.5}) == (1.0, 1.0, 1.0, False, ())


@each("algo", [None, "FP8", "NVFP4"])
@each("name", ["k_scale", "v_scale", "q_scale"])
@each("value", [0.0, -1.0, np.nan, np.inf])
def test_impossible_scales_are_refused(algo, name, value):
    with pytest.raises(ValueError, match=f"{name}: expected a positive finite value"):
        KVCacheMethod(algo).prepare({name: scalar(value)})


def test_other_tensors_and_formats_are_refused():
    with pytest.raises(ValueError, match=r"k_scale: expected one value, got shape \[2\]"):
        KVCacheMethod("FP8").prepare({"k_scale": scalar(1, (2,))})
    with pytest.raises(ValueError, match="expected only k_scale, v_scale, q_scale, got k_bias"):
        KVCacheMethod("FP8").prepare({"k_bias": scalar(1)})
    with pytest.raises(UnsupportedQuantization, match="'INT8' has no cache method; supported are FP8, NVFP4"):
        KVCacheMethod("INT8")
    assert set(KVCacheMethod("FP8").checkpoint_params) == {"k_scale", "v_scale", "q_scale"}


@pytest.mark.parametrize("value", [0.25, np.float32(0.25), np.float64(0.25), 1, np.int64(1)])
def test_scales_as_numbers(value):
    scales = KVCacheMethod("FP8").prepare({"k_scale": value, "v_scale": value})
    assert scales.k_scale == scales.v_scale == float(value)


def test_raw_bfloat16_is_no_integer():
    bits = np.float32(0.375).view(np.uint32) >> np.uint32(16)
    scales = KVCacheMethod("FP8").prepare({"k_scale": np.array(bits, np.uint16)})
    assert scales.k_scale == 0.375


def test_torch_scales():
    torch = pytest.importorskip("torch")
    scale = torch.tensor([0.375], dtype=torch.bfloat16)
    assert KVCacheMethod("FP8").prepare({"v_scale": scale}).v_scale == 0.375
    with pytest.raises(TypeError, match=r"v_scale: expected float32, .*, got int64"):
        KVCacheMethod("FP8").prepare({"v_scale": torch.tensor(1)})


@pytest.mark.parametrize("wrong", ["1", [1.0], True, np.array(7, np.uint8), {}])
def test_what_is_no_scale_is_refused(wrong):
    with pytest.raises(TypeError, match="k_scale: expected"):
        KVCacheMethod("FP8").prepare({"k_scale": wrong})
    with pytest.raises(TypeError, match="params: expected a mapping"):
        KVCacheMethod("FP8").prepare(wrong if wrong != {} else None)


def test_names_of_formats():
    assert KVCacheMethod("fp8").kv_cache_quant_algo == "FP8"
    with pytest.raises(TypeError, match="kv_cache_quant_algo: expected a str or None"):
        KVCacheMethod(8)


@each("value", [1e-300, 1e-45, 2.0**-128, 1e39])
@each("name", ["k_scale", "v_scale", "q_scale"])
def test_a_scale_without_a_reciprocal_in_float32_is_refused(name, value):
    with pytest.raises(
        ValueError, match=rf"^{name}: expected a float32 whose reciprocal is one, above 2.939e-39"
    ):
        KVCacheMethod("FP8").prepare({name: value})
    least = np.nextafter(np.float32(2.0**-128), np.float32(1))
    KVCacheMethod("FP8").prepare({name: least})
