"""Layers that plug-ins leave to their engine, whichever that is."""

import pytest

pytest.importorskip("torch", minversion="2.10")

from moqext.algorithms import LINEARS
from moqext_torch.stepping_aside import read_config, reason_to_step_aside


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_every_format_but_mxfp8_is_moqexts_where_it_ran(capability):
    left = {algo for algo in LINEARS if reason_to_step_aside(algo, capability) is not None}
    assert left == {"MXFP8"}


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


@pytest.mark.parametrize("others", [("NVFP4",), LINEARS[:3], ("INT4_AWQ", *LINEARS[:-1])])
def test_what_stands_for_an_unknown_algorithm_is_no_layers(others):
    """Or a fused layer of both would pass for one of one algorithm."""
    layers = {"a": {"quant_algo": "NVFP9"}} | {f"b{n}": {"quant_algo": algo} for n, algo in enumerate(others)}
    document = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    read = read_config(document)
    known = {read.config.layer_algo(name) for name in layers if name != "a"}
    assert read.algorithms() == sorted({*known, "NVFP9"})
    assert read.config.layer_algo("a") not in known
    assert read.algorithm_of(read.config.layer_quant("a")) == "NVFP9"
    assert not reason_to_step_aside("NVFP9", (9, 0)).runs
