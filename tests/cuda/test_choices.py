"""Choices of the plan on chips that need not be here: csrc/cuda/choice, in builds with and without nvcc."""

import math

import pytest

from moqext import _C

from .. import choice_layers
from ..choice_layers import Layer
from ..moe_calls import MODELS
from ..moe_calls import plan as experts
from ..work import each

OWN = ("cuda:sm90", "cuda:cublaslt", "cuda:sm80_general")
LAYERS = list(choice_layers.layers())
KINDS = sorted({(layer.chip, *layer[1:4]) for layer in LAYERS})


def of_kind(kind):
    return [layer for layer in LAYERS if layer[:4] == kind]


def plan_is_of_hopper(layer):
    return layer.chip in choice_layers.HOPPER


@each("kind", KINDS)
def test_no_estimate_is_missing(kind):
    """In a build without nvcc all of these were 0 once, and tests of choices passed by luck."""
    for layer in of_kind(kind):
        plan = layer.plan()
        for tokens in layer.tokens:
            estimates = plan.estimates(tokens)
            assert all(1e-7 < seconds < math.inf for _, _, seconds in estimates), (str(layer), tokens)
            own = [row for row in estimates if row[0].startswith(OWN)]
            kernel, _, _ = min(own if plan_is_of_hopper(layer) else estimates, key=lambda row: row[2])
            assert plan.backend(tokens) == kernel, (str(layer), tokens)


def test_an_estimate_of_every_kernel_for_hopper_is_compared():
    seen = {row[0] for layer in LAYERS for row in layer.plan().estimates(16)}
    hopper = {name for name, _ in LAYERS[0].plan().explain() if name.startswith("cuda:")}
    assert hopper - seen <= {"cuda:cublaslt_fp4"} | {name for name in hopper if "sm90" not in name}


def test_a_kernel_is_compared_for_the_tokens_that_it_runs():
    plan = Layer("9.0", "NVFP4", "exact", False, (4096,), 4096).plan()
    assert "cuda:sm90_nvfp4_decode" in {row[0] for row in plan.estimates(16)}
    assert "cuda:sm90_nvfp4_decode" not in {row[0] for row in plan.estimates(17)}


@pytest.mark.parametrize("kind", choice_layers.HOPPER_KINDS, ids=str)
def test_a_capability_alone_is_taken_for_an_h200(kind):
    known = Layer("H200 SXM", *kind, (4096,), 14336).plan()
    alone = Layer("9.0", *kind, (4096,), 14336).plan()
    for tokens in choice_layers.TOKENS:
        assert alone.estimates(tokens) == known.estimates(tokens)


@each(
    "capability, chip",
    [("10.0", "B200"), ("10.3", "B300"), ("12.0", "RTX PRO 6000"), ("12.1", "GB10"), ("8.9", "L40S")],
)
def test_a_capability_alone_is_taken_for_the_first_chip_that_has_it(capability, chip):
    for kind in choice_layers.OTHER_KINDS:
        known, alone = (Layer(name, *kind, (4096,), 14336).plan() for name in (chip, capability))
        assert alone.memory == known.memory
        assert alone.estimates(64) == known.estimates(64)


def test_a_capability_of_later_is_taken_for_a_chip_of_its_generation():
    """None of the table has 12.3; memory of 10 % of an H200's is nearer to it than an H200."""
    assert Layer("12.3", "NVFP4", "exact", False, (4096,), 4096).plan().memory < 0.4


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
    assert 1 < h100 / h200 <= 4.82 / 3.35


def test_products_take_as_long_on_an_h100():
    """An H100 has the tensor cores of an H200: thousands of tokens differ by the reading of the weight."""
    h200, h100 = (estimates(chip, 8192)["cuda:cublaslt"] for chip in ("H200 SXM", "H100 SXM"))
    assert h200 <= h100 < 1.02 * h200


def test_a_chip_has_one_name():
    with pytest.raises(ValueError, match=r'or a chip of "H200 SXM", "H100 SXM", .*, got "H100"$'):
        Layer("H100", "FP8", "exact", False, (16,), 16).plan()


# ---- chips by their attributes ----

CHIPS = {
    # how fast memory is, and the tensor cores of all multiprocessors, beside an H200's
    "H200 SXM": (1, 1),
    "H100 SXM": (0.70, 1),
    "H100 PCIe": (0.42, 0.77),
    "GH200": (0.84, 1),
    "H20": (0.84, 0.15),
    "A100 SXM": (0.42, 0.58),
    "L40S": (0.18, 1.37),
    "RTX 5090": (0.37, 1.57),
    "B200": (1.60, 1.11),
    "B300": (1.66, 1.09),
    "RTX PRO 6000": (0.37, 1.87),
    "GB10": (0.06, 0.46),
}
HOPPERS = ("H200 SXM", "H100 SXM", "H100 PCIe", "GH200", "H20")


@pytest.mark.parametrize("chip", CHIPS)
def test_rates_of_a_chip_are_those_of_its_attributes(chip):
    assert Layer(chip, "NVFP4", "exact", False, (4096,), 4096).plan().memory == pytest.approx(
        CHIPS[chip][0], abs=0.01
    )


