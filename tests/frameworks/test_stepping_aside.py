"""Layers that plug-ins leave to their engine, whichever that is."""

import pytest

pytest.importorskip("torch", minversion="2.10")

from moqext_torch.stepping_aside import STAND_IN, read_config, reason_to_step_aside


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_low_rank_pairs_are_the_engines(capability):
    reason = reason_to_step_aside("NVFP4_SVD", capability)
    assert reason is not None
    assert (reason.why, reason.runs) == ("moqext does not load low-rank pairs here", False)
    assert reason_to_step_aside("NVFP4_AWQ", capability) is None


def test_what_stands_for_an_unknown_algorithm_runs_in_no_plug_in():
    layers = {"a": {"quant_algo": "NVFP9"}, "b": {"quant_algo": "NVFP4"}}
    document = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = read_config(document)
    assert config.algorithms() == ["NVFP4", "NVFP9"]
    stand_in = config.config.layer_algo("a")
    assert stand_in == STAND_IN
    assert not reason_to_step_aside(stand_in, (9, 0)).runs
