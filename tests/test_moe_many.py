"""Which layers of experts, and how many tokens, the kernels of many tokens on Hopper are taken for."""

from typing import Any

import pytest

from moqext import _C

NVFP4, FP8 = "cuda:sm90_nvfp4_many", "cuda:sm90_fp8_many"
FORMATS = [
    ("NVFP4", NVFP4),
    ("W4A16_NVFP4", NVFP4),
    ("FP8", FP8),
    ("FP8_PER_CHANNEL_PER_TOKEN", FP8),
    ("FP8_PB_WO", FP8),
]


def plan(algo: str, *sizes: int, dtype: str = "bfloat16", compute: str = "exact", chip: str = "9.0") -> Any:
    """The plan of a layer on a chip that need not be here."""
    activation = ("silu", True, None, dtype, "cuda:0", compute)
    return _C.moe_plan(algo, *sizes, *activation, None, None, None, None, False, chip)


@pytest.mark.parametrize("chip", ["9.0", "H100 SXM", "H200 SXM"])
@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_models(algo, kernel, chip):
    """Experts with 64 rows and more are never done otherwise."""
    for sizes in (
        (128, 2048, 768, 8),
        (128, 4096, 1536, 8),
        (8, 4096, 14336, 2),
        (256, 7168, 256, 8),
        (32, 7168, 2048, 8),
        (128, 5120, 8192, 1),
        (128, 2880, 2880, 4),
        (512, 2048, 512, 10),
    ):
        layer = plan(algo, *sizes, chip=chip)
        for tokens in (2048, 4096, 8192, 65536):
            if tokens * sizes[3] >= 64 * sizes[0]:
                assert layer.backend(tokens) == kernel, (sizes, tokens)


@pytest.mark.parametrize("algo, kernel", FORMATS)
def test_one_token_goes_elsewhere(algo, kernel):
    layer = plan(algo, 128, 2048, 768, 8)
    assert layer.backend(1) != kernel
    assert layer.backend(512) == kernel


@pytest.mark.parametrize(
    "algo, sizes, options, kernel, reason",
    [
        ("FP8", (8, 264, 128, 2), {}, FP8, "multiple of 16"),
        ("FP8", (8, 256, 120, 2), {}, FP8, "multiple of 16"),
        ("FP8", (8, 256, 128, 2), {"dtype": "float32"}, FP8, "float32"),
        ("NVFP4", (8, 256, 128, 2), {"dtype": "float32"}, NVFP4, "float32"),
        ("NVFP4", (8, 256, 128, 2), {"compute": "fp8"}, NVFP4, "multiplies NVFP4 weights exactly"),
        ("NVFP4", (8, 256, 128, 2), {}, FP8, "multiplies FP8 weights"),
        ("FP8", (8, 256, 128, 2), {}, NVFP4, "multiplies NVFP4 weights exactly"),
        ("NVFP4", (8, 256, 128, 2), {"chip": "8.0"}, NVFP4, "9.0"),
        ("NVFP4", (8, 256, 128, 2), {"chip": "10.0"}, NVFP4, "9.0"),
    ],
)
def test_what_is_refused(algo, sizes, options, kernel, reason):
    assert reason in dict(plan(algo, *sizes, **options).explain())[kernel]
