"""Choices of the plan on chips that need not be here: csrc/cuda/choice, in builds with and without nvcc."""

import math

import pytest

from moqext import _C

from ..data import make_choices
from ..data.make_choices import Layer
from ..work import each

LAYERS = list(make_choices.layers())
RECORDED = make_choices.recorded()
KINDS = sorted({(layer.chip, *layer[1:4]) for layer in LAYERS})


def of_kind(kind):
    return [layer for layer in LAYERS if layer[:4] == kind]


def test_every_layer_of_the_grid_is_recorded_and_no_other():
    assert [str(layer) for layer in LAYERS] == list(RECORDED)


def differences(found, recorded):
    """Cells with another choice, or with other seconds than the digits that are written."""
    for now, before in zip(found, recorded, strict=True):
        choice, seconds = now.rsplit(" ", 1)
        as_before, expected = before.rsplit(" ", 1)
        if choice != as_before or float(seconds) != pytest.approx(float(expected), rel=1e-4):
            yield f"{now}, recorded: {before}"


@each("kind", KINDS)
def test_choices_are_the_recorded_ones(kind):
    """With nvcc or without, on any machine; python tests/data/make_choices.py records what is meant."""
    found = {str(layer): list(differences(layer.choices(), RECORDED[str(layer)])) for layer in of_kind(kind)}
    assert {layer: cells for layer, cells in found.items() if cells} == {}


@each("kind", KINDS)
def test_no_estimate_is_missing(kind):
    """In a build without nvcc all of these were 0 once, and tests of choices passed by luck."""
    for layer in of_kind(kind):
        plan = layer.plan()
        for tokens in layer.tokens:
            estimates = plan.estimates(tokens)
            assert all(1e-7 < seconds < math.inf for _, _, seconds in estimates), (str(layer), tokens)
            kernel, _, _ = min(estimates, key=lambda row: row[2])
            assert plan.backend(tokens) == kernel, (str(layer), tokens)


def test_an_estimate_of_every_kernel_for_hopper_is_compared():
    seen = {row[0] for layer in LAYERS for row in layer.plan().estimates(16)}
    hopper = {name for name, _ in LAYERS[0].plan().explain() if name.startswith("cuda:")}
    assert hopper - seen <= {"cuda:cublaslt_fp4"} | {name for name in hopper if "sm90" not in name}


def test_a_kernel_is_compared_for_the_tokens_that_it_runs():
    plan = Layer("9.0", "NVFP4", "exact", False, (4096,), 4096).plan()
    assert "cuda:sm90_nvfp4_decode" in {row[0] for row in plan.estimates(16)}
    assert "cuda:sm90_nvfp4_decode" not in {row[0] for row in plan.estimates(17)}


@pytest.mark.parametrize("kind", make_choices.HOPPER_KINDS, ids=str)
def test_an_unknown_chip_of_capability_9_0_counts_as_an_h200(kind):
    known = Layer("H200 SXM", *kind, (4096,), 14336)
    assert known._replace(chip="9.0").choices() == known.choices()


def estimates(chip, tokens, rows=57344, columns=8192, quant_algo="FP8", compute="exact"):
    plan = Layer(chip, quant_algo, compute, False, (rows,), columns).plan()
    return {kernel: seconds for kernel, _, seconds in plan.estimates(tokens)}


@each(
    "kernel, about",
    [
        ("cuda:sm90_fp8_decode", {}),
        ("cuda:sm90_fp8_prefill", {}),
        ("cuda:cublaslt", {}),
        ("cuda:cublaslt", {"quant_algo": "FP8_PB_WO"}),
        ("cuda:sm80_fp8", {}),
        ("cuda:simt", {}),
        ("cuda:sm90_nvfp4_decode", {"quant_algo": "NVFP4"}),
        ("cuda:sm90_nvfp4_medium", {"quant_algo": "NVFP4"}),
        ("cuda:sm90_nvfp4_fp8_medium", {"quant_algo": "NVFP4", "compute": "fp8"}),
        ("cuda:sm80_nvfp4", {"quant_algo": "NVFP4"}),
    ],
)
def test_a_weight_takes_longer_to_read_on_a_chip_with_slower_memory(kernel, about):
    """One token of a large layer: between no longer at all and what the rates of the data sheets say."""
    h200, h100 = (estimates(chip, 1, **about)[kernel] for chip in ("H200 SXM", "H100 SXM"))
    assert 1 < h100 / h200 <= 4.8 / 3.35


def test_products_take_as_long_on_an_h100():
    """An H100 has the tensor cores of an H200: thousands of tokens differ by the reading of the weight."""
    h200, h100 = (estimates(chip, 8192)["cuda:cublaslt"] for chip in ("H200 SXM", "H100 SXM"))
    assert h200 <= h100 < 1.02 * h200


def test_a_chip_has_one_name():
    with pytest.raises(ValueError, match=r'or a chip of "H200 SXM", "H100 SXM", got "H100"$'):
        Layer("H100", "FP8", "exact", False, (16,), 16).plan()


def test_estimates_are_of_one_token_or_more():
    with pytest.raises(ValueError, match="tokens"):
        Layer("9.0", "FP8", "exact", False, (16,), 16).plan().estimates(0)
    cpu = _C.linear_plan("FP8", 16, [16], None, "bfloat16", "cpu", "exact")
    assert "cpu:portable" in {kernel for kernel, _, _ in cpu.estimates(1)}
