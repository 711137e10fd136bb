"""Which layers of experts, and how many tokens, the kernels of many tokens on Hopper are taken for."""

from statistics import mean

import pytest

from .measured_experts import measured
from .moe_calls import MODELS, plan
from .work import each

NVFP4, FP8, FOLDED = "cuda:sm90_nvfp4_prefill", "cuda:sm90_fp8_prefill", "cuda:sm90_nvfp4_fp8_prefill"
FORMATS = [
    ("NVFP4", NVFP4),
    ("W4A16_NVFP4", NVFP4),
    ("FP8", FP8),
    ("FP8_PER_CHANNEL_PER_TOKEN", FP8),
    ("FP8_PB_WO", FP8),
]


@each("chip", ["9.0", "H100 SXM", "H200 SXM"])
@each("algo, kernel", FORMATS)
def test_models(algo, kernel, chip):
    """Experts with 64 rows and more are never done otherwise."""
    for sizes in MODELS.values():
        layer = plan(algo, *sizes, chip=chip)
        for tokens in (2048, 4096, 8192, 65536):
            if tokens * sizes[3] >= 64 * sizes[0]:
                assert layer.backend(tokens) == kernel, (sizes, tokens)


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_one_token_goes_elsewhere(algo, kernel):
    layer = plan(algo, 128, 2048, 768, 8)
    assert layer.backend(1) != kernel
    assert layer.backend(512) == kernel


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
def test_folded_weights(algo):
    """Taken from four rows an expert on, and from 2.3 where that was measured; fewer were not."""
    assert plan(algo, 256, 7168, 256, 8, compute="fp8", chip="H200 SXM").backend(64) == FOLDED
    for sizes in MODELS.values():
        layer = plan(algo, *sizes, compute="fp8", chip="H200 SXM")
        assert layer.backend(1) == "cuda:sm80_nvfp4_fp8", sizes
        for tokens in (256, 1024, 4096, 65536):
            if tokens * sizes[3] >= 4 * sizes[0]:
                assert layer.backend(tokens) == FOLDED, (sizes, tokens)


def test_auto_folds_where_that_is_faster():
    layer = plan("NVFP4", 128, 2048, 768, 8, compute="auto", chip="H200 SXM")
    assert layer.backend(256) == NVFP4
    assert layer.backend(4096) == FOLDED
    assert layer.compute_for(4096) == "fp8"


@each(
    "algo, sizes, options, kernel, reason",
    [
        ("FP8", (8, 264, 128, 2), {}, FP8, "multiple of 16"),
        ("FP8", (8, 256, 120, 2), {}, FP8, "multiple of 16"),
        ("FP8", (8, 256, 128, 2), {"dtype": "float32"}, FP8, "float32"),
        ("NVFP4", (8, 256, 128, 2), {"dtype": "float32"}, NVFP4, "float32"),
        ("NVFP4", (8, 256, 128, 2), {"compute": "fp8"}, NVFP4, "multiplies NVFP4 weights exactly"),
        ("NVFP4", (8, 256, 128, 2), {}, FP8, "multiplies FP8 weights"),
        ("FP8", (8, 256, 128, 2), {}, NVFP4, "multiplies NVFP4 weights exactly"),
        ("NVFP4", (8, 256, 128, 2), {}, FOLDED, "multiplies NVFP4 weights with compute fp8"),
        ("FP8", (8, 256, 128, 2), {}, FOLDED, "multiplies NVFP4 weights with compute fp8"),
        ("W4A8_NVFP4_FP8", (8, 256, 128, 2), {"compute": "fp8"}, FOLDED, "quantizes x by token"),
        ("NVFP4", (8, 256, 128, 2), {"compute": "fp8", "dtype": "float32"}, FOLDED, "float32"),
        ("NVFP4", (8, 256, 128, 2), {"compute": "fp8", "chip": "8.0"}, FOLDED, "9.0"),
        ("NVFP4", (8, 256, 128, 2), {"chip": "8.0"}, NVFP4, "9.0"),
        ("NVFP4", (8, 256, 128, 2), {"chip": "10.0"}, NVFP4, "9.0"),
    ],
)
def test_what_is_refused(algo, sizes, options, kernel, reason):
    assert reason in dict(plan(algo, *sizes, **options).explain())[kernel]


MEASURED = list(measured("expert_ways.txt"))
# Time of chosen ways beyond the fastest: the mean, and the most.
LOSSES = {"NVFP4": (0.005, 0.04), "NVFP4,fp8": (0.001, 0.005)}


@each("chip, layer", sorted({cell[:2] for cell in MEASURED}))
def test_tiles_are_the_fastest_that_were_measured(chip, layer):
    """One fit was of one chip, and on the other took the small tiles of FP8 for 45 % more time."""
    losses = {}
    for cell in (cell for cell in MEASURED if cell[:2] == (chip, layer)):
        kernel, row = cell.plan().row(cell.tokens)
        if kernel in (NVFP4, FP8, FOLDED):
            losses[cell.model, cell.tokens] = cell.loss(str(row))
    least, most = LOSSES.get(layer, (0.003, 0.07))
    assert len(losses) > 15
    assert mean(losses.values()) < least
    assert max(losses.values()) < most, losses
