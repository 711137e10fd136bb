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


def test_mxfp8_is_the_engines_but_as_fp8_on_hopper():
    found = {
        (capability, compute): reason_to_step_aside("MXFP8", capability, compute)
        for capability in (None, (8, 0), (9, 0), (10, 0))
        for compute in ("exact", "auto", "fp8")
    }
    assert {case for case, reason in found.items() if reason is None} == {((9, 0), "auto"), ((9, 0), "fp8")}
    assert all(reason is None or reason.runs for reason in found.values())


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 1)])
def test_gpus_on_which_nothing_ran_are_the_engines(capability):
    """Unless moqext is asked for."""
    for algorithm in ("FP8", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP4"):
        reason = reason_to_step_aside(algorithm, capability)
        assert reason is not None
        assert reason.runs
        assert reason_to_step_aside(algorithm, (9, 0)) is None
    here = ".".join(map(str, capability))
    assert reason_to_step_aside("FP8", capability).why.endswith(f"never run on a GPU of capability {here}")


def test_what_stands_for_an_unknown_algorithm_runs_in_no_plug_in():
    layers = {"a": {"quant_algo": "NVFP9"}, "b": {"quant_algo": "NVFP4"}}
    document = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = read_config(document)
    assert config.algorithms() == ["NVFP4", "NVFP9"]
    stand_in = config.config.layer_algo("a")
    assert stand_in == STAND_IN
    assert not reason_to_step_aside(stand_in, (9, 0)).runs
