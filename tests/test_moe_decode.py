"""Which layers of experts, and how many tokens, the kernels of few tokens on Hopper are taken for."""

from .moe_calls import MODELS, plan
from .work import each

NVFP4, FP8 = "cuda:sm90_nvfp4_decode", "cuda:sm90_fp8_decode"


@each("chip", ["9.0", "H100 SXM", "H200 SXM"])
@each(
    "algo, kernel",
    [
        ("NVFP4", NVFP4),
        ("W4A16_NVFP4", NVFP4),
        ("FP8", FP8),
        ("FP8_PER_CHANNEL_PER_TOKEN", FP8),
        ("FP8_PB_WO", FP8),
    ],
)
def test_models(algo, kernel, chip):
    """One token is done so in most of them, and in no other than the kernel of many tokens elsewhere."""
    taken = [plan(algo, *sizes, chip=chip).backend(1) for sizes in MODELS.values()]
    assert set(taken) <= {kernel, kernel.replace("_decode", "_prefill")}
    assert taken.count(kernel) > len(taken) / 2


def test_more_slots_go_elsewhere():
    layer = plan("NVFP4", 128, 2048, 768, 8)
    assert layer.backend(64) == NVFP4
    assert layer.backend(129) != NVFP4


@each(
    "algo, sizes, options, kernel, reason",
    [
        ("NVFP4", (8, 256, 96, 2), {}, NVFP4, "multiples of 64, got 256 and 96"),
        ("FP8", (8, 272, 128, 2), {}, FP8, "multiples of 32, got 272 and 128"),
        ("FP8", (8, 256, 128, 2), {"dtype": "float32"}, FP8, "needs bfloat16 or float16, got float32"),
        ("FP8", (8, 256, 128, 2), {}, NVFP4, "multiplies NVFP4 weights exactly"),
        ("NVFP4", (8, 256, 128, 2), {"compute": "fp8"}, NVFP4, "multiplies NVFP4 weights exactly"),
        ("NVFP4", (8, 256, 128, 2), {}, FP8, "multiplies FP8 weights"),
        ("NVFP4_AWQ", (8, 256, 128, 2), {}, NVFP4, "does not smooth x"),
        ("NVFP4", (8, 256, 128, 2), {"chip": "8.0"}, NVFP4, "needs compute capability 9.0"),
        ("NVFP4", (8, 256, 128, 2), {"chip": "10.0"}, NVFP4, "needs compute capability 9.0"),
    ],
)
def test_what_is_refused(algo, sizes, options, kernel, reason):
    assert reason in dict(plan(algo, *sizes, **options).explain())[kernel]
