"""Which kernels do experts of each algorithm and compute where no GPU need be, and what others say."""

from typing import Any

import pytest

from moqext import _C, UnsupportedQuantization

from .linear_cases import GENERAL
from .moe_cases import COMPUTES
from .moe_code_cases import CODED
from .work import each

CHIPS = ("8.0", "8.9", "9.0", "10.0", "12.0")


def plan(
    algo: str,
    compute: str,
    dtype: str = "bfloat16",
    chip: str = "8.0",
    sizes: Any = None,
    coded: bool = False,
) -> Any:
    """The plan of a layer on a chip that need not be here; x of a coded one is codes."""
    activation = ("silu", True, None, dtype, "cuda:0", compute)
    numbers = (None, None, None, None, False)
    return _C.moe_plan(algo, *(sizes or (128, 2048, 768, 8)), *activation, *numbers, chip, coded)


def product_of(algo: str, compute: str) -> str:
    """The kernel for any chip of 16-bit layers."""
    if algo in GENERAL and compute == "exact":
        return "cuda:sm80_general"
    if "FP4" not in algo:
        return "cuda:sm80_fp8"
    return "cuda:sm80_nvfp4_fp8" if compute == "fp8" else "cuda:sm80_nvfp4"


EVERY = [*COMPUTES, *((algo, "exact") for algo in GENERAL), ("MXFP8", "fp8")]


@each("dtype", ["bfloat16", "float16"])
@each("algo, compute", EVERY)
def test_tensor_cores_do_every_compute(algo, compute, dtype):
    """Whatever is multiplied, no layer of a model is left to plain cores on any chip."""
    for chip in CHIPS:
        layer = plan(algo, compute, dtype, chip)
        assert dict(layer.explain())[product_of(algo, compute)] is None
        for tokens in (1, 64, 512, 4096, 65536):
            assert layer.backend(tokens) != "cuda:simt"


@pytest.mark.parametrize("chip", CHIPS)
def test_auto_is_exact_where_folding_gains_nothing(chip):
    """Exact and folded kernels multiply float16, and folding has more to do."""
    for algo in ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"):
        layer = plan(algo, "auto", chip=chip)
        assert dict(layer.explain())["cuda:sm80_nvfp4_fp8"] is None
        assert all(
            layer.backend(tokens) != "cuda:sm80_nvfp4_fp8" for tokens in (1, 16, 256, 1024, 4096, 65536)
        )


@each(
    "algo, compute, dtype, kernel, reason",
    [
        ("NVFP4", "fp8", "bfloat16", "cuda:sm80_nvfp4", "weights exactly, compute fp8 asks for another"),
        ("NVFP4", "exact", "bfloat16", "cuda:sm80_nvfp4_fp8", "NVFP4 with compute exact is another layer"),
        ("NVFP4", "fp4", "bfloat16", "cuda:sm80_nvfp4_fp8", "NVFP4 with compute fp4 is another layer"),
        ("W4A8_NVFP4_FP8", "exact", "bfloat16", "cuda:sm80_nvfp4_fp8", "compute exact is another layer"),
        ("FP8", "exact", "bfloat16", "cuda:sm80_nvfp4", "multiplies NVFP4 weights, FP8 has others"),
        ("FP8", "exact", "bfloat16", "cuda:sm80_nvfp4_fp8", "multiplies NVFP4 weights, FP8 has others"),
        ("NVFP4", "fp8", "float32", "cuda:sm80_nvfp4_fp8", "16-bit activations, the layer has float32"),
        ("W4A8_NVFP4_FP8", "exact", "float32", "cuda:sm80_nvfp4", "the layer has float32"),
        ("NVFP4", "fp4", "bfloat16", "cuda:sm80_fp8", "multiplies FP8 weights"),
        ("FP8", "exact", "bfloat16", "cuda:sm80_general", "MXFP8, int8 and int4 weights, FP8 with compute"),
        ("W8A16", "exact", "float32", "cuda:sm80_general", "16-bit activations, the layer has float32"),
    ],
)
def test_what_is_refused(algo, compute, dtype, kernel, reason):
    assert reason in dict(plan(algo, compute, dtype).explain())[kernel]


@each("algo, compute", EVERY)
def test_too_many_experts_are_refused_by_all(algo, compute):
    """Their slots are sorted by counts that a block holds."""
    with pytest.raises(UnsupportedQuantization, match="needs at most 1024 experts, got 1025"):
        plan(algo, compute, sizes=(1025, 128, 128, 2))


@pytest.mark.parametrize("compute", ["exact", "fp8", "fp4", "auto"])
@pytest.mark.parametrize("chip", ["8.0", "10.0"])
def test_stacks_are_packed_whatever_is_multiplied(compute, chip):
    """One form of the codes and block scales for all kernels of experts."""
    params = {name: shape for name, shape, *_ in plan("NVFP4", compute, chip=chip).prepared_params()}
    assert params["w13_weight"] == (128, 96, 32, 576)
    assert params["w2_weight"] == (128, 128, 12, 576)
    assert "w13_weight_scale" not in params
    assert ("w13_fold_scale" in params) == (compute in ("fp8", "auto"))


@each("algo, compute", CODED)
def test_codes_have_the_kernels_of_values(algo, compute):
    """No layer is slower for codes, which leave less to do; every config of every kernel takes them."""
    for chip in CHIPS:
        coded, values = (plan(algo, compute, chip=chip, coded=each) for each in (True, False))
        for tokens in (1, 2, 4, 8, 64, 512, 4096):
            assert coded.config(tokens) == values.config(tokens)
            assert coded.configs(tokens) == values.configs(tokens)
