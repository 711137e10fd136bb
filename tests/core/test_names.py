"""Names that mean more than themselves: the reader and the configuration know the same ones."""

import pytest

from moqext import ConfigError, QuantConfig
from moqext.reader.findings.find_layers import find_layers
from moqext.reader.naming import FUSED_NAMES, PREFIXES, parse_expert_name, parse_tensor_name

from ..test_layers import codes, infos
from ..work import each

STEM = "model.layers.0.block"


def mixed(**layers):
    listed = {name: {"quant_algo": algo} for name, algo in layers.items()}
    return QuantConfig.from_dict(
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed}}
    )


def linears(*names):
    tensors = {}
    for name in names:
        tensors[f"{name}.weight"] = ("F8_E4M3", (64, 32))
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.input_scale"] = ("F32", ())
    return infos(**tensors)


def test_fused_qkv_a_proj_is_not_a_listed_module_that_is_missing():
    """The configuration resolved the name through its parts, and the reader did not know it."""
    parts = [f"{STEM}.{part}" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    config = mixed(**{f"{STEM}.fused_qkv_a_proj": "FP8"})
    assert "listed_module_missing" not in codes(find_layers(linears(*parts), config))
    assert codes(find_layers(linears(f"{STEM}.o_proj"), config))["listed_module_missing"] == 1


@pytest.mark.parametrize("fused", FUSED_NAMES)
def test_a_fused_name_means_one_thing_to_the_reader_and_to_the_configuration(fused):
    parts = FUSED_NAMES[fused]
    config = mixed(**{f"{STEM}.{part}": "FP8" for part in parts})
    assert config.layer_algo(f"{STEM}.{fused}") == "FP8"
    assert config.layer_algo(f"{STEM}.{fused}_") is None
    listed = mixed(**{f"{STEM}.{fused}": "FP8"})
    assert "listed_module_missing" not in codes(find_layers(linears(f"{STEM}.{parts[0]}"), listed))


@each("written", ["", *PREFIXES])
@each("stored", ["", *PREFIXES])
def test_prefixes_are_aligned_by_the_reader_and_by_the_configuration(written, stored):
    config = mixed(**{f"{written}layers.0.fc": "FP8"})
    assert config.layer_algo(f"{stored}layers.0.fc") == "FP8"
    assert "listed_module_missing" not in codes(find_layers(linears(f"{stored}layers.0.fc"), config))


@pytest.mark.parametrize("container", ["experts", "routed_experts", "local_experts"])
def test_what_the_reader_takes_for_experts_is_a_container_to_the_configuration(container):
    """A container whose name only ends in "experts" was unquantized, whatever was listed below it."""
    name = f"{STEM}.{container}"
    assert parse_expert_name(f"{name}.3.up_proj") == (name, 3, "up_proj")
    config = mixed(**{f"{name}.{i}.{part}": "NVFP4" for i in range(2) for part in ("up_proj", "down_proj")})
    assert config.layer_quant(name)[:2] == ("NVFP4", 16)
    excluded = QuantConfig.from_dict(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [f"{name}.1.up_proj"]}
    )
    with pytest.raises(ConfigError, match=r"excludes part of .*experts"):
        excluded.is_excluded(name)


@pytest.mark.parametrize("container", ["shared_experts", "Experts", "experts2"])
def test_what_the_reader_takes_for_ordinary_linears_is_no_container(container):
    name = f"{STEM}.{container}"
    assert parse_expert_name(f"{name}.3.up_proj") is None
    assert mixed(**{f"{name}.3.up_proj": "NVFP4"}).layer_algo(name) is None
    assert parse_tensor_name(f"{name}.gate_up_proj") is None
    assert parse_tensor_name(f"{name}.up_proj.weight") == (f"{name}.up_proj", "weight", "weight")


def test_stacked_projections_below_moe_make_it_a_container():
    """The reader gathered Step 3.5's projections under `moe`, which the configuration called unquantized."""
    name = "model.layers.3.moe"
    config = mixed(**{f"{name}.{part}": "NVFP4" for part in ("gate_proj", "up_proj", "down_proj")})
    assert config.layer_algo(name) == config.layer_algo("language_model.layers.3.moe") == "NVFP4"
    with pytest.raises(ConfigError, match="are quantized differently"):
        mixed(**{f"{name}.up_proj": "NVFP4", f"{name}.down_proj": "FP8"}).layer_algo(name)


def test_a_router_below_moe_says_nothing_of_the_experts():
    name = "model.layers.3.moe"
    config = QuantConfig.from_dict(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [f"{name}.gate"]}
    )
    assert not config.is_excluded(name)
    assert config.layer_algo(name) == "FP8"
    below = mixed(**{f"{name}.experts.{i}.up_proj": "FP8" for i in range(2)})
    assert below.layer_algo(f"{name}.experts") == "FP8"
    assert below.layer_algo(name) is None
