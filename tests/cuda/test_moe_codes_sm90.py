"""Codes as x in the kernels of Hopper: in every config, bit by bit what the same call makes of values."""

from typing import Any

import numpy as np
import pytest

from moqext import MoEMethod

from ..linear_cases import random_x
from ..moe_calls import as_values, layer_of, moved, prepared, run
from ..moe_cases import random_expert_map, random_routing, random_stacks
from ..moe_code_cases import check_codes, quantized, run_codes
from .cases import torch

pytestmark = pytest.mark.gpu

DECODE, PREFILL, FOLDED = "cuda:sm90_fp8_decode", "cuda:sm90_fp8_prefill", "cuda:sm90_nvfp4_fp8_prefill"
FORMATS = [
    ("FP8", "exact", DECODE),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact", DECODE),
    ("FP8_PB_WO", "exact", DECODE),
    ("FP8", "exact", PREFILL),
    ("FP8_PER_CHANNEL_PER_TOKEN", "exact", PREFILL),
    ("FP8_PB_WO", "exact", PREFILL),
    ("NVFP4", "fp8", FOLDED),
    ("W4A16_NVFP4", "fp8", FOLDED),
]
CONFIGS = {DECODE: 5, PREFILL: 2, FOLDED: 2}
"""Variants of a kernel beside its own choice."""


class Pair:
    """A layer of codes and one of values, which `kernel` runs, with the same stacks."""

    def __init__(
        self,
        monkeypatch: Any,
        rng: Any,
        kernel: str,
        algo: str,
        *sizes: int,
        bias: Any = None,
        **options: Any,
    ) -> None:
        self.kernel = kernel
        gated = options.get("gated", True)
        self.coded = layer_of(monkeypatch, kernel, algo, *sizes, quantized_input=True, **options)
        self.plain = layer_of(monkeypatch, kernel, algo, *sizes, **options)
        self.stacks = random_stacks(rng, algo, *sizes, gated=gated, bias=bias)
        self.params = prepared(self.coded, self.stacks)
        self.own = prepared(self.plain, self.stacks)

    def keep(self, tokens: int, config: int) -> None:
        for method in (self.coded, self.plain):
            method._plan.keep(tokens, self.kernel, config)

    def check_bits(
        self, rng: Any, tokens: int, kind: str, ids_dtype: str = "int32", **options: Any
    ) -> tuple[Any, ...]:
        """Codes and scales, routing and y, whose bits are those of values."""
        method: MoEMethod = self.coded
        x = random_x(rng, (tokens, method.hidden_size), method.dtype)
        experts = method.global_num_experts
        weights, ids = random_routing(rng, tokens, method.top_k, experts, kind, ids_dtype)
        codes, scale = quantized(method, self.stacks, as_values(x, method.dtype))
        y = run_codes(method, self.params, codes, scale, weights, ids, **options)
        expected = run(self.plain, self.own, x, weights, ids, **options)
        np.testing.assert_array_equal(y, expected)
        return codes, scale, weights, ids, y


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_every_config(rng, monkeypatch, algo, compute, kernel, dtype):
    """One slot, a warp's lanes of them and more, with K that ends within a block."""
    options = {"top_k": 3, "dtype": dtype, "compute": compute, "bias": "float32"}
    pair = Pair(monkeypatch, rng, kernel, algo, 20, 352, 448, **options)
    for tokens in (1, 2, 9, 70):
        for config in range(CONFIGS[kernel] + 1):
            pair.keep(tokens, config)
            for kind in ("random", "few"):
                codes, scale, weights, ids, y = pair.check_bits(rng, tokens, kind, "int64")
        check_codes(y, pair.coded, pair.stacks, codes, scale, weights, ids)


