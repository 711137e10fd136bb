"""Misspelt algorithms: what was probably meant is said wherever one is named, and nothing is guessed."""

import numpy as np
import pytest

from moqext import ConfigError, LinearMethod, QuantConfig, UnsupportedQuantization, ops

from ..work import each

CODES = np.zeros((2, 16), np.uint8)


def of_method(name):
    LinearMethod(name, 32, [8])


def of_dequantize(name):
    ops.dequantize(CODES, name)


def of_linear(name):
    ops.linear(np.zeros((1, 32), np.float32), {}, name, [8])


def of_config(name):
    QuantConfig.from_dict({"quant_method": "modelopt", "quant_algo": name})


def of_layer(name):
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": name}}
    QuantConfig.from_dict({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}})


def of_moe(name):
    QuantConfig.from_dict({"quant_method": "modelopt", "quant_algo": "FP8", "moe_quant_algo": name})


PLACES = [of_method, of_dequantize, of_linear, of_config, of_layer, of_moe]
each_place = each("place", PLACES)


def message(place, name):
    with pytest.raises((ValueError, ConfigError, UnsupportedQuantization)) as caught:
        place(name)
    assert name[:64] in str(caught.value)
    return str(caught.value)


@each_place
@pytest.mark.parametrize(
    "name, meant",
    [
        ("NVPF4", "NVFP4"),
        ("nvfp-4", "NVFP4"),
        ("NVFP4 ", "NVFP4"),
        ("NVFP", "NVFP4"),
        ("NVFP44", "NVFP4"),
        ("NVFP4_AQW", "NVFP4_AWQ"),
        ("W4A16NVFP4", "W4A16_NVFP4"),
        ("FP8_PB_W0", "FP8_PB_WO"),
        ("FP8_PER_CHANEL_PER_TOKN", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("INT4_AWK", "W4A16_AWQ"),
    ],
)
def test_a_misspelt_algorithm_says_what_was_meant(place, name, meant):
    assert message(place, name).endswith(f"; did you mean {meant}?")


@each_place
@pytest.mark.parametrize(
    "name", ["FP9", "FP16", "FP4", "NVFP8", "W8A8_AWQ", "AWQ", "x", "", "_", "Ω", "NVFP4" * 20]
)
def test_what_is_near_to_none_or_to_several_is_not_guessed(place, name):
    """Digits tell formats apart: another one is another format."""
    assert "did you mean" not in message(place, name)


def test_an_algorithm_that_is_known_is_not_taken_for_misspelt():
    assert "did you mean" not in message(of_dequantize, "MIXED_PRECISION")
    assert "did you mean" not in message(of_method, "MIXED_PRECISION")


def test_a_misspelt_cache_says_what_was_meant():
    def cache(name):
        QuantConfig.from_dict({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": name})

    assert message(cache, "NVPF4").endswith("; did you mean NVFP4?")
    assert message(cache, "NVFP4_AFINE").endswith("; did you mean NVFP4_AFFINE?")
    assert "did you mean" not in message(cache, "FP9")