@pytest.mark.parametrize("chip", HOPPERS)
def test_every_chip_of_hopper_has_kernels_for_hopper(chip):
    """Few tokens in kernels that read, many in those that multiply, from 16 rows to 57344."""
    decode = {"FP8": ("fp8_decode", "fp8_prefill", "cublaslt"), "NVFP4": ("nvfp4_decode", "nvfp4_medium")}
    prefill = {"FP8": ("fp8_prefill", "cublaslt"), "NVFP4": ("nvfp4_prefill", "nvfp4_medium")}
    for algo in decode:
        for rows, columns in choice_layers.SHAPES[:13]:
            plan = Layer(chip, algo, "exact", False, (rows,), columns).plan()
            assert plan.backend(1).removeprefix("cuda:").removeprefix("sm90_") in decode[algo]
            assert plan.backend(8192).removeprefix("cuda:").removeprefix("sm90_") in prefill[algo]
    for algo, kernel in (("FP8", "cuda:sm90_fp8_prefill"), ("NVFP4", "cuda:sm90_nvfp4_prefill")):
        for sizes in MODELS.values():
            layer = experts(algo, *sizes, chip=chip)
            assert layer.backend(1).startswith("cuda:sm90")
            assert layer.backend(65536) == kernel


@pytest.mark.parametrize(
    "chip, algo, decode, prefill",
    [
        ("A100 SXM", "FP8", {"sm80_fp8"}, {"sm80_fp8"}),
        ("A100 SXM", "NVFP4", {"sm80_nvfp4"}, {"sm80_nvfp4"}),
        ("L40S", "FP8", {"sm89_fp8", "cublaslt"}, {"sm89_fp8", "cublaslt"}),
        ("L40S", "NVFP4", {"sm80_nvfp4"}, {"sm80_nvfp4"}),
        ("RTX 5090", "FP8", {"sm89_fp8", "cublaslt"}, {"sm89_fp8", "cublaslt"}),
        ("RTX 5090", "NVFP4", {"sm80_nvfp4"}, {"sm80_nvfp4"}),
        ("B200", "FP8", {"sm89_fp8", "cublaslt"}, {"cublaslt"}),
        ("GB10", "FP8", {"sm89_fp8", "cublaslt"}, {"sm89_fp8", "cublaslt"}),
        ("GB10", "NVFP4", {"sm80_nvfp4"}, {"sm80_nvfp4"}),
    ],
)
def test_other_chips_have_products_of_warps_or_the_library(chip, algo, decode, prefill):
    """Never plain cores, of layers and of experts."""
    for rows, columns in choice_layers.SHAPES[:13]:
        plan = Layer(chip, algo, "exact", False, (rows,), columns).plan()
        assert plan.backend(1).removeprefix("cuda:") in decode
        assert plan.backend(4096).removeprefix("cuda:") in prefill
    for sizes in MODELS.values():
        for tokens in (1, 64, 4096):
            assert experts(algo, *sizes, chip=chip).backend(tokens) != "cuda:simt"


def least(chip, tokens, algo="FP8"):
    plan = Layer(chip, algo, "exact", False, (28672,), 8192).plan()
    return min(seconds for kernel, _, seconds in plan.estimates(tokens) if "sm8" not in kernel)


@pytest.mark.parametrize("chip", HOPPERS[1:])
def test_reading_takes_as_long_as_memory_and_multiplying_as_cores(chip):
    memory, cores = CHIPS[chip]
    assert least(chip, 1) / least("H200 SXM", 1) == pytest.approx(1 / memory, rel=0.2)
    assert least(chip, 8192) / least("H200 SXM", 8192) == pytest.approx(1 / cores, rel=0.3)


@pytest.mark.parametrize("chip, times", [("RTX PRO 6000", 1.3), ("RTX 5090", 2.5), ("GB10", 5)])
def test_blackwell_is_not_taken_for_an_h200(chip, times):
    """Products of warps take as many times as long, at least, and weights longer to read."""
    of = [estimates(name, 4096, quant_algo="NVFP4")["cuda:sm80_nvfp4"] for name in (chip, "H200 SXM")]
    assert of[0] > times * of[1]
    reading = [estimates(name, 1, quant_algo="NVFP4")["cuda:sm80_nvfp4"] for name in (chip, "H200 SXM")]
    assert reading[0] > reading[1]


def test_auto_folds_sooner_where_cores_are_slow():
    """FP8 products are half the work of exact ones, and an H20 is bound by it from fewer tokens on."""
    first = {}
    for chip in HOPPERS:
        plan = Layer(chip, "NVFP4", "auto", False, (8192,), 8192).plan()
        first[chip] = next(
            tokens for tokens in (16, 32, 64, 128, 256, 512, 1024) if plan.compute_for(tokens) == "fp8"
        )
    assert first["H20"] < min(first[chip] for chip in HOPPERS if chip != "H20")


def test_estimates_are_of_one_token_or_more():
    with pytest.raises(ValueError, match="tokens"):
        Layer("9.0", "FP8", "exact", False, (16,), 16).plan().estimates(0)
    cpu = _C.linear_plan("FP8", 16, [16], None, "bfloat16", "cpu", "exact")
    assert "cpu:portable" in {kernel for kernel, _, _ in cpu.estimates(1)}
