"""Layers that moqext does not run, or that SGLang runs better, are SGLang's, by its own methods."""

import logging

import pytest

from .sglang_stand_ins import stand_in

stand_in()

from sglang.srt.layers.linear import LinearBase  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # noqa: E402
from sglang.srt.layers.quantization import QUANTIZATION_METHODS  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.models.utils import WeightsMapper  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402

from moqext import UnsupportedQuantization  # noqa: E402
from moqext_sglang import register  # noqa: E402
from moqext_sglang.config import MoqextFp4Config, MoqextFp8Config  # noqa: E402
from moqext_torch import stepping_aside  # noqa: E402

from . import sglang_cases as cases  # noqa: E402
from .sglang_cases import config_for, torch  # noqa: E402
from .test_sglang_config import method_of  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.unsanitized]

MODULE = "sglang.srt.layers.quantization."
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def _rank(monkeypatch):
    register()
    monkeypatch.setattr(stepping_aside, "_said", set())
    monkeypatch.delenv("MOQEXT_SGLANG_FORCE", raising=False)
    with cases.engine("cpu"):
        yield


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(10, 0)`: SGLang is on a GPU of that capability."""

    def on(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return on


def mixed(**algorithms):
    layers = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in algorithms.items()}
    fields = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    document = {"quant_method": "modelopt", "packed_modules_mapping": {}, **fields}
    return QUANTIZATION_METHODS["modelopt_mixed"].from_config(document)


def is_sglangs(thing):
    return type(thing).__module__.startswith("sglang.") and not isinstance(thing, UnquantizedLinearMethod)


def test_layers_in_mxfp8_among_others_are_sglangs(caplog):
    made = mixed(**{UP: "MXFP8", "model.layers.1.mlp.up_proj": "MXFP8", DOWN: "NVFP4"})
    with caplog.at_level(logging.INFO):
        assert is_sglangs(method_of(made, LinearBase, UP))
        assert is_sglangs(method_of(made, LinearBase, "model.layers.1.mlp.up_proj"))
        assert type(method_of(made, LinearBase, DOWN)).__name__ == "MoqextLinearMethod"
        assert type(method_of(made, LinearBase, "model.layers.0.mlp.gate_proj")) is UnquantizedLinearMethod
    lines = [record.message for record in caplog.records if "left to SGLang" in record.message]
    assert lines == [
        f"layers in MXFP8 are left to SGLang (the first is {UP}): it is not known to be faster in moqext"
    ]


def test_names_of_layers_that_are_sglangs_are_mapped():
    made = mixed(**{"language_model.model.layers.0.mlp.up_proj": "MXFP8", "language_model." + DOWN: "FP8"})
    made.apply_weight_name_mapper(WeightsMapper(orig_to_new_prefix={"language_model.": ""}))
    assert is_sglangs(method_of(made, LinearBase, UP))
    assert type(method_of(made, LinearBase, DOWN)).__name__ == "MoqextLinearMethod"


def test_an_algorithm_of_tomorrow_is_sglangs_where_it_knows_it(monkeypatch):
    made = mixed(**{UP: "NVFP3_NEXT", DOWN: "FP8"})
    with pytest.raises(UnsupportedQuantization, match=rf"{UP}: NVFP3_NEXT: .*SGLang says: it would not"):
        method_of(made, LinearBase, UP)
    method = object()
    monkeypatch.setattr(type(made.engine), "get_quant_method", lambda *_: method)
    assert method_of(made, LinearBase, UP) is method
    assert type(method_of(made, LinearBase, DOWN)).__name__ == "MoqextLinearMethod"


@pytest.mark.parametrize(
    "capability, algorithm, whose",
    [
        ((10, 0), "NVFP4", "sglang"),
        ((12, 0), "NVFP4", "sglang"),
        ((12, 0), "W4A8_NVFP4_FP8", "moqext"),  # SGLang takes it for NVFP4, with other groups
        ((10, 0), "FP8", "sglang"),
        ((8, 9), "FP8", "sglang"),
        ((8, 0), "FP8", "moqext"),  # which SGLang does not run there
        ((10, 0), "FP8_PB_WO", "moqext"),  # which it takes for FP8
        ((9, 0), "NVFP4", "moqext"),
        ((9, 0), "W4A16_AWQ", "moqext"),
        ((10, 0), "NVFP4_SVD", "moqext"),  # which it does not know, like those of int8 and int4
        ((12, 0), "W8A8_SQ_PER_CHANNEL", "moqext"),
        ((7, 5), "FP8", "sglang"),
    ],
)
def test_a_chip_tells_whose_a_checkpoint_is(gpu, capability, algorithm, whose):
    gpu(*capability)
    made = config_for(algorithm, **({"group_size": 16} if algorithm == "NVFP4" else {}))
    assert type(made).__module__.startswith(whose)
    if whose == "sglang":
        assert is_sglangs(made)
        assert not isinstance(made, (MoqextFp4Config, MoqextFp8Config))


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "NVFP4_SVD"])
def test_layers_that_sglang_has_no_name_for_are_moqexts_on_any_chip(gpu, algorithm):
    gpu(10, 0)
    made = mixed(**{UP: algorithm, DOWN: "NVFP4"})
    assert type(method_of(made, LinearBase, UP)).__name__ == "MoqextLinearMethod"
    assert is_sglangs(method_of(made, LinearBase, DOWN))


def test_moqext_is_asked_for_by_name(gpu, monkeypatch):
    gpu(10, 0)
    monkeypatch.setenv("MOQEXT_SGLANG_FORCE", "1")
    made = config_for("NVFP4", group_size=16)
    assert type(method_of(made, LinearBase, DOWN)).__name__ == "MoqextLinearMethod"
    gpu(7, 5)  # no kernel of moqext's runs there, whatever is asked for
    assert is_sglangs(config_for("FP8"))
    monkeypatch.setenv("MOQEXT_SGLANG_FORCE", "yes")
    with pytest.raises(ValueError, match="MOQEXT_SGLANG_FORCE: expected 0 or 1, got 'yes'"):
        config_for("FP8")


def test_experts_with_adapters_are_sglangs():
    made = config_for("FP8")
    with get_context().override_server_args(device="cpu", enable_lora=True):
        assert is_sglangs(method_of(made, FusedMoE, "model.layers.0.mlp.experts"))
        assert type(method_of(made, LinearBase, DOWN)).__name__ == "MoqextLinearMethod"
    assert type(method_of(made, FusedMoE, "model.layers.0.mlp.experts")).__name__ == "MoqextFusedMoEMethod"
