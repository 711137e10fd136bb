"""Which layers of experts, and how many tokens, the kernels of many tokens on Hopper are taken for."""

import pytest

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
    """Taken for any number of tokens; for few of them the kernel for any chip took up to 117 % more."""
    for sizes in MODELS.values():
        layer = plan(algo, *sizes, compute="fp8", chip="H200 SXM")
        for tokens in (1, 16, 256, 1024, 4096, 65536):
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