@pytest.mark.parametrize("hidden, inner", [(2048, 768), (2880, 384), (4096, 256), (128, 1152), (1056, 320)])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_hidden_sizes(rng, monkeypatch, algo, compute, kernel, hidden, inner):
    """Splits of one block of K to four that come out even and overlap, and rows of several copies."""
    pair = Pair(monkeypatch, rng, kernel, algo, 3, hidden, inner, top_k=2, compute=compute)
    for tokens in (1, 3, 50):
        for config in range(CONFIGS[kernel] + 1):
            pair.keep(tokens, config)
            pair.check_bits(rng, tokens, "random")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_routing_and_shares(rng, monkeypatch, algo, compute, kernel, gated):
    """Slots that count nothing, experts elsewhere, experts of many chunks and none; results that add up."""
    options = {"top_k": 4, "global_num_experts": 40, "compute": compute, "gated": gated}
    pair = Pair(monkeypatch, rng, kernel, algo, 10, 256, 128, **options)
    expert_map = random_expert_map(rng, 40, 10)
    for tokens in (1, 5, 60, 200):
        for config in range(CONFIGS[kernel] + 1):
            pair.keep(tokens, config)
            for kind in ("hostile", "one"):
                pair.check_bits(rng, tokens, kind, expert_map=expert_map)


@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_strides_of_codes_and_scales(rng, monkeypatch, algo, compute, kernel):
    """Rows apart, scales by column, and leading dimensions that are none of a matrix."""
    pair = Pair(monkeypatch, rng, kernel, algo, 6, 320, 192, top_k=2, compute=compute)
    for config in range(CONFIGS[kernel] + 1):
        pair.keep(12, config)
        codes, scale, weights, ids, y = pair.check_bits(rng, 12, "random")
        room = moved(pair.coded, np.full((12, 336), 0x7F, np.uint8))[:, :320]
        room.copy_(moved(pair.coded, codes))
        routing = moved(pair.coded, weights), moved(pair.coded, ids)
        scales = [moved(pair.coded, scale)]
        if scale is not None:
            by_column = torch.full((scale.shape[1] + 1, 12), float("nan"), device="cuda").t()[:, :-1]
            apart = torch.full((3, 5, 7, scale.shape[1]), float("nan"), device="cuda")[:, :4, :1]
            for view in (by_column, apart):
                view.copy_(scales[0].view(view.shape))
            scales += [by_column, apart]
        for other in scales:
            lead = (12,) if other is None or other.ndim == 2 else other.shape[:-1]
            x = room.view(*lead, 320)
            slots = (tensor.view(*lead, 2) for tensor in routing)
            again = pair.coded(x, pair.params, *slots, x_scale=other)
            np.testing.assert_array_equal(
                again.view(12, 320).view(torch.int16).cpu().numpy(), y.view(np.int16)
            )


@pytest.mark.parametrize("algo, compute, kernel", FORMATS)
def test_nan_stays_in_its_row(rng, monkeypatch, algo, compute, kernel):
    """NaN as a code, or as the last scale of a token, among the slots of one chunk."""
    pair = Pair(monkeypatch, rng, kernel, algo, 4, 384, 128, top_k=2, compute=compute)
    for config in range(CONFIGS[kernel] + 1):
        pair.keep(20, config)
        codes, scale, weights, ids, y = pair.check_bits(rng, 20, "few")
        rows = np.arange(20) != 7
        for tensor, nan in ((codes, 0x7F), (scale, np.nan)):
            if tensor is None:
                continue
            kept = tensor[7, -1]
            tensor[7, -1] = nan
            spoiled = run_codes(pair.coded, pair.params, codes, scale, weights, ids)
            tensor[7, -1] = kept
            assert np.isnan(as_values(spoiled, "bfloat16")[7]).all()
            np.testing.assert_array_equal(spoiled[rows], y[rows])


@pytest.mark.parametrize("algo, compute, kernel", FORMATS[:3])
def test_every_code_and_scales_of_others(rng, monkeypatch, algo, compute, kernel):
    """Codes that no quantization makes, -0 and subnormal ones, under scales that moqext would not find."""
    pair = Pair(monkeypatch, rng, kernel, algo, 4, 256, 128, top_k=2, compute=compute)
    for tokens in (2, 40):
        for config in range(CONFIGS[kernel] + 1):
            pair.keep(tokens, config)
            codes, scale, weights, ids, _ = pair.check_bits(rng, tokens, "random")
            codes = rng.integers(0, 127, codes.shape) | rng.choice([0, 128], codes.shape)
            codes = codes.astype(np.uint8)
            scale = None if scale is None else np.exp2(np.ceil(np.log2(scale))).astype(np.float32)
            y = run_codes(pair.coded, pair.params, codes, scale, weights, ids)
            check_codes(y, pair.coded, pair.stacks, codes, scale, weights, ids)
