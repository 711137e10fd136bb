"""The way of a call: found once by csrc/cuda/choice, kept by the plan, laid out by arithmetic alone."""

import math

import pytest

from .. import choice_layers
from ..choice_layers import Layer
from ..work import each

HOPPER_LAYERS = [layer for layer in choice_layers.layers() if layer.chip == "H200 SXM"]
KINDS = choice_layers.HOPPER_KINDS
VARIANTS = range(1, 64)
FUSED = range(14, 17)  # rows of fp8_prefill_config.h whose tiles quantize x, and need its scale


def layer_of(kind, rows=4096, columns=4096, chip="H200 SXM"):
    return Layer(chip, *kind, (rows,), columns)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_way_laid_out_takes_what_the_search_expected(kind):
    """To the last bit: another shape, division or number of blocks has another estimate."""
    for layer in HOPPER_LAYERS:
        if layer[1:4] != kind:
            continue
        plan = layer.plan()
        for tokens in layer.tokens:
            found = {kernel: (variant, seconds) for kernel, variant, seconds in plan.estimates(tokens)}
            kernel, variant, _, _, seconds = plan.config(tokens)
            assert kernel == plan.backend(tokens)
            assert (variant, seconds) == found[kernel], (str(layer), tokens)


@each("rows, columns", [(4096, 4096), (2112, 7168), (57344, 8192), (96, 64)])
@each("kind", KINDS)
def test_every_variant_is_a_way_of_its_own_or_the_choice(kind, rows, columns):
    plan = layer_of(kind, rows, columns).plan()
    for tokens in (1, 16, 33, 64, 96, 512, 2048):
        for kernel, chosen, least in plan.estimates(tokens):
            if not kernel.startswith("cuda:sm90"):
                continue
            configs = {}
            for variant in (0, *VARIANTS):
                plan.keep(tokens, kernel, variant)
                configs[variant] = plan.config(tokens)
            assert configs[0][4] == least
            for variant, config in configs.items():
                assert config[0] == kernel
                assert 1 <= config[3] <= 8
                assert 0 < config[4] < math.inf
                assert config[1] == variant or config == configs[0], (tokens, variant)
                assert configs[config[1]] == config, (tokens, variant)  # its number names it
            assert configs[0] == configs[chosen]


@pytest.mark.parametrize("kernel, kind, tokens, least", [
    ("cuda:sm90_fp8_prefill", ("FP8", "exact", False), 64, 8),
    ("cuda:sm90_nvfp4_decode", ("NVFP4", "exact", False), 8, 5),
    ("cuda:sm90_nvfp4_medium", ("NVFP4", "exact", False), 64, 8),
    ("cuda:sm90_nvfp4_prefill", ("NVFP4", "exact", False), 512, 4),
    ("cuda:sm90_general_prefill", ("MXFP8", "exact", False), 512, 4),
    ("cuda:sm90_nvfp4_fp8_medium", ("NVFP4", "fp8", False), 64, 8),
    ("cuda:sm90_nvfp4_fp8_prefill", ("NVFP4", "fp8", True), 512, 6),
])  # fmt: skip
def test_variants_are_many_configs(kernel, kind, tokens, least):
    """The choice is the soonest of them; were the variant lost on its way, there would be one."""
    plan = layer_of(kind).plan()
    configs = set()
    for variant in VARIANTS:
        plan.keep(tokens, kernel, variant)
        configs.add(plan.config(tokens)[2:])
    plan.keep(tokens, kernel, 0)
    assert len(configs) >= least
    assert plan.config(tokens)[2:] in configs


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 64])
def test_without_a_scale_of_x_no_shape_is_taken_that_needs_it(tokens):
    plan = layer_of(("FP8", "exact", False)).plan()
    without = []
    for variant in (0, *VARIANTS):
        plan.keep(tokens, "cuda:sm90_fp8_prefill", variant)
        given, dynamic = plan.config(tokens), plan.config(tokens, input_scale=False)
        assert dynamic[2] not in FUSED
        assert given[2] in FUSED or dynamic == given
        without.append(dynamic[4])
    assert without[0] == min(without)
    plan.keep(tokens, "cuda:sm90_fp8_prefill", FUSED[0] + 1)
    assert plan.config(tokens)[2] == FUSED[0]


def test_blocks_share_long_rows_of_x_that_are_not_quantized():
    """Values of 16 bits take twice the room of codes in the kernel for few tokens."""
    plan = layer_of(("FP8", "exact", False)).plan()
    plan.keep(8, "cuda:sm90_fp8_decode", 0)
    assert plan.config(8)[3] == 1
    assert plan.config(8, input_scale=False)[3] == 2


def test_what_is_kept_after_calls_is_taken():
    """For all numbers near it, which were remembered, and for no other."""
    plan = layer_of(("NVFP4", "exact", False)).plan()
    asked = range(1, 600)
    before = {tokens: plan.config(tokens) for tokens in asked}
    other = 1 if before[64][1] != 1 else 2
    plan.keep(64, "cuda:sm90_nvfp4_medium", other)
    after = {tokens: plan.config(tokens) for tokens in asked}
    assert [tokens for tokens in asked if after[tokens] != before[tokens]] == [61, 62, 63, 64]
    assert {after[tokens][1] for tokens in range(61, 65)} == {other}
    plan.keep(62, "cuda:sm90_nvfp4_medium", 0)
    assert {tokens: plan.config(tokens) for tokens in asked} == before


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_kept_variant_has_a_way_for_each_number_of_tokens(kind):
    """Whichever number was asked for first: blocks that share are as many as that number of tiles allows."""
    kernel, variant = {
        "FP8": ("fp8_prefill", 5),
        "NVFP4": ("nvfp4_medium", 5),
        "MXFP8": ("general", 5),
        "W8A8_SQ_PER_CHANNEL": ("int8_prefill", 2),
    }.get(kind[0], ("fp8_prefill", 2))
    if kind[1] == "fp8":
        kernel = "nvfp4_fp8_medium"
    near = range(241, 257)
    up, down = layer_of(kind).plan(), layer_of(kind).plan()
    for plan in (up, down):
        plan.keep(256, f"cuda:sm90_{kernel}", variant)
    assert [up.config(tokens) for tokens in near] == [down.config(tokens) for tokens in reversed(near)][::-1]


def test_no_tokens_are_not_what_was_kept_for_one():
    plan = layer_of(("NVFP4", "exact", False)).plan()
    usual, kept = plan.backend(0), "cuda:sm90_nvfp4_prefill"
    assert usual == plan.backend(1) != kept
    plan.keep(1, kept, 3)
    assert plan.config(1)[:2] == (kept, 3)
    assert plan.backend(0) == usual
    assert plan.config(1)[:2] == (kept, 3)


def test_more_tokens_than_are_remembered_have_a_way_too():
    plan = layer_of(("FP8", "exact", False)).plan()
    for tokens in (2**32 + 1, 1, 2**32 + 1, 2**63 - 1, 2**31 + 1, 1):
        assert plan.config(tokens) == layer_of(("FP8", "exact", False)).plan().config(tokens)


def test_a_way_is_of_one_token_or_more():
    plan = layer_of(("FP8", "exact", False)).plan()
    with pytest.raises(ValueError, match="tokens"):
        plan.config(0)
